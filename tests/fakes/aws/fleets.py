"""CreateFleet of type instant and RunInstances, with the semantics that mgpu relies on."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import convert_tag_spec, random_fleet_id

from fakes.aws import launch, patching, reservations
from fakes.aws.cloud import Cloud
from fakes.aws.rules import Pool

Data = dict[str, Any]


@dataclass
class Try:
    """One pool of a fleet: how an answer names it, and what came of it."""

    named: Data
    market: str
    data: Data
    max_usd: float | None
    pool: Pool | None = None
    subnet: Any = None
    count: int = 0
    refusal: EC2ClientError | None = None
    ids: list[str] = field(default_factory=list)


def install(cloud: Cloud) -> None:
    """From now on moto's EC2 creates by these rules."""

    def create_fleet(self: Any) -> ActionResult:
        self.error_on_dryrun()
        return ActionResult(_fleet(cloud, self.ec2_backend, self.params))

    def run_instances(self: Any) -> ActionResult:
        return ActionResult(_run(cloud, self))

    patching.replace(Fleets, "create_fleet", create_fleet)
    patching.replace(InstanceResponse, "run_instances", run_instances)


def _fleet(cloud: Cloud, backend: Any, asked: Data) -> Data:
    if asked.get("Type") != "instant":
        raise launch.refuse("InvalidParameterValue", "the fake AWS has fleets of type instant alone")
    sizes = asked["TargetCapacitySpecification"]
    market = sizes.get("DefaultTargetCapacityType", "on-demand")
    options = asked.get("SpotOptions" if market == "spot" else "OnDemandOptions") or {}
    if market == reservations.BLOCK and options:  # it gives what it has, and promises nothing
        raise launch.refuse("InvalidParameterCombination", "OnDemandOptions do not go with capacity-block.")
    total, least = int(sizes["TotalTargetCapacity"]), int(options.get("MinTargetCapacity") or 0)
    tries = [one for config in asked["LaunchTemplateConfigs"] for one in _tries(backend, config, market)]
    _grant(cloud, backend, tries, total, options)
    got = sum(one.count for one in tries)
    if got < least:
        for one in tries:
            _give_up(one, total)
    elif cloud.rules.fewer:
        _shorten(tries, cloud.rules.fewer.pop(0))
    fleet_id = random_fleet_id()
    for one in tries:
        _launch(cloud, backend, one, fleet_id, asked)
    return {
        "FleetId": fleet_id,
        "Errors": [_error(one) for one in tries if one.refusal],
        "Instances": [_made(one) for one in tries if one.ids],
    }


def _tries(backend: Any, config: Data, market: str) -> list[Try]:
    data, named = launch.template(backend, config["LaunchTemplateSpecification"])
    found = []
    for override in config.get("Overrides") or [{}]:
        merged = {**data, **{name: value for name, value in override.items() if name != "Placement"}}
        merged["Placement"] = {**(data.get("Placement") or {}), **(override.get("Placement") or {})}
        spot = (data.get("InstanceMarketOptions") or {}).get("SpotOptions") or {}
        bid = override.get("MaxPrice") or spot.get("MaxPrice")
        both = {"LaunchTemplateSpecification": named, "Overrides": override}
        found.append(Try(both, market, merged, float(bid) if bid else None))
    return found


def _grant(cloud: Cloud, backend: Any, tries: list[Try], total: int, options: Data) -> None:
    """Fills from one pool after the other, in the order given, within one type and one zone where that is asked."""
    first: Pool | None = None
    for one in tries:
        left = total - sum(each.count for each in tries)
        if not left:
            return
        try:
            one.pool, one.subnet = launch.pool(backend, one.data, one.market)
            launch.check(cloud, backend, one.data, one.subnet)
            held = reservations.target(cloud, backend, one.data, one.pool)
            _permitted(cloud)
        except EC2ClientError as refusal:
            one.refusal = _as_fleets_say(refusal)
            continue
        if first and _apart(first, one.pool, options):
            continue
        left = min(left, _paid_for(cloud, one.pool, options))
        one.count, one.refusal = launch.granted(cloud, one.pool, one.subnet, left, one.max_usd, held)
        first = first or (one.pool if one.count else None)


