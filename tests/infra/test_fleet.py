"""Fleet and FleetGuard over the wire, on a provider that only remembers: what diffs, what is touched, what is said."""

from __future__ import annotations

import itertools
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from mgpu_train.timeouts import Timeouts
from pulumi.runtime.proto import provider_pb2, status_pb2

from mgpu import acquire, paths
from mgpu.acquire import search
from mgpu.backend import location
from mgpu.context import Context
from mgpu.errors import (
    AuthError,
    Conflict,
    HostKeyMismatch,
    NoCapacity,
    NoOffer,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    StackError,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Event, Warned, ignore
from mgpu.iac import environment, failures, plugin, tokens
from mgpu.iac.engine.event_log import EngineLog
from mgpu.iac.engine.stack import Stack
from mgpu.iac.protocol.handler import Call, Handler, Settings
from mgpu.iac.protocol.wire import UNKNOWN, PartialFailure, from_struct
from mgpu.iac.types import contact, fleet, generations, searches, sweep
from mgpu.iac.types.fleet_model import FleetInputs, Machine
from mgpu.iac.types.guard import FleetGuardHandler
from mgpu.image import compat
from mgpu.journal import Journal
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import (
    FleetRequest,
    FleetState,
    JumpHost,
    Listing,
    MachineDriver,
    NodePhase,
    Offers,
    ProxyCommand,
    create_token,
)
from mgpu.run.fleet.stack import open_stack
from mgpu.spec.provider import installed

FLEET = tokens.FLEET
WANTED = {
    "provider": "fake",
    "nodes": 2,
    "market": "spot",
    "maxPriceUsdPerHour": 1,
    "maxHours": 2,
    "sshPublicKey": "ssh-ed25519 AAAA x",
}


@pytest.fixture
def wire(serve, fake):
    return serve(plugin.Handlers(Timeouts().scaled(0.01)))


@pytest.fixture
def here(at):
    return at(FLEET)


@pytest.fixture
def made(wire, here):
    """A fleet that stands: id, inputs, outputs."""
    inputs = wire.inputs(here, WANTED)
    answer = wire.create(here, inputs)
    return answer.id, inputs, from_struct(answer.properties)


def again(wire, here, made, **changes):
    """An `up` with changed requirements: the difference, and the outputs after it."""
    resource_id, old_inputs, old = made
    new = wire.inputs(here, WANTED | changes, old_inputs)
    return wire.diff(here, old_inputs, old, new), lambda: wire.update(here, resource_id, old, new)


def journal_of(xdg):
    """The file that stack `dev` has here."""
    (path,) = (xdg / "state/mgpu/journal").glob("fleet-dev@*")
    return path


def partial(error: grpc.RpcError) -> provider_pb2.ErrorResourceInitFailed:
    """What state is told when a resource exists in part."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    detail = provider_pb2.ErrorResourceInitFailed()
    assert status_pb2.Status.FromString(raw).details[0].Unpack(detail)
    return detail


def ids(outputs):
    return [machine["id"] for machine in outputs["machines"]]


# ---- check


def test_check_fills_in_every_default(wire, here):
    inputs = wire.inputs(here, WANTED)
    assert inputs["name"] == "dev"
    assert inputs["owner"].startswith("o-")
    assert inputs["leaseMinutes"] == 60
    assert inputs == wire.inputs(here, inputs, inputs), "a default that is written out is no change"


def test_check_names_everything_that_is_wrong_at_once(wire, here):
    wrong = {"nodes": 0, "market": "cheap", "maxHours": -1, "colour": "red", "provider": "fake"}
    failures = {failure.property: failure.reason for failure in wire.check(here, wrong).failures}
    assert failures.keys() == {"nodes", "market", "maxHours", "colour", "maxPriceUsdPerHour", "sshPublicKey"}
    assert failures["colour"] == "a Fleet has no such property"
    assert failures["sshPublicKey"] == "is needed"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"maxHours": 1441}, "must be from 0.01 to 1440, not 1441"),
        ({"maxHours": 0.001}, "must be from 0.01 to 1440, not 0.001"),
        ({"leaseMinutes": 1e6}, "must be from 0 to 86400, not 1000000"),
    ],
)
def test_check_keeps_times_within_the_bounds_of_a_run_file(wire, here, given, words):
    """In a program of the user's own; machines would live for years."""
    (failure,) = wire.check(here, WANTED | given).failures
    assert (failure.property, failure.reason) == (next(iter(given)), words)
    assert not wire.check(here, WANTED | given, WANTED | given).failures, "a fleet of before can still be repaired"
    assert not wire.check(here, WANTED | dict.fromkeys(given, UNKNOWN)).failures
    assert not wire.check(here, WANTED | {"maxHours": 1440, "leaseMinutes": 86400}).failures


def test_check_names_a_provider_that_there_is_not(wire, here):
    (failure,) = wire.check(here, WANTED | {"provider": "clowd"}).failures
    assert failure.property == "provider"
    assert "local" in failure.reason


def test_check_passes_over_what_is_not_known_yet(wire, here):
    inputs = wire.inputs(here, WANTED | {"sshPublicKey": UNKNOWN})
    assert inputs["sshPublicKey"] == UNKNOWN
    assert wire.check(here, WANTED | {"sshPublicKey": UNKNOWN, "nodes": -1}).failures


def test_check_names_settings_that_are_wrong(wire, here):
    (failure,) = wire.check(here, WANTED | {"options": {"wrong": "x"}}).failures
    assert (failure.property, "there is no such key" in failure.reason) == ("options", True)


@pytest.mark.parametrize("kind", [FLEET, tokens.FLEET_GUARD])
@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {"network": "auto"}, False),
        ({}, {"network": "auto", "address": "public"}, False),
        ({"address": "public", "network": "auto"}, {}, False),
        ({}, {"address": "ssm"}, True),
        ({"profile": "a"}, {}, True),
        ({"of_an_earlier_mgpu": "x"}, {}, True),
        ({"of_an_earlier_mgpu": "x"}, {"of_an_earlier_mgpu": "x"}, False),
        ({}, {"network": UNKNOWN}, True),
        ({}, UNKNOWN, True),
    ],
)
def test_an_option_at_its_default_is_one_that_is_left_out(wire, at, kind, before, now, differs):
    inputs = {"provider": "aws", "owner": "o", "image": ""}
    found = wire.diff(at(kind), inputs | {"options": before}, {}, inputs | {"options": now})
    assert list(found.diffs) == ["options"] * differs


def test_no_two_stacks_of_two_projects_are_one_fleet(wire, at, fake):
    stood = set[str]()
    for project, stack in (("llm", "ft-dev"), ("llm-ft", "dev"), ("llm", "dev"), ("mgpu", "llm-dev")):
        urn = at(FLEET, project=project, stack=stack)
        wire.create(urn, wire.inputs(urn, WANTED | {"sshPublicKey": f"ssh-ed25519 AAAA {project}"}))
        assert stood < fake.running, "nobody ends another one's machines"
        stood = fake.running


def test_a_fleet_and_its_guard_keep_the_name_that_they_have(wire, at):
    old = wire.inputs(at(FLEET, project="other"), WANTED | {"name": "other-dev"})
    assert wire.inputs(at(FLEET, project="other"), WANTED, old) == old
    urn = at(tokens.FLEET_GUARD, project="other")
    guard = wire.inputs(urn, {"provider": "fake", "fleet": "other-dev"})
    assert wire.inputs(urn, {"provider": "fake"}, guard) == guard
    assert wire.inputs(urn, {"provider": "fake"})["fleet"] == wire.inputs(at(FLEET, project="other"), WANTED)["name"]


# ---- create, adopt, end


def test_create_rents_the_gang_and_says_what_was_bought(made, fake):
    resource_id, _, outputs = made
    assert resource_id == "fake/dev"
    assert set(ids(outputs)) == fake.running
    assert len(fake.running) == 2
    assert outputs["generation"] == 1
    assert outputs["offer"]["instance_type"] == "m1"
    assert outputs["boughtAs"] == "spot"
    assert outputs["priceUsdPerHour"] == pytest.approx(0.1)
    assert outputs["otherUsdPerHour"] == pytest.approx(0.02)
    assert outputs["offersConsidered"]


