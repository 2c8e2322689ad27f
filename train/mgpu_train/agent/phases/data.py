"""The run's `data:` items: files that a node fetches before the launcher starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.phases.folders import inside
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.status.words import count
from mgpu_train.config import DataItem
from mgpu_train.store import NoStore, NotFound, StoreError, disk, open_store
from mgpu_train.store.base import ASIDE, Stat, Store, key_problem

_AT_ONCE = 8  # transfers


def fetch_data(attempt: Attempt, item: DataItem) -> None:
    """Fetches all files below an address into a folder; those that are here in full size are not fetched again.

    Raises:
        AttemptFailed: the address is wrong or empty, a name cannot be a file's, or the store failed.
    """
    into = Path(item.to) if item.to.startswith("/") else inside(attempt.work, item.to, "data")
    try:
        store = open_store(item.source, attempt.secrets.store, timeouts=attempt.times)
        found = [stat for stat in store.list("") if not stat.key.endswith("/")]
        if not found:
            raise AttemptFailed(Fault.USER, f"data: there is nothing under {item.source}")
        size = sum(stat.size for stat in found) >> 20
        attempt.say(f"data: {count(len(found), 'file')}, {size} MiB, from {item.source}")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda stat: _fetch(store, stat, into), found))
    except (NoStore, NotFound) as error:
        raise AttemptFailed(Fault.USER, f"data: {item.source}: {error}") from error
    except (StoreError, OSError) as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"data: {item.source}: {error}") from error


def _fetch(store: Store, stat: Stat, into: Path) -> None:
    if problem := key_problem(stat.key):
        raise AttemptFailed(Fault.USER, f"data: the object {stat.key[:80]!r} {problem}")
    path = into / stat.key
    if path.is_file() and path.stat().st_size == stat.size:  # of an older attempt; a name is given to whole files only
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    known = store.stat(stat.key)
    # an object that was uploaded without this checksum is read twice
    crc64nvme = (known.crc64nvme if known else None) or store.checksum(stat.key, stat.size)
    aside = path.with_name(f"{ASIDE}{path.name}")
    store.get_file(stat.key, aside, size=stat.size, crc64nvme=crc64nvme)
    disk.flush(aside)  # before it has its name: that alone tells a later attempt that it is whole
    aside.replace(path)
