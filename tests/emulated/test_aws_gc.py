"""What an owner has at AWS is found wherever it is, and nothing of anybody else (F14, F18, F19); 1,000 machines."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from click.testing import CliRunner
from fakes import fleets
from fakes.fleets import HERE, rent

from mgpu import paths
from mgpu.cli import cli
from mgpu.errors import AuthError, PermissionDenied, RateLimited, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import machines, teardown
from mgpu.providers.aws.options import Options
from mgpu.providers.base import NodePhase

OTHER_REGIONS = ("eu-west-1", "us-west-2")
NEAR = ("o-10", "o-", "O-1", " o-1", "o-1 ", "o-?", "o*", "*")


@pytest.fixture
def account(aws, reached):
    aws.quick()
    return reached


def listed(account, owner="o-1"):
    return {name for handle in teardown.list_owned(account, owner).handles for name in handle.ids if name}


# --- all of it --------------------------------------------------------------------------------------------------------


def test_one_handle_a_create_in_rank_order_with_what_destroy_needs(aws, account):
    first, second = rent(aws, 2), rent(aws, 1, token="token-2", generation=2, ranks=[1])
    one, two = teardown.list_owned(account, "o-1").handles
    assert (one.ids, two.ids) == (first.ids, ("", second.ids[1]))
    assert (one.fleet, one.token, one.generation, one.region) == ("demo", "token-1", 1, HERE)
    assert two.generation == 2
    assert one.made_at == pytest.approx(time.time(), abs=30)


def test_machines_of_all_regions_are_listed_under_theirs(aws, account):
    rented = [rent(aws, 1, region=region) for region in (HERE, *OTHER_REGIONS)]
    assert {handle.region: handle.ids for handle in teardown.list_owned(account, "o-1").handles} == {
        each.handle.region: each.ids for each in rented
    }


def test_a_machine_on_the_last_page_is_found(aws, account):
    """F18."""
    for number in range(5):
        rent(aws, 5, token=f"theirs-{number}", owner="o-2", ranked=False)
    mine = rent(aws, 1)
    aws.pages(2)
    assert listed(account) == set(mine.ids)
    all_theirs = listed(account, "o-2")
    assert len(all_theirs) == 25
    assert len(aws.calls("DescribeInstances")) > 13


@pytest.mark.parametrize("state", ["stopped", "shutting-down"])
def test_what_is_not_terminated_is_listed(aws, account, state):
    fleet = rent(aws, 1)
    aws.pace(ending_s=1000)
    ec2 = fleets.client(aws)
    (ec2.stop_instances if state == "stopped" else ec2.terminate_instances)(InstanceIds=list(fleet.ids))
    assert listed(account) == set(fleet.ids)


def test_what_is_terminated_is_not_listed_and_leaves_its_rank_free(aws, account):
    fleet = rent(aws, 3)
    fleets.client(aws).terminate_instances(InstanceIds=[fleet.ids[1]])
    (handle,) = teardown.list_owned(account, "o-1").handles
    assert handle.ids == (fleet.ids[0], "", fleet.ids[2])
    fleets.client(aws).terminate_instances(InstanceIds=list(fleet.ids))
    assert teardown.list_owned(account, "o-1").handles == ()


def test_addresses_and_disks_that_no_machine_has_are_listed_and_can_be_ended(aws, account):
    fleet = rent(aws, 2)
    fleets.address(aws, fleet, fleet.ids[0])
    loose = {fleets.address(aws, fleet), fleets.disk(aws, fleet)}
    (handle,) = teardown.list_owned(account, "o-1").handles
    assert handle.ids[:2] == fleet.ids
    assert set(handle.ids[2:]) == loose
    fleets.client(aws).terminate_instances(InstanceIds=list(fleet.ids))
    assert loose < listed(account), "the first machine's address has come loose, too"
    for handle in teardown.list_owned(account, "o-1").handles * 3:
        teardown.destroy(account, handle)
    assert (listed(account), aws.alive()) == (set(), [])


def test_machines_without_our_other_tags_are_listed(aws, account):
    """Somebody has taken them off; they are billed all the same."""
    fleet = rent(aws, 1)
    gone = [{"Key": key} for key in fleet.tags if key != names.OWNER] + [{"Key": names.RANK}]
    fleets.client(aws).delete_tags(Resources=list(fleet.ids), Tags=gone)
    (handle,) = teardown.list_owned(account, "o-1").handles
    assert (handle.ids, handle.fleet, handle.token, handle.generation) == (fleet.ids, "", "", 0)
    for _ in range(2):
        teardown.destroy(account, handle)
    assert aws.alive() == []


# --- nobody else's (F19) ----------------------------------------------------------------------------------------------


def strangers(aws):
    """Machines, an address and a disk that are nearly ours."""
    rented = [rent(aws, 1, token=f"near-{number}", owner=owner) for number, owner in enumerate(NEAR)]
    for number, key in enumerate(("mgpu:Owner", "owner", "mgpu:owner2", "mgpu-owner", "Name")):
        each = rent(aws, 1, token=f"key-{number}", **{key: "o-1"})
        fleets.client(aws).delete_tags(Resources=list(each.ids), Tags=[{"Key": names.OWNER}])
        rented.append(each)
    fleets.address(aws, rented[0]), fleets.disk(aws, rented[0])
    return set(itertools.chain.from_iterable(each.ids for each in rented))


def test_near_misses_are_not_listed(aws, account):
    strangers(aws)
    mine = rent(aws, 1)
    assert listed(account) == set(mine.ids)


@pytest.mark.parametrize("owner", ["o-?", "*", "o*"])
def test_an_owner_with_a_wildcard_in_its_name_has_its_own_alone(aws, account, owner):
    own = rent(aws, 1, token="own", owner=owner)
    rent(aws, 1)
    assert listed(account, owner) == set(own.ids)


def test_ending_all_of_ours_leaves_every_stranger(aws, account):
    strangers(aws)
    before = set(aws.alive())
    rent(aws, 3), rent(aws, 1, region=OTHER_REGIONS[0])
    for handle in teardown.list_owned(account, "o-1").handles * 2:
        teardown.destroy(account, handle)
    assert set(aws.alive()) == before


# --- never silently incomplete ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["DescribeInstances", "DescribeAddresses", "DescribeVolumes"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("Denied", PermissionDenied),
        ("Unavailable", Transient),
        ("OptInRequired", AuthError),
        ("Throttling", RateLimited),
    ],
)
def test_a_region_that_does_not_answer_is_said(aws, account, action, code, error):
    rent(aws, 1)
    aws.errors(action, code, region="eu-west-1")
    with pytest.raises(error, match="eu-west-1"):
        teardown.list_owned(account, "o-1")


def test_without_the_list_of_regions_nothing_is_concluded(aws, account):
    aws.errors("DescribeRegions", "Denied")
    with pytest.raises(PermissionDenied):
        teardown.list_owned(account, "o-1")


def test_what_is_made_a_moment_ago_is_listed_once_ec2_shows_it(aws, account):
    fleet = rent(aws, 1)
    aws.lag(30)
    assert listed(account) == set()
    aws.lag(0)
    assert listed(account) == set(fleet.ids)


# --- a thousand -------------------------------------------------------------------------------------------------------


def thousand(aws):
    """1,000 machines: one fleet of 500, and 500 fleets of one, over three regions."""
    aws.quick()
    big = rent(aws, 500, token="big", ranked=False)
    for number in range(500):
        region = (HERE, *OTHER_REGIONS)[number % 3]
        rent(aws, 1, token=f"small-{number}", fleet=f"small-{number}", region=region, ranked=False, template=False)
    return big


def test_a_thousand_machines_cost_few_calls(aws, account):
    thousand(aws)
    before = len(aws.calls())
    handles = teardown.list_owned(account, "o-1").handles
    states = machines.describe_all(account, Options(), handles)
    live = [node for state in states for node in state.nodes if node.phase is NodePhase.RUNNING]
    assert (len(handles), len(live)) == (501, 1000)
    assert len(aws.calls()) - before < 3 * len(account.regions()) + 15


# --- the command ------------------------------------------------------------------------------------------------------


def gc(*arguments):
    return CliRunner().invoke(cli, ["gc", *arguments], standalone_mode=False)


@pytest.fixture
def owner(xdg, monkeypatch):
    """Of a user with a state folder of this test's own; looks at machines follow each other at once."""
    monkeypatch.setenv("MGPU_TIMEOUTS", '{"describe_every_s": 0.01}')
    return paths.owner()


