"""I10: one due time starts at most one run, and what becomes of every time is written down with its reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mgpu.errors import InputError
from mgpu.run.record.record import Check, Record, Spent, State
from mgpu.schedule.decide import HISTORY, SURE_S, Seen, advanced, by_hand, decide, events, telling, told, untold
from mgpu.schedule.model import DueTime, IfMissed, IfRunning, Outcome, Schedule, parsed
from mgpu.schedule.nights import compared_with
from mgpu.words import seconds_of

HOUR, DAY = 3600.0, 86400.0
BEGIN = datetime(2027, 5, 1, tzinfo=UTC).timestamp()


def schedule(**changes: object) -> Schedule:
    """Every night at two, seen at midnight."""
    made = Schedule("nightly", "u1", "0 2 * * *", "UTC", {"name": "train"}, BEGIN, "me@here", BEGIN)
    return replace(made, **changes)


def record(run_id: str, **changes: object) -> Record:
    known = Record(run_id, "train", "p", "/", "/mgpu.yaml", run_id, True, "f", "local", 1, schedule="nightly")
    return replace(known, **changes)


class World:
    """A schedule, its runs and a clock: what a pass would see and write."""

    def __init__(self, found: Schedule) -> None:
        self.schedule, self.runs, self.now = found, dict[str, Record](), BEGIN

    def look(self, days: float = 0.0, hours: float = 0.0) -> list[str]:
        """One pass, at this time after the beginning; what it has decided, with the runs that it has submitted."""
        self.now = BEGIN + days * DAY + hours * HOUR
        before = {due.at: due.outcome for due in self.schedule.history}
        todo = decide({"nightly": self.schedule}, self.seen, self.runs.get, self.now)
        if todo.schedules:
            (self.schedule,) = todo.schedules
        for _, due in todo.submit:
            assert due.run_id not in self.runs, "a second run of one time"
            self.runs[due.run_id] = record(due.run_id, due_at=due.at, state=State.RUNNING)
        self.stopped = todo.stop
        self.schedule = advanced(self.schedule, self.runs.get, self.now)
        return [str(due.outcome) for due in self.schedule.history if before.get(due.at) is not due.outcome]

    @property
    def seen(self) -> dict[str, Seen]:
        return {run: Seen(each, supervised=True) for run, each in self.runs.items() if not each.settled}

    def ends(self, outcome: State = State.SUCCEEDED, **changes: object) -> None:
        """All runs that are not over end."""
        for run, each in self.runs.items():
            if not each.state.final:
                changes = {"ended_at": self.now, "teardown": "confirmed"} | changes
                self.runs[run] = replace(each, state=outcome, **changes)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(str(due.outcome), due.reason) for due in self.schedule.history]


def test_a_night_is_started_once_and_its_end_is_written_down():
    world = World(schedule())
    assert world.look(hours=1.9) == []
    assert world.look(hours=2) == ["running"]
    assert world.look(hours=2.1) == []
    spending = [Spent(1, 2.0, BEGIN + 2 * HOUR, BEGIN + 5 * HOUR)]
    world.now = BEGIN + 5 * HOUR
    world.ends(spending=spending, exit_code=0, recoveries=2, step=90, metrics={"loss": 1.5})
    assert world.look(hours=6) == ["succeeded"]
    (night,) = world.schedule.history
    assert (night.spent_usd, night.exit_code, night.recoveries, night.step) == (6.0, 0, 2, 90)
    assert (night.ended_at, night.metrics) == (BEGIN + 5 * HOUR, {"loss": 1.5})
    assert parsed(world.schedule.to_json(), "nightly") == world.schedule


def test_what_a_night_has_cost_is_known_once_its_machines_are_gone():
    world = World(schedule())
    world.look(hours=2)
    (run,) = world.runs
    world.now = BEGIN + 5 * HOUR
    world.ends(State.FAILED, spending=[Spent(1, 2.0, BEGIN + 2 * HOUR)], exit_code=7, teardown="asked")
    assert world.look(hours=6) == ["failed"]
    before = world.schedule
    assert (before.history[0].spent_usd, before.history[0].owes) == (6.0, True), "they may be billed still"
    world.look(hours=7)
    assert world.schedule == before, "and not each pass writes it anew"
    gone = [Spent(1, 2.0, BEGIN + 2 * HOUR, BEGIN + 9 * HOUR)]
    world.runs[run] = replace(world.runs[run], spending=gone, teardown="confirmed")
    assert world.look(hours=10) == []
    (night,) = world.schedule.history
    assert (night.spent_usd, night.owes, night.exit_code) == (14.0, False, 7)
    assert parsed(world.schedule.to_json(), "nightly") == world.schedule
    removed = advanced(before, lambda _: None, BEGIN + 11 * HOUR).history[0]
    assert (removed.outcome, removed.spent_usd, removed.owes) == (Outcome.FAILED, 6.0, False)


def test_what_came_of_expectations_is_written_down_too():
    world = World(schedule())
    world.look(hours=2)
    world.ends(checks=[Check("loss", False, "2 > 1", 2.0, 1.0, 7)], exit_code=6, reason="not as expected")
    world.look(hours=3)
    (night,) = world.schedule.history
    assert (night.outcome, night.exit_code, night.reason) == (Outcome.SUCCEEDED, 6, "not as expected")
    assert [each.said for each in night.unmet] == ["2 > 1"]
    assert parsed(world.schedule.to_json(), "nightly") == world.schedule


def night(days: float, value: float | None, outcome: Outcome = Outcome.SUCCEEDED, *, met: bool = True) -> DueTime:
    return DueTime(
        BEGIN + days * DAY,
        outcome,
        BEGIN,
        f"train-{days}",
        checks=[Check("loss", met, "", value), Check("lr", True, "")],
    )


def test_a_night_is_compared_with_those_before_that_were_as_expected():
    nights = [night(0, 9.0), night(1, 1.0), night(2, 5.0, Outcome.FAILED), night(3, 4.0, met=False), night(4, 2.0)]
    found = schedule(history=nights, run={"name": "train", "expect": {"loss": {"median_of": 2}, "lr": {"max": 1}}})
    assert compared_with(found, lambda: pytest.fail("there are enough")) == {"loss": [2.0, 1.0]}
    assert compared_with(schedule(), lambda: pytest.fail("nothing is compared")) == {}


def test_a_schedule_that_was_added_anew_goes_on_with_its_earlier_runs():
    found = schedule(history=[night(4, 2.0)], run={"name": "train", "expect": {"loss": {"median_of": 3}}})
    over = {"state": State.SUCCEEDED, "metrics": {"loss": 3.0}}
    known = [
        record("train-old", **over),
        record("train-other", **over | {"schedule": "weekly"}),
        record("train-failed", **over | {"state": State.FAILED}),
        record("train-new", **over | {"metrics": {"loss": 4.0}}),
        record("train-4", **over),  # that night's
    ]
    assert compared_with(found, lambda: known) == {"loss": [2.0, 4.0, 3.0]}


def test_that_times_were_missed_is_told_by_who_writes_it_down_and_once():
    world = World(schedule())
    world.look(days=2, hours=12)
    assert len(untold(world.schedule, world.now)) == 3
    assert decide({"nightly": world.schedule}, {}, world.runs.get, world.now).missed == (world.schedule,)
    after = telling(world.schedule, "me", world.now)
    assert [due.told for due in after.history] == ["me"] * 3
    assert telling(after, "you", world.now) == after
    assert parsed(after.to_json(), "nightly") == after
    assert untold(world.schedule, world.now + 2 * DAY) == [], "by then it is no news"


def test_who_dies_before_it_has_made_sure_of_what_it_tells_is_followed_by_another_that_tells_the_same():
    world = World(schedule())
    world.look(days=2, hours=12)
    begun = telling(world.schedule, "me", world.now)

    def missed(found, seconds: float) -> tuple[Schedule, ...]:
        return decide({"nightly": found}, {}, world.runs.get, world.now + seconds).missed

    ((whose, event),) = events(begun, "me", world.now)
    assert (whose, event.times, event.due_at) == ("me", 3, begun.history[2].at)
    assert missed(begun, SURE_S - 1) == (), "it may be at it"
    assert events(begun, "you", world.now + SURE_S - 1) == []
    assert missed(begun, SURE_S + 1) == (begun,)
    assert events(telling(begun, "you", world.now + SURE_S + 1), "you", world.now + SURE_S + 1) == [("me", event)]
    assert missed(told(begun, "me"), SURE_S + 1) == ()
    assert missed(begun, 2 * DAY) == (), "by then it is no news"
    assert parsed(begun.to_json(), "nightly") == begun


@pytest.mark.parametrize(
    ("days", "hours", "outcomes"),
    [
        (0, 5.9, ["running"]),
        (0, 6.1, ["missed"]),  # four hours are over
        (6, 3, ["missed"] * 6 + ["running"]),  # asleep for a week, awake in time for the last night
        (6, 12, ["missed"] * 7),
    ],
)
def test_what_nobody_has_looked_at_in_time_is_missed(days: float, hours: float, outcomes: list[str]):
    world = World(schedule())
    assert world.look(days, hours) == outcomes
    assert all(reason for outcome, reason in world.told if outcome == "missed")
    assert world.look(days, hours + 1) == [], "and that stays so"


def test_a_machine_that_was_asleep_for_a_week_starts_the_latest_if_it_is_told_to():
    world = World(schedule(if_missed=IfMissed.LATEST))
    assert world.look(days=6, hours=12) == ["missed"] * 6 + ["running"]
    assert world.told[5][1] == "nobody looked until 34 h later; it starts within 4 h"
    assert world.schedule.history[-1].caught_up
    assert parsed(world.schedule.to_json(), "nightly") == world.schedule
    assert world.look(days=6, hours=13) == [], "and that stays so"
    world.ends()
    assert world.look(days=7, hours=2) == ["succeeded", "running"], "the next night comes at its time"
    assert [due.caught_up for due in world.schedule.history[6:]] == [True, False]


def test_of_times_that_were_missed_the_latest_is_started_only_where_none_is_in_time():
    world = World(schedule(cron="0 * * * *", start_within_s=HOUR, if_missed=IfMissed.LATEST))
    assert world.look(hours=5.5) == ["missed"] * 4 + ["running"]
    assert not world.schedule.history[-1].caught_up


@pytest.mark.parametrize(
    ("rule", "outcome", "later"),
    [
        (IfRunning.SKIP, "skipped", ["succeeded"]),
        (IfRunning.QUEUE, "waiting", ["succeeded", "running"]),
        (IfRunning.REPLACE, "waiting", ["replaced", "running"]),
    ],
)
def test_the_latest_of_those_missed_waits_like_any_and_from_when_somebody_looked(rule, outcome: str, later: list[str]):
    world = World(schedule(if_missed=IfMissed.LATEST, if_running=rule))
    world.look(hours=2)
    assert world.look(days=6, hours=12) == ["missed"] * 5 + [outcome]
    world.ends(State.STOPPED if rule is IfRunning.REPLACE else State.SUCCEEDED)
    assert world.look(days=6, hours=15.9) == later
    assert len(world.runs) == len(later)


def test_one_that_was_caught_up_is_missed_too_once_it_waits_for_too_long():
    world = World(schedule(if_missed=IfMissed.LATEST, if_running=IfRunning.QUEUE))
    world.look(hours=2)
    world.look(days=6, hours=12)
    assert world.look(days=6, hours=16.1) == ["missed"]
    assert "was not over in time" in world.told[-1][1]


def test_what_passes_while_it_is_paused_is_not_caught_up():
    world = World(schedule(if_missed=IfMissed.LATEST, paused=True))
    assert world.look(days=6, hours=12) == ["skipped"] * 7


def test_of_several_in_time_the_newest_is_started():
    world = World(schedule(cron="0 * * * *"))
    assert world.look(hours=3.5) == ["missed", "missed", "running"]
    assert world.told[0] == ("missed", "a later time was due as well when somebody looked")


@pytest.mark.parametrize(
    ("rule", "then", "after_it_ended"),
    [
        (IfRunning.SKIP, ["skipped"], ["succeeded"]),
        (IfRunning.QUEUE, ["waiting"], ["succeeded", "running"]),
        (IfRunning.REPLACE, ["waiting"], ["replaced", "running"]),
    ],
)
def test_while_the_night_before_is_not_over(rule: IfRunning, then: list[str], after_it_ended: list[str]):
    world = World(schedule(if_running=rule))
    world.look(hours=2)
    (first,) = world.runs
    assert world.look(days=1, hours=2) == then
    assert world.look(days=1, hours=2.5) == []
    assert world.stopped == ((first,) if rule is IfRunning.REPLACE else ())
    assert len(world.runs) == 1, "never two at a time"
    world.ends(State.STOPPED if rule is IfRunning.REPLACE else State.SUCCEEDED)
    assert world.look(days=1, hours=3) == after_it_ended
    if rule is IfRunning.SKIP:
        assert world.told[1] == ("skipped", f"run {first} was not over")
    if rule is IfRunning.REPLACE:
        assert world.told[0] == ("replaced", "by the time of Sun 2027-05-02 02:00 UTC")


def test_of_those_that_wait_one_starts_at_a_time():
    world = World(schedule(cron="0 * * * *", if_running=IfRunning.QUEUE))
    for hours in (1, 2, 3):
        world.look(hours=hours)
    world.ends()
    assert world.look(hours=3.5) == ["succeeded", "running"]
    assert [outcome for outcome, _ in world.told] == ["succeeded", "running", "waiting"]


@pytest.mark.parametrize("rule", [IfRunning.QUEUE, IfRunning.REPLACE])
def test_a_time_that_waits_for_too_long_is_missed(rule: IfRunning):
    world = World(schedule(if_running=rule))
    world.look(hours=2)
    world.look(days=1, hours=2)
    assert world.look(days=1, hours=6.5) == ["missed"]
    assert "was not over" in world.told[1][1]
    assert [due.at for due in untold(world.schedule, world.now)] == [BEGIN + DAY + 2 * HOUR]
    world.ends()
    assert world.look(days=1, hours=7) == ["succeeded"], "asked to end, it may have succeeded all the same"
    assert len(world.runs) == 1


@pytest.mark.parametrize("state", [State.QUEUED, State.PROVISIONING, State.RUNNING])
def test_a_replaced_time_whose_run_comes_late_is_ended(state: State):
    """Its submission was under way when the next time was decided to replace it."""
    world = World(schedule(cron="0 2,3 * * *", if_running=IfRunning.REPLACE))
    starting = advanced(world.schedule, world.runs.get, BEGIN + 2 * HOUR)
    world.schedule = starting
    world.look(hours=3)
    first = starting.history[0]
    assert world.told[0][0] == "replaced"
    world.runs[first.run_id] = record(first.run_id, state=state, due_at=first.at)
    world.look(hours=3.1)
    assert world.stopped == (first.run_id,)


def test_a_run_that_cannot_be_submitted_fails_its_time_in_the_end():
    world = World(schedule())
    starting = advanced(world.schedule, lambda _: None, BEGIN + 2 * HOUR)
    assert starting.history[0].outcome is Outcome.STARTING
    starting.history[0].reason = "the disk is full"
    late = advanced(starting, lambda _: None, BEGIN + 7 * HOUR)
    assert (late.history[0].outcome, late.history[0].reason) == (Outcome.FAILED, "the disk is full")


def test_a_paused_schedule_starts_nothing_and_says_so():
    world = World(schedule(paused=True))
    assert world.look(days=1, hours=3) == ["skipped", "skipped"]
    assert world.told[0][1] == "the schedule was paused"
    world.schedule = replace(world.schedule, paused=False)
    assert world.look(days=2, hours=3) == ["running"]


def test_a_time_that_waits_when_a_schedule_is_paused_is_skipped():
    world = World(schedule(if_running=IfRunning.QUEUE))
    world.look(hours=2)
    world.look(days=1, hours=2)
    world.schedule = advanced(replace(world.schedule, paused=True), world.runs.get, world.now)
    world.ends()
    assert world.look(days=1, hours=3) == ["succeeded"]
    assert world.told[1] == ("skipped", "the schedule was paused")


def test_a_run_that_nobody_could_begin_with_in_time_is_ended():
    """A secret is missing wherever it was tried: it does not begin days later."""
    world = World(schedule())
    world.look(hours=2)
    (run,) = world.runs
    world.runs[run] = replace(world.runs[run], state=State.QUEUED)
    world.look(hours=5.9)
    assert world.stopped == ()
    world.look(hours=6.1)
    assert world.stopped == (run,)


def test_a_run_that_is_queued_again_after_it_has_trained_goes_on():
    """The kept fleet that it shared has lost a machine."""
    world = World(schedule())
    world.look(hours=2)
    (run,) = world.runs
    world.runs[run] = replace(world.runs[run], state=State.QUEUED, attempt=1)
    assert world.look(hours=7) == []
    assert world.stopped == ()


def test_a_run_whose_record_is_gone_has_stopped():
    world = World(schedule())
    world.look(hours=2)
    world.runs.clear()
    assert world.look(hours=3) == ["stopped"]
    assert world.told[0][1] == "the record of its run was removed"


def test_this_moment_is_a_time_too_and_waits_its_turn():
    world = World(schedule())
    made = by_hand(world.schedule, world.runs.get, BEGIN + HOUR)
    assert (made.history[0].outcome, made.history[0].by_hand) == (Outcome.STARTING, True)
    again = by_hand(made, world.runs.get, BEGIN + 1.5 * HOUR)
    assert again.history[1].outcome is Outcome.SKIPPED


@pytest.mark.parametrize("rule", [IfRunning.QUEUE, IfRunning.REPLACE])
def test_this_moment_does_not_wait_for_a_schedule_that_is_paused(rule: IfRunning):
    """The next pass would skip it, when whoever asked for it has gone. What is in its way is the run."""
    made = by_hand(schedule(if_running=rule, paused=True), lambda _: None, BEGIN + HOUR)
    assert made.history[0].outcome is Outcome.STARTING
    again = by_hand(made, lambda _: None, BEGIN + 1.5 * HOUR)
    why = f"run {made.history[0].run_id} was not over, and nothing waits while the schedule is paused"
    assert (again.history[1].outcome, again.history[1].reason) == (Outcome.SKIPPED, why)
    assert again.history[0] == made.history[0], "it goes on"
    goes_on = by_hand(replace(made, paused=False), lambda _: None, BEGIN + 1.5 * HOUR)
    assert goes_on.history[1].outcome is (Outcome.WAITING if rule is IfRunning.QUEUE else Outcome.STARTING)


def test_jitter_is_the_same_everywhere_and_holds_a_time_back():
    jittered = schedule(jitter_s=1800.0)
    (due,) = jittered.times.between(BEGIN, BEGIN + DAY, 10)[0]
    start = jittered.start_at(due)
    assert due <= start < due + 1800
    assert start == replace(jittered).start_at(due) != replace(jittered, uid="u2").start_at(due)
    assert advanced(jittered, lambda _: None, start - 1).history == []
    assert advanced(jittered, lambda _: None, start).history[0].at == due


def test_two_who_decide_at_once_mean_the_same_run():
    first, second = (advanced(schedule(), lambda _: None, BEGIN + 2 * HOUR + late).history[0].run_id for late in (0, 9))
    assert first == second
    assert first != advanced(schedule(uid="u2"), lambda _: None, BEGIN + 3 * HOUR).history[0].run_id


def test_the_history_has_an_end_but_not_for_what_is_under_way():
    old = [DueTime(BEGIN - (HISTORY - n) * DAY, Outcome.MISSED, BEGIN) for n in range(HISTORY)]
    old.insert(0, DueTime(BEGIN - 500 * DAY, Outcome.RUNNING, BEGIN, run_id="train-long"))
    after = advanced(
        schedule(history=old), {"train-long": record("train-long", state=State.RUNNING)}.get, BEGIN + 3 * HOUR
    )
    assert len(after.history) == HISTORY + 1
    assert (after.history[0].run_id, after.history[-1].at) == ("train-long", BEGIN + 2 * HOUR)


@pytest.mark.parametrize("rule", list(IfRunning))
@pytest.mark.parametrize("seed", range(4))
def test_a_year_of_nights_under_passes_at_any_time(rule: IfRunning, seed: int):
    """Runs of any length, passes that come late or not for days: never two runs of a time, never two at once, and every
    night has its line."""
    random_ = random.Random(f"{rule}{seed}")
    begin = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    world = World(schedule(timezone="Europe/Berlin", cron="30 2 * * *", decided_until=begin, if_running=rule))
    hours, until = 0.0, {}
    while hours < 358 * 24:
        hours += random_.choice([0.2, 0.5, 1.0, 1.0, 2.0, 30.0, 150.0])
        for run, each in world.runs.items():
            over = until.setdefault(run, hours + random_.choice([0.5, 3.0, 20.0, 40.0]))
            if not each.state.final and (hours >= over or run in getattr(world, "stopped", ())):
                state = State.STOPPED if hours < over else random_.choice([State.SUCCEEDED, State.FAILED])
                world.runs[run] = replace(each, state=state, teardown="confirmed", ended_at=begin + hours * HOUR)
        world.look(hours=(begin - BEGIN) / HOUR + hours)
        assert sum(not each.state.final for each in world.runs.values()) <= 1
    nights = [due.at for due in world.schedule.history]
    assert nights == schedule(timezone="Europe/Berlin", cron="30 2 * * *").times.between(begin, world.now, 1000)[0]
    assert len(world.runs) == sum(
        bool(due.run_id) for due in world.schedule.history if due.outcome is not Outcome.WAITING
    )
    assert all(due.reason for due in world.schedule.history if due.outcome in (Outcome.MISSED, Outcome.SKIPPED))


@pytest.mark.parametrize(
    ("state", "supervised", "more", "need"),
    [
        (State.QUEUED, False, {}, "queued"),
        (State.RUNNING, False, {}, "running, no supervisor"),
        (State.RUNNING, True, {}, None),
        (State.SUCCEEDED, False, {"teardown": "confirmed"}, None),
        (State.SUCCEEDED, False, {"teardown": "kept"}, None),
        (State.SUCCEEDED, False, {"teardown": "kept", "store_granted": True}, None),
        (State.FAILED, False, {"teardown": "asked"}, "it is over, and has left something"),
        (State.STOPPED, False, {"teardown": "confirmed", "store_granted": True}, "it is over, and has left something"),
    ],
)
def test_what_a_run_needs(state: State, supervised: bool, more: dict[str, object], need: str | None):
    todo = decide({}, {"a": Seen(record("a", state=state, **more), supervised)}, lambda _: None, BEGIN)
    assert [each.why for each in todo.needs] == ([need] if need else [])
    assert [each.give_back for each in todo.needs] == ([state.final] if need else [])


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("50m", 3000), ("1h30m", 5400), ("7d", 604800), ("0", 0), ("0.5h", 1800)]
)
def test_lengths_of_time(text: str, seconds: float):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "5x", "1h 30", "-3h"])
def test_what_is_no_length_of_time(text: str):
    with pytest.raises(ValueError, match="time"):
        seconds_of(text)


def test_what_a_newer_mgpu_has_written_is_carried_through_by_a_pass():
    """As of `if_missed`, which was new once: a pass of an older one made the schedule forget it."""
    world = World(schedule())
    kept = json.loads(world.schedule.to_json())
    kept["if_tomorrow"] = {"what": "then"}
    kept["history"] = [{"at": 1.0, "outcome": "succeeded", "decided_at": 1.0, "of_tomorrow": [1]}]
    kept["history"][0]["checks"] = [{"metric": "m", "met": True, "said": "ok", "of_tomorrow": 2}]
    found = parsed(json.dumps(kept).encode(), "nightly")
    again = json.loads(replace(found, paused=True).to_json())
    assert again["if_tomorrow"] == {"what": "then"}
    assert again["history"][0]["of_tomorrow"] == [1]
    assert again["history"][0]["checks"][0] == kept["history"][0]["checks"][0] | {
        "value": None,
        "median": None,
        "runs": 0,
    }
    assert (again["version"], again["paused"], "newer" in again) == (1, True, False)
    kept["history"][0]["outcome"] = "of tomorrow"
    with pytest.raises(InputError, match="cannot be read") as error:
        parsed(json.dumps(kept).encode(), "nightly")
    assert "newer mgpu" in error.value.next_step


def test_a_night_that_is_queued_again_after_it_has_begun_is_not_too_late():
    """Its machine was lost: it goes on elsewhere."""
    world = World(schedule(start_within_s=HOUR))
    world.look(hours=2)
    (run,) = world.runs
    for attempt, stopped in ((1, ()), (0, (run,))):
        world.runs[run] = replace(world.runs[run], state=State.QUEUED, attempt=attempt)
        world.look(hours=4)
        assert world.stopped == stopped
