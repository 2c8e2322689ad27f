"""A run that may have machines of several providers: one after the other, and none is left behind at any of them."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status.status import Fault, Phase

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    InputError,
    Interrupted,
    NoCapacity,
    NoOffer,
    RateLimited,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Event, Note, Warned
from mgpu.image import compat
from mgpu.plan.model import Offer
from mgpu.plan.rank import Rank
from mgpu.providers.base import NodePhase
from mgpu.run.budget import account
from mgpu.run.fleet import inventory
from mgpu.run.job import on_sale
from mgpu.run.job.on_sale import Priced
from mgpu.run.lifecycle import attach, down, supervise
from mgpu.run.lifecycle import launch as runs
from mgpu.run.lifecycle.capacity_wait import paused
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.run.record.session import Session

RUN_FILE = """
name: it
provider: [aws, slurm]
max_hours: 1
max_price_usd_per_hour: 100
market: spot-then-on-demand
command: [train.py]
checkpoint: none
"""
SOLD_OUT = NoCapacity("nothing is free")


def sells(cloud, name, price, market="spot", kind="big"):
    cloud.name = name
    where = {"region": "r", "market": market, "instance_type": kind, "fetched_at": 0}
    cloud.on_sale.append(Offer(provider=name, price_usd_per_hour=price, **where))


@pytest.fixture
def clouds(world):
    """Two providers; aws is the cheaper one on the spot market and the dearer one on demand."""
    aws, slurm = world.cloud, type(world.cloud)()
    world.elsewhere["slurm"] = slurm
    sells(aws, "aws", 1.0)
    sells(aws, "aws", 9.0, "on-demand")
    sells(slurm, "slurm", 2.0, "on-demand")
    return {"aws": aws, "slurm": slurm}


def ups(world):
    return [call.removeprefix("up at ") for call in world.calls if call.startswith("up at ")]


def test_the_best_offers_provider_is_asked_first_and_alone_where_it_has_machines(project, clouds):
    outcome = project.launch()
    assert outcome.record.state is State.SUCCEEDED
    assert (outcome.record.provider, ups(project.world)) == ("aws", ["aws"])
    assert project.world.ranked_up_to == [Rank(on_demand=True, preference=0, usd_per_hour=2.0)]
    assert outcome.record.spending[0].provider == "aws"


def test_one_without_machines_is_followed_by_the_next_as_their_offers_rank(project, clouds):
    world = project.world
    world.hooks |= {"up at aws": SOLD_OUT, "up at slurm": SOLD_OUT}
    outcome = project.launch("recovery: {wait_minutes: 0}")
    assert ups(world) == ["aws", "slurm", "aws"], "dear machines of the first one come after the second one's"
    assert isinstance(outcome.error, NoCapacity)
    assert world.ranked_up_to == []


def test_whoever_has_none_is_left_and_the_run_is_the_others(project, clouds):
    project.world.hooks["up at aws"] = SOLD_OUT
    outcome = project.launch()
    assert outcome.record.state is State.SUCCEEDED
    assert (outcome.record.provider, outcome.record.asked) == ("slurm", ["slurm"]), "nothing is left at the other"
    assert outcome.record.spending[0].provider == "slurm"
    project.nothing_is_left()


def test_what_waiting_does_not_mend_at_one_is_no_end_and_what_it_may_mend_is_waited_for(project, clouds):
    world = project.world
    world.hooks |= {"up at aws": AuthError("no credentials"), "up at slurm": SOLD_OUT}
    world.timeouts = world.timeouts.model_copy(update={"sold_out_s": 0.01})

    def free_again():
        if len(ups(world)) == 3:
            del world.hooks["up at slurm"]

    world.hooks["init"] = free_again
    assert project.launch("recovery: {wait_minutes: 1}").record.state is State.SUCCEEDED
    assert ups(world) == ["aws", "slurm", "aws", "aws", "slurm"]


def test_one_that_cannot_be_asked_hides_no_other(project, clouds):
    clouds["aws"].refuses |= {"offers": [Transient("no answer")], "check": [Transient("no answer")]}
    spec = project.spec()
    plan = on_sale.plan(spec)
    assert [offer.provider for offer in plan.offers] == ["slurm"]
    assert plan.notes == ("aws: no answer",)
    assert project.launch().record.provider == "slurm"


def test_a_plan_says_why_one_of_them_has_nothing(project, clouds):
    """Else the others' machines are paid for, and nobody knows that a host only does not answer."""
    clouds["slurm"].on_sale.clear()
    (note,) = on_sale.plan(project.spec()).notes
    assert note.startswith("slurm: no offer of provider slurm meets the run file")
    assert note.endswith("It has nothing of this kind on sale.")
    clouds["aws"].refuses["offers"] = [AuthError("expired", "word " * 100)]
    sells(clouds["slurm"], "slurm", 2.0, "on-demand")
    assert len(on_sale.plan(project.spec()).notes[0]) < 230


