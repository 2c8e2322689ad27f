"""EventBridge Scheduler that does what is due: one-shots that terminate machines or release addresses, in the name of
their role."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from moto.core.exceptions import ServiceException
from moto.ec2.models import ec2_backends
from moto.scheduler.exceptions import ValidationException
from moto.scheduler.models import EventBridgeSchedulerBackend, Schedule
from moto.scheduler.responses import EventBridgeSchedulerResponse

from fakes.aws import permissions
from fakes.aws.cloud import Cloud
from fakes.aws.faults import ACCOUNT
from fakes.aws.patching import existing, replace

TARGET = "arn:aws:scheduler:::aws-sdk:ec2:"  # and the call
ONCE = re.compile(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)")
AGAIN_S = 1.0  # between tries; AWS takes longer


def install(cloud: Cloud) -> None:
    """From now on schedules are checked and carried out."""
    create = existing(EventBridgeSchedulerBackend, "create_schedule")
    update = existing(EventBridgeSchedulerBackend, "update_schedule")
    respond = existing(EventBridgeSchedulerResponse, "update_schedule")

    def created(self: Any, **asked: Any) -> Schedule:
        _check(asked)
        return _arm(cloud, self, create(self, **asked))

    def updated(self: Any, **asked: Any) -> Schedule:
        _check(asked)
        return _arm(cloud, self, update(self, **asked))

    def respond_to_update(self: Any) -> str:
        answer = respond(self)
        name = self.uri.split("?")[0].split("/")[-1]
        schedule = self.scheduler_backend.get_schedule(self._get_param("GroupName"), name)
        schedule.action_after_completion = self._get_param("ActionAfterCompletion")  # what is left out is unset
        return answer

    replace(EventBridgeSchedulerBackend, "create_schedule", created)
    replace(EventBridgeSchedulerBackend, "update_schedule", updated)
    replace(EventBridgeSchedulerResponse, "update_schedule", respond_to_update)


def _check(asked: dict[str, Any]) -> None:
    target = asked["target"]
    if not permissions.trusts(target.get("RoleArn", ""), "scheduler.amazonaws.com"):
        text = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
        raise ValidationException(text)
    if _due(asked["schedule_expression"], asked.get("schedule_expression_timezone")) is None:
        raise ValidationException(f"Invalid Schedule Expression {asked['schedule_expression']}.")
    json.loads(target.get("Input") or "{}")


def _due(expression: str, zone: str | None) -> float | None:
    """UNIX time of a one-shot; infinity for rates and crons, which the fake does not carry out."""
    if expression.startswith(("rate(", "cron(")):
        return float("inf")
    found = ONCE.fullmatch(expression)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1]).replace(tzinfo=ZoneInfo(zone) if zone else UTC).timestamp()
    except ValueError:
        return None


def _arm(cloud: Cloud, backend: Any, schedule: Schedule) -> Schedule:
    """A time in the past never comes."""
    schedule.state = schedule.state or "ENABLED"  # moto's update unsets it
    due = _due(schedule.schedule_expression, schedule.schedule_expression_timezone)
    if due is not None and time.time() < due < float("inf"):
        version = schedule.schedule_expression
        cloud.timers.after(due - time.time(), lambda: _fire(cloud, backend, schedule, version, 0))
    return schedule


def _fire(cloud: Cloud, backend: Any, schedule: Schedule, version: str, tried: int) -> None:
    group = backend.schedule_groups[schedule.group_name].schedules
    if group.get(schedule.name) is not schedule or schedule.schedule_expression != version:
        return  # deleted, or put off
    if schedule.state == "ENABLED":
        try:
            _execute(backend, schedule)
        except ServiceException as error:
            cloud.failed_schedules.append(f"{schedule.name}: {error}")
            if tried < int(schedule.target["RetryPolicy"]["MaximumRetryAttempts"]):
                cloud.timers.after(AGAIN_S, lambda: _fire(cloud, backend, schedule, version, tried + 1))
                return
    if schedule.action_after_completion == "DELETE":
        del group[schedule.name]


def _execute(backend: Any, schedule: Schedule) -> None:
    ec2 = ec2_backends[backend.account_id][backend.region_name]
    asked = json.loads(schedule.target["Input"])
    match schedule.target["Arn"].removeprefix(TARGET):
        case "terminateInstances":
            for machine in ec2.get_multi_instances_by_id(asked["InstanceIds"]):
                _require(backend, schedule, "ec2:TerminateInstances", f"instance/{machine.id}", machine.get_tags())
            ec2.terminate_instances(asked["InstanceIds"])
        case "releaseAddress":
            (address,) = ec2.address_by_allocation([asked["AllocationId"]])
            tags = ec2.describe_tags(filters={"resource-id": [address.allocation_id]})
            _require(backend, schedule, "ec2:ReleaseAddress", f"elastic-ip/{address.allocation_id}", tags)
            ec2.release_address(allocation_id=address.allocation_id)


def _require(backend: Any, schedule: Schedule, action: str, resource: str, tags: list[dict[str, str]]) -> None:
    """Raises what EC2 answers where the schedule's role may not do this."""
    facts = {**{f"aws:ResourceTag/{tag['key']}": tag["value"] for tag in tags}, "aws:SourceAccount": ACCOUNT}
    arn = f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:{resource}"
    if not permissions.permits(schedule.target["RoleArn"], action, arn, facts):
        raise ServiceException("UnauthorizedOperation", f"the role may not do {action} with {resource}")