def test_a_preview_rents_nothing(wire, here, fake):
    answer = wire.create(here, wire.inputs(here, WANTED), preview=True)
    assert from_struct(answer.properties)["machines"] == UNKNOWN
    assert not fake.created


def test_a_preview_says_what_the_first_offer_costs_and_what_the_dearest_would(wire, here, fake, monkeypatch, tmp_path):
    def two(requirements: Requirements) -> Offers:
        (one, *_) = on_sale(requirements).offers
        dear = one.model_copy(update={"zone": "z9", "price_usd_per_hour": 2 * one.price_usd_per_hour})
        return Offers(offers=(one, dear), source="a test")

    on_sale, said = fake.offers, list[Event]()
    monkeypatch.setattr(fake, "offers", two)
    inputs = wire.inputs(here, WANTED)
    fleet.FleetHandler(Timeouts()).create(
        Call(here, Settings(tmp_path, "o"), said.append, threading.Event(), True), inputs
    )
    assert "$0.10/h, all nodes; $0.20/h at most" in str(said)


@pytest.mark.parametrize(("limit", "taken"), [(0.06, "z9"), (0.01, None)])
def test_what_is_made_is_of_an_offer_before_another_providers(here, wire, fake, monkeypatch, tmp_path, limit, taken):
    def three(requirements: Requirements) -> Offers:
        (one, *_) = on_sale(requirements).offers
        prices = {"z8": 0.07, "z9": 0.05}
        return Offers(
            offers=tuple(
                one.model_copy(update={"zone": zone, "price_usd_per_hour": price}) for zone, price in prices.items()
            ),
            source="a test",
        )

    on_sale, said = fake.offers, list[Event]()
    monkeypatch.setattr(fake, "offers", three)
    inputs = wire.inputs(here, WANTED)
    call = Call(here, Settings(tmp_path, "o"), said.append, threading.Event(), False)
    handler = fleet.FleetHandler(Timeouts(), ranked_up_to=[inputs["market"] != "spot", 0, limit])
    if taken is None:
        with pytest.raises(NoOffer, match="better than another provider's"):
            handler.create(call, inputs)
        assert not fake.created
        return
    _, made = handler.create(call, inputs)
    assert made["offer"]["zone"] == taken
    assert not any("z8" in each for each in made["offersConsidered"])


@pytest.mark.parametrize(("own", "counted"), [(True, 0), (True, 2), (False, 2)])
def test_the_fleet_is_asked_for_by_the_tokens_of_the_next_search(
    here, wire, fake, tmp_path, monkeypatch, own: bool, counted: int
):
    """From the run to the plugin, by its environment; of a stack of the user's the backend has counted them."""
    told, known = dict[str, str](), dict[str, Handler]()
    searches.end("o", "dev", ignore)

    def operate(stack, *_, more, **__):
        told.update({name: value for name, value in stack._environment().items() if name == environment.SEARCHES})
        told.update(more)
        return EngineLog(0, ignore)

    def end(handlers, *_):
        known.update(handlers)
        raise SystemExit

    for name in ("_make_way", "_clear"):
        monkeypatch.setattr(Stack, name, lambda _: None)
    monkeypatch.setattr(Stack, "_operate", operate)
    more = {"log_dir": tmp_path, "emit": ignore, "timeouts": Timeouts(), "own_config": own}
    (tmp_path / "Pulumi.yaml").write_text("name: mgpu\nruntime: python\n")
    stack = Stack(tmp_path, "it", tmp_path / "mgpu.yaml", **more)
    stack._engine = SimpleNamespace(path=())
    stack.up(searches=counted)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin, "Servicer", end)
    with pytest.raises(SystemExit):
        plugin.main()
    call = Call(here, Settings(tmp_path, "o"), lambda _: None, threading.Event(), False)
    _, made = known[FLEET].create(call, wire.inputs(here, WANTED | {"owner": "o"}))
    offer = Offer.model_validate(made["offer"])
    assert [*fake.gangs] == [create_token("o", "dev", 1, offer, 0, searches=counted if own else 1)]


def test_pulumi_up_on_fresh_machines_is_not_answered_as_an_earlier_one_was(here, wire, fake, tmp_path, monkeypatch):
    """As in CI, at a provider that answers a token that it knows as it did then."""
    answers, rents, machines = dict[str, bool](), fake.create, itertools.count()
    handler, inputs = fleet.FleetHandler(Timeouts(), ended_searches=None), wire.inputs(here, WANTED)
    sold_out = True

    def create(request, offer, token):
        if answers.setdefault(token, sold_out):
            raise NoCapacity("no capacity", scope="offer")
        return rents(request, offer, token)

    def fresh() -> Call:
        return Call(here, Settings(tmp_path / str(next(machines)), "o"), ignore, threading.Event(), False)

    monkeypatch.setattr(fake, "create", create)
    with pytest.raises(NoCapacity):
        handler.create(fresh(), inputs)
    sold_out = False
    name, made = handler.create(fresh(), inputs)
    _, again = handler.create(fresh(), inputs)  # it was cut off before it was in state
    assert again["handle"] == made["handle"]
    handler.delete(fresh(), name, made)
    assert fake.running == set()
    _, anew = handler.create(fresh(), inputs)
    assert len(fake.running) == WANTED["nodes"]
    assert len(fake.gangs) == 2, "no token of a fleet that is gone was asked by"
    fake.phases |= dict.fromkeys(fake.running, NodePhase.TERMINATED)
    assert handler.read(fresh(), name, anew, inputs) is None
    handler.create(fresh(), inputs)
    assert len(fake.gangs) == 3


