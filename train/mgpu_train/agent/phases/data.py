"""The run's `data:` items: files that a node fetches before the launcher starts, and keeps for its later attempts.

Several nodes, and runs, may see one folder (NFS, a volume): each fetches under names of its own, and the first gives a
file its name. Who comes later leaves it alone: others read it by now, and on NFS a replaced file is gone for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.host.layout import FETCHED
from mgpu_train.agent.phases.folders import inside
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.status.words import count
from mgpu_train.config import DataItem
from mgpu_train.store import NoStore, NotFound, StoreError, disk, open_store
from mgpu_train.store.base import ASIDE, Stat, Store, key_problem

_AT_ONCE = 8  # transfers


def fetch_data(attempt: Attempt, item: DataItem) -> None:
    """Fetches all files below an address into a folder; those that are here in full size are not fetched again, unless
    the store has another version since.

    Raises:
        AttemptFailed: the address is wrong or empty, a name cannot be a file's, the disk has no room, or the store
            failed.
    """
    into = Path(item.to) if item.to.startswith("/") else inside(attempt.work, item.to, "data")
    try:
        store = open_store(item.source, attempt.secrets.store, timeouts=attempt.times)
        found = [stat for stat in store.list("") if not stat.key.endswith("/")]
        if not found:
            raise AttemptFailed(Fault.USER, f"data: there is nothing under {item.source}")
        for stat in found:
            if problem := key_problem(stat.key):
                raise AttemptFailed(Fault.USER, f"data: the object {stat.key[:80]!r} {problem}")
        fetched, own = _Fetched(into), _own(attempt)
        missing = [stat for stat in found if not fetched.has(stat)]
        for folder in {(into / stat.key).parent for stat in missing}:
            _sweep(folder, own, attempt.times.prepare_s)
        _require_room(into, item.source, missing)
        size = sum(stat.size for stat in found) >> 20
        kept = f", {count(len(found) - len(missing), 'file')} of them kept" if len(missing) < len(found) else ""
        attempt.say(f"data: {count(len(found), 'file')}, {size} MiB, from {item.source}{kept}")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda stat: _fetch(store, stat, fetched, own), missing))
    except (NoStore, NotFound) as error:
        raise AttemptFailed(Fault.USER, f"data: {item.source}: {error}") from error
    except (StoreError, OSError) as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"data: {item.source}: {error}") from error


class _Fetched:
    """What a folder has. A line is written once the file has its name: a file of which none tells is one of the user's
    own, or the last of an attempt that was killed, and whole."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = folder, Lock()
        self._versions: dict[str, str] = {}  # by key
        try:
            lines = (folder / FETCHED).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                key, version, *_ = map(str, json.loads(line))
            except (ValueError, TypeError):  # empty, or cut off by a kill
                continue
            self._versions[key] = version

    def has(self, stat: Stat) -> bool:
        """Whether this very version is there, as far as one can know."""
        path = self.folder / stat.key
        whole = path.is_file() and path.stat().st_size == stat.size  # a name is given to whole files only
        return whole and self._versions.get(stat.key, stat.version) == stat.version

    def add(self, stat: Stat) -> None:
        """It is."""
        changed_ns = (self.folder / stat.key).stat().st_ctime_ns  # whatever is done to the file later has another time
        with self._lock, (self.folder / FETCHED).open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([stat.key, stat.version, changed_ns])}\n")  # the line before may be cut off


def _require_room(into: Path, source: str, missing: Sequence[Stat]) -> None:
    needed, free = sum(stat.size for stat in missing), shutil.disk_usage(into).free
    if needed > free:
        raise AttemptFailed(
            Fault.USER,
            f"data: {needed / 2**30:.1f} GiB are to be fetched from {source}, and the disk of {into} has "
            f"{free / 2**30:.1f} GiB free: take machines with a larger disk (`disk_gib`), or name less of it",
        )


def _own(attempt: Attempt) -> str:
    """What is in the names of all that this node of this run has not fetched whole."""
    return hashlib.sha256(f"{attempt.job.run_id}/{attempt.job.node_rank}".encode()).hexdigest()[:12]


def _sweep(folder: Path, own: str, old_s: float) -> None:
    """Removes what attempts that ended meanwhile have left: this node's at once, others' once nobody can be at it."""
    for path in folder.glob(f"{ASIDE}*"):
        with suppress(OSError):  # it has got its name, another node sweeps, or it is somebody else's to remove
            if own in path.name or time.time() - path.stat().st_mtime > old_s:
                path.unlink()


def _fetch(store: Store, stat: Stat, fetched: _Fetched, own: str) -> None:
    path = fetched.folder / stat.key
    path.parent.mkdir(parents=True, exist_ok=True)
    known = store.stat(stat.key)
    # an object that was uploaded without this checksum is read twice
    crc64nvme = (known.crc64nvme if known else None) or store.checksum(stat.key, stat.size)
    aside = path.with_name(f"{ASIDE}{own}{os.urandom(3).hex()}-{path.name}")
    store.get_file(stat.key, aside, size=stat.size, crc64nvme=crc64nvme)
    disk.flush(aside)  # before it has its name: that alone tells a later attempt that it is whole
    _name(aside, path, stat.size, crc64nvme)
    fetched.add(stat)


def _name(aside: Path, path: Path, size: int, crc64nvme: str) -> None:
    """Gives what was fetched its name, unless a file with the same bytes has it meanwhile."""
    try:
        os.link(aside, path)  # unlike a rename it fails where the name is taken
    except OSError:  # also where the file system knows no links
        if not _holds(path, size, crc64nvme):
            aside.replace(path)
    aside.unlink(missing_ok=True)


def _holds(path: Path, size: int, crc64nvme: str) -> bool:
    try:
        return path.stat().st_size == size and disk.checksum(path) == (size, crc64nvme)
    except OSError:
        return False
