"""One node as the supervisor sees it: its status, whether it answers, and copies of what it writes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.status.status import AgentStatus, Phase
from mgpu_train.timeouts import Timeouts
from pydantic import ValidationError

from mgpu.errors import ConnectionFailed, HostKeyMismatch, RemoteError
from mgpu.remote.node import Node
from mgpu.run.nodes import agent_client
from mgpu.run.supervision.remote_tail import RemoteTail

BEAT_S = 10.0  # a status that stands still this long: the agent is asked for, and as often
RETRY_S, RETRY_MOST_S = 0.5, 5.0  # between two new connections to a node that takes none


class NodeMonitor:
    """What is known of one node. `look` runs in a thread of its own; everybody may read the rest meanwhile."""

    def __init__(
        self,
        node: Node,
        run_id: str,
        copies: tuple[RemoteTail, ...],
        timeouts: Timeouts,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`copies`: of what it writes; `clock` gives monotonic seconds, `wall` UNIX seconds."""
        self.node = node
        self.rank = node.target.rank
        self._run_id, self._copies, self._timeouts = run_id, copies, timeouts
        self._clock, self._wall = clock, wall
        self._over = threading.Event()
        self._retry_at, self._pause = float("-inf"), 0.0
        self._beat_at, self._asked_at = clock(), float("-inf")
        self.status: AgentStatus | None = None
        self.seen = clock()  # when it last answered,
        self.heard_at = wall()  # in UNIX seconds
        self._excused = (self.seen, 0.0)  # of the time since then: seconds in which nobody listened
        self.dead = False  # the agent has ended without a word
        self.moves = False  # the agent has been seen to live: one that is dead leaves a status, too
        self.copied_at = float("-inf")  # all that was written before then is here
        self.lost_touch: float | None = None  # since when it does not answer over SSH
        self.told = 0  # how far the agent was told to stop

    def look(self, logs_s: float, beat_s: float = BEAT_S) -> None:
        """Reads the status, and new bytes for `logs_s`. A failure makes it silent: no teardown comes of that alone."""
        began = self._clock()
        try:
            if not self._connected():
                return
            self._read(beat_s)
            self.seen, self.heard_at = self._clock(), self._wall()
            until = began + logs_s
            whole = [copy.follow(self.node, lambda: self._clock() <= until) for copy in self._copies]
            self.lost_touch = None
            if all(whole):
                self.copied_at = began
        except (ConnectionFailed, HostKeyMismatch):
            self._lose_touch()
        except (RemoteError, FileNotFoundError, ValidationError, OSError):
            return

    def leave(self) -> None:
        """No new connection is made any more: the supervisor goes."""
        self._over.set()

    def excuse(self, seconds: float) -> None:
        """So many of the last seconds are no silence. Called by the thread that asks for `silent_s`."""
        seen = self.seen
        self._excused = seen, self._excused_s(seen) + min(seconds, self._clock() - seen)

    @property
    def silent_s(self) -> float:
        """Seconds for which it was listened to, and did not answer."""
        seen = self.seen
        return max(0.0, self._clock() - seen - self._excused_s(seen))

    def _excused_s(self, seen: float) -> float:
        since, seconds = self._excused
        return seconds if since == seen else 0.0

    @property
    def answers(self) -> bool:
        """False: the connection is lost, or the last look at it failed."""
        return self.lost_touch is None and not self.node.closed

    def _lose_touch(self) -> None:
        if self.lost_touch is None:
            self.lost_touch = self._clock()

    def _connected(self) -> bool:
        if not self.node.closed:
            return True
        self._lose_touch()
        if self._clock() < self._retry_at:
            return False
        try:
            self.node.reconnect()
        except RemoteError:
            self._pause = min(RETRY_MOST_S, max(RETRY_S, 2 * self._pause))
            self._retry_at = self._clock() + self._pause
            raise
        self._pause = 0.0
        if self._over.is_set():  # the supervisor left meanwhile
            self.node.close()
        return not self._over.is_set()

    def _read(self, beat_s: float) -> None:
        before, now = self.status, self._clock()
        text = self.node.read(str(RunLayout(self._run_id).status))
        self.status = status = AgentStatus.model_validate_json(text)
        if before is None or (status.attempt, status.beat) != (before.attempt, before.beat) or status.phase.final:
            self._beat_at, self.dead = now, False
            self.moves = before is not None
        elif min(now - self._beat_at, now - self._asked_at) >= beat_s:
            self._asked_at = now
            self.dead = self._has_died(status)
            self.moves = not self.dead

    def _has_died(self, status: AgentStatus) -> bool:
        """A status stands still when the agent is dead, and when the node's disk is full, which ends no training."""
        said = agent_client.status(self.node, self._run_id, self._timeouts)
        final = said.get("phase") in (Phase.DONE, Phase.FAILED)
        ended = final or said.get("attempt", status.attempt) != status.attempt
        return not said.get("alive") and not ended