def test_gc_ends_what_nothing_stands_for_in_any_region_and_nothing_else(aws, account, owner):
    strangers(aws)
    before = set(aws.alive())
    rent(aws, 2, owner=owner, **{names.PRICE: "1.5"})
    rent(aws, 1, owner=owner, region=OTHER_REGIONS[0], token="far", fleet="far", **{names.PRICE: "2"})
    rows = {row["name"]: row for row in json.loads(gc("--json").stdout)["fleets"]}
    assert {name: (row["usd_per_hour"], row["used_by"]) for name, row in rows.items()} == {
        "demo": (3.0, ""),
        "far": (2.0, ""),
    }
    assert len(aws.alive()) == len(before) + 3, "a look changes nothing"
    assert gc("--yes").return_value == 0
    assert set(aws.alive()) == before
    assert "no machines of yours" in gc().stdout


def test_gc_of_a_region_that_does_not_answer_is_no_success(aws, account, owner):
    rent(aws, 1, owner=owner)
    aws.errors("DescribeInstances", "Denied", region="eu-west-1")
    done = gc("--yes")
    code = done.exception.exit_code if done.exception else done.return_value
    assert code == 3
    assert len(aws.alive()) == 1


def test_gc_leaves_out_a_region_that_the_organization_denies_and_says_so(aws, account, owner):
    rent(aws, 1, owner=owner)
    text = "no: perform: ec2:DescribeInstances with an explicit deny in a service control policy"
    aws.errors("DescribeInstances", "UnauthorizedOperation", region="eu-west-1", message=text, status=403)
    done = gc("--yes")
    assert done.return_value == 0
    assert "not looked for machines in eu-west-1" in done.stderr
    assert aws.alive() == []


def test_gc_that_cannot_end_a_machine_says_so(aws, account, owner, monkeypatch):
    """F11, I7: exit code 7, and the machine is named."""
    fleet, other = rent(aws, 1, owner=owner), rent(aws, 1, owner=owner, token="token-2", fleet="other")
    monkeypatch.setenv("MGPU_TIMEOUTS", '{"describe_every_s": 0.01, "destroy_s": 20}')
    fleets.client(aws).modify_instance_attribute(InstanceId=fleet.ids[0], DisableApiTermination={"Value": True})
    done = gc("--yes")
    assert done.exception is not None
    assert done.exception.exit_code == 7
    assert fleet.ids[0] in str(done.exception)
    assert other.ids[0] not in aws.alive()
