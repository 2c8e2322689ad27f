"""What AWS answers, or does not, while a whole run is made, trains and is given back: F3 and F6 to F17 of the demands,
with the real command, engine and machines. What a provider's single calls make of them is in tests/emulated."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fakes.aws.operator import PULUMI, Done, Operator, left_behind, why_ended
from waiting import until

G_SPOT = "L-3819A6DF"  # the quota of all G and VT machines on the spot market
LEASE_S = 12
BY_ITSELF = "Client.InstanceInitiatedShutdown"
INCOMPLETE, REFUSED = 7, 3
ONE = {"nodes": 1, "command": ["count.py", "20", "0.1"]}


def good(user: Operator, done: Done) -> None:
    """The run succeeded, and nothing of it is left, by AWS's own word."""
    assert done.returncode == 0, done.stderr
    assert (user.run()["state"], user.run()["teardown"]) == ("succeeded", "confirmed")
    nothing_is_left(user)


def nothing_is_left(user: Operator) -> None:
    assert not any(left_behind(user.aws).values()), left_behind(user.aws)


# --- machines are made ------------------------------------------------------------------------------------------------


def engine_dies(user: Operator) -> None:
    """F3: by SIGKILL, while EC2 makes the machines; then the same command once more, which adopts them."""
    user.write()
    user.aws.hang("CreateFleet", 4, n=1)
    up = user.start("up", "--yes", "--skip-preview", program=PULUMI)
    until(lambda: user.aws.calls("CreateFleet"), 120)
    for pid, line in user.processes.items():
        if Path(line.split(" ")[0]).name == "pulumi":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    up.communicate(timeout=60)
    assert up.returncode != 0
    cancelled = user.mgpu("cancel", "--yes", program=PULUMI)  # Pulumi's own way past a lock that the dead have left
    assert cancelled.returncode == 0, cancelled.stderr
    again = user.mgpu("up", "--yes", "--skip-preview", program=PULUMI)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(user.aws.bill()) == len(user.aws.alive()) == 2, "one gang, and no machine more"
    destroyed = user.mgpu("destroy", "--yes", "--skip-preview", program=PULUMI)
    assert destroyed.returncode == 0, destroyed.stdout + destroyed.stderr
    nothing_is_left(user)


def answers_are_lost(user: Operator) -> None:
    """F6, F7, F8: a gang that comes with one machine less, then one whose every call is answered by nothing."""
    user.write()
    user.aws.fewer(1)
    user.aws.lose_answers("CreateLaunchTemplate")
    user.aws.lose_answers("CreateFleet", skip=1)
    user.aws.unavailable("CreateTags", n=1, after=True)
    user.aws.unavailable("CreateSchedule", n=1, after=True)
    good(user, user.mgpu("launch", "--yes"))
    assert len(user.aws.bill()) == 3, "the one machine of the first gang, and the second gang"


def ec2_is_late(user: Operator) -> None:
    """F9, F10, F17: it shows what was 3 s ago, ends nothing at the first word, and lets go of a group at the fourth."""
    block = {"endpoint_url": user.aws.endpoint, "python": sys.executable, "instance_type": "g4dn.8xlarge"}  # it has EFA
    user.write(aws=block, max_price_usd_per_hour=20)
    user.aws.lag(3)
    user.aws.stubborn(2)
    user.aws.errors("DeletePlacementGroup", "InvalidPlacementGroup.InUse", n=3)
    good(user, user.mgpu("launch", "--yes"))
    assert len(user.aws.bill()) == 2
    assert len(user.aws.calls("DeletePlacementGroup")) >= 4


def calls_are_throttled(user: Operator) -> None:
    """F14: three of ten, from the first to the last, S3's too."""
    user.write(**ONE)
    user.aws.throttle(0.3)
    done = user.mgpu("launch", "--yes")
    user.aws.calm()
    good(user, done)
    assert len(user.aws.bill()) == 1


def calls_are_throttled_for_good(user: Operator) -> None:
    """F14: every call for machines, until the search's time is over: few of them, and nothing is made."""
    user.env["MGPU_TIMEOUTS"] = json.dumps({"provision_s": 20, "listing_s": 2})
    user.write(**ONE)
    user.aws.throttle(1.0, "CreateFleet")
    done = user.mgpu("launch", "--yes")
    assert (done.returncode, "Traceback" in done.stderr) == (REFUSED, False), done.stderr
    assert 2 <= len(user.aws.calls("CreateFleet")) <= 40
    assert user.aws.bill() == []


def a_quota_is_reached(user: Operator) -> None:
    """F13: named by its code after one call for machines."""
    user.write()
    user.aws.quota(G_SPOT, 0)
    done = user.mgpu("launch", "--yes")
    assert (done.returncode, G_SPOT in done.stderr, "Traceback" in done.stderr) == (REFUSED, True, False), done.stderr
    assert len(user.aws.calls("CreateFleet")) == 1
    nothing_is_left(user)