def test_where_nobody_has_anything_all_of_them_say_why(project, clouds):
    for each in clouds.values():
        each.on_sale.clear()
    with pytest.raises(NoOffer) as caught:
        on_sale.plan(project.spec())
    assert "none of aws, slurm" in caught.value.what
    assert caught.value.why.count("no offer of provider") == 2
    told = "It has nothing of this kind on sale. Change `gpus_per_node`, `gpu`, `regions` or `provider`."
    assert caught.value.why.count(told) == 2, "why, and what to change"


def test_the_machines_of_all_who_were_asked_are_looked_for_and_swept(project, clouds, world):
    """The first one's create may have come through although its answer did not."""
    left = clouds["aws"].rent(f"mine-{project.left_behind().run_id}")
    found = record.load("run-1")
    found.candidates = {"aws": {"profile": "p"}, "slurm": {}}
    found.goes_to("aws")
    found.goes_to("slurm")
    record.save(found)
    assert dict(inventory._Users([found]).named) == {"aws": {"profile": "p"}, "slurm": {}}
    down.down(found, project.context)
    assert clouds["aws"].phases[left.ids[0]] is NodePhase.TERMINATED


def test_the_rights_that_any_of_them_gave_are_taken_away(project, clouds, world):
    project.left_behind()
    found = record.load("run-1")
    found.candidates, found.store_granted = {"aws": {}, "slurm": {}}, True
    found.goes_to("aws")
    found.goes_to("slurm")
    record.save(found)
    down.down(found, project.context)
    assert [each.revoked for each in clouds.values()] == [["run-1"], ["run-1"]]


def test_a_gang_whose_provider_has_nothing_left_goes_on_at_another(project, clouds, monkeypatch):
    world = project.world
    world.timeouts = world.timeouts.model_copy(update={"sold_out_s": 0.01})
    monkeypatch.setattr("mgpu.run.lifecycle.recovery.MOVE_AFTER_S", 0.0)
    attempts = list[str]()

    def train(node, job):
        attempts.append(record.load("last").provider)
        if len(attempts) > 1:
            return world.succeed(node, job)
        world.hooks["up at aws"] = SOLD_OUT
        clouds["aws"].on_sale.clear()  # as providers say that have none
        return node.says(Phase.FAILED, attempt=job.attempt, fault=Fault.PROVIDER, reason="the provider takes it")

    world.program = train
    outcome = project.launch("recovery: {attempts: 3}")
    assert outcome.record.state is State.SUCCEEDED, outcome.error
    assert attempts == ["aws", "slurm"]
    assert [each.provider for each in outcome.record.spending] == ["aws", "slurm"]
    project.nothing_is_left()


