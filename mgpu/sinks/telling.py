"""Sinks that tell somebody of what matters. Each message goes into the backend first (`mgpu.backend.outbox`), and is
tried until it is delivered, on whichever machine passes.

A message's id follows from its event's identity: it is told once, whichever command it comes from, and whoever says it
again. One that is cut off between the delivery and its mark tells it again, with the same id.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from mgpu.backend.outbox import NotKept, Outbox
from mgpu.errors import InputError, StackError
from mgpu.events import (
    AttemptEnded,
    CheckpointCommitted,
    RunEnded,
    RunEvent,
    RunRegressed,
    RunStateChanged,
    ScheduleMissed,
    SpendChanged,
)
from mgpu.run.record.record import find
from mgpu.sinks.base import Heard, Sink
from mgpu.spec.block import Block
from mgpu.words import count, utc

_RETRY_S = 30.0  # at most as often; and when the command is done
ANSWER_S = 10.0  # for whoever is told to answer

What = Literal["ended", "interrupted", "budget", "regression", "missed", "checkpoint", "state"]


class Options(Block):
    """What every such sink has."""

    events: tuple[What, ...] = Field(
        ("ended", "interrupted", "budget", "regression", "missed"),
        description="of what is told: ended, interrupted (another attempt follows), budget (50, 80, 100 % of max_usd, "
        "and of a month's), regression (it succeeded, and is not as `expect` says), missed (a time of its schedule), "
        "checkpoint, state (default: the first five)",
    )


@dataclass(frozen=True)
class Message:
    """What somebody is told. `event`: which of the kinds; `run_id`: empty for a schedule; `data`: the event as sink
    `jsonl` writes it."""

    id: str
    event: str
    run_id: str
    title: str
    text: str
    data: dict[str, Any]


class Telling(Sink, ABC):
    """A sink whose `tell` delivers a message, or raises."""

    name: str  # of the sink

    def __init__(self, options: Options, heard: Heard) -> None:
        self._wanted, self._outbox = options.events, Outbox(heard.whose, self.name)
        self._attempt: AttemptEnded | None = None
        self._waits = True  # an earlier command may have left something
        self._tried = float("-inf")

    def prepare(self) -> None:
        """Before anything is told: raises ValueError where it cannot be told from here, because a variable that this
        needs is not set. Then it waits for who can."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Delivers it. Raises what it likes: it is tried again."""

    # --- what is told

    def run_ended(self, event: RunEnded) -> None:
        """The run is over."""
        but = ", but not as expected" if event.state == "succeeded" and event.exit_code else ""
        self._hear("ended", event, f"run {event.run_id} {event.state}{but}", *_of_the_end(event))

    def run_regressed(self, event: RunRegressed) -> None:
        """The run is not as its run file expects."""
        whose = f"schedule {event.schedule}: " if event.schedule else ""
        checks = (f"{each['metric']} {each['said']}" for each in event.checks)
        see = f"mgpu schedule show {event.schedule}" if event.schedule else f"mgpu status {event.run_id}"
        self._hear("regression", event, f"{whose}run {event.run_id} is not as expected", *checks, event.code, see)

    def schedule_missed(self, event: ScheduleMissed) -> None:
        """Times of a schedule were missed."""
        times = count(event.times, "time")
        more = f" ({times} in all)" if event.times > 1 else ""
        title = f"schedule {event.schedule} missed its time of {utc(event.due_at)}{more}"
        self._hear("missed", event, title, event.reason, f"mgpu schedule show {event.schedule}")

    def attempt_ended(self, event: AttemptEnded) -> None:
        """Whether it was an interruption the next state says."""
        self._attempt = event
        self.event(event)

    def run_state_changed(self, event: RunStateChanged) -> None:
        """The run is in another state."""
        self._hear("state", event, f"run {event.run_id} is {event.state}")
        # queued again: nobody repairs a fleet that others use
        goes_on = event.state == "repairing" or (event.state, event.before) == ("queued", "running")
        if goes_on and self._attempt is not None:
            title = f"run {event.run_id} was interrupted"
            self._hear(
                "interrupted", self._attempt, title, self._attempt.reason, "It goes on from its newest checkpoint."
            )

    def spend_changed(self, event: SpendChanged) -> None:
        """Another part of a budget is spent."""
        whose = f"run {event.run_id}" if event.limit == "max_usd" else "all runs of this month"
        self._hear("budget", event, f"{whose}: ${event.spent_usd:.2f} of ${event.max_usd:.2f} are spent")

    def checkpoint_committed(self, event: CheckpointCommitted) -> None:
        """A checkpoint is safe."""
        self._hear("checkpoint", event, f"run {event.run_id}: checkpoint of step {event.step}")

    def event(self, event: RunEvent) -> None:
        """Tries again what waits, now and then."""
        if self._waits and time.monotonic() - self._tried >= _RETRY_S:
            self._deliver()

    def close(self) -> None:
        """Tries again what waits."""
        if self._waits:
            self._deliver()

    # --- what waits

    def _hear(self, kind: What, event: RunEvent | ScheduleMissed, title: str, *text: str) -> None:
        if kind in self._wanted:
            data, run_id = event.to_json(), event.run_id if isinstance(event, RunEvent) else ""
            known = hashlib.sha256(json.dumps([kind, event.identity()]).encode()).hexdigest()[:16]
            message = Message(known, kind, run_id, title, "\n".join(filter(None, text)), data)
            try:
                self._outbox.keep(message.id, event.at, asdict(message))
            except NotKept as lost:  # the backend is away, and who is told may be there
                if self._outbox.noted(message.id):
                    return
                try:
                    self.prepare()
                    self.tell(message)
                except Exception as error:  # whatever somebody else's service does
                    raise NotKept(f"{lost}; {type(error).__name__}: {error}") from error
                self._outbox.note(message.id)
                return
            self._waits = True
            self._deliver()
        elif isinstance(event, RunEvent):
            self.event(event)

    def _deliver(self) -> None:
        """In their order: what cannot be delivered holds up what is newer."""
        self._tried = time.monotonic()
        try:
            self.prepare()
        except ValueError as error:
            if said := self._outbox.give_up_late():
                raise ValueError(f"{error}; {said}") from error
            raise
        self._waits = not self._outbox.deliver(lambda message: self.tell(Message(**message)))


def _of_the_end(event: RunEnded) -> Iterator[str]:
    yield event.reason
    parts = [f"step {event.step}" if event.step is not None else "", f"${event.spent_usd:.2f}"]
    with suppress(InputError, StackError):  # it cannot be read
        record = find(event.run_id)
        if record is not None:  # not removed meanwhile
            named = record.expect.keys() | record.first_metrics.keys()  # by the run file, and by its validations
            parts[1:1] = [f"{name} {value:.4g}" for name, value in sorted(record.metrics.items()) if name in named]
            parts.append(f"{record.recoveries} recoveries" if record.recoveries else "")
    yield ", ".join(filter(None, parts))
    if event.teardown == "asked":
        yield f"Its machines may still be billed: mgpu down {event.run_id}"
    yield f"mgpu status {event.run_id}"
