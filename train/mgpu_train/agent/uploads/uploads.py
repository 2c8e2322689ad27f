"""Brings finished checkpoints into the store while training goes on: one at a time, all nodes the same ones.

A checkpoint counts only when every node's part is in the store, so nodes must not choose each for itself which saves
they skip. Node 0 chooses: it takes its newest finished save, announces the step by a tiny object in the store, uploads
its part, waits for the others' parts and commits. The other nodes upload what it announces, and nothing else. When the
launcher has ended, the last announcement says that it is final.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mgpu_train.agent.attempt.save_budget import FACTOR
from mgpu_train.agent.status.log import clean
from mgpu_train.agent.status.status import CheckpointStatus
from mgpu_train.agent.uploads.saves import ALONE, ALONE_IDLE, KEPT, KEPT_IDLE, tidy
from mgpu_train.checkpoint.local import finished
from mgpu_train.timeouts import Timeouts

_BACKOFF_S = (1.0, 30.0)  # first and longest wait between two tries
_REFUSALS = 3  # tries of what the store refuses; what it only fails at is tried as long as it matters


class CheckpointStoreError(Exception):
    """The store failed or refused. `passing`: it may work later by itself; `unkeepable`: what was left is the
    program's to mend."""

    def __init__(self, problem: str, *, passing: bool = True, unkeepable: bool = False) -> None:
        super().__init__(problem)
        self.passing, self.unkeepable = passing, unkeepable


class NewerAttempt(Exception):
    """A newer attempt of the run was started: this one may commit nothing any more."""


@dataclass(frozen=True)
class Announced:
    """What node 0 uploads; -1 = nothing. `final`: nothing comes after it."""

    step: int
    final: bool


class CheckpointStore(Protocol):
    """One attempt's part of the store. Every call may raise DepotError, and may be repeated."""

    def announce(self, said: Announced) -> None:
        """Tells the other nodes what to upload (node 0)."""
        ...

    def announced(self) -> Announced | None:
        """What node 0 told last; None = nothing yet."""
        ...

    def upload(self, step: int, folder: Path) -> None:
        """Puts this node's part into the store."""
        ...

    def commit(self, step: int) -> str | None:
        """Commits the checkpoint and returns its id; None: parts of other nodes are missing (node 0).

        Raises:
            NewerAttempt: this attempt is over.
        """
        ...

    def prune(self) -> None:
        """Deletes old committed checkpoints (node 0)."""
        ...


