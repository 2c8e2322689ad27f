"""I7: "destroyed" is said when the provider says terminated, and not before."""

from __future__ import annotations

from functools import partial

import pytest

from mgpu import acquire, paths
from mgpu.context import Context
from mgpu.errors import (
    AuthError,
    InvalidRequest,
    MgpuError,
    PermissionDenied,
    RateLimited,
    StackError,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Warned
from mgpu.iac.types import generations
from mgpu.providers.base import Listing, NodePhase
from mgpu.run.fleet import stack as stacks
from mgpu.run.fleet.teardown import give_back, owned
from mgpu.run.lifecycle import down
from mgpu.run.record import record
from mgpu.run.record.record import State


@pytest.fixture
def stack(world):
    """A stack of `mgpu launch`'s own with two machines, beside a fleet that is not its."""
    world.has_nodes(2)
    made = stacks.Stack(world.folder, "run-1", world.run_file, log_dir=world.folder)
    made.init()
    made.up()
    world.cloud.rent("mine-dev")
    world.calls.clear()
    return made


def back(world, stack, *, remove=True):
    give_back(stack, [lambda: world.cloud], paths.owner(), world.timeouts, world.events.append, remove=remove)


def test_all_good_the_stack_is_forgotten(world, stack):
    back(world, stack)
    assert world.calls == ["destroy run-1", "remove run-1"]
    assert world.cloud.billed == {"mine-dev-0"}, "the fleet of another stack is not touched"
    assert world.of(Warned) == []


def test_a_users_own_stack_is_emptied_and_stays(world, stack):
    back(world, stack, remove=False)
    assert world.calls == ["destroy run-1"]
    assert world.stacks == {"run-1": None}


def test_a_second_time_is_success(world, stack):
    back(world, stack)
    back(world, stack)
    assert "run-1" not in world.stacks


def test_machines_that_the_stack_does_not_know_are_swept(world, stack):
    """A create that was cut off: the engine's state is empty, the machines are there."""
    world.stacks["run-1"] = None
    stack.destroy = lambda: None
    back(world, stack)
    assert world.cloud.billed == {"mine-dev-0"}


def test_where_nothing_is_left_the_provider_is_asked_once(world, stack):
    """It is a question to every region."""
    asked, listed = [], world.cloud.list_owned
    world.cloud.list_owned = lambda owner: asked.append(owner) or listed(owner)
    back(world, stack)
    assert len(asked) == 1


def test_a_machine_that_the_provider_still_lists_is_named_and_the_stack_is_kept(world, stack):
    world.cloud.stuck.add(f"{stack.fleet}-1")
    with pytest.raises(TeardownIncomplete, match=f"{stack.fleet}-1"):
        back(world, stack)
    assert "remove run-1" not in world.calls


def test_a_machine_that_does_not_end_keeps_no_other_one(world, stack):
    """A repair leaves two gangs of one fleet. Of a machine that somebody has protected EC2 says that it may not end."""
    stack.destroy = lambda: None
    ids = {"first": f"{stack.fleet}-0", "second": f"{stack.fleet}-1"}
    made = world.cloud.handles.pop(stack.fleet)
    world.cloud.handles |= {token: made.model_copy(update={"token": token, "ids": (ids[token],)}) for token in ids}
    ends = world.cloud.destroy

    def destroy(handle, nodes=None):
        if handle.token == "first":
            raise PermissionDenied("EC2 does not let it go")
        return ends(handle, nodes)

    world.cloud.destroy = destroy
    with pytest.raises(TeardownIncomplete, match=ids["first"]) as caught:
        back(world, stack)
    assert "EC2 does not let it go" in caught.value.why
    assert world.cloud.billed == {"mine-dev-0", ids["first"]}


def test_no_part_of_a_fleet_is_billed_while_another_one_ends(world, stack):
    """Bare metal takes half an hour to end."""
    stack.destroy = lambda: None
    ids = {"first": f"{stack.fleet}-0", "second": f"{stack.fleet}-1"}
    made = world.cloud.handles.pop(stack.fleet)
    world.cloud.handles |= {token: made.model_copy(update={"token": token, "ids": (ids[token],)}) for token in ids}
    ends, asked = world.cloud.destroy, list[str]()

    def destroy(handle, nodes=None):
        asked.append(handle.token)
        return asked.count(handle.token) > 2 and ends(handle, nodes)

    world.cloud.destroy = destroy
    back(world, stack, remove=False)
    assert asked[:2] == ["first", "second"]
    assert world.cloud.billed == {"mine-dev-0"}


def test_a_provider_that_says_done_while_it_still_lists_one_is_not_believed(world, stack):
    world.cloud.stuck.add(f"{stack.fleet}-1")
    world.cloud.destroy = lambda *_: True
    stack.destroy = lambda: None
    with pytest.raises(TeardownIncomplete, match=f"{stack.fleet}-1"):
        back(world, stack)
    assert "remove run-1" not in world.calls


def test_a_machine_that_is_only_stopping_is_still_billed(world, stack):
    assert [handle.fleet for handle in owned(world.cloud, paths.owner(), stack.fleet)] == [stack.fleet]
    world.cloud.phases |= {f"{stack.fleet}-0": NodePhase.TERMINATED, f"{stack.fleet}-1": NodePhase.STOPPING}
    assert [handle.fleet for handle in owned(world.cloud, paths.owner(), stack.fleet)] == [stack.fleet]
    world.cloud.phases[f"{stack.fleet}-1"] = NodePhase.TERMINATED
    assert owned(world.cloud, paths.owner(), stack.fleet) == ()


def test_when_pulumi_fails_the_machines_go_all_the_same_and_the_stack_is_told(world, stack):
    world.hooks["destroy"] = StackError("the state is locked", "by another update")
    with pytest.raises(TeardownIncomplete, match="machines are gone") as caught:
        back(world, stack)
    assert "run-1" in caught.value.what
    assert "the state is locked" in caught.value.why
    assert world.cloud.billed == {"mine-dev-0"}
    assert "remove run-1" not in world.calls, "its state is still needed"
    assert any("the state is locked" in event.text for event in world.of(Warned))


def test_where_a_machine_cannot_be_asked_nobody_says_that_all_are_gone(world, stack):
    world.hooks["destroy"] = StackError("it refused")
    listed, mute = world.cloud.list_owned, InvalidRequest("host gpu1 has no python3")
    world.cloud.list_reached = lambda owner: Listing(handles=listed(owner), failures=(mute,))
    with pytest.raises(TeardownIncomplete, match="cannot be asked") as caught:
        back(world, stack)
    assert "are gone" not in caught.value.what
    assert "host gpu1 has no python3" in caught.value.why


@pytest.mark.parametrize("known", ["", "by the caller", "by the journal"])
def test_a_region_that_is_closed_fails_the_end_only_of_a_fleet_that_may_be_there(world, stack, known):
    denied, listed = PermissionDenied("aws east: the organization forbids it"), world.cloud.list_owned
    world.cloud.list_reached = lambda owner: Listing(handles=listed(owner), closed={"east": denied})
    if known == "by the journal":
        intent = {"provider": "local", "region": "east"}
        generations.open_journal(paths.state_dir(), paths.owner(), stack.fleet).append(
            "intent", token="t", offer=intent
        )
    region = "east" if known == "by the caller" else "west"

    def end():
        sellers = [lambda: world.cloud]
        give_back(stack, sellers, paths.owner(), world.timeouts, world.events.append, remove=True, region=region)

    if not known:
        end()
        return
    with pytest.raises(TeardownIncomplete, match="may still be billed"):
        end()


def test_a_provider_that_is_silent_for_a_moment_is_asked_again_what_is_left(world, stack, monkeypatch):
    """Else one call that is throttled at the very end of a run would be an incomplete teardown."""
    monkeypatch.setattr(acquire, "ANSWER_S", 30.0)
    monkeypatch.setattr("mgpu.acquire.pauses._BACKOFF_S", 0.001)
    silent, listed = [Transient("503"), RateLimited("too many calls")], world.cloud.list_owned

    def list_owned(owner):
        if silent:
            raise silent.pop()
        return listed(owner)

    world.cloud.list_owned = list_owned
    back(world, stack)
    assert (silent, world.cloud.billed) == ([], {"mine-dev-0"})


@pytest.mark.parametrize("call", ["list_owned", "describe", "destroy"])
@pytest.mark.parametrize("error", [AuthError("the key has expired"), Transient("503")])
@pytest.mark.parametrize("pulumi", ["fails", "works"])
def test_a_provider_that_cannot_be_asked_is_an_incomplete_teardown(world, stack, call, error, pulumi):
    if pulumi == "fails":
        world.hooks["destroy"] = StackError("the state is locked")
    else:
        stack.destroy = lambda: world.calls.append("destroy run-1")  # it says so, and nobody can confirm it
    world.cloud.refuses[call] = [error]
    with pytest.raises(MgpuError) as caught:
        back(world, stack)
    assert caught.value.exit_code == 7
    assert error.what in str(caught.value)
    assert "remove run-1" not in world.calls


def test_what_each_of_several_providers_says_of_its_own_machines_is_told(world, stack):
    world.cloud.stuck.add(f"{stack.fleet}-1")

    def cannot_be_asked(error):
        raise error

    first = AuthError("the first key has expired", next_step="Log in anew.")
    second = AuthError("the second account is closed")
    sellers = [lambda: world.cloud, partial(cannot_be_asked, first), partial(cannot_be_asked, second)]
    with pytest.raises(TeardownIncomplete) as caught:
        give_back(stack, sellers, paths.owner(), world.timeouts, world.events.append, remove=True)
    said = str(caught.value)
    for words in (
        f"{stack.fleet}-1",
        "2 providers cannot be asked",
        "the first key",
        "Log in anew.",
        "the second account",
    ):
        assert words in said
    assert "their hard cap" in caught.value.next_step


@pytest.mark.parametrize("away", ["fleet", "records"])
def test_a_backend_that_is_away_once_the_machines_are_gone_fails_no_teardown(world, stack, monkeypatch, away):
    before = world.record("before", teardown="kept", state=State.SUCCEEDED, fleet=world.stacks["run-1"].model_dump())

    def no_answer(*_, **__):
        raise StackError("the backend s3://team could not be written")

    def goes_away():
        if away == "fleet":
            monkeypatch.setattr(type(stack), "fleet", property(no_answer))
        else:
            monkeypatch.setattr(stacks, "write", no_answer)

    world.hooks["remove"] = goes_away
    context = Context(world.events.append, world.timeouts)
    stacks.give_back_fleet(stack, [lambda: world.cloud], world.stacks["run-1"], context, remove=True)
    assert world.cloud.billed == {"mine-dev-0"}
    said = record.load(before.run_id).teardown
    told = [event.text for event in world.of(Warned)]
    if away == "fleet":
        assert (said, told) == ("confirmed", [])
    else:
        assert said == "kept"
        assert ["until its lease is over" in text for text in told] == [True]


def test_a_stack_that_never_came_up_whole_is_of_its_run_files_provider_also_of_a_sweeps(tmp_path):
    """Else its machines could not be given back."""
    (tmp_path / "t.py").touch()
    (tmp_path / "mgpu.yaml").write_text(
        "{name: a, provider: slurm, max_hours: 1, max_price_usd_per_hour: 1, command: [t.py], checkpoint: none, "
        "matrix: {nodes: [1, 2]}}"
    )
    assert down._provider(tmp_path, None).name == "slurm"
