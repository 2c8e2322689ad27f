"""Sinks that tell somebody of what matters. What could not be delivered waits on disk, and is tried again.

    <run>/outbox/<sink>/<id>.json     waits; replaced by <id>.told, which is empty, when it was delivered

A message's id follows from its event: it is told once, whichever command it comes from. One that is cut off between the
delivery and its mark tells it again, with the same id.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mgpu.errors import InputError
from mgpu.events import (
    AttemptEnded,
    CheckpointCommitted,
    RunEnded,
    RunEvent,
    RunStateChanged,
    SpendChanged,
)
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import load
from mgpu.sinks.base import Heard, Sink
from mgpu.spec.block import Block

_RETRY_S = 30.0  # at most as often; and when the command is done
ANSWER_S = 10.0  # for whoever is told to answer

What = Literal["ended", "interrupted", "budget", "checkpoint", "state"]


class Options(Block):
    """What every such sink has."""

    events: tuple[What, ...] = Field(
        ("ended", "interrupted", "budget"),
        description="of what is told: ended, interrupted (another attempt follows), budget (50, 80, 100 % of max_usd, "
        "and of a month's), checkpoint, state (default: the first three)",
    )


@dataclass(frozen=True)
class Message:
    """What somebody is told. `event`: which of the kinds; `data`: the event as sink `jsonl` writes it."""

    id: str
    event: str
    run_id: str
    title: str
    text: str
    data: dict[str, Any]


class Telling(Sink):
    """A sink whose `tell` delivers a message, or raises."""

    name: str  # of the sink

    def __init__(self, options: Options, heard: Heard) -> None:
        self._wanted, self._run_id = options.events, heard.run_id
        self._waiting = Folder(heard.run_id).root / "outbox" / self.name
        self._attempt: AttemptEnded | None = None
        self._tried = float("-inf")

    def tell(self, message: Message) -> None:
        """Delivers it. Raises what it likes: it is tried again."""
        raise NotImplementedError

    # --- what is told

    def run_ended(self, event: RunEnded) -> None:
        """The run is over."""
        self._hear("ended", event, f"run {event.run_id} {event.state}", *_of_the_end(event))

    def attempt_ended(self, event: AttemptEnded) -> None:
        """Whether it was an interruption the next state says."""
        self._attempt = event
        self.event(event)

    def run_state_changed(self, event: RunStateChanged) -> None:
        """The run is in another state."""
        self._hear("state", event, f"run {event.run_id} is {event.state}")
        if event.state == "repairing" and self._attempt is not None:
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
        if time.monotonic() - self._tried >= _RETRY_S:
            self._deliver()

    def close(self) -> None:
        """Tries again what waits."""
        self._deliver()

    # --- what waits

    def _hear(self, kind: What, event: RunEvent, title: str, *text: str) -> None:
        if kind in self._wanted:
            data = event.to_json()
            known = hashlib.sha256(json.dumps([kind, data]).encode()).hexdigest()[:16]
            self._keep(Message(known, kind, event.run_id, title, "\n".join(filter(None, text)), data), event.at)
            self._deliver()
        else:
            self.event(event)

    def _keep(self, message: Message, at: float) -> None:
        path = self._waiting / f"{at:015.3f}-{message.id}.json"
        if not path.with_suffix(".told").exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(json.dumps(asdict(message)))

    def _deliver(self) -> None:
        """In their order: what cannot be delivered holds up what is newer."""
        self._tried = time.monotonic()
        for path in sorted(self._waiting.glob("*.json")):
            self.tell(Message(**json.loads(path.read_text())))
            path.write_text("")
            path.rename(path.with_suffix(".told"))


def waiting(runs: Path) -> Iterator[str]:
    """Runs of which somebody is still to be told."""
    yield from sorted({path.parents[2].name for path in runs.glob("*/outbox/*/*.json")})


def _of_the_end(event: RunEnded) -> Iterator[str]:
    yield event.reason
    parts = [f"step {event.step}" if event.step is not None else "", f"${event.spent_usd:.2f}"]
    try:
        record = load(event.run_id)
        parts[1:1] = [f"{name} {value:.4g}" for name, value in sorted(record.metrics.items()) if "loss" in name]
        parts.append(f"{record.recoveries} recoveries" if record.recoveries else "")
    except InputError:  # removed meanwhile
        pass
    yield ", ".join(filter(None, parts))
    if event.teardown == "asked":
        yield f"Its machines may still be billed: mgpu down {event.run_id}"
    yield f"mgpu status {event.run_id}"
