"""What tables and closing lines say of a run, by its record."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgpu.acquire.fit import ANY
from mgpu.cli import ls, submit
from mgpu.cli.common import agreement, closing
from mgpu.cli.common.agreement import Budget
from mgpu.console import Console
from mgpu.errors import InputError, NoOffer
from mgpu.plan.model import CheckpointRoom, Cost, Offer, Plan, Requirements
from mgpu.run.job import on_sale
from mgpu.run.record.record import Interruption, Record, Spent, State
from mgpu.spec.load import loads
from mgpu.words import count


def record(**given):
    fields = {"run_id": "a-1", "name": "a", "project": "/p", "project_base": "/p", "run_file": "/p/mgpu.yaml"}
    fields |= {"stack": "a-1", "own_stack": True, "fleet_name": "p-a-1", "provider": "local", "nodes": 2}
    return Record(**fields | given)


@pytest.mark.parametrize(
    ("state", "reason", "shown"),
    [
        (State.STOPPED, "run a-1 was stopped", "stopped"),
        (State.STOPPED, "run a-1 stopped at its hard cap (max_hours)", "stopped: at its hard cap (max_hours)"),
        (State.FAILED, "run a-1 failed: exit code 3", "failed: exit code 3"),
        (State.FAILED, "no quota", "failed: no quota"),
        (State.SUCCEEDED, "", "succeeded"),
    ],
)
def test_the_state_says_nothing_twice(state, reason, shown):
    assert dict(closing.summary(record(state=state, reason=reason)))["state"] == shown


def test_machines_are_rented_when_a_fleet_is_known():
    assert closing.machines(record()) == "none yet"
    assert closing.machines(record(fleet={"fleet": "p-a-1"})) == "2 rented"


def test_machines_that_never_were_are_not_given_back():
    assert closing.machines(record(teardown="confirmed")) == "none left, confirmed by the provider"
    given_back = record(teardown="confirmed", fleet={"fleet": "p-a-1"})
    assert closing.machines(given_back) == "given back, confirmed by the provider"


def test_a_fleet_that_was_kept_and_is_not_billed_is_gone():
    kept = record(teardown="kept", price_usd_per_hour=0.06, fleet={"nodes": [{"id": "i-0"}, {"id": "i-1"}]})
    assert "$0.06 per hour" in ls._machines(kept, {"i-1"})
    assert ls._machines(kept, {"i-7"}) == "kept, and gone since"


@pytest.mark.parametrize(
    ("state", "alive", "shown"),
    [
        (State.QUEUED, False, "queued"),
        (State.PROVISIONING, False, "provisioning, no supervisor"),
        (State.PROVISIONING, True, "provisioning"),
        (State.RUNNING, False, "running, no supervisor"),
        (State.SUCCEEDED, False, "succeeded"),
    ],
)
def test_a_run_that_nobody_supervises_is_listed_as_such(monkeypatch, state, alive, shown):
    monkeypatch.setattr(ls, "supervised", lambda run_id: alive)
    assert ls._state(record(state=state)) == shown


def test_one_validation_is_told_once():
    once = dict(closing.summary(record(metrics={"validation_loss": 5.5}, first_metrics={"validation_loss": 5.5})))
    assert once["validation loss"] == "5.5000"
    twice = dict(closing.summary(record(metrics={"validation_loss": 2.25}, first_metrics={"validation_loss": 5.5})))
    assert twice["validation loss"] == "2.2500 (first 5.5000)"


def test_an_end_on_another_day_is_told_with_its_date(monkeypatch):
    begins = time.mktime((2026, 11, 27, 14, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: begins)
    ends = [closing.clock(begins + hours * 3600) for hours in (5, 29)]
    assert ends == ["19:00", "2026-11-28 19:00"]
    kept = record(teardown="kept", price_usd_per_hour=0.06, lease_until=begins + 29 * 3600)
    assert "until 2026-11-28 19:00" in closing.machines(kept)


@pytest.mark.parametrize(("state", "told"), [(State.STOPPED, True), (State.FAILED, True), (State.SUCCEEDED, False)])
def test_how_to_go_on_is_told_where_there_is_a_checkpoint(state, told):
    def lines(**given):
        return "\n".join(closing.next_lines(record(state=state, **given), resume=True))

    assert ("--resume a-1" in lines(checkpoint_id="a001-step-5")) is told
    assert "--resume" not in lines()


def test_what_to_type_next_names_a_run_file_of_another_name_or_folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    kept = {"teardown": "kept", "state": State.STOPPED, "checkpoint_id": "a001-step-5"}

    def lines(path):
        return closing.next_lines(record(run_file=str(path), **kept), resume=True)

    other, on = tmp_path / "sub" / "other.yaml", "--stack a-1 --resume a-1 "
    assert any(line.startswith(f"mgpu run {on}") for line in lines(tmp_path / "sub" / "mgpu.yaml"))
    assert any(line.startswith(f"mgpu run other.yaml {on}") for line in lines(other))
    assert not any("launch" in line for line in lines(other)), "its machines would have to be given back before"
    gone = closing.next_lines(record(run_file=str(other), **kept | {"teardown": "confirmed"}), resume=True)
    assert any(line.startswith("mgpu launch other.yaml --resume a-1 ") for line in gone)
    assert any(line.startswith("mgpu run ../mgpu.yaml --stack a-1") for line in lines(tmp_path / "mgpu.yaml"))
    blank = tmp_path / "sub" / "my run.yaml"
    assert any(line.startswith("mgpu run 'my run.yaml' --stack a-1") for line in lines(blank))


@pytest.mark.parametrize(
    "why",
    [
        {"stop_reason": "hard_cap"},
        {"stop_reason": "budget"},
        {"stop_reason": "month"},
        {"fault": "provider"},
        {"lease_until": 1.0},
        {"interruptions": [Interruption(1, "node 1 is gone", "provider", [1], 5, 0.0, 0.0)]},  # it was not replaced
    ],
)
def test_kept_machines_that_do_not_last_are_given_back_before_others_are_rented(tmp_path, monkeypatch, why):
    monkeypatch.chdir(tmp_path)
    kept = {"run_file": str(tmp_path / "mgpu.yaml"), "teardown": "kept", "state": State.STOPPED}
    lines = closing.next_lines(record(checkpoint_id="a001-step-5", **kept, **why), resume=True)
    begins = [line.partition("    ")[0] for line in lines]
    assert begins[-2:] == ["mgpu down a-1", "mgpu launch --resume a-1"]
    assert not any(line.startswith("mgpu run") for line in lines)


def test_a_run_that_was_stopped_before_its_next_attempt_goes_on_on_machines_that_are_all_there():
    """The program hung, and no machine was lost."""
    hung = Interruption(1, "no sign of progress", "infrastructure", [], 5, 0.0, 0.0)
    kept = record(checkpoint_id="a001-step-5", teardown="kept", state=State.STOPPED, interruptions=[hung])
    assert any(" --stack a-1 --resume a-1" in line for line in closing.next_lines(kept, resume=True))


def test_machines_that_were_kept_before_any_node_has_spoken_can_be_given_back():
    lines = closing.next_lines(record(teardown="kept", state=State.FAILED), resume=True)
    assert any(line.startswith("mgpu down ") for line in lines)
    assert not any(line.startswith("mgpu launch") for line in lines), "others would be rented beside them"


@pytest.mark.parametrize(
    ("saves", "shown"),
    [
        ({"stall_s": 0.0231, "save_s": 12.3}, "the newest: training stood still for 0.02 s, on disk after 12.30 s"),
        ({"failed": 2, "skipped": 1}, "2 failed; 1 skipped"),
        ({"save_s": 100.0, "failed": 1}, "the newest: on disk after 100.00 s; 1 failed"),
    ],
    ids=["fine", "program", "one-failed"],
)
def test_how_saves_went_is_one_line(saves, shown):
    assert dict(closing.summary(record(saves=saves)))["saves"] == shown
    assert "saves" not in dict(closing.summary(record()))


def test_numbers_have_their_plural():
    assert [count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


# --- interruptions ----------------------------------------------------------------------------------------------------


def broken(**given):
    whole = {"attempt": 1, "reason": "node 1 is gone", "fault": "provider", "nodes": [1], "step": 120}
    whole |= {"heard_at": 10.0, "noticed_at": 10.9, "ended_at": 12.1, "repaired_at": 18.4, "started_at": 20.0}
    return Interruption(**whole | {"resumed_at": 27.2, "resumed_step": 100} | given)


def test_a_run_without_an_interruption_has_no_row_of_them():
    assert not {"interruptions", "steps done again", "recovery"} & set(dict(closing.summary(record())))


def test_an_interruption_is_told_with_its_price():
    rows = dict(closing.summary(record(step=140, interruptions=[broken(reason="node 0 is gone; node 1 is gone")])))
    assert rows["interruptions"] == "1"
    assert rows["  of attempt 1"] == (
        "node 0 is gone and node 1 is gone; "
        "back after 17.2 s: detected 0.9 s, stopped 1.2 s, repaired 6.3 s, resumed 8.8 s"
    )
    assert rows["steps done again"] == "20"


def test_of_a_program_that_says_no_steps_nobody_knows_how_many_were_done_again():
    assert "steps done again" not in dict(closing.summary(record(interruptions=[broken()])))


def test_of_many_interruptions_the_newest_have_a_row_each():
    rows = dict(closing.summary(record(interruptions=[broken(attempt=n) for n in range(1, 31)])))
    assert rows["interruptions"] == "30"
    assert rows["  earlier"].startswith("25, see ")
    assert [each for each in rows if "of attempt" in each] == [f"  of attempt {n}" for n in range(26, 31)]


def test_several_are_added_up_and_the_one_that_is_under_way_is_told_as_far_as_it_went():
    under_way = broken(
        reason="node 0 has not answered for 120 s", ended_at=15.9, repaired_at=None, resumed_at=None, resumed_step=None
    )
    under_way.attempt = 3
    rows = dict(closing.summary(record(step=140, interruptions=[broken(), broken(attempt=2), under_way])))
    assert rows["interruptions"] == "3"
    assert rows["steps done again"] == "40 so far"
    assert rows["  of attempt 3"] == "node 0 has not answered for 120 s; detected 0.9 s, stopped 5.0 s"


def test_a_run_that_goes_on_from_zero_has_done_all_steps_again():
    rows = dict(closing.summary(record(step=140, interruptions=[broken(resumed_step=-1)])))
    assert rows["steps done again"] == "120"


def test_the_json_has_the_interruptions_and_no_token():
    result = closing.result_of(record(interruptions=[broken()], writer="w", supervisor="s"))
    found = result.model_dump(mode="json")
    assert found["interruptions"][0]["resumed_step"] == 100
    assert not {"writer", "supervisor"} & set(found)
    json.dumps(found)


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ([0.195, 0.75], "$0.39 per hour for all nodes, up to $1.50 if another offer has to be taken; at most $0.75"),
        ([0.195], "$0.39 per hour for all nodes; at most $0.20"),
        ([0.001], "$0.002 per hour for all nodes; at most $0.001 until"),
        ([0.195, 0.195], "$0.39 per hour for all nodes; at most $0.20"),
    ],
)
def test_a_plan_says_what_the_first_offer_costs_and_the_most_that_is_agreed_to(prices, said, capsys):
    places = [
        Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=usd, region=f"r{i}", fetched_at=1)
        for i, usd in enumerate(prices)
    ]
    needed = Requirements(provider="p", nodes=2, max_price_usd_per_hour=2, max_hours=0.5)
    agreement.show_plan(Console(), Plan(requirements=needed, offers=tuple(places)))
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_plan_says_what_a_budget_pays_for_and_refuses_one_that_pays_for_nothing(capsys):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    needed = Requirements(provider="p", nodes=2, max_price_usd_per_hour=2, max_hours=10)
    plan = Plan(requirements=needed, offers=(offer,))
    agreement.show_plan(Console(), plan, budget=Budget(5))
    assert "at most $5.00 (max_usd), which pays for 2.5 h of them" in " ".join(capsys.readouterr().err.split())
    agreement.show_plan(Console(), plan, budget=Budget(50))
    assert "at most $20.00 until the hard cap of 10 h" in " ".join(capsys.readouterr().err.split())
    disks = (Cost(what="disks", usd=2.0, per="hour"), Cost(what="traffic", usd=9.0, per="GiB"))
    agreement.show_plan(Console(), plan, disks, Budget(30))
    assert "at most $30.00 (max_usd), which pays for 7.5 h of them" in " ".join(capsys.readouterr().err.split())
    for enough in (None, 5.0):
        agreement.require_paid(plan, Budget(enough), 2.0)
    with pytest.raises(InputError, match=r"\$0.30 pays for 4.5 min of these machines"):
        agreement.require_paid(plan, Budget(0.3), 2.0 + 2.0)
    with pytest.raises(InputError, match=r"\$0.10 pays for 3 min of these machines"):
        agreement.require_paid(plan, Budget(0.1), 2.0)
    moves = plan.model_copy(update={"offers": (plan.best.model_copy(update={"most_usd_per_hour": 100.0}),)})
    with pytest.raises(InputError, match="lower `max_price_usd_per_hour`"):
        agreement.require_paid(moves, Budget(1), 200.0)


@pytest.mark.parametrize("usd", [0, 0.1])
def test_a_budget_that_the_first_offer_cannot_spend_is_told_without_a_time(capsys, usd):
    own = Offer(
        provider="hosts", instance_type="m", market="on-demand", price_usd_per_hour=usd, region="r", fetched_at=1
    )
    rented = own.model_copy(update={"provider": "aws", "price_usd_per_hour": 30.0})
    needed = Requirements(provider="hosts", max_price_usd_per_hour=40, max_hours=10)
    agreement.show_plan(Console(), Plan(requirements=needed, offers=(own, rented)), budget=Budget(10))
    said = " ".join(capsys.readouterr().err.split())
    assert "up to $30.00 if another offer has to be taken; at most $10.00 (max_usd) prices of" in said


def test_a_spot_price_that_is_only_known_to_be_lower_is_marked(capsys):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    needed = Requirements(provider="p", max_price_usd_per_hour=2, max_hours=1)
    agreement.show_plan(Console(), Plan(requirements=needed, offers=(offer,)))
    assert "<" not in capsys.readouterr().err
    limit = offer.model_copy(update={"price_is_limit": True})
    agreement.show_plan(Console(), Plan(requirements=needed, offers=(limit,)))
    said = " ".join(capsys.readouterr().err.split())
    assert "at p r: < $1.00 per hour for all nodes" in said
    assert "<: the spot price is not known, but that it is not above this" in said


def test_a_run_that_is_resumed_is_told_what_is_left_of_its_budget(monkeypatch, capsys):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    needed = Requirements(provider="p", max_price_usd_per_hour=2, max_hours=100)
    plan = Plan(requirements=needed, offers=(offer,))
    for name, answer in {
        "make_plan": plan,
        "machines_of": None,
        "look_at_image": (None, plan),
        "other_costs": (),
    }.items():
        monkeypatch.setattr(agreement, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr("mgpu.run.lifecycle.launch.preflight", lambda *_: None)
    monkeypatch.setattr(agreement, "show_changes", lambda *_: None)
    spec = SimpleNamespace(max_usd=50, recovery=SimpleNamespace(wait_minutes=0))

    def agree(hours: float) -> None:
        spent = Spent(generation=1, price_usd_per_hour=1.0, since=0, until=hours * 3600)
        agreement.agreed(Console(), Path("mgpu.yaml"), spec, True, record(spending=[spent]))

    agree(40)
    said = " ".join(capsys.readouterr().err.split())
    assert "at most $10.00 (what is left of max_usd), which pays for 10 h of them" in said
    for hours in (49.99, 51):
        with pytest.raises(InputError, match="which is left of it, pays for"):
            agree(hours)


def test_room_under_the_limits_is_for_the_most_that_spot_machines_may_be_billed_at(monkeypatch):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    moves = offer.model_copy(update={"most_usd_per_hour": 3.0})
    needed = Requirements(provider="p", nodes=2, max_price_usd_per_hour=6, max_hours=10)
    plan, asked = Plan(requirements=needed, offers=(moves,)), list[float]()
    costs = (Cost(what="disks", usd=0.5, per="hour"),)
    known = {"make_plan": plan, "machines_of": None, "look_at_image": (None, plan), "other_costs": costs}
    for name, answer in {**known, "show_plan": None}.items():
        monkeypatch.setattr(agreement, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr("mgpu.run.lifecycle.launch.preflight", lambda *_: None)
    monkeypatch.setattr("mgpu.run.budget.account.require_room", asked.append)
    spec = SimpleNamespace(max_usd=None, recovery=SimpleNamespace(wait_minutes=0))
    agreement.looked_at(Console(), Path("mgpu.yaml"), spec, begins=True)
    assert asked == [2 * 3.0 + 0.5]


def test_a_plan_says_what_else_costs_and_warns_of_what_can_be_avoided(capsys):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    needed = Requirements(provider="p", nodes=2, max_price_usd_per_hour=2, max_hours=0.5)
    costs = (
        Cost(what="disks, 2", usd=0.25, per="hour"),
        Cost(what="addresses, 2", usd=0.01, per="hour"),
        Cost(what="store", usd=0.5, per="GiB", estimate=True),
        Cost(what="traffic", usd=0.02, per="GiB", avoidable="`regions: [r]` avoids it."),
    )
    agreement.show_plan(Console(), Plan(requirements=needed, offers=(offer,)), costs)
    said = " ".join(capsys.readouterr().err.split())
    assert "at most $1.00 until the hard cap" in said, "the price of the machines, and of nothing else"
    assert "beside the machines $0.26 per hour (disks, 2: $0.25; addresses, 2: $0.010)" in said
    assert "store: about $0.50 per GiB" in said
    assert "warning: traffic: $0.020 per GiB; `regions: [r]` avoids it." in said


@pytest.mark.parametrize(("disk", "warned"), [(400, False), (300, True)])
def test_a_plan_says_what_checkpoints_take_and_warns_of_a_restart_without_room(disk, warned, capsys):
    offer = Offer(provider="p", instance_type="m", market="spot", price_usd_per_hour=1, region="r", fetched_at=1)
    needed = Requirements(provider="p", max_price_usd_per_hour=2, max_hours=0.5)
    takes = CheckpointRoom(save_gib=90, count=3, resumed_gib=90, disk_gib=disk)
    agreement.show_plan(Console(), Plan(requirements=needed, offers=(offer,), checkpoints=takes))
    said = " ".join(capsys.readouterr().err.split())
    assert f"checkpoints take up to 270 of the {disk} GiB of a machine's disk, 90 GiB more after a restart" in said
    assert ("warning: after a restart the disk does not hold" in said) is warned


TOO_SMALL = (
    "{name: x, provider: aws, max_price_usd_per_hour: 900, max_hours: 1, gpus_per_node: 8, disk_gib: 200, "
    "checkpoint: {to: s3://bkt/r}, train: {tokens: /t, strategy: fsdp, global_batch: 64, "
    "model: {preset: llama-8b}}"
)


def test_machines_whose_disk_is_too_small_are_not_planned():
    with pytest.raises(InputError, match=r"disk_gib: 200 GiB do not hold the checkpoints, 269\.1 GiB"):
        agreement.make_plan(loads(TOO_SMALL + "}", "f"))


@pytest.mark.parametrize("wrong", ["gpu: H1000, regions: us-est-1", "aws: {disk: {type: io2, iops: 256000}}"])
def test_a_disk_that_is_too_small_is_told_along_with_what_the_provider_does_not_have(wrong):
    with pytest.raises(InputError) as refused:
        agreement.make_plan(loads(f"{TOO_SMALL}, {wrong}}}", "f"))
    said = str(refused.value)
    assert refused.value.what.startswith("aws does not have")
    assert ("200 GiB do not hold the checkpoints" in said, "Write `disk_gib: " in refused.value.next_step) == (
        True,
        True,
    )
    for word in ("H1000", "us-est-1") if "gpu" in wrong else ("IOPS of io2 need a disk of 256 GiB",):
        assert word in said


def test_a_disk_that_is_too_small_is_a_mistake_of_the_run_file_beside_what_nobody_sells(monkeypatch):
    def nothing(spec):
        raise NoOffer("aws has no offer that meets the run file", "All cost more.", "Raise `max_price_usd_per_hour`.")

    monkeypatch.setattr(on_sale, "plan", nothing)
    with pytest.raises(InputError) as refused:
        agreement.make_plan(loads(TOO_SMALL + "}", "f"))
    assert refused.value.exit_code == 2
    said = str(refused.value)
    assert [word in said for word in ("no offer", "All cost more", "200 GiB do not hold")] == [True, True, True]
    assert [word in refused.value.next_step for word in ("max_price_usd_per_hour", "disk_gib: ")] == [True, True]
    with pytest.raises(NoOffer):
        agreement.make_plan(loads(TOO_SMALL.replace("disk_gib: 200", "disk_gib: 2000") + "}", "f"))


def test_all_that_aws_does_not_have_is_told_at_once():
    text = (
        "{name: x, provider: aws, max_price_usd_per_hour: 9, max_hours: 1, gpus_per_node: 8, gpu: H1000, "
        "regions: us-est-1, disk_gib: 70000, command: [t.py], checkpoint: none}"
    )
    with pytest.raises(InputError) as refused:
        agreement.make_plan(loads(text, "f"))
    assert [line.partition(":")[0] for line in refused.value.why.splitlines()] == ["regions", "gpu", "disk_gib"]


def test_room_under_the_limits_is_for_what_the_dearest_provider_bills_beside_its_machines(monkeypatch):
    """The first offer is of hosts, which cost nothing, and have nothing beside them."""
    own = Offer(provider="hosts", instance_type="m", market="on-demand", price_usd_per_hour=0, region="r", fetched_at=1)
    rented = own.model_copy(update={"provider": "aws", "price_usd_per_hour": 3.0})
    needed = Requirements(provider="hosts", nodes=2, max_price_usd_per_hour=9, max_hours=1)
    plan = Plan(requirements=needed, offers=(own, rented))
    spec = loads(
        "{name: x, provider: [hosts, aws], hosts: {addresses: [a]}, nodes: 2, max_price_usd_per_hour: 9, "
        "max_hours: 1, disk_gib: 730, command: [t.py], checkpoint: none, aws: {address: private}}",
        "f",
    )
    disks = 2 * 730 * 0.08 / 730
    assert agreement.most_usd_per_hour(spec, plan, ()) == pytest.approx(2 * 3.0 + disks)


def test_runs_of_a_sweep_whose_checkpoints_take_more_of_a_disk_are_looked_at_each(monkeypatch):
    text = (
        "{{name: x, provider: aws, max_price_usd_per_hour: 9, max_hours: 1, gpus_per_node: 8, disk_gib: 200, "
        "checkpoint: {{to: s3://bkt/r}}, train: {{tokens: /t, strategy: fsdp, global_batch: 64, steps: {}, lr: {}, "
        "model: {{preset: llama-8b}}}}}}"
    )
    few, other, many = (loads(text.format(*each), "f") for each in ((10, 0.1), (10, 0.2), (1000, 0.1)))
    looked = list[object]()
    monkeypatch.setattr(agreement, "looked_at", lambda _console, _run_file, spec: looked.append(spec) or ANY)
    monkeypatch.setattr(agreement, "agree", lambda *_: None)
    assert submit._agreed(Console(), Path("f"), [few, other, many], True) == [ANY] * 3
    assert looked == [few, many], "the disk holds one checkpoint, not three"


@pytest.mark.parametrize(("image", "alike"), [("", True), ("image: {repository: r.io/x}, ", False)])
def test_runs_of_a_sweep_that_need_other_packages_of_their_image_are_looked_at_each(image, alike, monkeypatch):
    """Else the first ones are queued before it is said what a later one lacks."""
    text = (
        "{{name: x, provider: local, max_price_usd_per_hour: 9, max_hours: 1, checkpoint: none, {}"
        "train: {{optimizer: {}, lr: {}}}}}"
    )
    specs = [loads(text.format(image, *each), "f") for each in (("adamw", 1), ("adamw", 2), ("adamw8bit", 1))]
    looked = list[object]()
    monkeypatch.setattr(agreement, "looked_at", lambda _console, _run_file, spec: looked.append(spec) or ANY)
    monkeypatch.setattr(agreement, "agree", lambda *_: None)
    submit._agreed(Console(), Path("f"), specs, True)
    assert looked == (specs[:1] if alike else [specs[0], specs[2]])


def test_what_may_still_be_billed_comes_before_all_that_could_be_typed():
    owed = record(teardown="asked", state=State.FAILED)
    assert closing.next_lines(owed)[0].startswith("mgpu down a-1 ")
    assert not any("launch" in line for line in closing.next_lines(owed))
