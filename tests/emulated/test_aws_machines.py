"""What `describe` and `find` of provider `aws` make of what EC2 shows: late, in part, or not at all (F9, I2, I7)."""

from __future__ import annotations

import time

import pytest
from fakes import fleets
from fakes.fleets import HOST_KEY, rent

from mgpu.errors import AuthError, PermissionDenied, ProviderError, Transient
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import machines
from mgpu.providers.aws.options import Options
from mgpu.providers.base import NodePhase, NodeState

JUMP = {"jump_host": "me@198.51.100.9:2222", "jump_host_key": HOST_KEY}


@pytest.fixture
def account(aws, reached):
    aws.quick()
    return reached


@pytest.fixture
def old(monkeypatch):
    """Every create was long ago."""
    monkeypatch.setattr(names, "LAG_S", -3600.0)


def describe(account, handle, **options):
    return machines.describe(account, Options.of({**options}), handle)


# --- what a machine is ------------------------------------------------------------------------------------------------


def test_a_machine_is_described_with_all_that_its_tags_say(aws, account):
    fleet = rent(aws, 2, **{names.PRICE: "1.25", names.HARD_CAP_AT: "1800000000", names.ONE_USE_KEY: HOST_KEY})
    state = describe(account, fleet.handle)
    assert state.ready
    node = state.nodes[1]
    shown = fleets.client(aws).describe_instances(InstanceIds=[fleet.ids[1]])["Reservations"][0]["Instances"][0]
    assert node == NodeState(
        rank=1,
        id=fleet.ids[1],
        phase=NodePhase.RUNNING,
        address=shown["PublicIpAddress"],
        user="ubuntu",
        host_key=HOST_KEY,
        one_use_key=HOST_KEY,
        python=machines.PYTHON,
        private_address=shown["PrivateIpAddress"],
        price_usd_per_hour=1.25,
        hard_cap_at=1800000000,
    )


def test_a_private_address_is_reached_through_the_jump_host(aws, account):
    fleet = rent(aws, 1)
    (node,) = describe(account, fleet.handle, address="private", python="/opt/me/python", **JUMP).nodes
    assert node.address == node.private_address != ""
    assert node.via is not None
    assert (node.via.user, node.via.address, node.via.port) == ("me", "198.51.100.9", 2222)
    assert node.python == "/opt/me/python"


def test_a_machine_without_a_host_key_is_not_ready(aws, account):
    fleet = rent(aws, 2)
    fleets.client(aws).delete_tags(Resources=[fleet.ids[0]], Tags=[{"Key": names.HOST_KEY}])
    assert not describe(account, fleet.handle).ready


def test_tags_that_somebody_has_edited_are_no_numbers(aws, account):
    fleet = rent(aws, 1, **{names.PRICE: "cheap", names.HARD_CAP_AT: "-5"})
    (node,) = describe(account, fleet.handle).nodes
    assert (node.price_usd_per_hour, node.hard_cap_at) == (0, 0)


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("pending", NodePhase.PENDING),
        ("running", NodePhase.RUNNING),
        ("shutting-down", NodePhase.ENDING),
        ("stopping", NodePhase.STOPPING),
        ("stopped", NodePhase.STOPPING),
        ("terminated", NodePhase.TERMINATED),
    ],
)
def test_each_state_of_ec2_is_a_phase(state, phase):
    assert machines.phase_of({"State": {"Name": state}}) is phase


def test_a_stopped_machine_is_still_billed_and_it_says_so(aws, account):
    fleet = rent(aws, 1)
    fleets.client(aws).stop_instances(InstanceIds=list(fleet.ids))
    (node,) = describe(account, fleet.handle).nodes
    assert node.phase is NodePhase.STOPPING
    assert "its disk is still billed" in node.reason


def test_a_machine_that_the_spot_market_took_says_so(aws, account):
    fleet = rent(aws, 2)
    aws.kill(fleet.ids[0])
    state = describe(account, fleet.handle)
    assert state.lost == (0,)
    assert state.nodes[0].reason == "taken by the spot market"
    assert state.nodes[1].reason == ""


# --- what EC2 does not show -------------------------------------------------------------------------------------------


def test_a_rank_without_a_machine_is_terminated(aws, account):
    fleet = rent(aws, 1, ranks=[1])
    nodes = describe(account, fleet.handle).nodes
    assert [(node.id, node.phase is NodePhase.TERMINATED) for node in nodes] == [("", True), (fleet.ids[1], False)]


def test_a_machine_that_is_not_shown_yet_is_not_lost(aws, account):
    """F9: by the handle's own age, whatever became of the template."""
    fleet = rent(aws, 1, template=False)
    aws.lag(30)
    with pytest.raises(Transient, match=fleet.ids[0]):
        describe(account, fleet.handle)


