"""L2: EventBridge Scheduler ends each machine at the hard cap, whoever is gone (F51, I1)."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from fakes import fleets
from fakes.fleets import HERE, rent, schedules

from mgpu.errors import PermissionDenied, Transient
from mgpu.providers.aws.instances import reaper
from mgpu.providers.aws.options import Options

HOUR = 3600.0


@pytest.fixture
def account(aws, reached):
    aws.quick()
    fleets.reaper(aws)
    return reached


def arm(account, rented, at, **options):
    reaper.arm(account, Options.of(options), HERE, rented.ids, at)


def schedule(aws, machine):
    return fleets.client(aws, "scheduler").get_schedule(Name=reaper.name_of(machine))


def test_each_machine_has_a_schedule_of_its_own(aws, account):
    fleet = rent(aws, 3)
    arm(account, fleet, time.time() + HOUR)
    assert schedules(aws) == {f"mgpu-{name}": [name] for name in fleet.ids}


def test_a_schedule_fires_once_at_the_hard_cap_and_goes(aws, account):
    fleet, at = rent(aws, 1), 1_900_000_000.0
    arm(account, fleet, at)
    made = schedule(aws, fleet.ids[0])
    assert made["ScheduleExpression"] == "at(2030-03-17T17:46:40)"
    assert made["ScheduleExpressionTimezone"] == "UTC"
    assert made["FlexibleTimeWindow"] == {"Mode": "OFF"}
    assert made["ActionAfterCompletion"] == "DELETE"
    target = made["Target"]
    assert target["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
    assert target["RoleArn"] == "arn:aws:iam::123456789012:role/mgpu-reaper"
    assert target["RetryPolicy"]["MaximumRetryAttempts"] > 100


def test_the_run_files_role_is_taken(aws, account):
    role = fleets.reaper(aws, "mine")
    fleet = rent(aws, 1)
    arm(account, fleet, time.time() + HOUR, reaper_role=role)
    assert schedule(aws, fleet.ids[0])["Target"]["RoleArn"] == role


def test_armed_again_the_newest_time_counts(aws, account):
    fleet = rent(aws, 2)
    arm(account, fleet, 1_900_000_000.0)
    arm(account, fleet, 1_900_003_600.0)
    assert schedule(aws, fleet.ids[1])["ScheduleExpression"] == "at(2030-03-17T18:46:40)"
    assert len(schedules(aws)) == 2


def test_a_hard_cap_that_has_passed_is_soon(aws, account):
    """A schedule in the past would never fire."""
    fleet = rent(aws, 1)
    arm(account, fleet, time.time() - HOUR)
    text = schedule(aws, fleet.ids[0])["ScheduleExpression"]
    at = datetime.strptime(text, "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=UTC).timestamp()
    assert 30 < at - time.time() < 90


def test_disarmed_is_gone_and_again_is_no_error(aws, account):
    fleet, other = rent(aws, 2), rent(aws, 1, token="token-2")
    arm(account, fleet, time.time() + HOUR), arm(account, other, time.time() + HOUR)
    for _ in range(2):
        reaper.disarm(account, HERE, (*fleet.ids, "", "i-0123456789abcdef0"))
    assert schedules(aws) == {f"mgpu-{other.ids[0]}": [other.ids[0]]}


@pytest.mark.parametrize(("code", "error"), [("Unavailable", Transient), ("Denied", PermissionDenied)])
def test_a_kill_switch_that_cannot_be_set_or_taken_away_is_loud(aws, account, code, error):
    fleet = rent(aws, 2)
    aws.errors("CreateSchedule", code), aws.errors("DeleteSchedule", code)
    with pytest.raises(error):
        arm(account, fleet, time.time() + HOUR)
    with pytest.raises(error):
        reaper.disarm(account, HERE, fleet.ids)


def test_a_fleet_ends_at_its_hard_cap_though_nobody_is_left_and_its_kernels_hang(aws, account):
    """F51: neither the machine's own clock nor gc has a part in it."""
    fleet, other = rent(aws, 3), rent(aws, 1, token="token-2")
    arm(account, fleet, time.time() + HOUR)
    aws.age(HOUR - 120)
    assert len(aws.alive()) == 4, "not before"
    aws.age(180)
    assert aws.alive() == list(other.ids)
    assert schedules(aws) == {}


def test_a_machine_that_ec2_has_forgotten_keeps_no_other_alive(aws, account):
    """TerminateInstances with one id that is not known ends none: a repaired fleet has such ids."""
    fleet = rent(aws, 3)
    arm(account, fleet, time.time() + 3 * HOUR)
    aws.pace(forget_s=HOUR)
    fleets.client(aws).terminate_instances(InstanceIds=[fleet.ids[0]])
    aws.age(2 * HOUR)
    shown = fleets.client(aws).describe_instances()["Reservations"]
    assert fleet.ids[0] not in [each["InstanceId"] for one in shown for each in one["Instances"]], "it is forgotten"
    aws.age(2 * HOUR)
    assert aws.alive() == []


def test_armed_and_disarmed_by_many_at_once(aws, account):
    fleet = rent(aws, 60, ranked=False)
    arm(account, fleet, time.time() + HOUR)
    assert len(fleets.schedules(aws)) == 60
    reaper.disarm(account, HERE, fleet.ids)
    assert fleets.schedules(aws) == {}