class Uploads:
    """The background thread of one node that has a part in the checkpoints."""

    def __init__(
        self,
        checkpoint_store: CheckpointStore,
        folder: Path,
        *,
        leads: bool,
        alone: bool,
        times: Timeouts,
        say: Callable[[str], None],
        resumed_step: int = -1,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        """`leads`: this is node 0. `alone`: no other node has a part. `pause` (for tests) waits so many seconds.

        Saves of steps before `resumed_step` are not uploaded: the durable step never goes back (invariant I5).
        """
        self._checkpoint_store, self._folder = checkpoint_store, folder
        self._leads, self._alone, self._times = leads, alone, times
        self._say, self._clock = say, clock
        self._pause = pause or self._wait
        self._draining = threading.Event()
        self._hurried = threading.Event()
        self._patience_s = times.peers_s
        self._newer_waits_s = times.peers_s  # how long the parts of others may keep a newer save waiting
        self._lock = threading.Lock()  # of what follows
        self._looking = threading.Lock()  # both threads look and delete, one at a time
        self._status = CheckpointStatus()
        self._seen: set[int] = set()
        self._taken = max(-1, resumed_step - 1)
        self._in_flight: int | None = None
        self._told_room = self._told_late = False
        self._began: float | None = None  # when the one in flight was taken
        self._took_s: float | None = None  # what the last one took
        self._held_s = 0.0  # how long it had waited for node 0's word
        self._thread = threading.Thread(target=self.run, name="uploads", daemon=True)
        self.fenced: str | None = None
        self.unkept = -1  # the newest step of which the program has left what cannot be kept

    # --- for the agent's own thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to watch the folder."""
        self._thread.start()

    def drain(self, patience_s: float) -> None:
        """Says that no more checkpoints will come: the newest is uploaded, and the thread ends.

        `patience_s` is how long other nodes may keep this one waiting.
        """
        self._patience_s = patience_s
        self._draining.set()

    def hurry(self) -> None:
        """After `drain`: other nodes keep this one waiting no more. Everything is looked at, and tried, once more."""
        self._hurried.set()

    def expect_s(self) -> float | None:
        """Seconds that one more save would take from its name to the store: what the last one took, and what is left
        of the one in flight. None: not known."""
        began, took_s = self._began, self._took_s
        if took_s is None or began is None:
            return took_s
        return took_s + max(0.0, began + took_s - self._clock())

    def drain_s(self) -> float:
        """Seconds that what is left gets once the launcher has ended: `drain_s`, or more where uploads take longer,
        here or on the nodes that node 0 waits for."""
        return max(self._times.drain_s, FACTOR * ((self.expect_s() or 0.0) + self._held_s))

    def ended(self, wait_s: float) -> bool:
        """Waits so long; True when everything is done."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    @property
    def status(self) -> CheckpointStatus:
        """What has become of the checkpoints so far."""
        with self._lock:
            return self._status

    def note(self, **changes: int | float | str | None) -> None:
        """Changes fields of the status. From any thread."""
        with self._lock:
            self._status = self._status.model_copy(update=changes)

    def look(self) -> int:
        """Looks at the folder, deletes what nobody will ask for, and returns the newest finished step (-1: none)."""
        with self._looking:
            found = tidy(self._folder, self._in_flight, self._kept)
        with self._lock:
            self._seen.update(found)
            newest = max(self._seen, default=-1)
            self._status = self._status.model_copy(update={"saved_step": newest})
        return newest

    @property
    def _kept(self) -> int:
        """How many of the newest stay beside the one in flight."""
        idle = self._in_flight is None
        if self._alone:
            return ALONE_IDLE if idle else ALONE  # the thread may be about to take one
        return KEPT_IDLE if idle else KEPT

    # --- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's life; returns when the last checkpoint is dealt with."""
        try:
            while not self._passed():
                self._pause(self._times.poll_s)
        except NewerAttempt as error:
            self._trouble(str(error))
            self.fenced = str(error)
        except Exception as error:  # noqa: BLE001 - a bug here must be seen in the status, not end in a silent thread
            self._trouble(f"the uploads ended: {type(error).__name__}: {error}")

    def _passed(self) -> bool:
        """True: all is dealt with. A disk that fails now may work later, and checkpoints must not end with it."""
        try:
            if self._leads:
                self._lead()
            else:
                self._follow()
        except OSError as error:
            self._trouble(f"the checkpoint folder cannot be read: {error}")
            return self._draining.is_set()
        return True

    def _lead(self) -> None:
        final = False
        while not final:
            # in this order: when no more will come, this look sees the last one
            final = self._draining.is_set()
            step = self.look()
            if step > self._taken and (final or self._begun(step)):
                self._take(step, final)
            elif not final:
                self._pause(self._times.poll_s)
        if not self._alone:
            end = Announced(self._taken, final=True)
            self._insist("announcing the end", lambda: self._checkpoint_store.announce(end), tries=5)

    def _begun(self, step: int) -> bool:
        """False for a folder that a program has made before it gathers what it will write there. One of several nodes
        may have nothing to write."""
        return not self._alone or any(not each.is_dir() for each in (self._folder / f"step-{step}").rglob("*"))

    def _follow(self) -> None:
        since: float | None = None  # when it began to wait for node 0 in the drain
        held: float | None = None  # ... for its next announcement, while a newer save is here
        while True:
            draining, last = self._draining.is_set(), self._hurried.is_set()  # before the look: haste leaves one more
            newest = self.look()
            said = self._announced() if newest > self._taken else None
            # node 0 may be ahead: what it asks for is finished here soon, unless nothing more comes
            if said is not None and self._taken < said.step and (said.step <= newest or draining):
                self._held_s = self._clock() - held if held is not None else 0.0
                self._take(said.step, said.final)
                since = held = None
                continue
            if newest > self._taken and held is None:
                held = self._clock()
            if draining and (newest <= self._taken or (said is not None and said.final)):
                return
            if draining:
                since = self._clock() if since is None else since
                waited_s = self._clock() - since
                if last or waited_s > self._patience_s:
                    self._trouble(
                        f"node 0 has not asked for step-{newest} within {min(waited_s, self._patience_s):.3g} s"
                    )
                    return
            self._pause(self._times.poll_s)

    def _announced(self) -> Announced | None:
        try:
            return self._checkpoint_store.announced()
        except CheckpointStoreError as error:
            self._trouble(f"node 0's announcement cannot be read: {error}")
            return None

    def _take(self, step: int, final: bool) -> None:
        with self._lock:
            skipped = sum(self._taken < seen < step for seen in self._seen)
        with self._looking:
            self._taken, self._in_flight = step, step
        self._began = self._clock()
        self.note(skipped=self._status.skipped + skipped)
        path = dict(finished(self._folder)).get(step)
        try:
            done = path is not None and self._bring(step, path, final)
        finally:
            self._began = None
            self.look()
            with self._looking:
                self._in_flight = None
        if path is None:
            self._trouble(f"step-{step} was asked for, but is not on this node's disk")
        if not done:
            self.note(failed=self._status.failed + 1)

    def _bring(self, step: int, path: Path, final: bool) -> bool:
        name = f"step-{step}"
        if self._leads and not self._alone:
            said = Announced(step, final)
            if not self._insist(f"announcing {name}", lambda: self._checkpoint_store.announce(said)):
                return False
        if not self._insist(f"uploading {name}", lambda: self._checkpoint_store.upload(step, path)):
            return False
        self.note(uploaded_step=step)
        self._say(f"checkpoint {name}: uploaded")
        self._look_for_room(name, path)
        self._look_for_late(name, path)
        if self._leads:
            return self._commit(step)
        self._measure()
        return True

    def _commit(self, step: int) -> bool:
        """Commits as soon as all parts are there. What keeps a newer save waiting gets `peers_s`, also in the drain.

        Where that was too short it is doubled for the next save, else a node that takes longer for its part is one save
        behind for ever; after a commit it is twice what this one took.
        """
        begin = self._clock()
        found: list[str | None] = []
        while True:
            last = self._hurried.is_set()  # before the look: haste leaves one more
            if not self._insist(f"committing step-{step}", lambda: found.append(self._checkpoint_store.commit(step))):
                return False
            if (checkpoint_id := found[-1]) is not None:
                self.note(committed_step=step, committed_id=checkpoint_id)
                self._newer_waits_s = max(self._times.peers_s, 2 * (self._clock() - begin))
                self._measure()
                self._say(f"checkpoint step-{step}: committed as {checkpoint_id}")
                self._prune()
                return True
            newer = step < self.look()
            patience_s = self._patience(newer)
            if last or self._clock() > begin + patience_s:
                waited_s = min(patience_s, self._clock() - begin)
                self._trouble(f"step-{step}: other nodes' parts are missing after {waited_s:.3g} s")
                if newer or self._draining.is_set():  # else there is nothing better to do than to wait on
                    # a peer may also have given it up; longer than for the last save of all nobody waits
                    self._newer_waits_s = min(2 * patience_s, self._times.drain_s)
                    return False
            self._pause(self._times.poll_s)

    def _patience(self, newer: bool) -> float:
        """Seconds that the parts of others may take, by whether a newer save waits."""
        if not newer:
            return self._patience_s
        if self._draining.is_set():  # the last save has to find time, too
            return max(self._times.peers_s, min(self._newer_waits_s, self._patience_s / 2))
        return self._newer_waits_s

    def _look_for_room(self, name: str, path: Path) -> None:
        """The next one is written beside this one: a disk that has no room for it is told, once, before it is full."""
        if self._told_room:
            return
        try:
            size = sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
            free = shutil.disk_usage(self._folder).free
        except OSError:  # whatever it is, the upload is done
            return
        if size > free:
            self._told_room = True
            self._trouble(
                f"{name} has {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the disk are free: the next save "
                "may not fit. Use a larger disk (`disk_gib`)"
            )

    def _look_for_late(self, name: str, path: Path) -> None:
        """What is written after a folder has its name may be missing in the store: told, once."""
        if self._told_late:
            return
        try:
            named = max(path.stat().st_ctime, self._folder.stat().st_mtime)  # by the rename, or since
            files = (each for each in path.rglob("*") if each.is_file())
            late = next((each.name for each in files if each.lstat().st_mtime > named), None)
        except OSError:
            return
        if late is not None:
            self._told_late = True
            self._trouble(
                f"{name}: {late} was written after the folder had that name. What comes so late may be missing in the "
                "store: write the folder beside, and rename it when it is whole"
            )

    def _measure(self) -> None:
        if self._began is not None:
            self._took_s = self._clock() - self._began

    def _prune(self) -> None:
        try:
            self._checkpoint_store.prune()
        except CheckpointStoreError as error:
            self._say(f"old checkpoints could not be deleted: {error}")  # the next commit tries again

    def _insist(self, doing: str, work: Callable[[], object], tries: int | None = None) -> bool:
        """Tries with growing waits until it works. Gives up when a newer save waits; the agent bounds the drain."""
        wait, longest = _BACKOFF_S
        refusals = 0
        while True:
            try:
                work()
                return True
            except CheckpointStoreError as error:
                self._trouble(f"{doing}: {error}")
                refusals += not error.passing
                if error.unkeepable:
                    self.unkept = self._taken
            tries = None if tries is None else tries - 1
            if tries == 0 or refusals >= _REFUSALS or self._taken < self.look() or self._hurried.is_set():
                return False
            self._pause(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, longest)

    def _trouble(self, problem: str) -> None:
        problem = clean(problem, 300)
        if problem != self.status.problem:
            self._say(f"checkpoint: {problem}")
        self.note(problem=problem)

    def _wait(self, seconds: float) -> None:
        """Waits, and not longer than until the drain begins, or haste."""
        (self._hurried if self._draining.is_set() else self._draining).wait(seconds)