def test_by_its_template_a_create_is_young_where_the_handle_does_not_say(aws, account):
    fleet = rent(aws, 1)
    aws.lag(30)
    with pytest.raises(Transient):
        describe(account, fleet.handle.model_copy(update={"made_at": 0}))


def test_a_clock_that_is_fast_makes_no_create_old(aws, account, monkeypatch):
    """F34: the template's age is told by AWS's clock alone."""
    fleet = rent(aws, 1)
    aws.lag(30)
    now = time.time
    monkeypatch.setattr(machines.time, "time", lambda: now() + 1200)
    with pytest.raises(Transient):
        describe(account, fleet.handle.model_copy(update={"made_at": 0}))


def test_an_old_machine_that_is_not_shown_is_gone_and_hides_no_other(aws, account, old):
    """EC2 forgets a terminated machine after an hour; one unknown id would fail a call that names ids."""
    fleet = rent(aws, 1)
    handle = fleet.handle.model_copy(update={"ids": (*fleet.ids, "i-0123456789abcdef0")})
    first, second = describe(account, handle).nodes
    assert (first.phase, second.phase) == (NodePhase.RUNNING, NodePhase.TERMINATED)


def test_without_a_template_an_old_machine_is_gone(aws, account):
    fleet = rent(aws, 1, template=False)
    handle = fleet.handle.model_copy(update={"ids": ("i-0123456789abcdef0",), "made_at": time.time() - 600})
    assert describe(account, handle).nodes[0].phase is NodePhase.TERMINATED


def test_what_another_account_does_not_show_is_not_gone(aws, account, old):
    handle = rent(aws, 1).handle.model_copy(update={"ids": ("i-0123456789abcdef0",), "account": "210987654321"})
    with pytest.raises(AuthError, match="210987654321"):
        describe(account, handle)
    assert describe(account, handle.model_copy(update={"account": account.id()})).lost == (0,)


@pytest.mark.parametrize(
    ("code", "error"), [("Unavailable", Transient), ("Denied", PermissionDenied), ("Expired", AuthError)]
)
@pytest.mark.parametrize("action", ["DescribeInstances", "DescribeLaunchTemplates"])
def test_an_error_concludes_nothing(aws, account, old, action, code, error):
    fleet = rent(aws, 1)
    handle = fleet.handle.model_copy(update={"ids": (*fleet.ids, "i-0123456789abcdef0")})
    aws.errors(action, code)
    with pytest.raises(error):
        describe(account, handle)


def test_many_handles_cost_as_many_calls_as_their_machines_need(aws, account):
    rented = [rent(aws, 2, token=f"token-{n}") for n in range(20)]
    states = machines.describe_all(account, Options(), [each.handle for each in rented])
    assert [tuple(node.id for node in state.nodes) for state in states] == [each.ids for each in rented]
    assert len(aws.calls("DescribeInstances")) == 1


def test_more_machines_than_a_filter_takes_and_than_a_page_shows(aws, account):
    fleet = rent(aws, 230, ranked=False)
    aws.pages(50)
    assert [node.id for node in describe(account, fleet.handle).nodes] == list(fleet.ids)


def test_an_address_and_a_disk_are_shown_until_they_are_gone(aws, account):
    fleet = rent(aws, 1)
    loose = (fleets.address(aws, fleet), fleets.disk(aws, fleet))
    handle = fleet.handle.model_copy(update={"ids": loose})
    assert [node.phase for node in describe(account, handle).nodes] == [NodePhase.STOPPING] * 2
    fleets.client(aws).release_address(AllocationId=loose[0])
    fleets.client(aws).delete_volume(VolumeId=loose[1])
    assert [node.phase for node in describe(account, handle).nodes] == [NodePhase.TERMINATED] * 2


# --- find -------------------------------------------------------------------------------------------------------------


def test_what_a_create_made_is_found_in_rank_order(aws, account):
    fleet = rent(aws, 3)
    ec2 = fleets.client(aws)
    for rank, name in zip((2, 0, 1), fleet.ids, strict=True):
        ec2.create_tags(Resources=[name], Tags=fleets.pairs({names.RANK: str(rank)}))
    found = machines.find(account, fleet.intent)
    assert found is not None
    assert found.ids == (fleet.ids[1], fleet.ids[2], fleet.ids[0])
    assert (found.token, found.fleet, found.region) == ("token-1", "demo", "us-east-1")
    assert found.made_at == pytest.approx(time.time(), abs=30)


def test_machines_that_nobody_ranked_take_the_ranks_that_were_asked_for(aws, account):
    fleet = rent(aws, 2, ranks=[1, 3], ranked=False)
    found = machines.find(account, fleet.intent)
    assert found is not None
    assert found.ids == ("", fleet.ids[1], "", fleet.ids[3])