def test_a_supervisor_that_takes_over_keeps_the_fleet_that_was_made(project, clouds, world):
    """Its provider is the second one; the first one has machines again."""
    project.spec()
    found = world.record("run-1", candidates={"aws": {}, "slurm": {}})
    found.goes_to("slurm")
    record.save(found)
    Folder("run-1").make()
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    handle = clouds["slurm"].rent("mine-run-1")
    world.stacks["run-1"] = world.output(handle, "slurm")
    outcome = attach.attach(found, project.context)
    assert outcome is not None
    assert outcome.record.state is State.SUCCEEDED, outcome.error
    assert ups(world) == ["slurm"]


def test_any_is_whoever_is_set_up_and_whom_the_run_file_suits(project, clouds):
    """Kubernetes needs an image and hosts their addresses, which this run file does not name."""
    clouds["slurm"].is_configured = False
    spec = project.spec().model_copy(update={"providers": ("any",)})
    assert "kubernetes" in spec.candidates
    assert set(on_sale.sellers(spec)) == {"aws"}, "the fake is any of them but slurm"


def test_nobody_gets_rights_in_the_store_before_it_has_the_machines(project, clouds):
    """They would stay there, with nobody who takes them away."""
    project.world.hooks["up at aws"] = SOLD_OUT
    project.world.timeouts = project.world.timeouts.model_copy(update={"stop_grace_s": 0.1})
    outcome = project.launch("data: [{from: s3://my-data/x, to: x}]\n", nodes=1)
    aws, slurm = clouds.values()
    assert aws.granted == []
    assert [run for run, *_ in slurm.granted] == [outcome.record.run_id] == slurm.revoked
    assert not outcome.record.store_granted


def test_where_one_cannot_be_reached_any_more_the_others_machines_go_all_the_same(project, clouds, world):
    project.left_behind()
    found = record.load("run-1")
    found.candidates = {"aws": {}, "slurm": {}}
    found.goes_to("aws")
    found.goes_to("slurm")
    record.save(found)
    stray = clouds["slurm"].rent("mine-run-1")
    clouds["aws"].refuses["list_owned"] = [AuthError("the key has expired")]
    with pytest.raises(TeardownIncomplete, match="may still be billed"):
        down.down(found, project.context)
    assert clouds["slurm"].phases[stray.ids[0]] is NodePhase.TERMINATED


def test_a_supervisor_that_takes_over_asks_first_where_the_dead_one_was_asking(project, clouds, world):
    """Its create may have taken the last machines: the plan of now shows none there."""
    project.spec()
    found = world.record("run-1", candidates={"aws": {}, "slurm": {}})
    found.goes_to("slurm")
    record.save(found)
    Folder("run-1").make()
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    clouds["slurm"].on_sale.clear()
    outcome = attach.attach(found, project.context)
    assert outcome is not None
    assert (ups(world), outcome.record.asking) == (["slurm"], "")


def test_a_supervisor_that_takes_over_asks_that_one_for_no_more_than_the_dead_one_has(project, clouds, world):
    """Its dear machines come after the other one's."""
    project.spec()
    found, limit = world.record("run-1", candidates={"aws": {}, "slurm": {}}), Rank(True, 0, 2.0)
    found.goes_to("aws", limit)
    record.save(found)
    Folder("run-1").make()
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    world.hooks["up at aws"] = NoOffer("what is left there is dearer than the other one's")
    outcome = attach.attach(record.load("run-1"), project.context)
    assert outcome is not None
    assert (outcome.record.provider, ups(world)[:1]) == ("slurm", ["aws"])

    del world.hooks["up at aws"]
    again = world.record("run-2", candidates={"aws": {}, "slurm": {}})
    again.goes_to("aws", limit)
    record.save(again)
    Folder("run-2").make()
    Folder("run-2").run_file.write_text(world.run_file.read_text())
    world.ranked_up_to.clear()
    attach.attach(record.load("run-2"), project.context)
    assert world.ranked_up_to == [limit]