def test_all_searches_of_one_create_have_one_budget_and_the_engine_waits_for_it(
    here, wire, fake, tmp_path, monkeypatch
):
    """Machines are in its way, and it looks for more where nothing is to be had: it begins four times."""
    untils, patience, limits, acquires = list[float](), list[float](), list[float](), acquire.acquire

    def searched(*given, until, **terms):
        untils.append(until)
        if len(untils) % 2:
            raise Conflict("machines are in the way", scope="offer")
        if len(untils) == 2:
            raise NoCapacity("no capacity", scope="offer")
        return acquires(*given, until=until, clock=lambda: clock.now, **terms)

    def asked(ask, limit_s, *_):
        patience.append(limit_s)
        clock.now += 300
        return ask()

    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(fleet.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(acquire, "acquire", searched)
    monkeypatch.setattr(acquire, "patiently", asked)
    monkeypatch.setattr(fleet, "sweep", lambda *_, **__: True)
    times = Timeouts(listing_s=30)
    call = Call(here, Settings(tmp_path, "o"), ignore, threading.Event(), False)
    fleet.FleetHandler(times).create(call, wire.inputs(here, WANTED))
    assert untils == [1000 + 30 + 600 + 300] * 4
    assert patience == [600, acquire.LOOKED_S, 930 - 600], "offers, machines, and offers again"

    for name in ("_make_way", "_clear"):
        monkeypatch.setattr(Stack, name, lambda _: None)
    monkeypatch.setattr(Stack, "_operate", lambda *_, limit_s, **__: limits.append(limit_s) or EngineLog(0, ignore))
    Stack(tmp_path, "it", tmp_path / "mgpu.yaml", log_dir=tmp_path, emit=ignore, timeouts=times).up()
    before, undone, swept = 300, 30 + 300 + 300, acquire.LOOKED_S + 30 + 300
    assert limits == [before + 930 + undone + swept], "and for the ends that come before, and may follow"
    able = installed().found["aws"].capabilities
    open_stack(tmp_path, "it", tmp_path / "mgpu.yaml", tmp_path, Context(ignore, Timeouts()), sellers={"aws": {}}).up()
    assert able.listing_lag_s > 0
    assert limits[1] >= 2 * able.boot_s + 3 * max(300, able.end_s) + 2 * able.listing_lag_s


@pytest.mark.parametrize(("alone", "nodes"), [(False, 2), (True, 1)])
def test_what_a_repair_ends_first_is_of_its_own_budget(here, wire, fake, tmp_path, monkeypatch, alone, nodes):
    """Or it would still search when the engine waits no longer."""
    call = Call(here, Settings(tmp_path, "o"), ignore, threading.Event(), False)
    handler, inputs = fleet.FleetHandler(Timeouts(listing_s=30)), wire.inputs(here, WANTED)
    name, made = handler.create(call, inputs)
    clock, untils = SimpleNamespace(now=1000.0), list[float]()

    def ended(*_, **__):
        clock.now += 300

    def searched(*_, until, **__):
        untils.append(until)
        raise NoCapacity("no capacity", scope="offer")

    monkeypatch.setattr(
        type(fake), "capabilities", fake.capabilities.model_copy(update={"repairs_single_nodes": alone})
    )
    fake.phases[ids(made)[0]] = NodePhase.TERMINATED
    monkeypatch.setattr(fleet.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(acquire, "destroy", ended)
    monkeypatch.setattr(acquire, "acquire", searched)
    monkeypatch.setattr(acquire, "repair", searched)
    monkeypatch.setattr(fleet, "sweep", lambda *_, **__: False)
    with pytest.raises(PartialFailure):
        handler.update(call, name, made, inputs | {"nodes": nodes})
    assert (clock.now, untils) == (1300, [1000 + 930])


def test_a_backend_that_is_away_or_not_mgpus_ends_no_search(here, wire, fake, tmp_path, monkeypatch):
    handler, said = fleet.FleetHandler(Timeouts(), ended_searches=None), list[Event]()
    call = Call(here, Settings(tmp_path, "o"), said.append, threading.Event(), False)
    monkeypatch.setenv(location.VARIABLE, "azblob://theirs")
    name, made = handler.create(call, wire.inputs(here, WANTED))
    handler.delete(call, name, made)
    assert not [each for each in said if isinstance(each, Warned)]
    monkeypatch.setattr(searches.objects, "read", Mock(side_effect=StackError("no answer")))
    monkeypatch.setattr(searches.objects, "change", Mock(side_effect=StackError("no answer")))
    name, made = handler.create(call, wire.inputs(here, WANTED))
    handler.delete(call, name, made)
    assert ["no answer" in each.text for each in said if isinstance(each, Warned)] == [True, True]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("limit", "cap"), [([False, 0, 0.06], 1), ([], 0.12)])
def test_nothing_stays_at_a_provider_that_is_left_because_its_price_has_risen(
    here, wire, fake, tmp_path, elsewhere, limit, cap
):
    """The engine died after it had the machines, before they were in state; whoever takes over may have no journal."""
    inputs = wire.inputs(here, WANTED | {"maxPriceUsdPerHour": cap})
    first, second = (Settings(tmp_path / each, "o") for each in ("here", "there" if elsewhere else "here"))
    called = threading.Event()
    called.wait = lambda _=None: False
    fleet.FleetHandler(Timeouts()).create(Call(here, first, lambda _: None, called, False), inputs)
    stands = fake.running
    assert len(stands) == 2
    fake.price = 0.07
    handler = fleet.FleetHandler(Timeouts(), ranked_up_to=limit)
    call = Call(here, second, lambda _: None, called, False)
    silent, listed = [Transient("no answer")], fake.list_owned

    def list_owned(owner):
        if silent:
            raise silent.pop()
        return listed(owner)

    fake.list_owned = list_owned
    with pytest.raises(NoOffer):
        handler.create(call, inputs)
    assert (fake.running, set(fake.created)) == (set(), stands)
    fake.price = 0.05
    _, made = handler.create(call, inputs)
    assert made["generation"] == 2, "a token of the gang that was ended would name that one"


def test_what_a_dead_create_of_another_machine_holds_is_not_left_where_nothing_is_granted(here, wire, fake, tmp_path):
    """The limit of the account is used up by the gang that nobody knows of: it is ended, and another one is made."""
    inputs = wire.inputs(here, WANTED)
    called = threading.Event()
    first, second = (Call(here, Settings(tmp_path / each, "o"), lambda _: None, called, False) for each in ("a", "b"))
    handler = fleet.FleetHandler(Timeouts())
    handler.create(first, inputs)
    stands, create = fake.running, fake.create

    limit = 2

    def limited(*asked):
        if len(fake.running) + 2 > limit:
            raise QuotaExceeded(f"{limit} machines at most")
        return create(*asked)

    fake.create = limited
    _, made = handler.create(second, inputs)
    assert set(ids(made)) == fake.running
    assert not stands & fake.running
    limit = 0
    with pytest.raises(QuotaExceeded):
        handler.create(first, inputs)
    assert fake.running == set()


def test_a_refusal_stays_one_where_nobody_may_look_what_is_there(here, wire, fake, tmp_path, monkeypatch):
    """Whoever hears it waits for capacity, or asks elsewhere. What this machine has asked for has to be looked for."""
    said, called = list[Event](), threading.Event()
    called.wait = lambda _=None: False
    call = Call(here, Settings(tmp_path, "o"), said.append, called, False)
    inputs = wire.inputs(here, WANTED)

    def raises(error):
        def refuse(*_):
            raise error

        return refuse

    monkeypatch.setattr(fake, "create", raises(NoCapacity("sold out")))
    monkeypatch.setattr(fake, "list_owned", raises(PermissionDenied("not in east")))
    with pytest.raises(NoCapacity):
        fleet.FleetHandler(Timeouts()).create(call, inputs)
    assert "nobody could look whether it has machines: not in east" in str(said)
    owner = FleetInputs.model_validate(inputs).owner
    offer = {"provider": fake.name, "region": "east"}
    generations.open_journal(tmp_path, owner, inputs["name"]).append(
        "intent", token="t", fleet="other", generation=9, offer=offer
    )
    with pytest.raises(PermissionDenied):
        fleet.FleetHandler(Timeouts()).create(call, inputs)


def test_a_create_whose_result_was_lost_is_adopted(wire, here, made, fake):
    again = from_struct(wire.create(here, made[1]).properties)
    assert ids(again) == ids(made[2])
    assert len(fake.created) == 2, "not one machine more"


def test_what_was_cut_off_is_ended_when_the_requirements_changed_since(wire, here, made, fake):
    other = wire.inputs(here, WANTED | {"leaseMinutes": 30})
    outputs = from_struct(wire.create(here, other).properties)
    assert fake.running == set(ids(outputs))
    assert not set(ids(made[2])) & fake.running


def test_a_gang_that_was_made_where_the_journal_is_not_is_ended_too(wire, here, made, fake, xdg):
    journal_of(xdg).unlink()
    other = wire.inputs(here, WANTED | {"leaseMinutes": 30})
    outputs = from_struct(wire.create(here, other).properties)
    assert fake.running == set(ids(outputs))
    assert outputs["generation"] == 2


def test_another_backends_stack_of_this_name_has_machines_of_its_own(wire, here, made, fake):
    theirs = wire.inputs(here, WANTED | {"owner": "o-of-the-team", "sshPublicKey": "ssh-ed25519 BBBB y"})
    answer = wire.create(here, theirs)
    outputs = from_struct(answer.properties)
    assert fake.running == {*ids(made[2]), *ids(outputs)}
    wire.delete(here, answer.id, outputs)
    again = from_struct(wire.create(here, made[1]).properties)
    assert ids(again) == ids(made[2]), "the end of one uses up no generation of the other"


def test_a_journal_that_owners_shared_is_gone_on_from(wire, here, made, fake, xdg):
    own, shared = journal_of(xdg), xdg / "state/mgpu/journal/fleet-dev.jsonl"
    own.rename(shared)
    theirs = wire.inputs(here, WANTED | {"owner": "o-of-the-team"})
    outputs = from_struct(wire.create(here, theirs).properties)
    assert fake.running == {*ids(made[2]), *ids(outputs)}
    again = from_struct(wire.create(here, made[1]).properties)
    assert ids(again) == ids(made[2])
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


def test_what_another_owner_began_is_not_open_here(tmp_path):
    shared = tmp_path / "journal/fleet-dev.jsonl"
    with Journal(shared) as entries:
        for owner in ("mine", "theirs"):
            entries.append("intent", token=owner, owner=owner, offer={"provider": "fake"})
            entries.append("created", token=owner)
    assert [each.token for each in generations.begun(tmp_path, "mine", "dev")] == ["mine"]


def test_a_fleet_after_a_destroyed_one_is_a_new_generation(wire, here, made, fake):
    wire.delete(here, made[0], made[2])
    assert not fake.running
    outputs = from_struct(wire.create(here, made[1]).properties)
    assert outputs["generation"] == 2
    assert fake.running == set(ids(outputs))


def test_a_state_whose_hours_no_run_file_could_have_is_read_and_deleted(wire, here, made, fake):
    """A Pulumi program names any hours above 0; machines that exist can always be given back."""
    name, inputs, state = made[0], made[1] | {"maxHours": 2000}, made[2] | {"maxHours": 2000}
    assert wire.read(here, name, state, inputs).id == name
    wire.delete(here, name, state)
    assert not fake.running


def test_delete_of_what_is_gone_succeeds(wire, here, made):
    wire.delete(here, made[0], made[2])
    wire.delete(here, made[0], made[2])


@pytest.mark.parametrize(
    ("change", "cure"), [({"maxPriceUsdPerHour": 0.01}, "max_price_usd_per_hour"), ({"memoryGib": 9}, "writers: all")]
)
def test_a_create_that_fails_says_so_in_its_own_words(wire, here, change, cure):
    with pytest.raises(grpc.RpcError) as failed:
        wire.create(here, wire.inputs(here, {**WANTED, **change}))
    lines = failed.value.details().splitlines()
    assert "no offer" in lines[0]
    assert cure in lines[-2]
    assert lines[-1].startswith("[mgpu:NoOffer ")


def test_a_gang_of_which_a_node_is_lost_at_once_is_undone_and_asked_for_again(wire, here, fake):
    def lose_one(fresh):
        fake.phases[fresh[1]] = NodePhase.TERMINATED
        fake.on_create = lambda fresh: None

    fake.on_create = lose_one
    outputs = from_struct(wire.create(here, wire.inputs(here, WANTED)).properties)
    assert fake.running == set(ids(outputs))
    assert len(fake.running) == 2


def test_after_any_number_of_failed_creates_the_next_one_succeeds(wire, here, fake):
    def lose_all(fresh):
        fake.phases |= dict.fromkeys(fresh, NodePhase.TERMINATED)

    fake.on_create = lose_all
    inputs = wire.inputs(here, WANTED)
    for _ in range(2):
        with pytest.raises(grpc.RpcError, match="none of the offers"):
            wire.create(here, inputs)
    fake.on_create = lambda fresh: None
    assert set(ids(from_struct(wire.create(here, inputs).properties))) == fake.running


def test_every_call_of_the_provider_has_the_settings_of_the_fleet(wire, here, fake):
    options = {"endpoint_url": "http://fake", "account": "1"}
    wanted = wire.inputs(here, WANTED | {"options": options})
    calls = {
        "preview": lambda: wire.create(here, wanted, preview=True),
        "create": lambda: wire.create(here, wanted),
        "read": lambda: wire.read(here, "fake/dev", state, wanted),
        "update": lambda: wire.update(here, "fake/dev", state, wanted | {"nodes": 3}),
        "delete": lambda: wire.delete(here, "fake/dev", state),
    }
    state = {}
    for name, call in calls.items():
        fake.options.clear()
        answer = call()
        state = from_struct(answer.properties) if name == "create" else state
        assert fake.options, name
        assert all(each == options for each in fake.options), name


VIA = [JumpHost(address="192.0.2.9", user="j", host_key="ssh-ed25519 J"), ProxyCommand(command=("{python}", "-m", "x"))]


@pytest.mark.parametrize("via", VIA)
def test_what_the_provider_says_of_a_machine_reaches_the_state(wire, here, fake, monkeypatch, via):
    described = type(fake)._node
    more = {"via": via, "python": "/opt/python"}
    monkeypatch.setattr(type(fake), "_node", lambda *args: described(*args).model_copy(update=more))
    (machine, _) = from_struct(wire.create(here, wire.inputs(here, WANTED)).properties)["machines"]
    assert machine["python"] == "/opt/python"
    assert machine["via"] == via.model_dump(mode="json")
    assert Machine.model_validate(machine).via == via


def test_a_state_of_an_earlier_version_can_be_read(wire, here, made):
    resource_id, inputs, outputs = made
    old = {key: value for key, value in outputs.items() if key not in ("sshPrivateKeyFile", "otherUsdPerHour")}
    old["machines"] = [{k: v for k, v in m.items() if k not in ("python", "via")} for m in outputs["machines"]]
    old["handle"] = {key: value for key, value in outputs["handle"].items() if key != "made_at"}
    assert from_struct(wire.read(here, resource_id, old, inputs).properties) == outputs


def busy(monkeypatch: pytest.MonkeyPatch, fake: Any, name: str) -> list[ProviderError]:
    """Errors that this call of the provider raises, the last one first, before it answers; asked again at once."""
    errors, answer = list[ProviderError](), getattr(fake, name)

    def call(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return answer(*given)

    monkeypatch.setattr("mgpu.acquire.pauses._BACKOFF_S", 0.001)
    monkeypatch.setattr(fake, name, call)
    return errors


def test_a_provider_that_does_not_say_what_it_sells_is_asked_again_and_a_repair_does_not_end_with_it(
    wire, here, made, fake, monkeypatch
):
    answers = busy(monkeypatch, fake, "offers")
    answers[:] = [Transient("no good answer"), RateLimited("too many calls")]
    lost = ids(made[2])[1]
    fake.phases[lost] = NodePhase.TERMINATED
    outputs = wire.update(here, made[0], made[2], made[1])
    assert (len(outputs["machines"]), lost in ids(outputs), answers) == (2, False, [])


def test_of_thousands_of_offers_the_best_are_on_record(wire, here, fake):
    fake.zones = tuple(f"z{number}" for number in range(2000))
    outputs = from_struct(wire.create(here, wire.inputs(here, WANTED)).properties)
    assert len(outputs["offersConsidered"]) == 21
    assert outputs["offersConsidered"][-1] == "and 1980 more"


def test_a_fleet_of_a_thousand_machines_is_made_read_and_repaired(wire, here, fake):
    inputs = wire.inputs(here, WANTED | {"nodes": 1000, "maxPriceUsdPerHour": 1000})
    outputs = from_struct(wire.create(here, inputs).properties)
    fake.phases |= dict.fromkeys(ids(outputs)[::2], NodePhase.TERMINATED)
    seen = from_struct(wire.read(here, "fake/dev", outputs, inputs).properties)
    repaired = wire.update(here, "fake/dev", seen, inputs)
    assert (seen["nodes"], repaired["nodes"], len(fake.running)) == (500, 1000, 1000)


# ---- machines whose host key is for one use


@pytest.fixture
def one_use(fake, monkeypatch):
    """The provider's machines come so; what first contact was given, and when."""
    monkeypatch.setattr(type(fake), "rekeyed", lambda *_, **__: None, raising=False)
    seen = []

    class Contact:
        def __init__(self, provider, key_file, timeouts, *, emit, cancelled):
            seen.append(("made", key_file, len(fake.created)))

        def meet(self, handle, state):
            seen.append(("met", handle.ids))
            fresh = [node.model_copy(update={"host_key": f"own {node.id}"}) for node in state.nodes]
            return FleetState(nodes=tuple(fresh))

    monkeypatch.setattr(contact, "Contact", Contact)
    return seen


def test_the_key_in_state_is_the_one_that_first_contact_has_made(wire, here, fake, one_use):
    inputs = wire.inputs(here, WANTED | {"sshPrivateKeyFile": "/keys/id"})
    outputs = from_struct(wire.create(here, inputs).properties)
    assert one_use == [("made", Path("/keys/id"), 0), ("met", tuple(ids(outputs)))]
    assert [machine["hostKey"] for machine in outputs["machines"]] == [f"own {name}" for name in ids(outputs)]
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    repaired = wire.update(here, "fake/dev", outputs, inputs)
    assert [machine["hostKey"] for machine in repaired["machines"]] == [f"own {name}" for name in ids(repaired)]


def test_a_provider_whose_machines_make_their_own_key_needs_no_contact(wire, here, fake, monkeypatch):
    monkeypatch.setattr(contact, "Contact", None)
    wire.create(here, wire.inputs(here, WANTED))
    assert len(fake.running) == 2


def test_without_a_private_key_such_machines_are_not_asked_for(wire, here, one_use):
    (failure,) = wire.check(here, WANTED).failures
    assert failure.property == "sshPrivateKeyFile"
    assert not wire.check(here, WANTED | {"sshPrivateKeyFile": UNKNOWN}).failures


def test_another_place_of_the_private_key_is_no_change(wire, here, made):
    diff, _ = again(wire, here, made, sshPrivateKeyFile="/elsewhere/id")
    assert diff.changes == diff.DIFF_NONE


def test_another_host_key_travels_through_the_engine_as_what_it_is():
    found = failures.parse(failures.describe(HostKeyMismatch("node 0 shows another key", "Shown: x.", "Look.")))
    assert (type(found), found.exit_code) == (HostKeyMismatch, 5)


# ---- drift


def test_read_of_a_whole_fleet_is_no_change(wire, here, made):
    found = wire.read(here, made[0], made[2], made[1])
    assert from_struct(found.inputs) == made[1]
    assert from_struct(found.properties) == made[2]
    assert found.refresh_before_update


def test_a_lost_node_shows_and_is_replaced_alone(wire, here, made, fake):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    found = wire.read(here, resource_id, outputs, inputs)
    seen_inputs, seen = from_struct(found.inputs), from_struct(found.properties)
    assert seen_inputs["nodes"] == seen["nodes"] == 1
    assert seen["priceUsdPerHour"] == pytest.approx(0.05)
    assert seen["otherUsdPerHour"] == pytest.approx(0.01)
    diff = wire.diff(here, seen_inputs, seen, inputs)
    assert dict(diff.detailedDiff).keys() == {"nodes"}
    assert not diff.replaces
    repaired = wire.update(here, resource_id, seen, inputs)
    assert ids(repaired)[1] == ids(outputs)[1], "the one that lived was not touched"
    assert ids(repaired)[0] not in ids(outputs)
    assert repaired["generation"] == 2
    assert set(ids(repaired)) == fake.running


def test_a_node_that_is_stopping_is_lost_but_the_fleet_is_not_gone(wire, here, made, fake):
    for name in ids(made[2]):
        fake.phases[name] = NodePhase.STOPPING
    found = wire.read(here, made[0], made[2], made[1])
    assert found.id == made[0]
    assert from_struct(found.properties)["nodes"] == 0


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_fleet_of_which_no_node_lives_is_read_again_and_repaired(wire, here, made, fake, nodes):
    """Spot machines that are taken together shut down for a minute, in which the repair begins."""
    resource_id, inputs, state = made
    for name in ids(state):
        fake.phases[name] = NodePhase.STOPPING
    for _ in range(2):
        state = from_struct(wire.read(here, resource_id, state, inputs).properties)
    repaired = wire.update(here, resource_id, state, inputs | {"nodes": nodes})
    assert len(ids(repaired)) == repaired["nodes"] == nodes
    assert not set(ids(repaired)) & set(ids(made[2]))


def test_gone_only_when_every_machine_is_terminated(wire, here, made, fake):
    for name in ids(made[2]):
        fake.phases[name] = NodePhase.TERMINATED
    assert wire.read(here, made[0], made[2], made[1]).id == ""
    assert from_struct(wire.create(here, made[1]).properties)["generation"] == 2


def test_state_forgets_a_fleet_once_what_its_machines_had_is_released(wire, here, made, fake):
    """Its addresses, say: nobody would look for them any more."""
    fake.phases |= dict.fromkeys(ids(made[2]), NodePhase.TERMINATED)
    answers, asked = [False, False, True], []
    fake.destroy = lambda handle, nodes=None: asked.append((handle.ids, nodes)) or answers.pop(0)
    assert wire.read(here, made[0], made[2], made[1]).id == ""
    assert asked == [(tuple(ids(made[2])), None)] * 3


def test_a_fleet_whose_left_overs_cannot_be_released_stays_in_state(wire, here, made, fake):
    fake.phases |= dict.fromkeys(ids(made[2]), NodePhase.TERMINATED)
    fake.destroy = lambda handle, nodes=None: False
    with pytest.raises(grpc.RpcError) as failed:
        wire.read(here, made[0], made[2], made[1])
    assert isinstance(failures.parse(failed.value.details()), TeardownIncomplete)


def test_a_provider_that_does_not_answer_for_a_moment_is_asked_again_what_machines_are(
    wire, here, made, fake, monkeypatch
):
    """Else one call that is throttled would end a repair, and the run with it."""
    answers = busy(monkeypatch, fake, "describe")
    lost = ids(made[2])[1]
    fake.phases[lost] = NodePhase.TERMINATED
    answers[:] = [RateLimited("too many calls"), Transient("503")]
    seen = from_struct(wire.read(here, made[0], made[2], made[1]).properties)
    assert (seen["nodes"], answers) == (1, [])
    answers[:] = [RateLimited("too many calls")]
    outputs = wire.update(here, made[0], seen, made[1])
    assert (len(outputs["machines"]), lost in ids(outputs), answers) == (2, False, [])


def test_a_provider_that_does_not_answer_concludes_nothing(wire, here, made, fake, monkeypatch):
    monkeypatch.setattr(acquire, "ANSWER_S", 0.0)
    fake.refuse_describe = Transient("503", "the provider is down", "Try again.")
    with pytest.raises(grpc.RpcError) as failed:
        wire.read(here, made[0], made[2], made[1])
    assert "\n[mgpu:Transient " in failed.value.details()


def test_the_pinned_host_key_stays_whatever_is_described(wire, here, made, fake, monkeypatch):
    described = type(fake)._node

    def impostor(self, rank, name):
        return described(self, rank, name).model_copy(update={"host_key": "ssh-ed25519 other"})

    monkeypatch.setattr(type(fake), "_node", impostor)
    seen = from_struct(wire.read(here, made[0], made[2], made[1]).properties)
    assert [m["hostKey"] for m in seen["machines"]] == [m["hostKey"] for m in made[2]["machines"]]


def test_a_replacement_is_bought_in_the_zone_of_the_machines_that_live(wire, here, fake, monkeypatch):
    asked, make = [], type(fake)._make
    fake.zones = ("z2",)
    outputs = from_struct(wire.create(here, wire.inputs(here, WANTED)).properties)
    fake.zones = ("z1", "z2", "z3")

    def repair(handle, missing, request, offer, token):
        asked.append((offer.zone, offer.market))
        if offer.market == "spot":
            raise NoCapacity("none left", scope="zone")
        return make(fake, request, token, missing, handle.ids)

    fake.repair = repair
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    wanted = wire.inputs(here, WANTED | {"market": "spot-then-on-demand"})
    wire.update(here, "fake/dev", outputs, wanted)
    assert asked == [("z2", "spot"), ("z2", "on-demand")]


def test_a_replacement_is_asked_for_although_it_is_not_on_the_list_any_more(wire, here, made, fake):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    fake.zones = ("z9",)
    repaired = wire.update(here, resource_id, outputs, inputs)
    assert set(ids(repaired)) == fake.running
    assert repaired["offer"]["zone"] is None


def test_a_repair_that_fails_leaves_state_with_what_lives(wire, here, made, fake):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    fake.refuse_repair = NoCapacity("none left", "sold out", "Wait.", scope="provider")
    with pytest.raises(grpc.RpcError) as failed:
        wire.update(here, resource_id, outputs, inputs)
    state = from_struct(partial(failed.value).properties)
    assert ids(state) == ids(outputs)[:1]
    assert list(wire.diff(here, inputs, state, inputs).diffs) == ["nodes"], "the next `up` goes on from there"
    fake.refuse_repair = None
    assert set(ids(wire.update(here, resource_id, state, inputs))) == fake.running
    assert "\n[mgpu:NoCapacity " in failed.value.details()


@pytest.fixture
def gangs(fake):
    """The provider, whose gangs come and end as one."""
    fake.capabilities = fake.capabilities.model_copy(update={"repairs_single_nodes": False})
    return fake


def test_where_no_machine_is_replaced_alone_the_whole_gang_is_made_anew(wire, here, made, gangs):
    resource_id, inputs, outputs = made
    gangs.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    gangs.refuse_repair = AssertionError("nobody asks for it")
    found = wire.read(here, resource_id, outputs, inputs)
    seen = from_struct(found.properties)
    assert list(wire.diff(here, from_struct(found.inputs), seen, inputs).diffs) == ["nodes"]
    asked: list[FleetRequest] = []
    gangs.on_create = lambda _: asked.append([*gangs.gangs.values()][-1][0])
    anew = wire.update(here, resource_id, seen, inputs)
    assert not {*ids(anew)} & {*ids(outputs)}, "the survivor is given back, too"
    assert set(ids(anew)) == gangs.running
    assert anew["generation"] == 2
    assert [each.generation for each in asked] == [2]
    assert asked[0].ends_by == outputs["hardCapAt"], "however late it starts"
    assert asked[0].hard_cap_s == pytest.approx(outputs["hardCapAt"] - time.time(), abs=30)
    assert wire.update(here, resource_id, anew, inputs) == anew, "a fleet that is whole is left alone"


def test_a_gang_that_cannot_be_made_anew_has_left_nothing_and_the_next_up_makes_it(wire, here, made, gangs):
    resource_id, inputs, outputs = made
    gangs.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    offers, gangs.price = gangs.price, 100.0
    with pytest.raises(grpc.RpcError) as failed:
        wire.update(here, resource_id, outputs, inputs)
    gangs.price = offers
    state = from_struct(partial(failed.value).properties)
    assert ids(state) == []
    assert gangs.running == set()
    assert len(ids(wire.update(here, resource_id, state, inputs))) == 2


def test_a_gang_of_another_size_is_made_anew(wire, here, made, gangs):
    _, update = again(wire, here, made, nodes=3)
    grown = update()
    assert len(ids(grown)) == 3
    assert not {*ids(grown)} & {*ids(made[2])}
    assert set(ids(grown)) == gangs.running


def test_a_repair_whose_result_was_lost_is_done_again_and_what_lives_is_kept(wire, here, made, fake, xdg):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    first = wire.update(here, resource_id, outputs, inputs)
    journal_of(xdg).unlink()  # it was done on another machine
    again = wire.update(here, resource_id, outputs, inputs)  # state never heard of it
    assert ids(again)[1] == ids(outputs)[1] == ids(first)[1]
    assert fake.running == set(ids(again))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_repair_that_was_cut_off_in_a_full_reservation_is_done_again(wire, here, made, fake, xdg, elsewhere):
    """What it rented, and state never heard of, has the last place; whoever repairs may have no journal of it."""
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    first = wire.update(here, resource_id, outputs, inputs)
    if elsewhere:
        journal_of(xdg).unlink()
    whole = fake.offers

    def left(needed):
        found, stock = whole(needed), 2 - len(fake.running)
        return found.model_copy(update={"offers": [each.model_copy(update={"stock": stock}) for each in found.offers]})

    fake.offers = left
    again = wire.update(here, resource_id, outputs, inputs)
    assert ids(again)[0] == ids(outputs)[0] == ids(first)[0], "what lives is kept"
    assert fake.running == set(ids(again))


def test_a_repair_that_was_cut_off_is_not_billed_where_its_price_is_above_the_cap(wire, here, made, fake):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    wire.update(here, resource_id, outputs, inputs)
    price, fake.price = fake.price, 5.0
    with pytest.raises(grpc.RpcError, match="NoOffer") as failed:
        wire.update(here, resource_id, outputs, inputs)
    state = from_struct(partial(failed.value).properties)
    assert fake.running == set(ids(state)) == {ids(outputs)[0]}
    fake.price = price
    assert set(ids(wire.update(here, resource_id, state, inputs))) == fake.running


def test_no_machine_is_added_at_the_hard_cap(wire, here, made, fake):
    resource_id, inputs, outputs = made
    fake.phases[ids(outputs)[1]] = NodePhase.TERMINATED
    with pytest.raises(grpc.RpcError, match="hard cap"):
        wire.update(here, resource_id, outputs | {"hardCapAt": 1.0}, inputs)
    assert len(fake.created) == 2


def test_a_fleet_that_is_made_again_for_a_run_ends_by_the_hard_cap_that_the_run_had(serve, here, fake):
    cap = time.time() + 1800
    wire = serve(plugin.Handlers(Timeouts().scaled(0.01), cap))
    made = from_struct(wire.create(here, wire.inputs(here, WANTED)).properties)
    fake.phases |= dict.fromkeys(ids(made), NodePhase.TERMINATED)
    assert not wire.read(here, "fake/dev", made).id, "all were lost: it has to be made anew"
    wire.create(here, wire.inputs(here, WANTED))
    left = [request.hard_cap_s for request, _ in fake.gangs.values()]
    assert all(1790 < seconds <= 1800 for seconds in left), left


def test_no_fleet_is_made_at_the_hard_cap_of_its_run(serve, here, fake):
    wire = serve(plugin.Handlers(Timeouts().scaled(0.01), time.time() + acquire.ENDING_S - 1))
    with pytest.raises(grpc.RpcError, match="at its hard cap"):
        wire.create(here, wire.inputs(here, WANTED))
    assert not fake.created


def test_the_hard_cap_of_a_run_makes_no_fleet_live_longer(serve, here, fake):
    wire = serve(plugin.Handlers(Timeouts().scaled(0.01), time.time() + 1e6))
    wire.create(here, wire.inputs(here, WANTED))
    assert [request.hard_cap_s for request, _ in fake.gangs.values()] == [7200]


# ---- changed requirements


def test_prices_never_diff(wire, here, made, fake):
    fake.price = 0.4
    diff, _ = again(wire, here, made)
    assert diff.changes == diff.DIFF_NONE


@pytest.mark.parametrize(
    "change", [{"stores": ["s3://another/runs"]}, {"memoryGib": 1.5}, {"computeCapability": 8.9}], ids=str
)
def test_what_only_chooses_among_offers_never_diffs(wire, here, made, change):
    diff, _ = again(wire, here, made, **change)
    assert diff.changes == diff.DIFF_NONE


def test_growing_adds_ranks_and_touches_no_other(wire, here, made, fake):
    diff, update = again(wire, here, made, nodes=4)
    assert not diff.replaces
    grown = update()
    assert ids(grown)[:2] == ids(made[2])
    assert len(grown["machines"]) == grown["nodes"] == 4
    assert set(ids(grown)) == fake.running


def test_shrinking_ends_the_surplus_ranks_alone(wire, here, made, fake):
    diff, update = again(wire, here, made, nodes=1)
    assert not diff.replaces
    shrunk = update()
    assert ids(shrunk) == ids(made[2])[:1]
    assert fake.running == set(ids(shrunk))
    assert shrunk["generation"] == 1


@pytest.mark.parametrize(
    "change", [{"maxPriceUsdPerHour": 2}, {"leaseMinutes": 5}, {"processesPerNode": 3}], ids=lambda c: next(iter(c))
)
def test_what_machines_need_not_know_is_recorded_without_touching_them(wire, here, made, fake, change):
    diff, update = again(wire, here, made, **change)
    assert dict(diff.detailedDiff).keys() == change.keys()
    assert not diff.replaces
    updated = update()
    assert updated | change == updated
    assert ids(updated) == ids(made[2])
    assert len(fake.created) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"market": "on-demand"},
        {"gpu": ["H100"]},
        {"regions": ["r1"]},
        {"maxHours": 3},
        {"diskGib": 200},
        {"options": {"a": "b"}},
        {"sshPublicKey": "ssh-ed25519 BBBB x"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_machines_cannot_take_over_replaces_them_old_ones_first(wire, here, made, change):
    diff, _ = again(wire, here, made, **change)
    assert list(diff.replaces) == list(change)
    assert diff.deleteBeforeReplace


# ---- the image that nodes are to run

CUDA_13 = {compat.TORCH: "2.9.0", compat.CUDA: "13.0"}
OLD = MachineDriver(version="570.172.08", why="Image m-1 brings 570.172.08.", cure="`machine: m-2` is newer.")
NEW = OLD.model_copy(update={"version": "580.105.08"})


@pytest.mark.parametrize("preview", [True, False], ids=["preview", "up"])
def test_machines_that_cannot_run_the_image_are_not_rented(wire, here, fake, preview):
    fake.driver = OLD
    inputs = wire.inputs(here, WANTED | {"imageLabels": CUDA_13})
    with pytest.raises(grpc.RpcError, match=r"needs a newer NVIDIA driver than 570\.172\.08[^$]+\[mgpu:InputError "):
        wire.create(here, inputs, preview=preview)
    assert fake.asked_for_driver == [("r1",)]
    assert fake.created == []


def test_machines_that_run_the_image_are_rented(wire, here, fake):
    fake.driver, fake.gpu = NEW, "H100-80GB"
    outputs = from_struct(wire.create(here, wire.inputs(here, WANTED | {"imageLabels": CUDA_13})).properties)
    assert (outputs["imageLabels"], len(fake.created)) == (CUDA_13, 2)


def test_another_image_is_compared_with_the_machines_that_stand_and_replaces_none(wire, here, made, fake):
    diff, update = again(wire, here, made, imageLabels=CUDA_13)
    assert (list(diff.diffs), list(diff.replaces)) == (["imageLabels"], [])
    fake.driver = OLD
    with pytest.raises(grpc.RpcError, match="needs a newer NVIDIA driver"):
        update()
    fake.driver = NEW
    assert update()["imageLabels"] == CUDA_13
    assert [asked.ids for asked in fake.asked_for_driver] == [tuple(ids(made[2]))] * 2
    assert len(fake.created) == 2


def test_machines_that_are_containers_of_an_image_are_told_which_and_another_one_replaces_them(wire, here, fake):
    first, other = (f"r.test/t@sha256:{digit * 64}" for digit in "01")
    inputs = wire.inputs(here, WANTED | {"image": first})
    answer = wire.create(here, inputs)
    assert {request.image for request, _ in fake.gangs.values()} == {first}
    diff, _ = again(wire, here, (answer.id, inputs, from_struct(answer.properties)), image=other)
    assert list(diff.replaces) == ["image"]


def test_a_fleet_of_before_that_knows_no_image_stays(wire, here, made):
    _, inputs, outputs = made
    old = {key: value for key, value in inputs.items() if key != "image"}
    assert len(old) == len(inputs) - 1
    assert list(wire.diff(here, old, outputs, wire.inputs(here, WANTED, old)).diffs) == []


def test_an_image_that_is_yet_to_be_built_is_no_difference(wire, here, fake):
    fake.driver = NEW
    first = wire.inputs(here, WANTED | {"imageLabels": CUDA_13})
    outputs = from_struct(wire.create(here, first).properties)
    later = wire.inputs(here, WANTED | {"imageLabels": UNKNOWN}, first)
    assert wire.diff(here, first, outputs, later).changes == provider_pb2.DiffResponse.DIFF_NONE
    assert from_struct(wire.create(here, later, preview=True).properties)["machines"] == UNKNOWN


def test_a_repair_does_not_ask_for_the_driver_again(wire, here, fake):
    """An answer that nobody needs must not keep a run from its next machine."""
    inputs = wire.inputs(here, WANTED | {"imageLabels": CUDA_13})
    made = wire.create(here, inputs)
    fake.asked_for_driver.clear()
    outputs = from_struct(made.properties)
    fake.phases[ids(outputs)[0]] = NodePhase.TERMINATED
    assert len(ids(wire.update(here, made.id, outputs, inputs))) == 2
    assert fake.asked_for_driver == []


def test_ignored_changes_are_ignored(wire, here, made):
    new = wire.inputs(here, WANTED | {"market": "on-demand", "nodes": 3}, made[1])
    diff = wire.diff(here, made[1], made[2], new, ignore=("market",))
    assert list(diff.diffs) == ["nodes"]


# ---- import


def test_import_of_a_missing_fleet_answers_empty(wire, here):
    assert wire.read(here, "fake/nothing").id == ""


def test_import_of_a_fleet_that_stands_is_refused(wire, here, made):
    with pytest.raises(grpc.RpcError, match="cannot be imported"):
        wire.read(here, "fake/dev")


# ---- the guard


@pytest.fixture
def guard(wire, at):
    where = at(tokens.FLEET_GUARD, name="fleet-guard")
    inputs = wire.inputs(where, {"provider": "fake", "options": {"a": "b"}})
    answer = wire.create(where, inputs)
    return where, answer.id, from_struct(answer.properties)


def test_the_guard_asks_a_provider_again_that_is_busy_for_a_moment(wire, guard, made, fake, monkeypatch):
    busy, listed = [RateLimited("too many calls")], fake.list_owned

    def list_owned(owner):
        if busy:
            raise busy.pop()
        return listed(owner)

    monkeypatch.setattr("mgpu.acquire.pauses._BACKOFF_S", 0.001)
    monkeypatch.setattr(fake, "list_owned", list_owned)
    wire.delete(*guard)
    assert (busy, bool(fake.running)) == ([], False)


def test_the_guard_sweeps_what_state_does_not_know(wire, here, guard, made, fake):
    where, resource_id, state = guard
    wire.delete(where, resource_id, state)  # the Fleet's create was cut off: it is in no state
    assert not fake.running
    assert from_struct(wire.create(here, made[1]).properties)["generation"] == 2


@pytest.mark.parametrize("busy_s", [0, 0.4])  # between the intent and the call that makes them
def test_the_guard_waits_for_what_is_not_listed_yet(wire, here, guard, fake, monkeypatch, busy_s):
    lag_s, listed = 0.3, type(fake).list_owned
    monkeypatch.setattr(type(fake), "capabilities", fake.capabilities.model_copy(update={"listing_lag_s": lag_s}))

    def asked(fresh):
        time.sleep(busy_s)
        until = time.time() + lag_s / 2
        fake.list_owned = lambda owner: listed(fake, owner) if time.time() > until else ()
        raise MemoryError  # the plugin dies before it hears of them, and undoes nothing

    def die(*_):
        raise MemoryError

    fake.on_create = asked
    monkeypatch.setattr(search.Search, "_undo", die)
    with pytest.raises(grpc.RpcError, match="MemoryError"):
        wire.create(here, wire.inputs(here, WANTED))
    assert len(fake.running) == 2
    where, resource_id, state = guard
    wire.delete(where, resource_id, state)
    assert not fake.running


@pytest.mark.parametrize("asked_in", ["here", "east"])
def test_the_guard_needs_a_region_that_is_closed_only_where_its_fleet_was_asked_for_there(
    wire, guard, made, fake, asked_in
):
    denied, seen = PermissionDenied("east: the organization forbids it"), fake.list_owned
    fake.list_reached = lambda owner: Listing(handles=seen(owner), closed={"east": denied})
    journal = generations.open_journal(paths.state_dir(), guard[2]["owner"], "dev")
    journal.append("intent", token="t", offer={"provider": "fake", "region": asked_in})
    journal.append("created", token="t")
    if asked_in == "here":
        wire.delete(*guard)
        assert not fake.running
        return
    with pytest.raises(grpc.RpcError, match="the organization forbids it"):
        wire.delete(*guard)


def test_the_guard_ends_what_can_be_ended_beside_a_machine_that_cannot(wire, guard, made, fake, monkeypatch):
    (whole,), ends = fake.list_owned(guard[2]["owner"]), fake.destroy
    parts = tuple(whole.model_copy(update={"ids": (each,)}) for each in whole.ids)

    def destroy(handle, nodes=None):
        if handle.ids == parts[0].ids:
            raise PermissionDenied("it is protected")
        return ends(handle, handle.ids)

    monkeypatch.setattr(fake, "list_owned", lambda owner: parts)
    monkeypatch.setattr(fake, "destroy", destroy)
    with pytest.raises(grpc.RpcError, match="it is protected"):
        wire.delete(*guard)
    assert set(fake.running) == {*parts[0].ids}


def test_the_guard_ends_all_parts_of_a_fleet_though_nothing_can_be_noted(wire, guard, made, fake, monkeypatch):
    (whole,), ends = fake.list_owned(guard[2]["owner"]), fake.destroy
    parts = tuple(whole.model_copy(update={"ids": (each,)}) for each in whole.ids)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fake, "list_owned", lambda owner: parts)
    monkeypatch.setattr(fake, "destroy", lambda handle, nodes=None: ends(handle, handle.ids))
    monkeypatch.setattr(generations, "used", full)
    with pytest.raises(grpc.RpcError, match="No space left"):
        wire.delete(*guard)
    assert len(parts) > 1
    assert not fake.running


def test_a_sweep_after_an_answer_does_not_wait(wire, guard, made, fake, monkeypatch):
    monkeypatch.setattr(type(fake), "capabilities", fake.capabilities.model_copy(update={"listing_lag_s": 1e6}))
    wire.delete(*guard)
    assert not fake.running


def test_the_guard_leaves_other_fleets_and_other_owners_alone(wire, guard, fake, at):
    where, resource_id, state = guard
    for name, owner in (("dev2", state["owner"]), ("de", state["owner"]), ("dev", "o-somebody")):
        wire.create(at(FLEET), wire.inputs(at(FLEET), WANTED | {"name": name, "owner": owner}))
    wire.delete(where, resource_id, state)
    assert len(fake.running) == 6


def test_the_guard_of_another_fleet_comes_before_the_old_one_goes(wire, guard):
    where, _, state = guard
    diff = wire.diff(where, state, state, state | {"fleet": "other"})
    assert list(diff.replaces) == ["fleet"]
    assert not diff.deleteBeforeReplace
    assert wire.diff(where, state, state, state).changes == diff.DIFF_NONE


def test_the_guard_sweeps_with_the_settings_of_its_fleet(wire, guard, made, fake):
    fake.options.clear()
    wire.delete(*guard)
    assert fake.options == [{"a": "b"}]


def test_other_settings_make_no_other_guard(wire, guard):
    """It would come before the fleet's replacement, and the old one, which goes last, would sweep that."""
    where, _, state = guard
    diff = wire.diff(where, state, state, state | {"options": {"a": "c"}})
    assert (list(diff.diffs), list(diff.replaces)) == (["options"], [])
    earlier = {key: value for key, value in state.items() if key != "options"}
    assert wire.diff(where, earlier, earlier, earlier | {"options": {}}).changes == diff.DIFF_NONE
    wire.delete(where, "fake/dev", earlier)


def test_a_guard_stays_where_its_fleet_has_another_provider_and_looks_at_both_in_the_end(
    wire, here, guard, fake, monkeypatch, tmp_path
):
    """Another guard would sweep, when it goes, what the fleet has got back at its first provider."""
    where, resource_id, state = guard
    diff = wire.diff(where, state, state, state | {"provider": "other", "options": {}})
    assert (sorted(diff.diffs), list(diff.replaces)) == (["options", "provider"], [])
    handler, asked = FleetGuardHandler(Timeouts()), list[str]()
    call = Call(here, Settings(tmp_path, "o"), lambda _: None, threading.Event(), False)
    other = handler.update(call, resource_id, state, state | {"provider": "other", "options": {}})
    back = handler.update(call, resource_id, other, state)

    def swept(_, provider, *__):
        asked.append(provider)
        raise Transient(f"{provider} does not answer")

    monkeypatch.setattr("mgpu.iac.types.guard.registry.get", lambda name, options: f"{name} {dict(options)}")
    monkeypatch.setattr("mgpu.iac.types.guard.sweep", swept)
    with pytest.raises(Transient, match="fake"):
        handler.delete(call, resource_id, back)
    assert asked == ["fake {'a': 'b'}", "other {}"]


def test_a_guard_remembers_the_account_that_its_fleet_had_before(here, guard, fake, monkeypatch, tmp_path):
    """Of settings that lead elsewhere; others are as they are now."""
    fake.capabilities = fake.capabilities.model_copy(update={"account_options": frozenset({"account"})})
    handler, asked = FleetGuardHandler(Timeouts()), list[dict[str, str]]()
    call = Call(here, Settings(tmp_path, "o"), lambda _: None, threading.Event(), False)
    _, resource_id, state = guard
    first = state | {"options": {"account": "1", "disk": "small"}}
    same = handler.update(call, resource_id, first, state | {"options": {"account": "1", "disk": "large"}})
    assert "earlier" not in same
    other = handler.update(call, resource_id, same, state | {"options": {"account": "2"}})
    monkeypatch.setattr("mgpu.iac.types.guard.registry.get", lambda _, options: asked.append(options))
    monkeypatch.setattr("mgpu.iac.types.guard.sweep", lambda *_: None)
    handler.delete(call, resource_id, other)
    assert asked == [{"account": "2"}, {"account": "1", "disk": "large"}]
    unknown = state | {"options": UNKNOWN}
    assert handler.update(call, resource_id, first, unknown) == unknown, "in a preview"


def test_machines_of_a_create_that_was_cut_off_are_what_the_plan_lacks(here, wire, fake, monkeypatch, tmp_path):
    """Its own gang has taken the last ones: they are ended, and asked for again."""
    inputs, whole = wire.inputs(here, WANTED), fake.offers
    call = Call(here, Settings(tmp_path, "o"), lambda _: None, threading.Event(), False)
    begun = {"fleet": "another", "generation": 9, "offer": {"provider": fake.name}}
    generations.open_journal(tmp_path, inputs["owner"], inputs["name"]).append("intent", token="t", **begun)
    asked = list[int]()

    def sold_out(requirements: Requirements) -> Offers:
        asked.append(1)
        found = whole(requirements)
        return found if len(asked) > 1 else found.model_copy(update={"offers": ()})

    monkeypatch.setattr(fake, "offers", sold_out)
    monkeypatch.setattr(sweep, "_listed_at", lambda *_: 0.0)  # what it was asked for would be listed by now
    _, made = fleet.FleetHandler(Timeouts()).create(call, inputs)
    assert (len(made["machines"]), len(asked)) == (WANTED["nodes"], 2)


def test_a_guard_does_not_need_an_earlier_provider_that_was_asked_for_nothing(wire, here, guard, monkeypatch, tmp_path):
    _, resource_id, state = guard
    said = list[Event]()
    call = Call(here, Settings(tmp_path, "o"), said.append, threading.Event(), False)
    old = {**state, "earlier": [{"provider": "other", "options": {}}]}

    def swept(_, provider, *__):
        if provider == "other":
            raise AuthError("the key has expired")

    monkeypatch.setattr("mgpu.iac.types.guard.registry.get", lambda name, options: name)
    monkeypatch.setattr("mgpu.iac.types.guard.sweep", swept)
    FleetGuardHandler(Timeouts()).delete(call, resource_id, old)
    assert "the key has expired" in str(said)
    generations.open_journal(tmp_path, state["owner"], state["fleet"]).append(
        "intent", token="t", offer={"provider": "other"}
    )
    with pytest.raises(AuthError):
        FleetGuardHandler(Timeouts()).delete(call, resource_id, old)