@pytest.mark.parametrize(
    "other",
    [
        {"token": "token-10"},
        {"token": "Token-1"},
        {"token": "token-?"},
        {"token": "token-2", "fleet": "demo"},
        {"owner": "o-2", "token": "token-1"},
        {"fleet": "demo-2", "token": "token-1"},
    ],
)
def test_only_the_tokens_own_machines_are_found(aws, account, other):
    wanted = rent(aws, 1, token="token-1").intent
    stranger = rent(aws, 1, template=False, **other)
    found = machines.find(account, wanted)
    assert found is not None
    assert not set(stranger.ids) & set(found.ids)


@pytest.mark.parametrize("token", ["*", "token-?", "\\*"])
def test_a_wildcard_finds_nothing(aws, account, token):
    fleet = rent(aws, 1)
    assert machines.find(account, fleet.intent.model_copy(update={"token": token})) is None


def test_a_create_whose_machines_are_terminated_has_made_them(aws, account):
    fleet = rent(aws, 2)
    fleets.client(aws).terminate_instances(InstanceIds=list(fleet.ids))
    found = machines.find(account, fleet.intent)
    assert found is not None
    assert found.ids == fleet.ids
    assert all(node.phase is NodePhase.TERMINATED for node in describe(account, found).nodes)


def test_nothing_is_found_of_what_is_not_there_or_not_shown_yet(aws, account):
    fleet = rent(aws, 1)
    assert machines.find(account, fleet.intent.model_copy(update={"token": "token-2"})) is None
    aws.lag(30)
    assert machines.find(account, fleet.intent) is None


def test_a_find_that_fails_is_not_nothing(aws, account):
    fleet = rent(aws, 1)
    aws.errors("DescribeInstances", "Unavailable")
    with pytest.raises(ProviderError):
        machines.find(account, fleet.intent)


# --- host keys --------------------------------------------------------------------------------------------------------


def test_a_new_host_key_stands_beside_the_one_use_key_until_it_is_in_use(aws, account):
    fleet = rent(aws, 1, **{names.ONE_USE_KEY: HOST_KEY})
    machines.rekeyed(account, fleet.handle, fleet.ids[0], "ssh-ed25519 AAAANew", used=False)
    (node,) = describe(account, fleet.handle).nodes
    assert (node.host_key, node.one_use_key) == ("ssh-ed25519 AAAANew", HOST_KEY)
    machines.rekeyed(account, fleet.handle, fleet.ids[0], "ssh-ed25519 AAAANew", used=True)
    (node,) = describe(account, fleet.handle).nodes
    assert (node.host_key, node.one_use_key) == ("ssh-ed25519 AAAANew", "")


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([0], "0"), ([0, 1, 2], "0-2"), ([3, 1], "1,3"), ([7, 8, 9, 3], "3,7-9"), (range(1024), "0-1023")],
)
def test_ranks_are_written_as_runs(ranks, text):
    assert machines.ranks_tag(ranks) == text
    assert machines._ranks(text) == sorted(ranks)


def test_ranks_that_a_tag_has_no_room_for_are_left_out_from_the_highest_on():
    text = machines.ranks_tag(range(0, 600, 2))
    assert 250 < len(text) <= 256
    assert machines._ranks(text) == list(range(0, 2 * len(machines._ranks(text)), 2))


def shown(name, **tags):
    return {"InstanceId": name, "Tags": fleets.pairs({f"mgpu:{key}": value for key, value in tags.items()})}


@pytest.mark.parametrize(
    ("machines_shown", "ids"),
    [
        ([], ()),
        ([shown("i-b", rank="0"), shown("i-a", rank="1")], ("i-b", "i-a")),
        ([shown("i-a", rank="2")], ("", "", "i-a")),
        ([shown("i-b"), shown("i-a")], ("i-a", "i-b")),
        ([shown("i-b", ranks="1,3"), shown("i-a", ranks="1,3", rank="3")], ("", "i-b", "", "i-a")),
        ([shown("i-a", rank="0"), shown("i-b", rank="0")], ("i-a", "i-b")),
        ([shown("i-a", rank="99999999999"), shown("i-b", rank="-1")], ("i-a", "i-b")),
        ([shown("i-a", ranks="0-99999999999"), shown("i-b", ranks="")], ("i-a", "i-b")),
        ([shown("i-a", ranks="5"), shown("i-b", ranks="5")], ("i-b", "", "", "", "", "i-a")),
    ],
)
def test_no_id_is_lost_whatever_the_tags_say(machines_shown, ids):
    assert machines.in_rank_order(machines_shown) == ids
