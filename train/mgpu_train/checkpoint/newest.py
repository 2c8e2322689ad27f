"""What a run resumes from: the newest committed checkpoint that is what it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit, Unreadable, standing
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.store.base import Damaged, NotFound, Progress, Store


def newest_verified(
    store: Store,
    run_id: str,
    *,
    deep: bool = False,
    damaged: Mapping[str, str] | None = None,
    report: Callable[[str], None],
) -> Commit | None:
    """The newest committed checkpoint that verifies; None: the run has committed none.

    Every step back is told to `report`. `damaged`: checkpoints that somebody has read and found so, by id with the
    problem; only `deep` would find it here.

    Raises:
        Damaged: checkpoints were committed, or may have been where the log cannot be read, and not one of them
            verifies: starting from zero is not decided here.
        StoreError: the store cannot be read: that says nothing of its checkpoints.
    """
    log = CommitLog(store, run_id)
    lines = log.read()
    stand = {commit.seq: commit for commit in standing(lines)}
    bad, unread = 0, 0
    for line in reversed(lines):
        commit = stand.get(line.seq)
        if commit is not None:
            known = (damaged or {}).get(commit.checkpoint_id)
            problems = (known,) if known else problems_of(store, log, commit, deep=deep)
            if not problems:
                return commit
            bad += 1
            problems = (f"{commit.checkpoint_id} does not verify: {problems[0]}", *problems[1:])
        elif isinstance(line, Unreadable):
            unread += 1
            problems = (line.problem,)
        else:
            continue
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        report(f"{problems[0]}{more}; looking at what was committed before")
    if bad or unread:
        entries = f", and {unread} entries of its commit log cannot be read" if unread else ""
        raise Damaged(
            f"run {run_id}: none of its {bad} committed checkpoints verifies{entries}. "
            "Mend the store, or start a new run to train from the beginning."
        )
    return None


def problems_of(
    store: Store, log: CommitLog, commit: Commit, *, deep: bool, progress: Progress | None = None
) -> tuple[str, ...]:
    """Why a committed checkpoint does not verify, its entry in the log included; none: it does. `progress`: of bytes
    that are read, with `deep`.

    Raises StoreError when the store cannot be read: that says nothing of the checkpoint.
    """
    try:
        manifest = log.manifest(commit)
    except (Damaged, NotFound) as error:
        return (str(error),)
    return verify(store, manifest.run_id, manifest, deep=deep, progress=progress)
