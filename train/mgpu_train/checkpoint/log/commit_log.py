"""The commit log of a run: numbered objects, each created once, that say which attempt is on and what is committed.

An entry wins its number by a conditional create; who loses reads what came before and decides anew. So attempts and
commits have one order that everybody sees, without a lock, and a writer of an older attempt is found out in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from mgpu_train.checkpoint.log import keys, lines
from mgpu_train.checkpoint.log.lines import Commit, Line, Unreadable, commit_of, in_short
from mgpu_train.checkpoint.log.manifest import (
    MAX_DOCUMENT_BYTES,
    AttemptEntry,
    CheckpointEntry,
    EndEntry,
    Entry,
    Manifest,
    PrunedEntry,
    SupervisorEntry,
    to_bytes,
)
from mgpu_train.checkpoint.log.reader import LogReader
from mgpu_train.store.base import Ambiguous, Damaged, NotFound, Store, StoreError, Unavailable

E = TypeVar("E", bound=Entry | Commit)

_TRIES = 100  # numbers that one call may lose to others
_ANSWERS = 5  # answers that may get lost of one create


class Fenced(Exception):
    """A newer attempt exists, or may exist: this writer must stop."""


class StepBack(StoreError):
    """The same attempt has committed this step, or a later one, already (invariant I5)."""


class CommitLog:
    """The log of one run in one store. `clock` gives UNIX seconds. Entries that were read once are not read again."""

    def __init__(self, store: Store, run_id: str, clock: Callable[[], float] = time.time) -> None:
        """Nothing is read yet."""
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._reader = LogReader(store, run_id)

    def read(self) -> list[Line]:
        """Every number of the log from 0 on, oldest first.

        Raises Damaged when most of it is missing, and StoreError when the store cannot be read.
        """
        return self._reader.lines()

    def entries(self) -> list[lines.Readable]:
        """What can be read of it, oldest first."""
        return [line for line in self.read() if not isinstance(line, Unreadable)]

    def checkpoints(self) -> list[Commit]:
        """The committed checkpoints that were not given up, newest first."""
        return lines.standing(self.read())

    def age_s(self, commit: Commit) -> float:
        """Seconds since it was written, by the store's own clock."""
        return self._store.read(keys.commit(self._run_id, commit.seq), MAX_DOCUMENT_BYTES).age_s

    def manifest(self, commit: Commit) -> Manifest:
        """The list of a committed checkpoint's files.

        Raises NotFound, and Damaged when the entry is not the one that was committed.
        """
        entry = self._checkpoint_at(commit.seq, commit.checkpoint_id)
        if entry.manifest_sha256 != commit.manifest_sha256:
            raise Damaged(f"entry {commit.seq} of the commit log has another manifest than the index says")
        return entry.manifest

    def manifest_at(self, seq: int, checkpoint_id: str) -> Manifest:
        """The manifest in entry `seq`, which is to be this checkpoint's; nothing else of the log is read.

        Raises NotFound, and Damaged when it is another one's.
        """
        return self._checkpoint_at(seq, checkpoint_id).manifest

    def _checkpoint_at(self, seq: int, checkpoint_id: str) -> CheckpointEntry:
        entry = self._reader.entry(seq)
        if not isinstance(entry, CheckpointEntry) or entry.manifest.checkpoint_id != checkpoint_id:
            raise Damaged(f"entry {seq} of the commit log is not the checkpoint {checkpoint_id}")
        return entry

    def newest_attempt(self) -> int:
        """The newest attempt that has begun; 0: none."""
        return lines.newest_attempt(self.read())

    def supervisor(self) -> SupervisorEntry | None:
        """Who supervises the run now; None: nobody has said so yet."""
        return lines.newest(self.entries(), SupervisorEntry)

    def take_over(self, writer: str, *, host: str, pid: int) -> SupervisorEntry:
        """Write that `writer` supervises the run from here on; again, while it does: the entry that stands.

        Raises StoreError.
        """

        def decide(log: list[Line]) -> SupervisorEntry:
            before = lines.newest(log, SupervisorEntry)
            if before is not None and before.writer == writer:
                return before
            newest, now = lines.newest_attempt(log), self._clock()
            return SupervisorEntry(seq=len(log), attempt=newest, writer=writer, at=now, host=host[:255], pid=pid)

        return self._append_decided(decide)

    def ended(self, attempt: int) -> EndEntry | None:
        """How an attempt ended, by its own word; None: it has said nothing."""
        return lines.end_of(self.read(), attempt)

    def end(
        self, attempt: int, writer: str, *, succeeded: bool, fault: str | None = None, reason: str | None = None
    ) -> EndEntry:
        """Write how an attempt ended; again: the entry that stands.

        Raises:
            Fenced: a newer attempt has begun, or this one with another writer.
            StoreError: the store does not work.
        """

        def decide(log: list[Line]) -> EndEntry:
            self._check_fence(log, attempt, writer)
            return lines.end_of(log, attempt) or EndEntry(
                seq=len(log),
                attempt=attempt,
                writer=writer,
                at=self._clock(),
                succeeded=succeeded,
                fault=fault,
                reason=reason,
            )

        return self._append_decided(decide)

    def begin_attempt(self, attempt: int, writer: str, *, supervisor: str | None = None) -> AttemptEntry:
        """Write that an attempt begins; again with the same writer: the entry that stands.

        Raises:
            Fenced: this attempt or a newer one has begun with another writer; or another process than `supervisor`
                (the `writer` of `take_over`) supervises the run now.
            StoreError: the store does not work.
        """

        def decide(log: list[Line]) -> AttemptEntry | None:
            other = lines.newest(log, SupervisorEntry)
            if supervisor is not None and other is not None and other.writer != supervisor:
                raise Fenced(f"run {self._run_id} is supervised by process {other.pid} on {other.host} now")
            begun = [entry for entry in log if isinstance(entry, AttemptEntry)]
            if begun and (begun[-1].attempt, begun[-1].writer) == (attempt, writer):
                return begun[-1]
            newest = lines.newest_attempt(log)
            if supervisor is not None and other is not None and lines.damaged(log[other.seq + 1 :]):
                # it may have been a takeover: whoever wrote it, and can read it, is to see that he supervises no more
                self._append(other.model_copy(update={"seq": len(log), "attempt": newest, "at": self._clock()}))
                return None
            if newest >= attempt:
                raise Fenced(f"attempt {attempt} cannot begin: attempt {newest} of run {self._run_id} has begun before")
            return AttemptEntry(seq=len(log), attempt=attempt, writer=writer, at=self._clock())

        return self._append_decided(decide)

    def commit(self, manifest: Manifest, writer: str) -> Commit:
        """Commit a checkpoint; again for the same one: what stands of it.

        Raises:
            Fenced: the manifest's attempt is not the newest one, not this writer's, or has written its end: from then
                on what it did not commit may be removed.
            StepBack: its attempt has committed this step or a later one.
            StoreError: the store does not work. Whether it is committed is then unknown: call again.
        """
        if manifest.run_id != self._run_id:
            raise StoreError(f"a manifest of run {manifest.run_id} does not belong into the log of {self._run_id}")

        def decide(log: list[Line]) -> Commit | CheckpointEntry:
            self._check_fence(log, manifest.attempt, writer)
            if stands := self._committed(log, manifest):
                return stands
            if lines.end_of(log, manifest.attempt):
                raise Fenced(f"attempt {manifest.attempt} of run {self._run_id} has written its end")
            return CheckpointEntry(
                seq=len(log),
                attempt=manifest.attempt,
                writer=writer,
                at=self._clock(),
                manifest=manifest,
                manifest_sha256=manifest.sha256(),
            )

        stands = self._append_decided(decide)
        if isinstance(stands, Commit):
            return stands
        self._reader.index()
        return commit_of(stands)

    def give_up(self, checkpoint_ids: Iterable[str], writer: str) -> PrunedEntry:
        """Write that checkpoints are given up, before the first of their files goes. Raises StoreError."""
        ids = tuple(sorted(checkpoint_ids))

        def decide(log: list[Line]) -> PrunedEntry:
            newest = max(lines.newest_attempt(log), 1)  # a supervisor may have been there before any attempt
            return PrunedEntry(seq=len(log), attempt=newest, writer=writer, at=self._clock(), checkpoint_ids=ids)

        return self._append_decided(decide)

    def _check_fence(self, log: list[Line], attempt: int, writer: str) -> None:
        """Raises Fenced unless the attempt began with this writer and surely nothing newer did."""
        begun = next(
            (e for e in log if isinstance(e, AttemptEntry) and (e.attempt, e.writer) == (attempt, writer)), None
        )
        if begun is None:
            raise Fenced(f"attempt {attempt} of run {self._run_id} did not begin with this writer's token")
        for entry in log[begun.seq + 1 :]:
            if isinstance(entry, Unreadable):  # it may have been the beginning of a newer attempt
                raise Fenced(f"after attempt {attempt} of run {self._run_id} began, {entry.problem}")
            if entry.attempt > attempt:
                raise Fenced(f"attempt {entry.attempt} of run {self._run_id} has begun; attempt {attempt} is over")

    def _committed(self, log: list[Line], manifest: Manifest) -> Commit | None:
        """What stands of this very checkpoint, if it is committed. Raises StepBack; Damaged for other files."""
        same = [line for line in log if isinstance(line, Commit) and line.attempt == manifest.attempt]
        for commit in same:
            if commit.checkpoint_id == manifest.checkpoint_id:
                if self.manifest(commit).files == manifest.files:  # it may have been assembled at another time
                    return commit
                raise Damaged(f"{manifest.checkpoint_id} is committed already, with other files")
        ahead = max((commit.step for commit in same), default=-1)
        if manifest.step <= ahead:
            raise StepBack(
                f"step {manifest.step} cannot be committed: attempt {manifest.attempt} is at step {ahead} already"
            )
        return None

    def _append_decided(self, decide: Callable[[list[Line]], E | None]) -> E:
        """What `decide` makes of the log, once it stands: its next entry, or one that is there already. Decided anew
        for each number that is lost to others, and after None. Raises what `decide` does; StoreError."""
        for _ in range(_TRIES):
            log = self.read()
            entry = decide(log)
            if entry is not None and (isinstance(entry, Commit) or entry.seq < len(log) or self._append(entry)):
                return entry
        raise Unavailable(f"the commit log of run {self._run_id} is too busy: {_TRIES} tries in vain. Try again later.")

    def _append(self, entry: Entry) -> bool:
        """True: the entry stands under its number; False: another one does.

        No single answer is believed: a create whose answer got lost is refused when it is repeated, though it was done.
        """
        key, data = keys.commit(self._run_id, entry.seq), to_bytes(entry)
        if len(data) > MAX_DOCUMENT_BYTES:  # nobody could read it, and it would fence everybody
            raise StoreError(f"{key} cannot be written: its list of files is too long. Write fewer, larger ones.")
        for _ in range(_ANSWERS):
            try:
                if self._store.put_if_absent(key, data):
                    break
            except Ambiguous:
                pass
            try:
                if self._store.get(key, MAX_DOCUMENT_BYTES) == data:
                    break
                return False
            except NotFound:  # it was not done after all
                continue
            except Damaged:
                return False
        else:
            raise Unavailable(f"{self._store.url} gives no clear answer about {key}. Try again later.")
        self._reader.keep([in_short(entry)])
        return True
