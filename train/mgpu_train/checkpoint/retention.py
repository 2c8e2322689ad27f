"""Which checkpoints the store keeps: what goes is decided first, as a value, and carried out second."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit, Line, Unreadable, end_of, newest_attempt, standing
from mgpu_train.checkpoint.log.manifest import PrunedEntry
from mgpu_train.checkpoint.newest import problems_of
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.config import Retention
from mgpu_train.store.base import Store

_THREADS = 8  # objects that go at a time
_ID = re.compile(r"a([0-9]{3,6})-step-([0-9]{1,15})")


@dataclass(frozen=True)
class PrunePlan:
    """What stays, by checkpoint id with the reason, newest first; what goes, oldest first, and how many bytes it has.

    `damaged`: checkpoints that were found not to verify, by id with the first problem. Somebody has to be told.
    """

    keep: Mapping[str, str]
    drop: tuple[str, ...]
    bytes: int
    damaged: Mapping[str, str]


def plan_prune(
    store: Store, run_id: str, retention: Retention, *, deep: bool = False, log: CommitLog | None = None
) -> PrunePlan:
    """What `retention` keeps of a run's committed checkpoints, and the newest one that verifies in any case (F29).

    `deep`: every byte is read to find that one. Where none verifies nothing goes. `log`: one that was read before.

    Raises StoreError.
    """
    log = log or CommitLog(store, run_id)
    commits = log.checkpoints()
    keep = _wanted(commits, retention)
    damaged: dict[str, str] = {}
    if len(keep) < len(commits):
        good = _newest_good(store, log, commits, damaged, deep=deep)
        if good is None:  # whatever is left may yet be of use to somebody
            keep = {commit.checkpoint_id: "none of them verifies" for commit in commits}
        else:
            keep.setdefault(good.checkpoint_id, "the newest that verifies")
    drop = [commit for commit in reversed(commits) if commit.checkpoint_id not in keep]
    return PrunePlan(
        keep={commit.checkpoint_id: keep[commit.checkpoint_id] for commit in commits if commit.checkpoint_id in keep},
        drop=tuple(commit.checkpoint_id for commit in drop),
        bytes=sum(commit.bytes for commit in drop),
        damaged=damaged,
    )


def prune(store: Store, run_id: str, plan: PrunePlan, *, log: CommitLog | None = None, over: int = 0) -> list[str]:
    """Carry a plan out: the log says what is given up before the first file goes, so nobody takes it for damage.

    What no commit can claim any more goes too: parts of older attempts, of one that has written its end, and of steps
    that were passed over; with `over` also those of attempts up to this one, of which somebody knows that nothing of
    them runs any more, though none wrote their end. Returns the ids that are gone.

    Raises StoreError; what is left then goes at the next call. Where nothing may be deleted nothing is given up.
    """
    log = log or CommitLog(store, run_id)
    stand = {commit.checkpoint_id for commit in log.checkpoints()}
    drop = [name for name in plan.drop if name in stand]
    if drop:
        in_threads(store.may_delete, [keys.checkpoint(run_id, name) for name in drop], _THREADS)
        log.give_up(drop, f"prune-{uuid.uuid4().hex}")
    return sorted({*remove_parts(store, run_id, log=log, over=over), *drop})


def remove_parts(store: Store, run_id: str, *, log: CommitLog, over: int = 0) -> set[str]:
    """Removes what no commit can claim any more, see `prune`; returns the ids of what was there.

    Raises StoreError; what is left then goes at the next call.
    """
    lines = log.read()
    kept = {commit.checkpoint_id for commit in standing(lines)}
    prefix = keys.checkpoints(run_id)

    @lru_cache  # keys are many, checkpoints few
    def gone(name: str) -> bool:
        return name not in kept and _over(name, lines, over)

    def dead(key: str) -> bool:
        return gone(keys.checkpoint_of(run_id, key))

    doomed = [stat.key for stat in store.list(prefix) if dead(stat.key)]
    for sidecars in (True, False):  # without its sidecar a part is not whole
        in_threads(store.delete, [key for key in doomed if key.endswith(".json") == sidecars], _THREADS)
    store.sweep(prefix, dead)
    return {keys.checkpoint_of(run_id, key) for key in doomed}


def _wanted(commits: Sequence[Commit], retention: Retention) -> dict[str, str]:
    """What the rules themselves keep, by id with the first reason; `commits` newest first."""
    last, hours, best = retention.keep_last, retention.keep_every_hours, retention.keep_best
    newest = "the newest" if last == 1 else f"one of the newest {last}"
    keep = {commit.checkpoint_id: newest for commit in commits[:last]}
    if hours is not None:
        for commit in _spaced(reversed(commits), hours * 3600):
            keep.setdefault(commit.checkpoint_id, "one every hour" if hours == 1 else f"one every {hours:g} hours")
    for commit in _best(commits, retention):
        which = "the best" if best == 1 else f"one of the best {best}"
        value = f"{retention.best_metric} {commit.meta[retention.best_metric]:.6g}"
        keep.setdefault(commit.checkpoint_id, f"{which}: {value}")
    return keep


def _spaced(commits: Iterator[Commit], seconds: float) -> Iterator[Commit]:
    """The first, and each that is so far from the one before it: from the oldest on, so that what is kept stays kept.

    A clock that was set back, or was wrong for a while, costs at most one checkpoint more.
    """
    last: float | None = None
    for commit in commits:
        if last is None or abs(commit.at - last) >= seconds:
            last = commit.at
            yield commit


def _best(commits: Sequence[Commit], retention: Retention) -> list[Commit]:
    """Those with the best metric, of the ones that have it; of equal ones the newer."""
    sign = 1 if retention.best_mode == "min" else -1
    rated = [
        (sign * value, -commit.seq, commit)
        for commit in commits
        if isinstance(value := commit.meta.get(retention.best_metric), int | float)
    ]
    return [commit for _, _, commit in sorted(rated, key=lambda each: each[:2])[: retention.keep_best or 0]]


def _newest_good(
    store: Store, log: CommitLog, commits: Sequence[Commit], damaged: dict[str, str], *, deep: bool
) -> Commit | None:
    """The newest that verifies; those before it that do not go into `damaged`."""
    for commit in commits:
        problems = problems_of(store, log, commit, deep=deep)
        if not problems:
            return commit
        damaged[commit.checkpoint_id] = problems[0]
    return None


def _over(name: str, log: Sequence[Line], over: int) -> bool:
    """True for a checkpoint that was given up, or that is not committed and never can be; attempts up to `over` have
    ended."""
    found = _ID.fullmatch(name)
    if found is None:  # nothing of ours
        return False
    if any(isinstance(line, PrunedEntry) and name in line.checkpoint_ids for line in log):
        return True
    readable = [line for line in log if not isinstance(line, Unreadable)]
    if len(readable) < len(log):  # its commit may be what cannot be read
        return False
    attempt, step = int(found[1]), int(found[2])
    newest = newest_attempt(readable)
    if (
        attempt < newest or attempt == newest <= over or end_of(readable, attempt)
    ):  # after its end an attempt commits nothing
        return True
    ahead = [line.step for line in readable if isinstance(line, Commit) and line.attempt == attempt]
    return attempt == newest and step < max(ahead, default=-1)