def test_a_supervisor_that_takes_over_in_a_move_goes_on_with_it(project, clouds, world, monkeypatch):
    """The fleet's own provider is not asked for machines again before its turn: the fleet was given back."""
    attempts = list[str]()

    def train(node, job):
        attempts.append(record.load("last").provider)
        return world.succeed(node, job)

    world.program = train
    found = project.left_behind(state=State.REPAIRING, candidates={"aws": {}, "slurm": {}}, provider="aws")
    old = clouds["aws"].rent("mine-run-1")
    found.fleet = world.output(old, "aws").model_dump(mode="json")
    found.recoveries, found.attempt = 1, 1
    found.moves = True
    found.goes_to("slurm", Rank(True, 0, 9.0))
    record.save(found)
    project.spec("recovery: {attempts: 3, wait_minutes: 1}\n")
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    outcome = attach.attach(record.load("run-1"), project.context)
    assert outcome is not None
    assert outcome.record.state is State.SUCCEEDED, outcome.error
    assert (ups(world), attempts) == (["slurm"], ["slurm"])
    assert world.ranked_up_to == [Rank(True, 0, 9.0)]
    assert not outcome.record.moves
    assert clouds["aws"].billed == set(), "what the dead one had not given back yet is"


def test_what_is_wrong_with_one_of_them_is_no_end(project, clouds):
    project.world.hooks["up at aws"] = InputError("image: it needs another driver")
    outcome = project.launch()
    assert (outcome.record.state, outcome.record.provider) == (State.SUCCEEDED, "slurm")


def test_a_short_silence_of_all_is_waited_for(project, clouds):
    for each in clouds.values():
        each.refuses["offers"] = [Transient("no answer"), Transient("no answer")]
    spec = project.spec()
    with pytest.raises(Transient):
        on_sale.plan(spec)
    clouds["aws"].refuses["offers"].clear()
    assert project.launch().record.provider == "aws"


def at_once(_seconds: float) -> bool:
    """A wait that takes no time, and that nothing ends."""
    return False


def unheard(_event: Event) -> None: ...


def test_a_limit_by_the_hour_counts_the_dearest_of_all_that_say_what_they_cost(project, clouds, monkeypatch):
    spec, nothing = project.spec(), list(clouds["slurm"].on_sale)
    assert on_sale.priced(spec, at_once, unheard) == Priced(9.0, ("aws", "slurm"), {})
    monkeypatch.setattr(on_sale, "ASKED_S", 0.0)
    for error in (Transient("no answer"), AuthError("no credentials"), InputError("no such profile")):
        clouds["slurm"].refuses["offers"] = [error]
        assert on_sale.priced(spec, at_once, unheard) == Priced(9.0, ("aws",), {"slurm": error})
    moves = clouds["aws"].on_sale[0]
    clouds["aws"].on_sale.append(moves.model_copy(update={"market": "spot", "most_usd_per_hour": 9.5}))
    assert on_sale.priced(spec, at_once, unheard).usd_per_hour == 9.5, "its price may rise"
    clouds["aws"].on_sale.pop()
    clouds["slurm"].refuses["offers"] = []
    clouds["slurm"].on_sale.clear()
    found = on_sale.priced(spec, at_once, unheard)
    assert (found.usd_per_hour, found.providers, [*found.without]) == (9.0, ("aws",), ["slurm"]), "it has none now"
    clouds["aws"].on_sale.clear()
    assert on_sale.priced(spec, at_once, unheard) == Priced(None, ("aws", "slurm"), {}), "who tries to rent it is told"
    clouds["slurm"].refuses["offers"] = [refused := AuthError("no credentials")]
    assert on_sale.priced(spec, at_once, unheard) == Priced(None, ("aws",), {"slurm": refused})
    clouds["aws"].refuses["offers"] = [AuthError("none here")]
    with pytest.raises(AuthError, match="none here"):
        on_sale.priced(spec, at_once, unheard)
    clouds["slurm"].refuses["offers"] = [Transient("no answer")]
    clouds["aws"].refuses["offers"] = []
    with pytest.raises(Transient):
        on_sale.priced(spec, at_once, unheard)
    clouds["slurm"].on_sale[:] = nothing


