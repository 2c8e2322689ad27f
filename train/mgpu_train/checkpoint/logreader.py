"""Reads the commit log: every number once, several at a time, and of each only what is worth keeping in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from mgpu_train.checkpoint import keys
from mgpu_train.checkpoint.lines import Line, Readable, Unreadable, in_short
from mgpu_train.checkpoint.manifest import MAX_DOCUMENT_BYTES, CheckpointEntry, Entry, parse_entry
from mgpu_train.store.base import Damaged, NotFound, Store

_THREADS = 8  # entries in flight
_MOST_MISSING = 1000  # numbers: a log with more holes is none


class LogReader:
    """The log of one run as far as it was read. What was read once is not read again: entries never change."""

    def __init__(self, store: Store, run_id: str) -> None:
        """Nothing is read yet."""
        self._store = store
        self._run_id = run_id
        self._known: dict[int, Readable] = {}

    def lines(self) -> list[Line]:
        """Every number of the log from 0 on, oldest first.

        Raises Damaged when most of it is missing, and StoreError when the store cannot be read.
        """
        named = [keys.seq_of(stat.key) for stat in self._store.list(keys.commits(self._run_id))]
        found = [seq for seq in named if seq is not None]
        length = max(found, default=-1) + 1
        if length - len(found) > _MOST_MISSING:
            raise Damaged(f"the commit log of run {self._run_id} has {length - len(found)} of {length} entries missing")
        unknown = [seq for seq in range(length) if seq not in self._known]
        bad = {line.seq: line for line in self._read(unknown) if isinstance(line, Unreadable)}
        return [self._known.get(seq) or bad[seq] for seq in range(length)]

    def entry(self, seq: int) -> Entry:
        """One entry, whole, as the store has it now. Raises NotFound, and Damaged when it is not what it should be."""
        where = f"entry {seq} of the commit log"
        try:
            entry = parse_entry(self._store.get(keys.commit(self._run_id, seq), MAX_DOCUMENT_BYTES), where)
        except NotFound as error:
            raise NotFound(f"{where} is missing") from error
        if entry.seq != seq or (isinstance(entry, CheckpointEntry) and entry.manifest.run_id != self._run_id):
            raise Damaged(f"{where} belongs to another place")
        return entry

    def keep(self, line: Readable) -> None:
        """What this process wrote itself, and surely stands, need not be read."""
        self._known[line.seq] = line

    def _read(self, numbers: list[int]) -> list[Line]:
        if len(numbers) < 2:
            return [self._line(seq) for seq in numbers]
        with ThreadPoolExecutor(min(_THREADS, len(numbers)), "log") as pool:
            try:
                return list(pool.map(self._line, numbers))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _line(self, seq: int) -> Line:
        try:
            line = in_short(self.entry(seq))
        except (NotFound, Damaged) as error:
            return Unreadable(seq, str(error))
        self._known[seq] = line
        return line
