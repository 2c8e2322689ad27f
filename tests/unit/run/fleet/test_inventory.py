"""I1: what is billed is found, and only what nothing stands for is ever ended."""

from __future__ import annotations

import json
import threading

import pytest
from click.testing import CliRunner

from mgpu import paths
from mgpu.backend import location
from mgpu.cli import cli
from mgpu.context import Context
from mgpu.errors import AuthError, InputError, PermissionDenied, Transient
from mgpu.events import Warned
from mgpu.iac import tokens
from mgpu.iac.types import generations
from mgpu.providers import registry
from mgpu.providers.base import Listing, NodePhase
from mgpu.run.fleet import inventory
from mgpu.run.lifecycle.gc import end, end_all
from mgpu.run.record import record
from mgpu.run.record.record import State
from mgpu.spec.provider import installed


def stack_file(project, stack, packed=""):
    """The state that the engine has of a stack."""
    path = location.current().folder / ".pulumi" / "stacks" / project / f"{stack}.json{packed}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def gc(*args):
    return CliRunner().invoke(cli, ["gc", *args], standalone_mode=False)


@pytest.fixture
def four(world):
    """A fleet of a run, two of stacks, and one that nothing stands for."""
    for name in ("mine-run-1", "mine-dev", "prod", "mine-lost"):
        world.cloud.rent(name, 2)
    stack_file("mine", "dev")
    stack_file("mgpu", "prod", ".gz")
    world.record("run-1", state=State.RUNNING)
    with record.supervising("run-1") as mine:
        assert mine
        yield world


def test_every_fleet_is_told_with_its_price_and_what_stands_for_it(four):
    found = {fleet.name: fleet for fleet in inventory.survey().fleets}
    assert {name: fleet.used_by for name, fleet in found.items()} == {
        "mine-run-1": "run run-1",
        "mine-dev": "stack dev",
        "prod": "stack prod",
        "mine-lost": "",
    }
    assert found["mine-lost"].ids == ("mine-lost-0", "mine-lost-1")
    assert found["mine-lost"].usd_per_hour == 1.0


def test_machines_that_came_later_are_of_the_same_fleet(four, monkeypatch):
    """As after a repair: each make has a handle of its own, and is ended by it."""
    one = four.cloud.handles.pop("mine-lost")
    for name, ids in (("mine-lost/1", one.ids[:1]), ("mine-lost/2", one.ids[1:])):
        four.cloud.handles[name] = one.model_copy(update={"ids": ids, "token": name})
    survey = inventory.survey()
    assert [each.ids for each in survey.fleets if each.name == "mine-lost"] == [one.ids[:1], one.ids[1:]]
    (shown,) = [each for each in survey.by_name if each.name == "mine-lost"]
    assert (shown.ids, shown.usd_per_hour) == (one.ids, 1.0)
    assert gc().stdout.count("mine-lost") == 1
    assert gc("--yes").return_value == 0
    assert not set(one.ids) & four.cloud.billed


@pytest.mark.parametrize("text", ["", '{"checkpoint": {"lat', "\x1f\x8bcut off"])
def test_a_stack_whose_state_is_damaged_stands_for_nothing(world, text):
    """F5: the engine can end nothing of it any more; an older copy beside it does not change that."""
    world.cloud.rent("mine-dev", 2)
    stack_file("mine", "dev", ".bak")
    stack_file("mine", "dev").write_bytes(text.encode("latin-1"))
    assert gc("--yes").return_value == 0
    assert world.cloud.billed == set()


def test_a_dry_run_changes_nothing_and_says_what_it_would_do(four):
    done = gc()
    assert done.return_value == 0
    assert "mine-lost" in done.stdout
    assert "mgpu gc --yes" in done.stderr
    assert len(four.cloud.billed) == 8
    assert four.cloud.ended == []


