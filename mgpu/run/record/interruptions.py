"""When an interruption was noticed, and when the run was back: what `Record.interruptions` holds of each."""

from __future__ import annotations

import time

from mgpu_train.agent.status.status import AgentStatus, Phase

from mgpu.events import Recovered
from mgpu.run.record.record import Interruption, Record
from mgpu.run.record.session import Session


def repaired(record: Record) -> None:
    """The fleet is whole again; said once."""
    if record.under_repair is not None:
        record.under_repair.repaired_at = time.time()


def started(record: Record, resumed_step: int) -> None:
    """All agents have started the attempt, from this step on (-1: from zero)."""
    newest = record.interruptions[-1] if record.interruptions else None
    if newest is not None and newest.started_at is None:
        newest.started_at, newest.resumed_step = time.time(), resumed_step


def moved(session: Session, status: AgentStatus) -> None:
    """Node 0 of the present attempt says how far it is: with its first new step the run is back, and this is told."""
    interruption = session.record.interruptions[-1] if session.record.interruptions else None
    if (
        interruption is None
        or interruption.resumed_at is not None
        or interruption.started_at is None
        or interruption.resumed_step is None
    ):
        return
    since = training_since(status)
    # a program that says no steps is back with its first sign of progress
    if since is None or 0 <= status.step <= interruption.resumed_step:
        return
    interruption.resumed_at = max(since, interruption.started_at)
    session.emit(_recovered(interruption))


def training_since(status: AgentStatus) -> float | None:
    """When an attempt made its first progress, however late somebody looks: UNIX seconds of the node's clock."""
    if Phase.TRAINING not in status.phase_seconds:
        return None
    before = (Phase.PREPARING, Phase.RESUMING, Phase.LAUNCHING)
    return status.started_at + sum(status.phase_seconds.get(phase, 0.0) for phase in before)


def _recovered(interruption: Interruption) -> Recovered:
    ended = interruption.ended_at or interruption.noticed_at
    repaired_at = interruption.repaired_at or ended
    return Recovered(
        steps_lost=interruption.steps_lost or 0,
        detected_s=max(0.0, interruption.noticed_at - interruption.heard_at),
        stopped_s=max(0.0, ended - interruption.noticed_at),
        repaired_s=max(0.0, repaired_at - ended),
        resumed_s=max(0.0, (interruption.resumed_at or repaired_at) - repaired_at),
    )


def newest_step(statuses: list[AgentStatus]) -> int:
    """The newest step that is known of an attempt; of a program that says no steps, of its newest checkpoint."""
    steps = max((status.step for status in statuses), default=-1)
    return steps if steps >= 0 else max((status.checkpoint.saved_step for status in statuses), default=-1)
