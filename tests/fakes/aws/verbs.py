"""What a test can tell the running fake: the other side of FakeAws's methods."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.utils import random_id
from moto.moto_api._internal.models import moto_api_backend

from fakes.aws import buckets, images, ledger, reservations
from fakes.aws.cloud import Cloud
from fakes.aws.faults import ACCOUNT, Fault
from fakes.aws.life import BY_ITSELF, BY_SPOT, Life
from fakes.aws.pace import Pace
from fakes.aws.rules import About
from fakes.aws.sessions import Sessions

Verb = Callable[..., Any]


def verbs(cloud: Cloud, streams: Sessions) -> dict[str, Verb]:
    """By name; each runs under the lock that requests are answered under."""
    ours = [_Requests(cloud), _Market(cloud), _Machines(cloud, streams), _Account(cloud, streams)]
    named = {name: verb for group in ours for name, verb in group.verbs().items()}
    return {name: _locked(cloud, verb) for name, verb in named.items()}


def _locked(cloud: Cloud, verb: Verb) -> Verb:
    def run(**arguments: Any) -> Any:
        with cloud.lock:
            return verb(**arguments)

    return run


class _Requests:
    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def verbs(self) -> dict[str, Verb]:
        return {"fault": self.fault, "calls": self.calls, "calm": self.calm}

    def fault(self, **rule: Any) -> None:
        self.cloud.faults.rules.append(Fault(**rule))

    def calm(self) -> None:
        self.cloud.faults.rules.clear()

    def calls(self) -> list[dict[str, Any]]:
        return [{"at": at, **vars(call)} for at, call in self.cloud.calls]


class _Market:
    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def verbs(self) -> dict[str, Verb]:
        told = {"capacity": self.capacity, "price": self.price, "quota": self.quota, "set": self.set}
        told |= {"pace": self.pace}
        return {**told, "reserve": self.reserve, "sell": self.sell}

    def reserve(self, begins_s: float, hours: float | None, zone: str, **wanted: Any) -> str:
        begins_at = time.time() + begins_s
        ends_at = begins_at + hours * 3600 if hours else None
        backend = ec2_backends[ACCOUNT][zone[:-1]]
        times = {"begins_at": begins_at, "ends_at": ends_at, "unpaid_s": 0.0}
        return reservations.reserve(self.cloud, backend, zone=zone, **times, **wanted).id

    def sell(self, instance_type: str, count: int, zone: str, **at: float) -> str:
        begins = time.time() + at["begins_s"]
        offering = {
            "CapacityBlockOfferingId": random_id("cb"),
            "InstanceType": instance_type,
            "AvailabilityZone": zone,
            "InstanceCount": count,
            "StartDate": datetime.fromtimestamp(begins, UTC),
            "EndDate": datetime.fromtimestamp(begins + at["hours"] * 3600, UTC),
            "CapacityBlockDurationHours": int(at["hours"]),
            "UpfrontFee": f"{at['usd']:.2f}",
            "CurrencyCode": "USD",
            "Tenancy": "default",
            "expires_at": time.time() + at["expires_s"],
            "left": at["left"],
        }
        self.cloud.offerings[offering["CapacityBlockOfferingId"]] = offering
        return offering["CapacityBlockOfferingId"]

    def capacity(self, count: int | None, code: str, **about: str) -> None:
        self.cloud.rules.capacities.append((About(**about), count, code))

    def price(self, usd_per_hour: float, **about: str) -> None:
        self.cloud.rules.prices.append((About(**about), usd_per_hour))

    def quota(self, code: str, vcpus: float) -> None:
        self.cloud.rules.quotas[code] = vcpus

    def pace(self) -> dict[str, float]:
        return {each.name: getattr(self.cloud.rules, each.name) for each in fields(Pace)}

    def set(self, name: str, value: Any) -> None:
        if name == "fewer":
            self.cloud.rules.fewer.append(value)
        elif hasattr(self.cloud.rules, name):
            setattr(self.cloud.rules, name, value)
        else:
            raise KeyError(f"there is no rule {name}")


class _Machines:
    def __init__(self, cloud: Cloud, streams: Sessions) -> None:
        self.cloud, self.streams = cloud, streams

    def verbs(self) -> dict[str, Verb]:
        told = {"kill": self.kill, "interrupt": self.interrupt, "rebalance": self.rebalance, "stop": self.stop}
        return {**told, "trouble": self.trouble, "sessions": self.streams.shown, "server": self.server}

    def life(self, instance_id: str) -> Life:
        if instance_id not in self.cloud.lives.by_id:
            raise KeyError(f"there is no instance {instance_id}")
        return self.cloud.lives.by_id[instance_id]

    def kill(self, instance_id: str) -> None:
        self.cloud.lives.end(self.life(instance_id), BY_SPOT)

    def stop(self, instance_id: str) -> None:
        """As a power-off from inside, which the machine's shutdown behaviour judges."""
        life = self.life(instance_id)
        life.reason = BY_ITSELF
        self.cloud.lives.powered_off(instance_id)

    def interrupt(self, instance_id: str, seconds: float) -> None:
        life = self.life(instance_id)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        self.cloud.emptied(life.pool)
        self.cloud.machines.notice(life, "spot/instance-action", {"action": "terminate", "time": at})
        self.cloud.timers.after(seconds, lambda: self.cloud.lives.end(life, BY_SPOT))

    def rebalance(self, instance_id: str) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.cloud.machines.notice(self.life(instance_id), "events/recommendations/rebalance", {"noticeTime": at})

    def server(self, instance_id: str, host: str, port: int) -> None:
        self.streams.servers[instance_id] = (host, port)

    def trouble(self, instance_id: str, what: str, value: Any) -> None:
        """What only a machine can have: see Machines.connect, .hang, .trouble."""
        self.cloud.machines.trouble(self.life(instance_id), what, value)


class _Account:
    def __init__(self, cloud: Cloud, streams: Sessions) -> None:
        self.cloud, self.streams = cloud, streams

    def verbs(self) -> dict[str, Verb]:
        told = {"reset": self.reset, "bill": self.bill, "age": self.age, "enforce": self.enforce, "failed": self.failed}
        return {**told, "organization": self.organization, "deprecate": self.deprecate}

    def deprecate(self, image_id: str) -> None:
        images.deprecated.add(image_id)

    def organization(self, statements: list[dict[str, Any]]) -> None:
        self.cloud.organization = statements

    def enforce(self, on: bool) -> None:
        self.cloud.enforced = on

    def failed(self) -> list[str]:
        return self.cloud.failed_schedules

    def reset(self) -> None:
        self.cloud.machines.clear()
        self.cloud.clear()
        self.streams.clear()
        images.deprecated.clear()
        moto_api_backend.reset()

    def bill(self) -> list[dict[str, Any]]:
        return ledger.bill(self.cloud)

    def age(self, seconds: float) -> None:
        """All that there is was made that much earlier."""
        past = timedelta(seconds=seconds)
        for life in self.cloud.lives.by_id.values():
            life.age(seconds)
        for reservation in self.cloud.reservations.values():
            reservation.age(seconds)
        for offering in self.cloud.offerings.values():
            offering["expires_at"] -= seconds
            offering |= {name: offering[name] - past for name in ("StartDate", "EndDate")}
        for backend in (backend for account in ec2_backends.values() for backend in account.values()):
            for dated in [*backend.volumes.values(), *backend.launch_templates.values()]:
                dated.create_time -= past
            for version in (one for template in backend.launch_templates.values() for one in template.versions):
                version.create_time -= past
        buckets.age(seconds)
        self.cloud.timers.age(seconds)