def test_with_yes_the_orphan_goes_and_nothing_else(four):
    done = gc("--yes")
    assert done.return_value == 0
    assert set(four.cloud.ended) == {"mine-lost"}
    assert not {"mine-lost-0", "mine-lost-1"} & four.cloud.billed
    assert len(four.cloud.billed) == 6
    assert "mine-lost: ended" in done.stderr


def test_the_json_of_gc_has_what_a_script_needs(four):
    found = json.loads(gc("--json").stdout)["fleets"]
    assert {fleet["name"]: fleet["used_by"] for fleet in found}["mine-lost"] == ""
    assert set(found[0]) == {"name", "provider", "ids", "usd_per_hour", "used_by", "left_by"}


def test_an_end_that_the_provider_does_not_confirm_is_exit_code_7(four):
    four.cloud.stuck.add("mine-lost-1")
    done = gc("--yes")
    assert done.exception is not None
    assert done.exception.exit_code == 7
    assert "mine-lost-1" in str(done.exception)
    assert "ended, confirmed" not in done.stderr


# --- runs that lost their supervisor ----------------------------------------------------------------------------------


def left_behind(world, state, **more):
    """A run whose supervisor was killed; the engine still has a state of its stack."""
    world.run_file.write_text("name: a\n")
    world.stacks["run-1"] = output = world.output(world.cloud.rent("mine-run-1"))
    stack_file("mine", "run-1")
    return world.record("run-1", **{"state": state, "fleet": output.model_dump(mode="json")} | more)


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING, State.TEARDOWN])
def test_a_run_that_neither_trains_nor_is_supervised_is_ended_as_a_run(world, state):
    left_behind(world, state)
    told = gc()
    assert "nothing: left by run run-1" in told.stdout
    assert world.cloud.billed == {"mine-run-1-0"}, "a dry run changes nothing"
    assert gc("--yes").return_value == 0
    assert world.cloud.billed == set()
    ended = record.load("run-1")
    assert (ended.state, ended.teardown, ended.exit_code) == (State.STOPPED, "confirmed", 130)
    assert world.stacks == {}, "nothing of it stays in the engine"


@pytest.mark.parametrize("teardown", ["asked", "none", "confirmed"])
def test_machines_of_a_run_that_is_over_are_ended(world, teardown):
    """`confirmed`: an engine that went on after its driver was killed made them later."""
    left_behind(world, State.FAILED, teardown=teardown, exit_code=6)
    assert gc("--yes").return_value == 0
    assert world.cloud.billed == set()
    assert (record.load("run-1").state, record.load("run-1").exit_code) == (State.FAILED, 6)


@pytest.mark.parametrize("state", [State.RUNNING, State.STOPPING])
def test_a_run_that_trains_without_a_supervisor_keeps_its_machines(world, state):
    left_behind(world, state)
    done = gc("--yes")
    assert "no supervisor: mgpu attach run-1" in done.stdout
    assert world.cloud.billed == {"mine-run-1-0"}
    assert record.load("run-1").state is state


@pytest.mark.parametrize("state", [State.PROVISIONING, State.TEARDOWN, State.FAILED])
def test_what_somebody_supervises_is_left_to_them(world, state):
    """A final run is supervised while `mgpu down` gives its machines back."""
    left_behind(world, state, teardown="asked")
    with record.supervising("run-1"):
        assert [fleet.used_by for fleet in inventory.survey().fleets] == ["run run-1"]
        gc("--yes")
    assert world.cloud.billed == {"mine-run-1-0"}


@pytest.mark.parametrize(
    ("state", "more"),
    [
        (State.SUCCEEDED, {"teardown": "kept"}),
        (State.PROVISIONING, {"own_stack": False}),
        (State.FAILED, {"own_stack": False, "teardown": "confirmed"}),
    ],
)
def test_a_fleet_that_was_kept_or_is_a_users_own_stands_for_itself(world, state, more):
    left_behind(world, state, **more)
    assert [(fleet.used_by, fleet.left_by) for fleet in inventory.survey().fleets] == [("stack run-1", "")]


