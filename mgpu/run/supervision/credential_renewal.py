"""Fresh credentials of the object store for agents that live, before the ones that they have expire (F16)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mgpu.errors import MgpuError
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.nodes import agent_client

if TYPE_CHECKING:
    from mgpu.run.record.session import Session
    from mgpu.run.supervision.background_calls import BackgroundCalls
    from mgpu.run.supervision.node_monitor import NodeMonitor

EVERY_S = 60.0  # between two looks at the operator's own: botocore renews them many minutes before their end


class CredentialRenewal:
    """What the agents of one attempt were given, and what they should have. One `round` a pass of the supervisor."""

    def __init__(
        self,
        session: Session,
        keys: StoreKeys,
        sent: Mapping[str, str] | None,
        clock: Callable[[], float],
        once: Callable[[str], None],
    ) -> None:
        """`sent` is what the agents were started with; None: not known here, so that they get it anew at once."""
        self._session, self._keys, self._clock, self._once = session, keys, clock, once
        self._sent = sent
        self._asked_at = float("-inf") if sent is None else clock()
        self._due: set[int] = set()  # ranks that wait for `_sent`

    def round(self, monitors: list[NodeMonitor], calls: BackgroundCalls) -> None:
        """Asks for the keys when it is time, and begins to send new ones to those that can be reached."""
        if self._clock() - self._asked_at >= EVERY_S and calls.begin("keys", lambda: self._ask(monitors)):
            self._asked_at = self._clock()
        for monitor in [monitor for monitor in monitors if monitor.rank in self._due and not monitor.node.closed]:
            self._due.discard(monitor.rank)  # first: a call that fails puts it back
            if not calls.begin(("keys", monitor.rank), lambda monitor=monitor: self._send(monitor)):
                self._due.add(monitor.rank)

    def _ask(self, monitors: list[NodeMonitor]) -> None:
        try:
            fresh = self._keys.now()
        except MgpuError as error:
            self._once(f"{error.what}: the nodes keep the ones that they have")
            return
        if fresh and fresh != self._sent:
            self._sent, self._due = fresh, {monitor.rank for monitor in monitors}

    def _send(self, monitor: NodeMonitor) -> None:
        if monitor.dead or (monitor.status is not None and monitor.status.phase.final):
            return
        try:
            agent_client.renew(
                monitor.node, self._session.record.run_id, dict(self._sent or {}), self._session.timeouts
            )
        except MgpuError as error:
            self._due.add(monitor.rank)
            self._once(f"node {monitor.rank} could not be given fresh credentials of the store: {error.what}")
