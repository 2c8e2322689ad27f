"""The provider's own kill switch (L2): at the hard cap EventBridge Scheduler terminates a machine, whoever is gone, and
some minutes later releases the address that was rented for it.

One schedule a machine, and not one a fleet: TerminateInstances with several ids ends none of them if one is not known
any more, and a fleet that was repaired has lost machines which EC2 has forgotten by the hard cap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling, code_of
from mgpu.providers.aws.instances.listing import unless_absent
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

_SOON_S = 60.0  # a schedule in the past never fires; Scheduler goes by whole minutes
_AFTER_S = 600.0  # an address cannot be released before its machine is gone
_AT_ONCE = 16  # calls in flight
# what Scheduler may do at most; the role may be gone for a while, and a machine must end all the same
_RETRIES = {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": 185}


def arm(account: Account, options: Options, region: str, ids: Iterable[str], at: float) -> None:
    """Has these machines terminated at `at` (UNIX seconds; within a minute), and these addresses released after that.
    Again: the newest time counts.

    Raises:
        InvalidRequest: Scheduler may not take on the role.
        ProviderError: AWS refused, or did not answer.
    """
    scheduler = account.client("scheduler", region)
    partition = scheduler.meta.partition
    role = options.reaper_role or f"arn:{partition}:iam::{account.id()}:role/{names.REAPER_ROLE}"

    def arm_one(machine: str) -> None:
        wanted = _schedule(partition, role, machine, at)
        with calling(f"arming the kill switch of {machine}", region):
            _put(scheduler, wanted)

    _each(arm_one, ids)


def disarm(account: Account, region: str, ids: Iterable[str]) -> None:
    """Takes the schedules of these machines and addresses away; one that is not there is fine.

    Raises:
        ProviderError: AWS refused, or did not answer.
    """
    scheduler = account.client("scheduler", region)

    def disarm_one(machine: str) -> None:
        with calling(f"taking away the kill switch of {machine}", region), unless_absent():
            scheduler.delete_schedule(Name=name_of(machine))

    _each(disarm_one, ids)


def name_of(resource: str) -> str:
    """The name of the schedule of a machine or an address."""
    return f"mgpu-{resource}"


def _schedule(partition: str, role: str, resource: str, at: float) -> dict[str, Any]:
    if resource.startswith("eipalloc-"):
        call, argument, at = "releaseAddress", {"AllocationId": resource}, at + _AFTER_S
    else:
        call, argument = "terminateInstances", {"InstanceIds": [resource]}
    moment = datetime.fromtimestamp(max(at, time.time() + _SOON_S), UTC)
    return {
        "Name": name_of(resource),
        "Description": f"mgpu: the hard cap of {resource}",
        "ScheduleExpression": f"at({moment:%Y-%m-%dT%H:%M:%S})",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:{call}",
            "RoleArn": role,
            "Input": json.dumps(argument),
            "RetryPolicy": _RETRIES,
        },
    }


def _put(scheduler: Any, wanted: dict[str, Any]) -> None:
    from botocore.exceptions import ClientError

    try:
        scheduler.create_schedule(**wanted)
    except ClientError as error:
        if code_of(error) != "ConflictException":
            raise
        scheduler.update_schedule(**wanted)


def _each(call: Callable[[str], None], ids: Iterable[str]) -> None:
    machines = [name for name in ids if name]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        list(pool.map(call, machines))  # the list: an error is raised here