def test_a_users_stack_that_was_brought_up_again_is_not_the_last_runs(world):
    """The fleet's name is the same; its machines are others."""
    left_behind(world, State.FAILED, own_stack=False, teardown="asked", fleet_name="mine-run-1")
    world.cloud.handles["mine-run-1"] = world.cloud.handles["mine-run-1"].model_copy(update={"ids": ("new-0",)})
    world.cloud.phases["new-0"] = NodePhase.RUNNING
    assert [(fleet.used_by, fleet.left_by) for fleet in inventory.survey().fleets] == [("stack run-1", "")]


def test_a_run_that_is_taken_over_between_the_look_and_the_end_is_not_ended(world):
    left_behind(world, State.REPAIRING)
    (fleet,) = inventory.survey().fleets
    again = record.load("run-1")
    again.to(State.RUNNING)
    record.save(again)
    with pytest.raises(InputError, match="trains"):
        end(fleet, Context(world.events.append, world.timeouts))
    assert world.cloud.billed == {"mine-run-1-0"}


def test_machines_that_are_named_like_no_run_and_no_stack_are_nobodys(world):
    world.cloud.rent("mine-run-2")
    world.record("run-1", state=State.FAILED)
    assert [(fleet.used_by, fleet.left_by) for fleet in inventory.survey().fleets] == [("", "")]


def test_a_stack_of_another_project_does_not_stand_for_ours(world):
    world.cloud.rent("mine-dev")
    stack_file("theirs", "dev")
    assert [fleet.used_by for fleet in inventory.survey().fleets] == [""]


def test_machines_that_are_terminated_are_no_fleet_and_a_partly_lost_one_is(world):
    world.cloud.rent("mine-a"), world.cloud.rent("mine-b", 2)
    world.cloud.phases |= {"mine-a-0": NodePhase.TERMINATED, "mine-b-0": NodePhase.TERMINATED}
    (fleet,) = inventory.survey().fleets
    assert (fleet.name, fleet.ids, fleet.usd_per_hour) == ("mine-b", ("mine-b-1",), 0.5)


def test_a_provider_that_cannot_be_asked_is_not_taken_for_an_empty_one(world):
    world.cloud.refuses["list_owned"] = [Transient("503 from local")]
    done = gc()
    assert done.return_value == 3
    assert "503 from local" in done.stderr
    assert "no machines of yours at any provider that could be asked" in done.stdout


@pytest.fixture
def far(world):
    """A second provider, which is set up."""
    world.elsewhere["far"] = type(world.cloud)()
    return world.elsewhere["far"]


def test_a_provider_that_cannot_be_asked_hides_nothing_of_the_others(world, far):
    world.cloud.rent("mine-lost", 2)
    far.refuses["list_owned"] = [AuthError("far: the credentials have expired")]
    listed, swept = CliRunner().invoke(cli, ["ls"], standalone_mode=False), gc("--yes")
    for done in (listed, swept):
        assert done.return_value == 3
        assert "mine-lost" in done.stdout
        assert "far: the credentials have expired" in done.stderr
    assert "billed now: 2 nodes, $1.00 per hour, and what those have that could not be asked" in listed.stdout
    assert world.cloud.billed == set(), "what is seen is ended all the same"


def test_machines_that_cannot_be_asked_what_they_carry_are_told_beside_those_that_can(world):
    world.cloud.rent("mine-lost", 2)
    silent, listed = Transient("host gpu2 does not answer"), world.cloud.list_owned
    world.cloud.list_reached = lambda owner: Listing(handles=listed(owner), failures=(silent,))
    done = CliRunner().invoke(cli, ["ls"], standalone_mode=False)
    assert done.return_value == 3
    assert "mine-lost" in done.stdout
    assert "host gpu2 does not answer" in done.stderr


