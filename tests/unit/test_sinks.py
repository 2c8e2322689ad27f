"""A run's events reach its sinks, and no sink reaches the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from mgpu.backend.outbox import NotKept
from mgpu.errors import StackError
from mgpu.events import Event, MetricsSampled, Note, RunEnded, RunEvent, RunStateChanged, Warned
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, save
from mgpu.sinks.base import Sink
from mgpu.sinks.delivery import Delivery, Makers, of_record

RUN = "doors-1123-abcde"
FILE = """
name: doors
provider: local
max_price_usd_per_hour: 1
max_hours: 1
command: [train.py]
"""


def changed(state: str) -> RunStateChanged:
    return RunStateChanged(RUN, 1, 5.0, state=state, before="")


def ended() -> RunEnded:
    how = {"state": "failed", "reason": "no disk", "fault": "user", "stop_reason": None, "teardown": "confirmed"}
    return RunEnded(RUN, 2, 9.0, exit_code=6, spent_usd=0.5, step=7, checkpoint_step=None, **how)  # type: ignore[arg-type]


def sampled(step: int) -> MetricsSampled:
    return MetricsSampled(RUN, 1, 6.0, step=step, steps=None, phase="training", values={"loss": 0.5})


class Keeps(Sink):
    """A sink in memory, which waits for a gate before each event."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.taken: list[RunEvent] = []
        self.ends: list[RunEnded] = []
        self.closed, self._gate = False, gate

    def event(self, event: RunEvent) -> None:
        if self._gate is not None:
            self._gate.wait(60)
        self.taken.append(event)

    def run_ended(self, event: RunEnded) -> None:
        self.ends.append(event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def console() -> list[Event]:
    return []


def delivery(console: list[Event], sinks: dict[str, Callable[[], Sink]], queued: int = 100) -> Delivery:
    return Delivery(console.append, lambda _run: sinks, queued=queued)


def test_a_sink_hears_what_runs_tell_in_their_order_and_the_console_hears_everything(console):
    sink = Keeps()
    made = delivery(console, {"keeps": lambda: sink})
    told = [changed("running"), Note("for people"), *map(sampled, range(50)), ended()]
    for event in told:
        made.emit(event)
    made.close()
    assert console == told
    assert sink.taken == [event for event in told[:-1] if isinstance(event, RunEvent)]
    assert (sink.ends, sink.closed) == ([ended()], True)


def test_a_sink_that_hangs_delays_neither_the_run_nor_the_others(console):
    gate, well = threading.Event(), Keeps()
    made = delivery(console, {"stuck": lambda: Keeps(gate), "well": lambda: well})
    for step in range(5):
        made.emit(sampled(step))  # returns, whatever the sink does
    until(lambda: len(well.taken) == 5)
    made.close(within_s=0)
    (warning,) = [event for event in console if isinstance(event, Warned)]
    assert warning.text == "sink stuck: 5 events did not reach it"
    gate.set()


def test_a_sink_that_is_slow_loses_what_does_not_fit_its_queue_and_says_so(console):
    gate = threading.Event()
    sink = Keeps(gate)
    made = delivery(console, {"slow": lambda: sink}, queued=3)
    made.emit(sampled(0))
    until(lambda: made._threads[f"run {RUN}"][0]._queue.qsize() == 0)  # it is at the first one
    for step in range(1, 8):
        made.emit(sampled(step))
    gate.set()
    made.close()
    assert [event.step for event in sink.taken if isinstance(event, MetricsSampled)] == [0, 1, 2, 3]
    assert [event.text for event in console if isinstance(event, Warned)] == ["sink slow: 4 events did not reach it"]


def test_a_sink_that_raises_is_told_once_and_is_tried_again(console):
    class Fails(Keeps):
        def event(self, event: RunEvent) -> None:
            super().event(event)
            raise OSError("the service is down")

        def close(self) -> None:
            raise OSError("still down")

    sink = Fails()
    made = delivery(console, {"fails": lambda: sink})
    for step in range(4):
        made.emit(sampled(step))
    made.close()
    assert len(sink.taken) == 4
    assert [event.text for event in console if isinstance(event, Warned)] == [
        "sink fails: OSError: the service is down; the run goes on without it"
    ]


def test_a_sink_that_ends_its_thread_ends_nothing_else(console):
    class Leaves(Keeps):
        def event(self, event: RunEvent) -> None:
            super().event(event)
            raise SystemExit(3)

        def __len__(self) -> int:
            return 0

    made_sinks: list[Leaves] = []
    made = delivery(console, {"leaves": lambda: made_sinks.append(Leaves()) or made_sinks[-1]})
    for step in range(4):
        made.emit(sampled(step))
    made.close()
    assert [len(each.taken) for each in made_sinks] == [4]
    assert "SystemExit: 3" in next(event.text for event in console if isinstance(event, Warned))


def test_metrics_that_have_not_changed_are_no_news(console):
    sink = Keeps()
    made = delivery(console, {"keeps": lambda: sink})
    for at, step in ((1.0, 1), (2.0, 1), (3.0, 2), (4.0, 2)):
        made.emit(replace(sampled(step), at=at))
    made.close()
    assert [(event.at, event.step) for event in sink.taken if isinstance(event, MetricsSampled)] == [(1.0, 1), (3.0, 2)]


def test_a_sink_that_no_thread_is_left_for_ends_no_run(console, monkeypatch):
    def full(_thread):
        raise RuntimeError("can't start new thread")

    made = delivery(console, {"keeps": Keeps})
    monkeypatch.setattr(threading.Thread, "start", full)
    made.emit(changed("running"))
    made.emit(changed("stopping"))
    made.close()
    (warned,) = [event.text for event in console if isinstance(event, Warned)]
    assert "has no sinks from here on: can't start new thread" in warned


def test_a_sink_that_no_thread_is_left_for_leaves_none_of_another_one_behind(console, monkeypatch):
    """Each pass tries again, and would leave one more."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def one(thread):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    made = delivery(console, {"first": Keeps, "second": Keeps})
    monkeypatch.setattr(threading.Thread, "start", one)
    made.emit(changed("running"))
    made.close()
    begun[0].join(20)
    assert not begun[0].is_alive()


def test_whatever_keeps_the_sinks_from_being_found_ends_no_run(console):
    def nowhere(_run: str) -> dict[str, Callable[[], Sink]]:
        raise ZeroDivisionError("a bug")

    made = Delivery(console.append, nowhere)
    made.emit(changed("running"))
    assert "has no sinks from here on: a bug" in next(event.text for event in console if isinstance(event, Warned))


def test_a_sink_that_cannot_be_made_is_told(console):
    def make() -> Sink:
        raise ImportError("no module named theirs")

    made = delivery(console, {"theirs": make})
    made.emit(changed("running"))
    made.close()
    assert "no module named theirs" in next(event.text for event in console if isinstance(event, Warned))


class Refusal(ValueError):
    """A sink's own word that this run is not for it."""


@pytest.mark.parametrize(
    ("in_the_way", "counts"),
    [(ImportError("not here"), False), (StackError("no backend"), False), (Refusal("no"), True)],
)
@pytest.mark.parametrize("where", ["finding", "making"])
def test_an_end_counts_as_told_only_where_sinks_could_be_made(console, in_the_way, counts, where):
    def raises() -> Any:
        raise in_the_way

    told: list[str] = []
    sinks = (lambda _run: raises()) if where == "finding" else lambda _run: {"theirs": raises}
    made = Delivery(console.append, sinks, ended=told.append)
    made.emit(ended())
    made.close()
    assert told == [RUN] * (counts and where == "making")


def test_an_end_counts_as_told_while_others_are_still_awaited(console):
    told: list[str] = []
    sink, held = Keeps(), Keeps(threading.Event())
    made = Delivery(console.append, lambda run: {"one": lambda: sink if run == RUN else held}, ended=told.append)
    made.emit(replace(changed("running"), run_id="other-1123-abcde"))
    made.emit(ended())
    until(lambda: sink.ends)
    until(lambda: (made.settle(), told)[1])
    made.close(0)
    assert told == [RUN]


@pytest.mark.parametrize("where", ["finding", "making", "keeping"])
def test_an_end_that_could_not_be_told_is_told_when_it_is_said_again(console, where):
    """By the next look of the same process: a watch lasts for weeks."""
    done, sink, away = list[str](), Keeps(), [StackError("the backend does not answer")]

    def reached(step: str) -> None:
        if step == where and away:
            raise NotKept(away.pop()) if step == "keeping" else away.pop()

    class Waits(Keeps):
        def run_ended(self, event: RunEnded) -> None:
            reached("keeping")
            sink.run_ended(event)

    def made() -> Sink:
        reached("making")
        return Waits()

    def found(_run: str) -> Makers:
        reached("finding")
        return {"one": made}

    deliver = Delivery(console.append, found, ended=done.append)
    for _ in range(2):
        deliver.emit(ended())
        until(lambda: not any(thread.lost for threads in deliver._threads.values() for thread in threads))
        deliver.settle()
    assert (sink.ends, done) == ([ended()], [RUN])
    deliver.close()


@pytest.fixture
def recorded(xdg: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A run whose run file says this of its sinks; the folder that the file stood in."""

    def make(sinks: str) -> Path:
        here = tmp_path / "mine"
        here.mkdir()
        Folder(RUN).make()
        Folder(RUN).run_file.write_text(FILE + sinks)
        save(Record(RUN, "doors", "p", str(here), str(here / "mgpu.yaml"), "s", True, "f", "local", 1))
        return here

    return make


@pytest.mark.parametrize(
    ("sinks", "file"),
    [
        ("sinks: {jsonl: {}}", f"mgpu-runs/{RUN}/events.jsonl"),
        ("sinks: {jsonl: {path: logs/e.jsonl}}", "logs/e.jsonl"),
    ],
)
def test_the_file_has_an_event_a_line_of_every_command_that_tells_of_the_run(recorded, console, sinks, file):
    here = recorded(sinks)
    for told in ([changed("running"), sampled(3)], [ended()]):  # a launch, and an `mgpu down` on another day
        made = Delivery(console.append)
        for event in told:
            made.emit(event)
        made.close()
    lines = [json.loads(line) for line in (here / file).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["RunStateChanged", "MetricsSampled", "RunEnded"]
    assert {(line["version"], line["run_id"]) for line in lines} == {(1, RUN)}
    assert (lines[1]["values"], lines[2]["exit_code"]) == ({"loss": 0.5}, 6)
    assert not [event for event in console if isinstance(event, Warned)]


def test_a_run_that_names_no_sink_has_none(recorded):
    recorded("")
    assert of_record(RUN) == {}


def test_a_run_whose_file_cannot_be_read_has_no_sinks_and_goes_on(recorded, console):
    recorded("sinks: {fax: {}}\n")  # of a package that is not installed here
    made = Delivery(console.append)
    made.emit(changed("running"))
    made.emit(ended())
    made.close()
    (warning,) = [event for event in console if isinstance(event, Warned)]
    assert "has no sinks from here on" in warning.text
    assert "sinks.fax" in warning.text
