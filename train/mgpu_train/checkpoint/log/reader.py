"""Reads the commit log: every number once, several at a time, and of each only what is worth keeping in memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mgpu_train.checkpoint.log import index, keys
from mgpu_train.checkpoint.log.lines import Line, Readable, Unreadable, in_short
from mgpu_train.checkpoint.log.manifest import MAX_DOCUMENT_BYTES, CheckpointEntry, Entry, parse_entry
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.store.base import Damaged, NotFound, Store, StoreError
from mgpu_train.store.listed import surely

_THREADS = 8  # entries in flight
_MOST_MISSING = 1000  # numbers: a log with more holes is none


class LogReader:
    """The log of one run as far as it was read. What was read once is not read again: entries never change."""

    def __init__(self, store: Store, run_id: str) -> None:
        """Nothing is read yet."""
        self._store = store
        self._run_id = run_id
        self._known: dict[int, Readable] = {}
        self._whole = 0  # the numbers below it are all known
        self._indexed = 0  # and below this one they stand in an index

    def lines(self) -> list[Line]:
        """Every number of the log from 0 on, oldest first.

        Raises Damaged when most of it is missing, and StoreError when the store cannot be read.
        """
        if not self._whole:
            self._take_index()
        length = self._length()
        unknown = [seq for seq in range(self._whole, length) if seq not in self._known]
        bad = {line.seq: line for line in self._read(unknown) if isinstance(line, Unreadable)}
        return [self._known.get(seq) or bad[seq] for seq in range(length)]

    def entry(self, seq: int) -> Entry:
        """One entry, whole, as the store has it now. Raises NotFound, and Damaged when it is not what it should be."""
        where, key = f"entry {seq} of the commit log", keys.commit(self._run_id, seq)
        try:
            entry = parse_entry(surely(self._store, key, lambda: self._store.get(key, MAX_DOCUMENT_BYTES)), where)
        except NotFound as error:
            raise NotFound(f"{where} is missing") from error
        if entry.seq != seq or (isinstance(entry, CheckpointEntry) and entry.manifest.run_id != self._run_id):
            raise Damaged(f"{where} belongs to another place")
        return entry

    def keep(self, lines: Iterable[Readable]) -> None:
        """These are known, and need not be read."""
        self._known.update((line.seq, line) for line in lines)
        whole = self._whole
        while whole in self._known:
            whole += 1
        self._whole = whole  # at once: another thread may be doing the same

    def index(self) -> None:
        """Write an index when the newest one is old. It is a help, no more: what hinders it is passed over."""
        if self._whole - self._indexed < index.EVERY:
            return
        self._indexed = self._whole  # also where it fails: the next try is for the next ones
        with suppress(StoreError):
            index.save(self._store, self._run_id, [self._known[seq] for seq in range(self._whole)])

    def _take_index(self) -> None:
        """Believes an index whose last line is, word for word, what the log itself says under that number."""
        found = index.load(self._store, self._run_id)
        if found is not None and self._line(found.upto) == found.lines[-1]:
            self.keep(found.lines)
            self._indexed = self._whole

    def _length(self) -> int:
        """How many numbers the log has, those included that are missing in the middle."""
        after = keys.commit(self._run_id, self._whole - 1) if self._whole else ""
        named = [keys.seq_of(stat.key) for stat in self._store.list(keys.commits(self._run_id), after)]
        found = [seq for seq in named if seq is not None and seq >= self._whole]
        length = max(found, default=self._whole - 1) + 1
        missing = length - self._whole - len(found)
        if missing > _MOST_MISSING:
            raise Damaged(f"the commit log of run {self._run_id} has {missing} of {length} entries missing")
        return length

    def _read(self, numbers: list[int]) -> list[Line]:
        found = in_threads(self._line, numbers, max(1, min(_THREADS, len(numbers))))
        self.keep(line for line in found if not isinstance(line, Unreadable))
        return found

    def _line(self, seq: int) -> Line:
        try:
            return in_short(self.entry(seq))
        except (NotFound, Damaged) as error:
            return Unreadable(seq, str(error))
