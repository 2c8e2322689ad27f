"""I1, I7: what is ended is gone by EC2's own word and by the bill, and nothing else is touched (F10, F11, F14, F17)."""

from __future__ import annotations

import time

import pytest
from fakes import fleets
from fakes.clock import Clock
from fakes.fleets import HERE, rent, schedules, templates
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.errors import InvalidRequest, PermissionDenied, ProviderError, RateLimited, TeardownIncomplete, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import reaper, teardown
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import NodePhase

UNKNOWN = "i-0123456789abcdef0"


@pytest.fixture
def account(aws, reached):
    aws.quick()
    fleets.reaper(aws)
    return reached


@pytest.fixture
def old(monkeypatch):
    """Every create was long ago."""
    monkeypatch.setattr(names, "LAG_S", -3600.0)


def arm(account, rented):
    reaper.arm(account, Options(), rented.handle.region, rented.ids, time.time() + 3600)


def group(aws, rented):
    name = names.template(rented.handle.token)
    fleets.client(aws).create_placement_group(GroupName=name, Strategy="cluster")
    return name


def groups(aws):
    return {each["GroupName"] for each in fleets.client(aws).describe_placement_groups()["PlacementGroups"]}


def end(account, handle, nodes=None, calls=5):
    """As acquire.destroy asks, without its pauses; how many calls it took."""
    for call in range(1, calls + 1):
        if teardown.destroy(account, handle, nodes):
            return call
    raise AssertionError(f"not gone after {calls} calls")


# --- the whole --------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_fleet_that_is_ended(aws, account):
    fleet = rent(aws, 2)
    arm(account, fleet), group(aws, fleet)
    fleets.address(aws, fleet, fleet.ids[0]), fleets.address(aws, fleet), fleets.disk(aws, fleet)
    assert not teardown.destroy(account, fleet.handle), "asked to end is not gone"
    end(account, fleet.handle)
    assert aws.alive() == []
    assert (templates(aws), schedules(aws), groups(aws)) == (set(), {}, set())
    assert fleets.client(aws).describe_addresses()["Addresses"] == []


def test_machines_that_shut_down_are_still_there_and_are_not_asked_again(aws, account):
    fleet = rent(aws, 2)
    aws.pace(ending_s=1000)
    assert [teardown.destroy(account, fleet.handle) for _ in range(3)] == [False] * 3
    assert len(aws.calls("TerminateInstances")) == 1
    assert templates(aws) == {"mgpu-token-1"}, "the template goes when the machines have gone"


def test_others_are_not_touched(aws, account):
    fleet, other = rent(aws, 2), rent(aws, 2, token="token-2")
    arm(account, other), group(aws, other)
    fleets.address(aws, other), fleets.disk(aws, other)
    before = set(aws.alive()) - set(fleet.ids)
    end(account, fleet.handle)
    assert set(aws.alive()) == before
    assert set(schedules(aws)) == {reaper.name_of(name) for name in other.ids}
    assert (templates(aws), groups(aws)) == ({"mgpu-token-2"}, {"mgpu-token-2"})


def test_to_end_what_is_gone_is_no_error_and_ends_nothing(aws, account, old):
    handle = rent(aws, 1).handle.model_copy(update={"ids": (UNKNOWN, "", "eipalloc-0123", "vol-0123")})
    assert teardown.destroy(account, handle)
    assert teardown.destroy(account, handle)
    assert aws.calls("TerminateInstances") == []


def test_no_machines_asked_for_is_no_call(aws, account):
    fleet = rent(aws, 1)
    assert teardown.destroy(account, fleet.handle, ())
    assert teardown.destroy(account, fleet.handle, ("",))
    assert aws.calls("TerminateInstances") == aws.calls("DescribeAddresses") == []


def test_what_is_left_of_a_handle_without_machines_goes(aws, account):
    """A create that made an address and a template, and was refused its machines."""
    fleet = rent(aws, 1)
    fleets.client(aws).terminate_instances(InstanceIds=list(fleet.ids))
    fleets.address(aws, fleet)
    end(account, fleet.handle.model_copy(update={"ids": ("",)}))
    assert (aws.alive(), templates(aws)) == ([], set())


# --- some of a fleet --------------------------------------------------------------------------------------------------


def test_one_of_three_is_ended_and_the_rest_stays_whole(aws, account):
    fleet = rent(aws, 3)
    arm(account, fleet), group(aws, fleet)
    kept = [fleets.address(aws, fleet, name) for name in fleet.ids[1:]]
    fleets.address(aws, fleet, fleet.ids[0])
    end(account, fleet.handle, fleet.ids[:1])
    assert sorted(aws.alive()) == sorted(fleet.ids[1:])
    shown = fleets.client(aws).describe_addresses()["Addresses"]
    assert {each["AllocationId"]: each["InstanceId"] for each in shown} == dict(zip(kept, fleet.ids[1:], strict=True))
    assert set(schedules(aws)) == {reaper.name_of(name) for name in fleet.ids[1:]}
    assert (templates(aws), groups(aws)) == ({"mgpu-token-1"}, {"mgpu-token-1"})


