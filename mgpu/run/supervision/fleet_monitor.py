"""All nodes and their provider as one supervisor sees them. Whatever may hang runs beside its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.status.status import Phase

from mgpu.errors import MgpuError, ProviderError
from mgpu.events import LogChunk, Note, Warned
from mgpu.run.nodes import agent_client
from mgpu.run.record.logs import times_of
from mgpu.run.supervision import metrics
from mgpu.run.supervision.background_calls import BackgroundCalls
from mgpu.run.supervision.health import NodeView
from mgpu.run.supervision.node_monitor import BEAT_S, NodeMonitor
from mgpu.run.supervision.remote_tail import RemoteTail, untold

if TYPE_CHECKING:
    from mgpu.providers.base import Handle, Provider
    from mgpu.remote.node import Node
    from mgpu.remote.nodeset import NodeSet
    from mgpu.run.record.session import Session

DESCRIBE_EVERY_S, DESCRIBE_SOON_S = 2.0, 0.5  # the latter while something is amiss
WARN_S = 0.5  # most connections that were cut are back before then
STOPPING_BEAT_S = 2.0  # `BEAT_S` of an agent that is to end
LATE_S = 1.0  # a supervisor that is so late was held up: by a disk, SIGSTOP, whatever it was
SAVE, NOW, HURRY = 1, 2, 3  # how an agent is to stop; the last: it gives up waiting for its peers as well


class FleetMonitor:
    """What is known of every node, as of the last round of looks."""

    def __init__(
        self,
        session: Session,
        nodes: NodeSet,
        provider: Provider | None,
        handle: Handle,
        processes_per_node: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._session, self._provider, self._handle = session, provider, handle
        self._clock, self._wall = clock, wall
        self.calls = BackgroundCalls()  # of this supervisor; it begins them in its passes
        self._told: set[str] = set()
        self._silent: set[int] = set()  # ranks that were told not to answer
        self._stop_level = 0
        self._viewed_at = clock()  # when a verdict was made last,
        self.late_s = 0.0  # and for how long nobody was listened to before it, because this process stood still
        self._described_at = clock()  # when the provider was asked last,
        self.described = float("-inf")  # and when, at the earliest, it was as it answered
        self.gone: dict[int, str] = {}  # rank -> why, by the provider's word
        self.monitors = [self._monitor(node, node.target.rank * processes_per_node) for node in nodes.nodes]

    def _monitor(self, node: Node, first: int) -> NodeMonitor:
        session, rank, instance = self._session, node.target.rank, self._handle.ids[node.target.rank]
        layout, local = RunLayout(session.record.run_id), session.folder.log(rank, instance)
        log = RemoteTail(
            str(layout.log),
            local,
            tell=lambda offset, data: session.emit(LogChunk(rank, offset, data)),
            warn=self.once,
            hidden=session.hidden,
        )
        times = RemoteTail(str(layout.log_times), times_of(local), tell=untold, warn=self.once)
        copies = (log, times, metrics.copy_of(session, first, instance, self.once))
        return NodeMonitor(node, session.record.run_id, copies, session.timeouts, self._clock, self._wall)

    # --- seeing -------------------------------------------------------------------------------------------------

    def round(self, logs_s: float, *, amiss: bool = False) -> None:
        """Looks at every node, and at the machines when it is time; waits `look_s`. A look that takes longer goes on,
        and the others' with it. `amiss`: the provider's word is wanted soon."""
        look_s = self._session.timeouts.look_s
        beat_s = STOPPING_BEAT_S if self._stop_level else BEAT_S
        for monitor in self.monitors:
            if monitor.rank not in self.gone:
                self.calls.begin(("look", monitor.rank), lambda monitor=monitor: monitor.look(logs_s, beat_s))
        self._tell_to_stop()
        self._ask_provider(amiss=amiss)
        self.calls.wait(look_s)
        if self._ask_provider(amiss=amiss):  # a connection was lost meanwhile
            self.calls.wait(min(look_s, DESCRIBE_SOON_S), "describe")
        self._tell_of_links()

    def views(self) -> tuple[NodeView, ...]:
        """What the verdict is made of, once a pass: what a pass took longer than it may is no silence of a node's."""
        times, now = self._session.timeouts, self._clock()
        late_s, self._viewed_at = now - self._viewed_at - times.poll_s - 2 * times.look_s, now
        self.late_s = late_s if late_s > LATE_S else 0.0
        for monitor in self.monitors if self.late_s else ():
            monitor.excuse(self.late_s)
        return tuple(
            NodeView(
                monitor.rank,
                monitor.status,
                monitor.silent_s,
                monitor.rank in self.gone,
                monitor.dead,
                self.gone.get(monitor.rank, ""),
            )
            for monitor in self.monitors
        )

    def phases(self) -> list[str]:
        """Where every node is, in words."""
        said = [str(monitor.status.phase) if monitor.status else "unknown" for monitor in self.monitors]
        return [
            "gone" if monitor.rank in self.gone else phase for monitor, phase in zip(self.monitors, said, strict=True)
        ]

    def has_ended(self, monitor: NodeMonitor) -> bool:
        """True when nothing of the attempt is left to wait for on this node."""
        phase = self._phase(monitor)
        return monitor.rank in self.gone or monitor.dead or (phase is not None and phase.final)

    def all_train(self, since: float) -> bool:
        """True when every node has been seen to move in this attempt, and all that it had written then is here."""
        return self.all_answer and all(
            monitor.moves and self._phase(monitor) is not None and monitor.copied_at >= since
            for monitor in self.monitors
        )

    def behind(self, since: float, *, but: tuple[int, ...], wait_s: float) -> bool:
        """True while there is a node of which not all is here that it had written then, and that is waited for."""
        for monitor in self.monitors:
            away_s = self._away_s(monitor)
            if monitor.rank not in (*but, *self.gone) and monitor.copied_at < since and away_s <= wait_s:
                return True
        return False

    def _phase(self, monitor: NodeMonitor) -> Phase | None:
        """Where the node is in the present attempt; None: it has said nothing of that yet."""
        status = monitor.status
        return status.phase if status is not None and status.attempt == self._session.record.attempt else None

    @property
    def all_answer(self) -> bool:
        """False while a node that is not gone does not answer over SSH."""
        return all(monitor.answers for monitor in self.monitors if monitor.rank not in self.gone)

    def _ask_provider(self, *, amiss: bool) -> bool:
        if self._provider is None:
            return False
        rarely_s = max(DESCRIBE_EVERY_S, self._provider.capabilities.look_every_s)
        every_s = DESCRIBE_SOON_S if amiss or not self.all_answer else rarely_s
        if self._clock() - self._described_at < every_s or not self.calls.begin("describe", self._describe):
            return False
        self._described_at = self._clock()
        return True

    def _describe(self) -> None:
        if self._provider is None:
            return
        asked = self._clock()
        try:
            state = self._provider.describe(self._handle)
        except ProviderError as error:
            self.once(f"the provider does not answer: {error.what}")
            return
        self.gone = {node.rank: node.reason for node in state.nodes if node.rank in state.lost}
        self.described = asked

    def _tell_of_links(self) -> None:
        for monitor in self.monitors:
            told, away_s = monitor.rank in self._silent, self._away_s(monitor)
            if told and monitor.lost_touch is None:
                self._silent.discard(monitor.rank)
                self._session.emit(Note(f"node {monitor.rank} answers again"))
            elif not told and away_s >= WARN_S and monitor.rank not in self.gone:
                self._silent.add(monitor.rank)
                self._session.emit(Warned(f"node {monitor.rank} does not answer over SSH; the run goes on"))

    def _away_s(self, monitor: NodeMonitor) -> float:
        since = monitor.lost_touch
        return 0.0 if since is None else self._clock() - since

    def once(self, text: str) -> None:
        """Warns, the first time."""
        if text not in self._told:
            self._told.add(text)
            self._session.emit(Warned(text))

    # --- stopping -----------------------------------------------------------------------------------------------

    def stop(self, level: int) -> None:
        """Every agent that has not ended is told to, at once or as soon as it can be reached."""
        self._stop_level = level
        self._tell_to_stop()
        self.calls.wait(self._session.timeouts.look_s)

    def _tell_to_stop(self) -> None:
        level = self._stop_level
        for monitor in self.monitors:
            # one that has nothing left but its uploads is left to them, unless the others wait for it
            told = monitor.told >= level or (level < HURRY and self._phase(monitor) is Phase.DRAINING)
            if not (told or monitor.node.closed or self.has_ended(monitor)):
                self.calls.begin(("stop", monitor.rank), lambda monitor=monitor: self._tell(monitor, level))

    def _tell(self, monitor: NodeMonitor, level: int) -> None:
        try:
            agent_client.stop(monitor.node, self._session.record.run_id, self._session.timeouts, now=level > SAVE)
            monitor.told = level
        except MgpuError as error:
            self.once(f"node {monitor.rank} could not be asked to stop: {error.what}")
