"""All nodes and their provider as one supervisor sees them. Whatever may hang runs beside its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.status import Phase

from mgpu.errors import MgpuError, ProviderError
from mgpu.events import LogChunk, Note, Warned
from mgpu.run.nodes import agent_client
from mgpu.run.record.logs import times_of
from mgpu.run.supervision import metrics
from mgpu.run.supervision.background_calls import Calls
from mgpu.run.supervision.health import NodeView
from mgpu.run.supervision.node_monitor import BEAT_S, Eye
from mgpu.run.supervision.remote_tail import Copy, nobody

if TYPE_CHECKING:
    from mgpu.providers.base import Handle, Provider
    from mgpu.remote.node import Node
    from mgpu.remote.nodeset import NodeSet
    from mgpu.run.record.session import Session

DESCRIBE_EVERY_S, DESCRIBE_SOON_S = 2.0, 0.5  # the latter while something is amiss
WARN_S = 0.5  # most connections that were cut are back before then
STOPPING_BEAT_S = 2.0  # `BEAT_S` of an agent that is to end
SAVE, NOW, HURRY = 1, 2, 3  # how an agent is to stop; the last: it gives up waiting for its peers as well


class Outlook:
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
        self.calls = Calls()  # of this supervisor; it begins them in its passes
        self._told: set[str] = set()
        self._silent: set[int] = set()  # ranks that were told not to answer
        self._stop_level = 0
        self._described_at = clock()  # when the provider was asked last,
        self.described = float("-inf")  # and when, at the earliest, it was as it answered
        self.gone: dict[int, str] = {}  # rank -> why, by the provider's word
        self.eyes = [self._eye(node, node.target.rank * processes_per_node) for node in nodes.nodes]

    def _eye(self, node: Node, first: int) -> Eye:
        session, rank, instance = self._session, node.target.rank, self._handle.ids[node.target.rank]
        layout, local = RunLayout(session.record.run_id), session.folder.log(rank, instance)
        log = Copy(
            str(layout.log),
            local,
            tell=lambda offset, data: session.emit(LogChunk(rank, offset, data)),
            warn=self.once,
            hidden=session.hidden,
        )
        times = Copy(str(layout.log_times), times_of(local), tell=nobody, warn=self.once)
        copies = (log, times, metrics.copy_of(session, first, instance, self.once))
        return Eye(node, session.record.run_id, copies, session.timeouts, self._clock, self._wall)

    # --- seeing -------------------------------------------------------------------------------------------------

    def round(self, logs_s: float, *, amiss: bool = False) -> None:
        """Looks at every node, and at the machines when it is time; waits `look_s`. A look that takes longer goes on,
        and the others' with it. `amiss`: the provider's word is wanted soon."""
        look_s = self._session.timeouts.look_s
        beat_s = STOPPING_BEAT_S if self._stop_level else BEAT_S
        for eye in self.eyes:
            if eye.rank not in self.gone:
                self.calls.begin(("look", eye.rank), lambda eye=eye: eye.look(logs_s, beat_s))
        self._tell_to_stop()
        self._ask_provider(amiss=amiss)
        self.calls.wait(look_s)
        if self._ask_provider(amiss=amiss):  # a connection was lost meanwhile
            self.calls.wait(min(look_s, DESCRIBE_SOON_S), "describe")
        self._tell_of_links()

    def views(self) -> tuple[NodeView, ...]:
        """What the verdict is made of."""
        now = self._clock()
        return tuple(
            NodeView(eye.rank, eye.status, now - eye.seen, eye.rank in self.gone, eye.dead, self.gone.get(eye.rank, ""))
            for eye in self.eyes
        )

    def phases(self) -> list[str]:
        """Where every node is, in words."""
        said = [str(eye.status.phase) if eye.status else "unknown" for eye in self.eyes]
        return ["gone" if eye.rank in self.gone else phase for eye, phase in zip(self.eyes, said, strict=True)]

    def has_ended(self, eye: Eye) -> bool:
        """True when nothing of the attempt is left to wait for on this node."""
        phase = self._phase(eye)
        return eye.rank in self.gone or eye.dead or (phase is not None and phase.final)

    def behind(self, since: float, *, but: tuple[int, ...], patience_s: float) -> bool:
        """True while there is a node of which not all is here that it had written then, and that is waited for."""
        for eye in self.eyes:
            away_s = self._away_s(eye)
            if eye.rank not in (*but, *self.gone) and eye.copied_at < since and away_s <= patience_s:
                return True
        return False

    def _phase(self, eye: Eye) -> Phase | None:
        """Where the node is in the present attempt; None: it has said nothing of that yet."""
        status = eye.status
        return status.phase if status is not None and status.attempt == self._session.record.attempt else None

    @property
    def all_answer(self) -> bool:
        """False while a node that is not gone does not answer over SSH."""
        return all(eye.answers for eye in self.eyes if eye.rank not in self.gone)

    def _ask_provider(self, *, amiss: bool) -> bool:
        if self._provider is None:
            return False
        every_s = DESCRIBE_SOON_S if amiss or not self.all_answer else DESCRIBE_EVERY_S
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
        for eye in self.eyes:
            told, away_s = eye.rank in self._silent, self._away_s(eye)
            if told and eye.lost_touch is None:
                self._silent.discard(eye.rank)
                self._session.emit(Note(f"node {eye.rank} answers again"))
            elif not told and away_s >= WARN_S and eye.rank not in self.gone:
                self._silent.add(eye.rank)
                self._session.emit(Warned(f"node {eye.rank} does not answer over SSH; the run goes on"))

    def _away_s(self, eye: Eye) -> float:
        since = eye.lost_touch
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
        for eye in self.eyes:
            # one that has nothing left but its uploads is left to them, unless the others wait for it
            told = eye.told >= level or (level < HURRY and self._phase(eye) is Phase.DRAINING)
            if not (told or eye.node.closed or self.has_ended(eye)):
                self.calls.begin(("stop", eye.rank), lambda eye=eye: self._tell(eye, level))

    def _tell(self, eye: Eye, level: int) -> None:
        try:
            agent_client.stop(eye.node, self._session.record.run_id, self._session.timeouts, now=level > SAVE)
            eye.told = level
        except MgpuError as error:
            self.once(f"node {eye.rank} could not be asked to stop: {error.what}")