def test_a_fleet_that_was_repaired_leaves_nothing_of_either_create(aws, account):
    first, second = rent(aws, 2), rent(aws, 1, token="token-2", generation=2, ranks=[1])
    end(account, first.handle, first.ids[1:])
    assert templates(aws) == {"mgpu-token-1", "mgpu-token-2"}
    end(account, second.handle.model_copy(update={"ids": (first.ids[0], second.ids[1])}))
    assert (aws.alive(), templates(aws)) == ([], set())


def test_addresses_and_disks_can_be_named(aws, account):
    """As list_owned gives them; their tags may have another token than the handle."""
    fleet = rent(aws, 1)
    other = rent(aws, 1, token="token-2")
    loose = (fleets.address(aws, other), fleets.disk(aws, other))
    end(account, fleet.handle, loose)
    assert sorted(aws.alive()) == sorted((*fleet.ids, *other.ids))


# --- what EC2 says and does not mean (F10), and what it refuses -------------------------------------------------------


def test_a_yes_to_terminate_is_not_the_end(aws, account):
    fleet = rent(aws, 2)
    aws.stubborn(2)
    assert [teardown.destroy(account, fleet.handle) for _ in range(3)] == [False] * 3
    assert teardown.destroy(account, fleet.handle)
    assert aws.alive() == []
    assert len(aws.calls("TerminateInstances")) == 3, "asked again as long as they run"


def test_not_found_after_terminate_is_not_terminated(aws, account):
    fleet = rent(aws, 2)
    aws.errors("TerminateInstances", "InvalidInstanceID.NotFound", n=3)
    assert not teardown.destroy(account, fleet.handle), "describe shows that it runs"
    assert len(aws.alive()) == 2
    end(account, fleet.handle)
    assert aws.alive() == []


def test_a_machine_that_is_not_shown_yet_is_asked_to_end_and_not_believed_gone(aws, account):
    fleet = rent(aws, 2)
    aws.lag(30)
    assert not teardown.destroy(account, fleet.handle)
    assert aws.alive() == [], "terminate reaches it all the same"
    assert not teardown.destroy(account, fleet.handle)
    assert templates(aws) == {"mgpu-token-1"}


def test_one_id_that_is_not_known_stops_no_other(aws, account):
    fleet = rent(aws, 5)
    aws.lag(30)
    handle = fleet.handle.model_copy(update={"ids": (*fleet.ids[:2], UNKNOWN, *fleet.ids[2:])})
    assert not teardown.destroy(account, handle)
    assert aws.alive() == []


def protect(aws, machine, on=True):
    fleets.client(aws).modify_instance_attribute(InstanceId=machine, DisableApiTermination={"Value": on})


def test_of_a_fleet_with_a_protected_machine_all_else_goes_and_that_one_is_told(aws, account):
    first, fleet = rent(aws, 1, token="token-0"), rent(aws, 5)
    arm(account, fleet)
    for machine in fleet.ids[1:3]:
        fleets.address(aws, fleet, machine)
    fleets.address(aws, first), fleets.disk(aws, fleet)
    kept, handle = fleet.ids[1], fleet.handle.model_copy(update={"ids": (*fleet.ids, *first.ids)})
    protect(aws, kept)
    provider, clock = AwsProvider(aws.options), Clock()
    with pytest.raises(TeardownIncomplete) as told:
        acquire.destroy(provider, handle, timeouts=Timeouts(), clock=clock, sleep=clock.sleep)
    assert clock() < Timeouts().destroy_s, "it is told when all else is gone"
    for words in (f"ending {kept}", "OperationNotPermitted", "--no-disable-api-termination", "`mgpu down`"):
        assert words in told.value.why
    (address,) = fleets.client(aws).describe_addresses()["Addresses"]
    assert (address["InstanceId"], aws.alive()) == (kept, [kept])
    assert set(schedules(aws)) == {reaper.name_of(kept)}, "it ends at its hard cap, whoever forgets it"
    assert templates(aws) == {"mgpu-token-1"}
    protect(aws, kept, on=False)
    end(account, handle)
    assert (aws.alive(), templates(aws), schedules(aws)) == ([], set(), {})


def test_a_protected_machine_is_told_while_the_others_are_on_their_way_out(aws, account):
    fleet = rent(aws, 3)
    fleets.address(aws, fleet)
    protect(aws, fleet.ids[1])
    aws.pace(ending_s=1000)
    for _ in range(2):
        with pytest.raises(Transient, match=fleet.ids[1]) as told:  # call again
            teardown.destroy(account, fleet.handle)
        assert "OperationNotPermitted" in told.value.what, "whoever waits reads why"
        assert f"--instance-id {fleet.ids[1]} " in told.value.next_step
    assert len(fleets.client(aws).describe_addresses()["Addresses"]) == 1