def test_a_limit_by_the_hour_counts_no_machines_that_the_image_does_not_run_on(project, clouds):
    aws = clouds["aws"]
    aws.on_sale[:] = [each.model_copy(update={"gpu": "A100-80GB", "gpus": 0}) for each in aws.on_sale]
    aws.on_sale.append(aws.on_sale[0].model_copy(update={"gpu": "B200", "price_usd_per_hour": 90.0}))
    spec, labels = project.spec(), {compat.TORCH: "2.6.0", compat.CUDA: "12.4"}
    assert on_sale.priced(spec, at_once, unheard).usd_per_hour == 90.0
    assert on_sale.priced(spec, at_once, unheard, labels).usd_per_hour == 9.0
    aws.on_sale[:] = aws.on_sale[-1:]
    found = on_sale.priced(spec, at_once, unheard, labels)
    assert (found.usd_per_hour, found.providers, "B200" in str(found.without["aws"])) == (2.0, ("slurm",), True)


def test_one_busy_moment_takes_no_provider_from_a_run(project, clouds, world, monkeypatch):
    offers, waited = clouds["aws"].offers, list[float]()
    answers = [RateLimited("too many calls", retry_after=7.0), Transient("no answer")]

    def on_sale_there(needed):
        if answers:
            raise answers.pop(0)
        return offers(needed)

    monkeypatch.setattr(clouds["aws"], "offers", on_sale_there)
    said = list[Event]()
    found = on_sale.priced(project.spec(), lambda seconds: waited.append(seconds) or False, said.append)
    assert found == Priced(9.0, ("aws", "slurm"), {})
    assert (waited[0], len(waited)) == (7.0, 2)
    assert said == [Note("too many calls: it is asked again, for up to 60 s")], "once, not each time"


def test_who_ends_a_queued_run_waits_for_no_price(project, clouds, world, monkeypatch):
    account.change(usd_per_hour=5.0)
    queued = runs.submitted(world.run_file, project.spec(), project.context)

    def silent(needed):
        Folder(queued.run_id).stop.touch()
        raise Transient("no answer")

    for each in clouds.values():
        monkeypatch.setattr(each, "offers", silent)
    outcome = attach.attach(queued, project.context)
    assert outcome is not None
    assert (outcome.record.state, ups(world)) == (State.STOPPED, [])


@pytest.mark.parametrize("begins", ["launched", "queued"])
def test_a_limit_of_runs_alone_needs_no_price(project, clouds, world, begins):
    account.change(runs=1)
    spec = project.spec()
    clouds["aws"].refuses["offers"] = [AuthError("not here")]
    if begins == "launched":
        outcome = runs.launch(world.run_file, spec, project.context)
    else:
        outcome = attach.attach(runs.submitted(world.run_file, spec, project.context), project.context)
    assert outcome is not None
    assert (outcome.record.state, [*outcome.record.candidates]) == (State.SUCCEEDED, ["aws", "slurm"])
    assert "limits" not in str(world.of(Warned))


@pytest.mark.parametrize("error", [AuthError("no credentials"), InputError("no such profile")])
def test_under_a_limit_who_is_not_set_up_here_rents_nothing_for_the_run_elsewhere_either(project, clouds, world, error):
    """Whoever takes over has the credentials: no room was claimed for those machines."""
    account.change(usd_per_hour=5.0)
    clouds["aws"].refuses["offers"] = [error]
    outcome = project.launch()
    assert (outcome.record.provider, [*outcome.record.candidates]) == ("slurm", ["slurm"])
    assert f"does without: {error.what}" in str(world.of(Warned))