@pytest.mark.parametrize("known", ["nothing", "run", "stack", "asked for"])
def test_a_region_that_an_organization_closes_matters_only_where_something_may_be_there(world, known):
    world.cloud.rent("mine-lost")
    denied, seen = PermissionDenied("aws east: the organization forbids it"), world.cloud.list_owned
    world.cloud.list_reached = lambda owner: Listing(handles=seen(owner), closed={"east": denied, "west": denied})
    if known == "run":
        output = world.output(world.cloud.rent("mine-run-1")).model_dump(mode="json")
        world.record("run-1", state=State.FAILED, fleet={**output, "region": "west"}, teardown="asked")
        world.record("run-0", state=State.FAILED, fleet={**output, "region": "east"}, teardown="confirmed")
    elif known != "nothing":
        inputs = {"name": "theirs", "provider": "local", "options": {}}
        outputs = {"region": "west" if known == "stack" else "here"}
        state = {"type": tokens.FLEET, "inputs": inputs, "outputs": outputs}
        stack_file("mine", "dev").write_text(json.dumps({"checkpoint": {"latest": {"resources": [state]}}}))
    if known == "asked for":
        journal = generations.open_journal(paths.state_dir(), paths.owner(), "theirs")
        journal.append("intent", token="t", offer={"provider": "local", "region": "west"})
        journal.append("created", token="t")
    listed, swept = CliRunner().invoke(cli, ["ls"], standalone_mode=False), gc()
    for done in (listed, swept):
        assert done.return_value == (0 if known == "nothing" else 3)
        assert "mine-lost" in done.stdout
        assert ("not looked for machines in east, west" in done.stderr) == (known == "nothing")
        assert "not looked for machines in east" in done.stderr


def test_regions_that_are_closed_for_different_reasons_are_told_with_theirs():
    denied, refused = PermissionDenied("the organization forbids it"), AuthError("the credentials are not taken")
    told = list[Warned]()
    inventory.Survey((), closed={("aws", "west"): denied, ("aws", "south"): refused, ("aws", "east"): denied}).warn(
        told.append
    )
    south, rest = sorted(event.text.removeprefix("it was not looked for machines in ") for event in told)[::-1]
    assert (south[:5], south[-29:]) == ("south", "the credentials are not taken")
    assert (rest[:10], rest[-27:]) == ("east, west", "the organization forbids it")


@pytest.mark.parametrize("broken", ["entry", "class"])
def test_a_provider_whose_package_does_not_work_hides_nothing_of_the_others_and_is_told(
    world, far, monkeypatch, broken
):
    """I7: what it has may still be billed."""
    world.cloud.rent("mine-lost", 2)
    if broken == "entry":
        monkeypatch.setitem(installed().broken, "yard", "mgpu_yard:ENTRY cannot be imported")
    else:

        def lost():
            raise InputError("provider yard: mgpu_yard:Yard does not work")

        monkeypatch.setattr(far, "configured", lost)
    listed, swept = CliRunner().invoke(cli, ["ls"], standalone_mode=False), gc("--yes")
    for done in (listed, swept):
        assert done.return_value != 0
        assert "mine-lost" in done.stdout
        assert "provider yard" in done.stderr
    assert world.cloud.billed == set()


def test_a_kept_fleet_is_not_said_to_be_gone_while_its_provider_cannot_be_asked(world, far):
    output = world.output(world.cloud.rent("mine-run-1")).model_dump(mode="json")
    world.record("run-1", state=State.SUCCEEDED, fleet=output, teardown="kept")
    world.cloud.refuses["list_owned"] = [Transient("503")]
    assert "gone since" not in CliRunner().invoke(cli, ["ls"], standalone_mode=False).stdout


def test_a_provider_that_is_not_set_up_is_not_asked(world, far):
    far.is_configured = False
    far.refuses["list_owned"] = [AuthError("no credentials")]
    assert gc().return_value == 0


