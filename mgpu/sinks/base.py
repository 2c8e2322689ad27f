"""What a sink is: a method for each event that it wants to hear."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu.events import (
    AttemptEnded,
    CheckpointCommitted,
    MetricsSampled,
    RunEnded,
    RunEvent,
    RunRegressed,
    RunStateChanged,
    ScheduleMissed,
    SpendChanged,
)


@dataclass(frozen=True)
class Heard:
    """The run, or the schedule, whose events these are."""

    run_id: str  # empty: a schedule's
    folder: Path  # of its run file: what relative paths in options are relative to
    whose: str  # below this key of the backend is what a sink has not delivered yet (`mgpu.backend.outbox`)


class Sink:
    """Hears the events of one run, in their order, in a thread of its own.

    It may take its time, and it may raise: neither reaches the run. What it has not taken 5 s after the command is done
    is lost.
    """

    def __init__(self, options: Any, heard: Heard) -> None:
        """`options`: the sink's block of the run file."""

    def run_state_changed(self, event: RunStateChanged) -> None:
        """The run is in another state."""
        self.event(event)

    def attempt_ended(self, event: AttemptEnded) -> None:
        """The launcher has ended on all nodes, or could not be started."""
        self.event(event)

    def run_regressed(self, event: RunRegressed) -> None:
        """The run has succeeded, and is not as its run file expects."""
        self.event(event)

    def run_ended(self, event: RunEnded) -> None:
        """The run is over: the last event, but of a run that is resumed."""
        self.event(event)

    def metrics_sampled(self, event: MetricsSampled) -> None:
        """The newest values of the program's metrics, where one has changed."""
        self.event(event)

    def spend_changed(self, event: SpendChanged) -> None:
        """Another part of a budget is spent: the run's `max_usd`, or the month's."""
        self.event(event)

    def checkpoint_committed(self, event: CheckpointCommitted) -> None:
        """A checkpoint survives the loss of every node from here on."""
        self.event(event)

    def schedule_missed(self, event: ScheduleMissed) -> None:
        """Times of a schedule were missed; by default nothing. A sink with a method of its own for it is made for the
        schedule, which has no run then."""

    def event(self, event: RunEvent) -> None:
        """All events of runs whose own method is not defined; by default nothing."""

    def close(self) -> None:
        """The command is done: nothing follows."""