def test_a_protected_machine_among_lost_ones_is_told_before_the_others_are_gone(aws, account):
    """The rest of the fleet is paid for and idle meanwhile; its teardown, which follows, sees to what is left."""
    fleet, clock = rent(aws, 4), Clock()
    protect(aws, fleet.ids[1])
    aws.pace(ending_s=1000)
    provider, lost = AwsProvider(aws.options), fleet.ids[1:3]
    with pytest.raises(TeardownIncomplete, match="OperationNotPermitted"):
        acquire.destroy(
            provider, fleet.handle, nodes=lost, unbilled=True, timeouts=Timeouts(), clock=clock, sleep=clock.sleep
        )
    assert clock() == 0
    phases = [node.phase for node in provider.describe(fleet.handle).nodes]
    assert phases == [NodePhase.RUNNING, NodePhase.RUNNING, NodePhase.ENDING, NodePhase.RUNNING]


def test_many_protected_machines_have_one_cure(aws, account):
    fleet = rent(aws, 12)
    for machine in fleet.ids:
        protect(aws, machine)
    with pytest.raises(InvalidRequest, match=r"--instance-id ID\b") as told:
        teardown.destroy(account, fleet.handle)
    assert told.value.next_step.count("`mgpu down`") == 1


def test_what_is_refused_for_all_is_not_asked_a_thousand_times(aws, account):
    fleet = rent(aws, 200, ranked=False)
    aws.errors("TerminateInstances", "Denied")
    with pytest.raises(PermissionDenied, match="TerminateInstances"):
        teardown.destroy(account, fleet.handle)
    assert len(aws.calls("TerminateInstances")) < 110


@pytest.mark.drawn("calls of AWS x errors", "mgpu/providers/aws")
@pytest.mark.parametrize(
    ("code", "error"), [("Unavailable", Transient), ("Throttling", RateLimited), ("Denied", PermissionDenied)]
)
@pytest.mark.parametrize(
    "action",
    [
        "TerminateInstances", "DescribeInstances", "DescribeAddresses", "DescribeVolumes", "ReleaseAddress",
        "DeletePlacementGroup", "DeleteLaunchTemplate", "DeleteSchedule",
    ],
)  # fmt: skip
def test_a_call_that_fails_is_never_the_end_and_heals(aws, account, action, code, error):
    """F11, F14: loud for as long as it lasts."""
    fleet = rent(aws, 2)
    fleets.address(aws, fleet), arm(account, fleet)
    aws.errors(action, code)
    with pytest.raises(error):
        end(account, fleet.handle)
    aws.calm()
    end(account, fleet.handle)
    assert (aws.alive(), templates(aws), schedules(aws)) == ([], set(), {})


def test_through_throttling_of_one_call_in_three_it_comes_to_an_end(aws, account):
    fleet = rent(aws, 4)
    aws.throttle(0.3)
    for _ in range(60):
        try:
            if teardown.destroy(account, fleet.handle):
                break
        except RateLimited:
            continue
    aws.calm()
    assert aws.alive() == []


def test_a_group_in_use_is_asked_again_and_the_template_waits_for_it(aws, account):
    """F17, for what fleets make themselves."""
    fleet = rent(aws, 2)
    group(aws, fleet)
    teardown.destroy(account, fleet.handle)
    aws.errors("DeletePlacementGroup", "InvalidPlacementGroup.InUse", n=2)
    assert [teardown.destroy(account, fleet.handle) for _ in range(2)] == [False] * 2
    assert templates(aws) == {"mgpu-token-1"}
    assert teardown.destroy(account, fleet.handle)


def test_an_address_in_use_is_asked_again(aws, account):
    fleet = rent(aws, 1)
    fleets.address(aws, fleet)
    teardown.destroy(account, fleet.handle)
    aws.errors("ReleaseAddress", "InvalidIPAddress.InUse", n=1)
    assert not teardown.destroy(account, fleet.handle)
    assert teardown.destroy(account, fleet.handle)


def test_a_disk_is_gone_when_ec2_shows_it_no_more(aws, account):
    fleet = rent(aws, 1)
    fleets.disk(aws, fleet)
    teardown.destroy(account, fleet.handle)
    assert not teardown.destroy(account, fleet.handle), "asked to go is not gone"
    assert teardown.destroy(account, fleet.handle)
    assert aws.alive() == []


@pytest.mark.parametrize(
    ("disk", "gone"),
    [
        ({"State": "deleting", "Attachments": []}, False),
        ({"State": "in-use", "Attachments": [{"InstanceId": "i-ended"}]}, False),
        ({"State": "in-use", "Attachments": [{"InstanceId": "i-alive"}]}, True),
    ],
)
def test_a_disk_that_ec2_is_at_is_waited_for_and_another_machines_is_not(aws, account, disk, gone):
    assert teardown._discarded(account, HERE, {"VolumeId": "vol-1", **disk}, {"i-ended"}) is gone
    assert aws.calls("DeleteVolume") == []


def test_errors_are_the_contracts_own(aws, account):
    aws.errors("DescribeInstances", "SomethingNew")
    with pytest.raises(ProviderError):
        teardown.destroy(account, rent(aws, 1).handle)
