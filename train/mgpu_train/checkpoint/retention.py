"""Which checkpoints the store keeps."""

from __future__ import annotations

import re
import uuid
from functools import lru_cache

from mgpu_train.checkpoint import keys
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.lines import Commit, Line, Unreadable, standing
from mgpu_train.checkpoint.manifest import PrunedEntry
from mgpu_train.checkpoint.newest import problems_of
from mgpu_train.store.base import Store

_ID = re.compile(r"a([0-9]{3,6})-step-([0-9]{1,15})")


def prune(store: Store, run_id: str, keep_last: int, *, deep: bool = False) -> list[str]:
    """Keep the newest `keep_last` committed checkpoints, and the newest one that verifies; remove the others' files.

    What no commit can claim any more goes too: parts of older attempts, and of steps that were passed over. The log
    says what is given up before the first file goes, so nobody takes it for damage. Called after a commit. Returns the
    ids that are gone.

    Raises StoreError; what is left then goes at the next call.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: at least one checkpoint is kept")
    log = CommitLog(store, run_id)
    surplus = _surplus(store, log, keep_last, deep=deep)
    if surplus:
        log.give_up(surplus, f"prune-{uuid.uuid4().hex}")
    entries = log.read()
    kept = {entry.checkpoint_id for entry in standing(entries)}
    prefix = keys.checkpoints(run_id)

    @lru_cache  # keys are many, checkpoints few
    def over(name: str) -> bool:
        return name not in kept and _over(name, entries)

    def dead(key: str) -> bool:
        return over(keys.checkpoint_of(run_id, key))

    doomed = [stat.key for stat in store.list(prefix) if dead(stat.key)]
    # sidecars sort behind their node's folder, and go first: without one a part is not whole
    for key in sorted(doomed, key=lambda key: not key.endswith(".json")):
        store.delete(key)
    store.sweep(prefix, dead)
    return sorted({keys.checkpoint_of(run_id, key) for key in doomed} | set(surplus))


def _surplus(store: Store, log: CommitLog, keep_last: int, *, deep: bool) -> list[str]:
    """The ids that go."""
    checkpoints: list[Commit] = log.checkpoints()
    if len(checkpoints) <= keep_last:
        return []
    good = next((e for e in checkpoints if not problems_of(store, log, e, deep=deep)), None)
    if good is None:  # nothing verifies: whatever is left may yet be of use to somebody
        return []
    return [entry.checkpoint_id for entry in checkpoints[keep_last:] if entry is not good]


def _over(name: str, log: list[Line]) -> bool:
    """True for a checkpoint that was given up, or that is not committed and never can be."""
    found = _ID.fullmatch(name)
    if found is None:  # nothing of ours
        return False
    if any(isinstance(entry, PrunedEntry) and name in entry.checkpoint_ids for entry in log):
        return True
    readable = [entry for entry in log if not isinstance(entry, Unreadable)]
    if len(readable) < len(log):  # its commit may be what cannot be read
        return False
    attempt, step = int(found[1]), int(found[2])
    newest = max((entry.attempt for entry in readable), default=0)
    ahead = [e.step for e in readable if isinstance(e, Commit) and e.attempt == attempt]
    return attempt < newest or (attempt == newest and step < max(ahead, default=-1))