def the_state_is_damaged(user: Operator) -> None:
    """F5: the engine knows of no machine any more; EC2's tags do."""
    user.write(**ONE)
    up = user.mgpu("up", "--yes", "--skip-preview", program=PULUMI)
    assert up.returncode == 0, up.stderr
    for file in (user.state / "pulumi" / ".pulumi" / "stacks").rglob("*.json"):
        file.write_bytes(file.read_bytes()[:100])
    assert user.aws.alive()[0] in json.loads(user.mgpu("gc", "--json").stdout)["fleets"][0]["ids"]
    ended = user.mgpu("gc", "--yes")
    assert ended.returncode == 0, ended.stderr
    nothing_is_left(user)


# --- they train -------------------------------------------------------------------------------------------------------


def credentials_expire(user: Operator) -> None:
    """F16: for a while EC2 knows the operator no more; the run goes on, and is not said to be lost."""
    user.write(nodes=1, command=["count.py", "100", "0.15"])
    launch = user.start("launch", "--yes")
    try:
        until(user.trains, 150)
        user.aws.errors("Describe*", "Expired")
        asked = len(user.aws.calls("DescribeInstances"))
        until(lambda: len(user.aws.calls("DescribeInstances")) > asked + 1, 60)
        user.aws.calm()
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    good(user, Done((), launch.returncode, out, err))
    assert (user.run()["attempt"], user.run()["interruptions"]) == (1, [])


def its_zone_is_sold_out(user: Operator) -> None:
    """A machine is reclaimed, and its zone has no other one: after half of the wait the whole gang moves."""
    user.write(command=["count.py", "100", "0.1"], recovery={"attempts": 3, "wait_minutes": 0.2})
    launch = user.start("launch", "--yes")
    try:
        until(user.trains, 150)
        first, (zone, _) = set(user.ids), zones_of(user)
        user.aws.capacity(0, zone=zone)
        user.aws.kill(min(first))
        until(lambda: user.run()["attempt"] == 2, 150)
        moved, elsewhere = set(user.ids), zones_of(user)
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    good(user, Done((), launch.returncode, out, err))
    assert len(moved - first) == 2, "none of the first gang stays"
    assert zone not in elsewhere
    assert len(set(elsewhere)) == 1, "a gang is in one zone"
    assert len(user.aws.bill()) == 4
    assert (user.run()["recoveries"], len(user.run()["interruptions"])) == (1, 1)


def zones_of(user: Operator) -> list[str]:
    """Where the machines of the user's run are."""
    found = user.aws.client("ec2").describe_instances(InstanceIds=list(user.ids))["Reservations"]
    return [each["Placement"]["AvailabilityZone"] for group in found for each in group["Instances"]]


# --- they are given back ----------------------------------------------------------------------------------------------


def nobody_may_end_them(user: Operator) -> None:
    """F15: the permission goes while the run trains. It is said, and the machines' own lease ends them."""
    quick = {"lease_s": LEASE_S, "lease_renew_s": 2, "stall_s": 10}
    user.env["MGPU_TIMEOUTS"] = json.dumps(quick)
    user.write(command=["count.py", "100", "0.1"])
    launch = user.start("launch", "--yes")
    try:
        until(user.trains, 150)
        user.aws.deny("TerminateInstances")
        _, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == INCOMPLETE, err
    assert "ec2:TerminateInstances" in err
    assert all(machine in err for machine in user.ids), "what is billed is named"
    assert user.run()["teardown"] != "confirmed"
    until(lambda: not user.aws.alive(), LEASE_S + 60, "a machine lives for ever")
    assert why_ended(user.aws) == [BY_ITSELF] * 2
    assert user.mgpu("down", user.run()["run_id"]).returncode == 0
    nothing_is_left(user)


def ec2_ends_nothing_for_long(user: Operator) -> None:
    """F11: 503 until the patience is over, which is loud; once EC2 has healed, the same command ends them."""
    user.env["MGPU_TIMEOUTS"] = json.dumps({"destroy_s": 5})
    user.write(**ONE)
    user.aws.unavailable("TerminateInstances")
    launched = user.mgpu("launch", "--yes")
    assert launched.returncode == INCOMPLETE, launched.stderr
    (machine,) = user.aws.alive()
    assert machine in launched.stderr
    assert user.run()["teardown"] != "confirmed"
    assert user.mgpu("down", user.run()["run_id"]).returncode == INCOMPLETE
    user.aws.calm()
    down = user.mgpu("down", user.run()["run_id"])
    assert down.returncode == 0, down.stderr
    nothing_is_left(user)


STORIES = {
    story.__name__: story
    for story in (
        *(engine_dies, answers_are_lost, ec2_is_late, calls_are_throttled, calls_are_throttled_for_good),
        *(a_quota_is_reached, the_state_is_damaged),
        *(credentials_expire, its_zone_is_sold_out, nobody_may_end_them, ec2_ends_nothing_for_long),
    )
}


@pytest.mark.drawn("whole runs on the fake AWS", "tests/failure/aws/conftest.py")
@pytest.mark.parametrize("story", STORIES)
def test_nothing_is_made_twice_or_left_and_the_truth_is_told_when(told, story):
    told(story)
