"""Of runs that are over: which records and code may be removed, by name or by age, and how; and what of their stores
nobody will ask for.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu.errors import InputError, MgpuError
from mgpu.events import Emit, Note
from mgpu.run.budget import costs
from mgpu.run.job import operator_store
from mgpu.run.lifecycle.post_mortem import forgotten
from mgpu.run.nodes import code_upload, outputs
from mgpu.run.record import files, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, busy, every, find, supervised, supervising

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.commit_log import CommitLog

GONE = ("confirmed", "not ours")  # `Record.teardown`: nothing of it is billed to us
_LATE_S = 3600.0  # after the end of machines that nobody saw ending: their clocks may be others


def obstacle(record: Record) -> str | None:
    """Why this run's record has to stay; None: it may go."""
    return "it is being supervised" if supervised(record.run_id) else _needed(record)


def _needed(record: Record) -> str | None:
    if not record.state.final:
        return f"it is not over: {record.state}"
    if record.teardown not in GONE and (record.fleet or record.teardown != "none"):
        return "its machines may be billed"
    return None


def due(older_than_days: float | None, keep_last: int | None) -> list[Record]:
    """Runs that are over and may go, oldest first: those that ended so long ago, and are not among the newest."""
    over = sorted((each for each in every() if obstacle(each) is None), key=_ended_at)
    if keep_last is not None:
        over = over[: max(0, len(over) - keep_last)]
    before = time.time() - (older_than_days or 0) * 86400
    return [each for each in over if _ended_at(each) <= before]


def remove(records: Sequence[Record]) -> int:
    """Removes the records, and the code that no other run has; the bytes that this freed.

    Raises:
        InputError: one of them may not go any more; those before it are gone.
        StackError: the backend does not answer.
    """
    freed = 0
    costs.remember(records)  # before they go: what was spent stays known
    for record in records:
        root = Folder(record.run_id).root
        with supervising(record.run_id) as mine:
            if not mine:
                raise busy(record.run_id)
            now = find(record.run_id) or record  # as nobody changes it any more: it may have been resumed meanwhile
            if why := _needed(now):
                raise _refusal({now.run_id: why}, "not removed")
            if now != record:
                costs.remember([now])
            freed += size(root)
            shared.remove(record.run_id)  # first: what is removed here alone would come back
            files.remove(record.run_id)
            aside = root.with_name(f".removed.{record.run_id}")
            shutil.rmtree(aside, ignore_errors=True)
            root.rename(aside)  # gone at once, whatever ends this process
        shutil.rmtree(aside, ignore_errors=True)
    if records:
        freed += code_upload.prune()
    return freed


def require_removable(records: Sequence[Record]) -> None:
    """Raises InputError with every run that may not go, and what to do about it."""
    problems = {each.run_id: why for each in records if (why := obstacle(each))}
    if problems:
        raise _refusal(problems, "not removed, nor any other run")


def _refusal(problems: Mapping[str, str], what: str) -> InputError:
    return InputError(
        f"{', '.join(problems)}: {what}",
        "\n".join(f"{run}: {why}" for run, why in problems.items()),
        f"End them first: `mgpu stop {next(iter(problems))}`, or `mgpu down {next(iter(problems))}`.",
    )


def size(root: Path) -> int:
    """Bytes of a run's files, without those that it shares."""
    found = (path.lstat() for path in root.rglob("*") if not path.is_dir() or path.is_symlink())
    return sum(each.st_size for each in found if each.st_nlink == 1)


def _ended_at(record: Record) -> float:
    return record.ended_at or record.updated_at or record.created_at


def tidy_store(record: Record, emit: Emit) -> None:
    """Removes from the store of a run that is over what nobody will ask for: of one that has succeeded the outputs of
    older attempts that a newer one has left, too; of any other the parts of checkpoints that were never committed. What
    stays, because the store does not answer or allow it, is told."""
    if record.store is None or not record.attempt:
        return
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.retention import remove_parts
    from mgpu_train.store import StoreError

    succeeded = record.state is State.SUCCEEDED
    try:
        store = operator_store.for_record(record.store, record)
        if not succeeded:
            log = CommitLog(store, record.run_id)
            remove_parts(store, record.run_id, log=log, over=attempts_over(record, log, time.time()))
        elif record.outputs is not None and record.attempt > 1:
            outputs.drop_superseded(store, record.run_id)
    except (StoreError, MgpuError, ValueError) as error:  # a provider that cannot be used here, too: the run is over
        what = "outputs of older attempts" if succeeded else "parts of checkpoints that were not committed"
        emit(Note(f"{what} stay in {record.store}/{record.run_id}: {error}"))


def attempts_over(record: Record, log: CommitLog, now: float) -> int:
    """Up to which attempt nothing of the run can write any more: it is over, and its machines are gone, or are past the
    last end that they can have. 0: nobody knows. Raises StoreError."""
    if not record.writer:  # its newest attempt was on a kept fleet that it has left, or before it was resumed
        return 0
    last = max(record.hard_cap_at, record.lease_until) + _LATE_S if record.hard_cap_at else float("inf")
    gone = record.state.final and (record.teardown == "confirmed" or now > last)
    # without the end of its log nobody knows what was committed
    return record.attempt if gone and not forgotten(record, log) else 0