def _paid_for(cloud: Cloud, pool: Pool, options: Data) -> int:
    """Machines that MaxTotalPrice pays for."""
    most_usd = options.get("MaxTotalPrice")
    return sys.maxsize if most_usd is None else int(float(most_usd) / cloud.rules.usd(pool))


def _as_fleets_say(refusal: EC2ClientError) -> EC2ClientError:
    """A fleet has a code of its own for a type that its zone does not have."""
    if refusal.code != "Unsupported":
        return refusal
    return launch.refuse("InvalidFleetConfiguration", refusal.message)


def _permitted(cloud: Cloud) -> None:
    """A fleet needs ec2:RunInstances as well; where that is denied, the pools say so."""
    if denial := cloud.faults.denial("ec2", "RunInstances"):
        raise launch.refuse("UnauthorizedOperation", denial)


def _apart(first: Pool, other: Pool, options: Data) -> bool:
    type_differs = bool(options.get("SingleInstanceType")) and first.instance_type != other.instance_type
    return type_differs or (bool(options.get("SingleAvailabilityZone")) and first.zone != other.zone)


def _give_up(one: Try, total: int) -> None:
    """All or nothing: a pool that could have given some gives none."""
    if one.count and one.refusal is None:
        text = f"Unable to fulfill capacity of {total} due to your request configuration."
        one.refusal = launch.refuse("UnfulfillableCapacity", text)
    one.count = 0


def _shorten(tries: list[Try], fewer: int) -> None:
    for one in reversed(tries):
        taken = min(one.count, fewer)
        one.count, fewer = one.count - taken, fewer - taken


def _launch(cloud: Cloud, backend: Any, one: Try, fleet_id: str, asked: Data) -> None:
    if not one.count:
        return
    assert one.pool
    given = one.named["LaunchTemplateSpecification"]
    tags = {
        **convert_tag_spec(asked.get("TagSpecifications") or []).get("instance", {}),
        "aws:ec2:fleet-id": fleet_id,
        "aws:ec2launchtemplate:id": given["LaunchTemplateId"],
        "aws:ec2launchtemplate:version": given["Version"],
    }
    made = launch.launch(cloud, backend, one.pool, one.subnet, one.data, one.count, tags=tags)
    one.ids = [instance.id for instance in made.instances]


def _error(one: Try) -> Data:
    assert one.refusal
    code, text = one.refusal.code, one.refusal.message
    return {"LaunchTemplateAndOverrides": one.named, "Lifecycle": one.market, "ErrorCode": code, "ErrorMessage": text}


def _made(one: Try) -> Data:
    assert one.pool
    kind = one.pool.instance_type
    return {
        "LaunchTemplateAndOverrides": one.named,
        "Lifecycle": one.market,
        "InstanceIds": one.ids,
        "InstanceType": kind,
    }


def _run(cloud: Cloud, response: Any) -> Any:
    asked, backend = response.params, response.ec2_backend
    data = launch.template(backend, asked["LaunchTemplate"])[0] if asked.get("LaunchTemplate") else {}
    tags = [*(data.get("TagSpecifications") or []), *(asked.get("TagSpecifications") or [])]
    data = {**data, **{name: value for name, value in asked.items() if value is not None}, "TagSpecifications": tags}
    options = data.get("InstanceMarketOptions") or {}
    spot = options.get("MarketType") == "spot"
    bid = (options.get("SpotOptions") or {}).get("MaxPrice")
    block = options.get("MarketType") == reservations.BLOCK
    pool, subnet = launch.pool(backend, data, "spot" if spot else reservations.BLOCK if block else "on-demand")
    launch.check(cloud, backend, data, subnet)
    held = reservations.target(cloud, backend, data, pool)
    response.error_on_dryrun()
    most, least = int(asked["MaxCount"]), int(asked["MinCount"])
    count, refusal = launch.granted(cloud, pool, subnet, most, float(bid) if bid else None, held)
    if count < least:
        raise refusal
    return launch.launch(cloud, backend, pool, subnet, data, count, client_token=asked.get("ClientToken", ""))
