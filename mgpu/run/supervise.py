"""Watches one attempt from outside until it is over: status files and logs over SSH, machines from the provider.

Level-triggered: every pass looks at everything again. A read that fails makes a node silent, and nothing else; what
has been read is on this machine's disk before the next pass, so a supervisor that dies loses nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.status import AgentStatus, Fault
from pydantic import ValidationError

from mgpu.errors import MgpuError, ProviderError, RemoteError
from mgpu.events import CheckpointCommitted, LogChunk, Note, Progress, Validated, Warned
from mgpu.providers.base import Handle, Provider
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run import agents
from mgpu.run.record import State, save
from mgpu.run.session import Session
from mgpu.run.verdict import Action, NodeView, decide

LOG_PIECE = 1 << 20
DESCRIBE_EVERY_S = 2.0
LOGS_S = 5.0  # for the logs' new bytes in one pass
BEAT_S = 10.0  # a status that stands still this long: the agent is asked for, and as often


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; `left`: it did not, the user chose to leave it running."""

    succeeded: bool
    reason: str = ""
    fault: Fault | None = None
    stopped_by: str = ""  # "", "user", "deadline"
    left: bool = False
    lost: tuple[int, ...] = ()  # ranks whose machines are gone, or go: they have to be replaced


class Supervisor:
    """One attempt under watch."""

    def __init__(
        self,
        session: Session,
        nodes: NodeSet,
        *,
        provider: Provider | None,
        handle: Handle,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`deadline` is on `clock`; `provider` None: the machines are not ours to describe."""
        self._session = session
        self._nodes = nodes
        self._provider = provider
        self._handle = handle
        self._deadline = deadline
        self._clock, self._sleep = clock, sleep
        self._statuses: dict[int, AgentStatus] = {}
        self._seen = {node.target.rank: clock() for node in nodes.nodes}
        self._beats = dict(self._seen)  # when each node's status last moved
        self._asked_at = dict.fromkeys(self._seen, float("-inf"))
        self._gone: set[int] = set()
        self._described = clock()
        self._stopped_by = ""
        self._heard = 0  # signals that were acted on
        self._stop_by: float | None = None
        self._warned: set[str] = set()

    def watch(self) -> Ended:
        """Passes until the attempt is over, was left, or is stopped and its grace has passed."""
        while True:
            self._pass()
            verdict = decide(
                self._views(), attempt=self._session.record.attempt, silence_s=self._session.timeouts.silence_s
            )
            if verdict.action is Action.END:
                self._pass(self._session.timeouts.sync_s)  # what was written between the last look and the end
                return Ended(verdict.succeeded, verdict.reason, verdict.fault, self._stopped_by)
            if verdict.action is Action.STOP:
                self._stop("peers", verdict.reason)
            if self._wants_to_leave():
                return Ended(False, left=True)
            if self._stop_by is not None and self._clock() > self._stop_by:
                return Ended(False, "the nodes did not stop in time", Fault.INFRASTRUCTURE, self._stopped_by)
            self._sleep(self._session.timeouts.poll_s)

    # --- one pass -----------------------------------------------------------------------------------------------

    def _pass(self, logs_s: float = LOGS_S) -> None:
        began = self._clock()
        self._nodes.each(lambda node: self._look(node, self._clock() + logs_s))
        self._describe()
        if self._seen[0] >= began:  # else nothing is new, and the record's age goes on growing
            self._report()
        if self._clock() > self._deadline:
            self._stop("deadline", "the hard cap (max_hours) is reached")
        if self._session.folder.stop.exists():
            self._stop("user", "`mgpu stop` asked for the end")

    def _look(self, node: Node, logs_until: float) -> None:
        """Reads one node's status and new log bytes. A failure makes it silent: no teardown comes of that alone."""
        layout, rank = RunLayout(self._session.record.run_id), node.target.rank
        if rank in self._gone:
            return
        try:
            if node.closed:
                node.reconnect()
            before = self._statuses.get(rank)
            self._statuses[rank] = now = AgentStatus.model_validate_json(node.read(str(layout.status)))
            if before is None or now.beat != before.beat or now.phase.final or now.attempt != before.attempt:
                self._beats[rank] = self._clock()
            if self._clock() - self._beats[rank] < BEAT_S or self._agent_lives(node):
                self._seen[rank] = self._clock()
            self._drain(node, str(layout.log), logs_until)
        except (RemoteError, FileNotFoundError, ValidationError, OSError):
            return

    def _agent_lives(self, node: Node) -> bool:
        """A status stands still when the agent is dead, and when the node's disk is full, which ends no training."""
        rank, clock = node.target.rank, self._clock
        if clock() - self._asked_at[rank] < BEAT_S:
            return False
        self._asked_at[rank] = clock()
        return bool(agents.status(node, self._session.record.run_id, self._session.timeouts).get("alive"))

    def _drain(self, node: Node, path: str, until: float) -> None:
        """Takes what is new in a log, for a while: one that grows faster than it is read holds up nothing."""
        local = self._session.folder.log(node.target.rank, self._handle.ids[node.target.rank])
        try:
            with local.open("ab") as out:
                # the local copy's size is the offset: bytes are neither lost nor doubled, whoever reads on
                while data := node.read_from(path, out.tell(), LOG_PIECE):
                    offset = out.tell()
                    out.write(data)
                    out.flush()
                    self._session.emit(LogChunk(node.target.rank, offset, data))
                    if self._clock() > until:
                        return
        except OSError as error:  # this machine's disk: no fault of the node
            self._once(f"the log of node {node.target.rank} cannot be written here: {error.strerror}")

    def _describe(self) -> None:
        if self._provider is None or self._clock() - self._described < DESCRIBE_EVERY_S:
            return
        self._described = self._clock()
        try:
            self._gone = set(self._provider.describe(self._handle).lost)
        except ProviderError as error:
            self._once(f"the provider does not answer: {error.what}")

    def _views(self) -> tuple[NodeView, ...]:
        now = self._clock()
        return tuple(
            NodeView(rank, self._statuses.get(rank), now - seen, rank in self._gone)
            for rank, seen in sorted(self._seen.items())
        )

    # --- telling ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        record = self._session.record
        record.node_phases = [
            str(self._statuses[rank].phase) if rank in self._statuses else "unknown" for rank in sorted(self._seen)
        ]
        status = self._statuses.get(0)
        if status is None or status.attempt != record.attempt:
            return
        steps = status.steps or 0
        progress = Progress(status.step, steps, status.loss or 0.0, status.tokens_per_s or 0.0, str(status.phase))
        self._session.note(progress)
        record.agent_seconds = {name: round(seconds, 1) for name, seconds in status.phase_seconds.items()}
        record.first_validation_loss = status.first_validation_loss
        if status.validation_loss is not None and status.validation_loss != record.validation_loss:
            record.validation_loss = status.validation_loss
            self._session.emit(Validated(status.validation_step, status.validation_loss))
        done = status.checkpoint
        if done.committed_id and done.committed_id != record.checkpoint_id:
            record.checkpoint_id, record.checkpoint_step = done.committed_id, done.committed_step
            self._session.emit(CheckpointCommitted(done.committed_id, done.committed_step))
        if done.problem:
            self._once(f"checkpoint: {done.problem}")
        save(record)

    def _once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._session.emit(Warned(text))

    # --- stopping -----------------------------------------------------------------------------------------------

    def _wants_to_leave(self) -> bool:
        """The first signal asks, where there is somebody to ask, and stops; a second one leaves, whatever stops it."""
        interrupts, ask = self._session.interrupts, self._session.ask
        if interrupts.count <= self._heard:
            return False
        self._heard += 1
        if self._heard > 1 or interrupts.hung_up:
            return True
        answer = True if ask is None or interrupts.told else self._asked(ask)
        if answer is None:
            self._heard = interrupts.count = 0
            self._session.emit(Note("no answer: the run goes on"))
        if answer:
            self._stop("user", "interrupted")
        return answer is False

    def _asked(self, ask: Callable[[], bool | None]) -> bool | None:
        try:
            with self._session.interrupts.leaving():
                return ask()
        except KeyboardInterrupt:
            return False

    def _stop(self, by: str, why: str) -> None:
        """Asks every agent once to save, stop and upload; after the grace the machines go anyway."""
        if self._stop_by is not None:
            return
        times = self._session.timeouts
        self._stop_by = self._clock() + times.stop_grace_s + times.drain_s
        self._stopped_by = "" if by == "peers" else by
        self._session.journal.append("stop", by=by, why=why)
        if by == "user":
            self._session.folder.stop.touch()  # whoever takes over in the middle of it goes on with it
        self._session.to(State.STOPPING)
        self._session.emit(Note(f"stopping: {why}"))
        # without a peer no rank can save any more: nothing to wait for
        self._nodes.each(lambda node: self._ask_to_stop(node, now=by == "peers"))

    def _ask_to_stop(self, node: Node, *, now: bool) -> None:
        if node.target.rank in self._gone:
            return
        try:
            agents.stop(node, self._session.record.run_id, self._session.timeouts, now=now)
        except MgpuError as error:
            self._once(f"node {node.target.rank} could not be asked to stop: {error.what}")


def collect_metrics(session: Session, nodes: NodeSet, processes_per_node: int) -> None:
    """Copies every rank's metrics into the record; what cannot be read is left out, with a warning."""
    folder = session.folder.root / "metrics"
    folder.mkdir(exist_ok=True, mode=0o700)
    remote = RunLayout(session.record.run_id).metrics

    def copy(node: Node) -> None:
        first = node.target.rank * processes_per_node
        for rank in range(first, first + processes_per_node):
            try:
                node.fetch(str(remote / f"rank-{rank}.jsonl"), folder / f"rank-{rank}.jsonl")
            except FileNotFoundError:
                continue
            except RemoteError as error:
                session.emit(Warned(f"metrics of rank {rank} could not be read: {error.what}"))

    nodes.each(copy)
    start = folder / "rank-0.jsonl"
    if start.exists():
        session.record.unigram_entropy = _number(start, "unigram_entropy")
        session.record.bigram_entropy = _number(start, "bigram_entropy")
        save(session.record)


def _number(metrics: Path, name: str) -> float | None:
    """A number of the first line; None where there is none: with `command:` the file holds what the user likes."""
    try:
        with metrics.open("rb") as lines:
            value = json.loads(lines.readline(1 << 20))[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return value if isinstance(value, int | float) else None