@pytest.mark.parametrize("teardown", ["none", "kept", "asked"])
def test_it_is_asked_where_a_run_has_machines_of_it(world, far, teardown):
    far.is_configured = False
    far.rent("mine-run-1")
    world.record("run-1", provider="far", state=State.FAILED, teardown=teardown)
    assert "mine-run-1" in gc().stdout


def test_it_is_asked_where_a_stack_has_machines_of_it(world, far):
    far.is_configured = False
    far.rent("theirs")
    inputs = {"name": "theirs", "provider": "far", "options": {"account": "1"}}
    state = {"checkpoint": {"latest": {"resources": [{"type": tokens.FLEET, "inputs": inputs}]}}}
    stack_file("mine", "dev").write_text(json.dumps(state))
    assert [(fleet.name, fleet.used_by) for fleet in inventory.survey().fleets] == [("theirs", "stack dev")]


def test_it_is_asked_where_a_stacks_fleet_has_been_before(world, far):
    """A create that was cut off may have left machines there: the guard remembers where it was."""
    far.is_configured = False
    far.rent("theirs")
    guard = {
        "type": tokens.FLEET_GUARD,
        "inputs": {"fleet": "theirs", "owner": "o", "provider": "local", "options": {}},
        "outputs": {"earlier": [{"provider": "far", "options": {"account": "1"}}, "nonsense"]},
    }
    stack_file("mine", "dev").write_text(json.dumps({"checkpoint": {"latest": {"resources": [guard]}}}))
    (fleet,) = inventory.survey().fleets
    assert (fleet.provider, fleet.used_by) == ("far", "stack dev")
    assert ("far", {}) in world.reached, "none of its settings says whose account it is"
    assert "theirs" in CliRunner().invoke(cli, ["ls"], standalone_mode=False).stdout
    far.capabilities = far.capabilities.model_copy(update={"account_options": frozenset({"account"})})
    assert [each.options for each in inventory.survey().fleets] == [{"account": "1"}]


def test_where_a_stacks_fleet_has_been_before_need_not_answer_unless_something_may_be_left_there(
    world, far, monkeypatch
):
    """As of an account that is closed: nothing else names it, and the stack stays for long."""

    def known(name, options=None, get=registry.get):
        if name == "gone-since":
            raise InputError("there is no such provider")
        return get(name, options)

    monkeypatch.setattr(registry, "get", known)
    far.is_configured = False
    far.refuses["list_owned"] = [AuthError("the account is closed")]
    earlier = [{"provider": name, "options": {}} for name in ("far", "gone-since")]
    guard = {
        "type": tokens.FLEET_GUARD,
        "inputs": {"fleet": "theirs", "owner": "o", "provider": "local", "options": {}},
        "outputs": {"earlier": earlier},
    }
    stack_file("mine", "dev").write_text(json.dumps({"checkpoint": {"latest": {"resources": [guard]}}}))
    for command in ("ls", "gc"):
        done = CliRunner().invoke(cli, [command], standalone_mode=False)
        assert done.return_value == 0
        assert "far, where a stack's fleet was before, cannot be asked: the account is closed" in done.stderr
        assert "gone-since, where a stack's fleet was before" in done.stderr
    far.is_configured = True
    assert gc().return_value == 3, "who is set up here has to answer as ever"
    far.is_configured = False
    journal = generations.open_journal(paths.state_dir(), "o", "theirs")
    journal.append("intent", token="t", offer={"provider": "far"})
    assert gc().return_value == 3
    journal.append("undone", token="t")
    assert gc().return_value == 0
    world.record("run-1", provider="far", state=State.FAILED, teardown="kept")
    assert gc().return_value == 3, "a run may have machines there"