def test_under_a_limit_whoever_does_not_say_what_it_costs_is_not_asked_for_machines(
    project, clouds, world, monkeypatch
):
    """Nor when it answers again: no room was claimed for its dear machines."""
    account.change(usd_per_hour=5.0)
    monkeypatch.setattr(on_sale, "ASKED_S", 0.0)
    silent, offers = iter([True]), clouds["aws"].offers

    def on_sale_there(needed):
        if next(silent, False):
            raise Transient("no answer")
        return offers(needed)

    monkeypatch.setattr(clouds["aws"], "offers", on_sale_there)
    world.hooks["up at slurm"] = SOLD_OUT
    outcome = project.launch("recovery: {wait_minutes: 0}")
    assert isinstance(outcome.error, NoCapacity)
    assert {*ups(world)} == {"slurm"}
    assert "what machines of aws cost is not known" in str(world.of(Warned))
    del world.hooks["up at slurm"]
    account.change(usd_per_hour=0.0)
    assert project.launch().record.provider == "aws", "without a limit as ever"


def test_a_queued_run_does_without_who_is_silent_when_it_begins(project, clouds, world, monkeypatch):
    monkeypatch.setattr(on_sale, "ASKED_S", 0.0)
    account.change(usd_per_hour=5.0)
    queued = runs.submitted(world.run_file, project.spec(), project.context)
    assert [*queued.candidates] == ["aws", "slurm"]
    clouds["aws"].refuses["offers"] = [Transient("no answer")]
    outcome = attach.attach(queued, project.context)
    assert outcome is not None
    assert (outcome.record.state, outcome.record.provider, ups(world)) == (State.SUCCEEDED, "slurm", ["slurm"])
    assert [*outcome.record.candidates] == ["slurm"]


def test_any_that_is_one_alone_is_chosen_too(project, clouds, world, monkeypatch):
    monkeypatch.setattr(on_sale, "_set_up", lambda name: name == "slurm")
    spec = project.spec()
    text = world.run_file.read_text().replace("[aws, slurm]", "any")
    world.run_file.write_text(text)
    outcome = runs.launch(world.run_file, spec.model_copy(update={"providers": ("any",)}), project.context)
    assert (outcome.record.state, ups(world)) == (State.SUCCEEDED, ["slurm"])


def test_a_fleet_that_is_known_is_kept_by_a_takeover_before_the_training(project, clouds, world):
    project.spec()
    found = world.record("run-1", candidates={"aws": {}, "slurm": {}})
    found.goes_to("slurm")
    handle = clouds["slurm"].rent("mine-run-1")
    world.stacks["run-1"] = world.output(handle, "slurm")
    found.fleet, found.asking = world.stacks["run-1"].model_dump(mode="json"), ""
    record.save(found)
    Folder("run-1").make()
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    clouds["aws"].refuses["offers"] = [AuthError("nobody is asked")]
    outcome = attach.attach(found, project.context)
    assert outcome is not None
    assert (outcome.record.state, ups(world)) == (State.SUCCEEDED, ["slurm"])


def test_what_may_have_been_made_ends_the_search(project, clouds):
    project.world.hooks["up at aws"] = AmbiguousCreate("its answer was lost")
    outcome = project.launch()
    assert (outcome.record.state, ups(project.world)) == (State.FAILED, ["aws"])
    assert outcome.record.asked == ["aws"], "where it is looked for in the end"


def test_the_nodes_of_the_next_provider_never_get_the_keys_of_the_one_before(project, clouds, world):
    """A supervisor takes over in the middle of a move: the fleet is the old one's still."""
    project.left_behind(candidates={"aws": {}, "slurm": {}}, provider="slurm")
    found = record.load("run-1")
    found.fleet = world.output(clouds["aws"].rent("mine-run-1"), "aws").model_dump(mode="json")
    session = Session(found, world.events.append, world.timeouts)
    run = supervise._Run(session, project.context, None, submitted=False)
    run._secrets(run._request(found.fleet_output()), run._provider())
    assert list(session.stores) == ["aws"]


def test_who_asks_for_the_end_waits_for_no_provider_that_is_silent(project, clouds, world):
    session = Session(project.left_behind(), world.events.append, world.timeouts)
    Folder("run-1").stop.touch()
    with pytest.raises(Interrupted):
        paused(session, 600)
