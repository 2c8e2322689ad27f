"""What provider and nodes say of a run now, for `mgpu status --live`: all are asked at once, and none for long."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.timeouts import Timeouts

from mgpu.errors import MgpuError
from mgpu.iac.outputs import StackOutput
from mgpu.providers.base import GOING, NodeState
from mgpu.remote import node as remote
from mgpu.remote.targets import Target
from mgpu.run.job.stack_output import handle_of, provider_of, targets
from mgpu.run.record.record import Record

NODES_S = 8.0  # for the nodes to answer, all of them
THREADS = 64
_SAID = ("phase", "step", "steps", "attempt", "at_risk_since", "notice", "reason")


def look(record: Record, timeouts: Timeouts) -> tuple[list[dict[str, Any]], MgpuError | None]:
    """One entry a node: what the provider says of its machine, and under `agent` what its agent says (None: no answer
    over SSH); and why the provider could not be asked, if so."""
    if not record.fleet:
        return [], None
    fleet = record.fleet_output()
    asked = _Agents(record, fleet, timeouts)
    told, problem = _told(fleet)
    gone = [node.rank for node in told if node.phase in GOING]
    said = asked.wait(but=gone)
    known = {node.rank: node.model_dump(mode="json") for node in told}
    plain = {node.rank: {"rank": node.rank, "id": node.id} for node in fleet.nodes}
    return [known.get(rank, each) | {"agent": said.get(rank)} for rank, each in plain.items()], problem


def _told(fleet: StackOutput) -> tuple[tuple[NodeState, ...], MgpuError | None]:
    try:
        provider = provider_of(fleet)
        return (provider.describe(handle_of(fleet)).nodes if provider else ()), None
    except MgpuError as error:
        return (), error


class _Agents:
    """The agents' own word, as it comes in. Threads that still wait for a node end with the process."""

    def __init__(self, record: Record, fleet: StackOutput, timeouts: Timeouts) -> None:
        self._until = time.monotonic() + NODES_S
        self._path, self._timeouts = str(RunLayout(record.run_id).status), timeouts
        self._key = Path(fleet.private_key_file).expanduser()
        self._said: dict[int, dict[str, Any] | None] = {}
        self._answered = threading.Condition()
        asked = () if record.state.final else targets(fleet)  # the agent of a run that is over has ended
        self._ranks = {target.rank for target in asked}
        self._waiting: queue.SimpleQueue[Target] = queue.SimpleQueue()
        for target in asked:
            self._waiting.put(target)
        for _ in range(min(THREADS, len(asked))):
            threading.Thread(target=self._work, name="mgpu-live", daemon=True).start()

    def wait(self, but: Sequence[int]) -> dict[int, dict[str, Any] | None]:
        """What has been said when all have, but those, or when the time is over."""
        wanted = self._ranks - set(but)
        with self._answered:
            self._answered.wait_for(lambda: wanted <= self._said.keys(), max(0.0, self._until - time.monotonic()))
            return dict(self._said)

    def _work(self) -> None:
        while True:
            try:
                target = self._waiting.get_nowait()
            except queue.Empty:
                return
            said = self._ask(target) if time.monotonic() < self._until else None
            with self._answered:
                self._said[target.rank] = said
                self._answered.notify_all()

    def _ask(self, target: Target) -> dict[str, Any] | None:
        try:
            with remote.connect(target, self._key, self._timeouts) as node:
                status = json.loads(node.read(self._path))
            return {name: status.get(name) for name in _SAID}
        except (MgpuError, OSError, ValueError, AttributeError):
            return None