def test_each_account_is_asked_once_with_the_settings_that_lead_there(world, far):
    far.capabilities = far.capabilities.model_copy(update={"account_options": frozenset({"account"})})
    far.rent("mine-run-1")
    for number, options in enumerate([{"account": "1", "python": "/a"}, {"account": "1"}, {"account": "2"}, {}]):
        world.record(f"run-{number}", provider="far", state=State.FAILED, teardown="kept", options=options)
    world.record("over", provider="far", state=State.FAILED, teardown="confirmed", options={"account": "3"})
    asked = []
    far.list_owned = lambda owner, listed=far.list_owned: asked.append(1) or listed(owner)
    (fleet,) = inventory.survey().fleets
    assert len(asked) == 3, "with nothing, for account 1, and for account 2"
    assert {dict(options).get("account") for name, options in world.reached if name == "far"} == {None, "1", "2"}
    assert fleet.used_by == ""


def test_a_fleet_is_ended_with_the_settings_by_which_it_was_found(world, far):
    far.capabilities = far.capabilities.model_copy(update={"account_options": frozenset({"account"})})
    far.is_configured = False
    far.rent("mine-run-1")
    world.record("run-1", provider="far", state=State.FAILED, teardown="kept", options={"account": "1", "python": "/a"})
    (fleet,) = inventory.survey().fleets
    end(fleet, Context(world.events.append, world.timeouts))
    assert world.reached[-1] == ("far", {"account": "1"})
    assert far.billed == set()


def test_nothing_is_billed_and_it_says_so(world):
    assert "no machines of yours" in gc("--yes").stdout
    assert json.loads(gc("--json").stdout) == {"version": 1, "fleets": [], "ended": []}


def test_many_fleets_cost_one_look_at_each_thing(world, monkeypatch):
    """Linear: the provider is asked once, a stack's state is read once before and once after, however many fleets there
    are."""
    asked, read = [], []
    for number in range(300):
        world.cloud.rent(f"mine-{number}", 2)
    for number in range(5):
        stack_file("mine", str(number))
        world.record(f"run-{number}", state=State.FAILED)
    describe_all, fleets_in = world.cloud.describe_all, inventory._fleets_in
    monkeypatch.setattr(
        world.cloud, "describe_all", lambda handles: asked.append(len(handles)) or describe_all(handles)
    )
    monkeypatch.setattr(inventory, "_fleets_in", lambda key: read.append(key.rpartition("/")[2]) or fleets_in(key))
    used = [fleet for fleet in inventory.survey().fleets if fleet.used_by]
    assert sorted(fleet.used_by for fleet in used) == [f"stack {number}" for number in range(5)]
    assert (asked, sorted(read[:5]), len(read)) == ([300], [f"{number}.json" for number in range(5)], 10)


def test_machines_that_a_run_rents_while_the_provider_is_asked_are_its_own(world, monkeypatch):
    list_owned = world.cloud.list_owned

    def meanwhile(owner):
        world.record("run-1", state=State.RUNNING)
        world.cloud.rent("mine-run-1", 1)
        return list_owned(owner)

    monkeypatch.setattr(world.cloud, "list_owned", meanwhile)
    (fleet,) = inventory.survey().fleets
    assert fleet.used_by == "run run-1, no supervisor: mgpu attach run-1"


def test_orphans_are_ended_side_by_side(world, monkeypatch):
    """Each waits for its provider: one after the other, twenty of them would take as many times as long."""
    for number in range(4):
        world.cloud.rent(f"lost-{number}")
    together, destroy = threading.Barrier(4, timeout=20), world.cloud.destroy
    monkeypatch.setattr(world.cloud, "destroy", lambda *asked: together.wait() >= 0 and destroy(*asked))
    assert gc("--yes").return_value == 0
    assert world.cloud.billed == set()


def test_a_bug_while_one_is_ended_is_no_providers_refusal(world, monkeypatch):
    world.cloud.rent("lost")
    monkeypatch.setattr(world.cloud, "destroy", lambda *_: {}["a bug"])
    lost = inventory.survey().fleets
    with pytest.raises(KeyError):
        list(end_all(lost, Context(world.events.append, world.timeouts)))
