"""What a run that is over has left on machines that stay, and nobody needs there: its checkpoints that the store has,
what it went on from, what was fetched for it alone. A failed run's stays, for who looks for the cause."""

from __future__ import annotations

import json
from typing import Any

from mgpu_train.agent.host.python_env import ProblemKind

from mgpu.errors import RemoteError
from mgpu.events import Warned
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job import operator_store
from mgpu.run.job.request import Request
from mgpu.run.nodes import host_script
from mgpu.run.record.record import Record
from mgpu.run.record.session import Session

_CURE = "Remove it there (`mgpu ssh`), or leave it: it goes with the machines."
_CURES = {
    ProblemKind.BUSY: ("an agent of the run lives there", _CURE),
    ProblemKind.DISK: ("its disk refuses", _CURE),
}
_MUTE = ("cannot clear up", "The machine's own Python has to be 3.8 or newer.")


def clear(session: Session, request: Request, nodes: NodeSet) -> None:
    """Removes it from these nodes. What cannot be removed now stays, and is told."""
    from mgpu_train.store import StoreError

    stored: dict[str, Any] = {"steps": [], "whole": False}
    try:
        if request.checkpoint is not None:
            stored = _stored(session.record, request.checkpoint.to)
    except StoreError as error:
        session.emit(Warned(f"the run's checkpoints are left on the fleet, for its store cannot be asked: {error}"))
    record, times = session.record, session.timeouts
    argv, given = (record.run_id, str(record.attempt), f"{times.command_s:g}"), json.dumps(stored).encode()
    try:
        nodes.each(
            lambda node: host_script.ask(
                node, "leftovers.py", *argv, seconds=times.outputs_s, cures=_CURES, mute=_MUTE, stdin=given
            )
        )
    except RemoteError as error:
        session.emit(Warned(f"what the run leaves behind is still on the fleet: {error.what}"))


def _stored(record: Record, to: str) -> dict[str, Any]:
    """What the nodes are told (`mgpu_train.agent.host.leftovers.Stored`). A checkpoint counts if it is whole in the
    store, or if the run file's own rule has given it up there, and another one is whole. Raises StoreError."""
    from mgpu_train.agent.uploads.saves import KEPT_IDLE
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.checkpoint.newest import problems_of

    store = operator_store.for_record(to, record)
    log = CommitLog(store, record.run_id)
    stand = {each.checkpoint_id for each in log.checkpoints()}
    # a disk has the newest alone, and one that was uploaded
    newest = [line for line in log.read() if isinstance(line, Commit)][-KEPT_IDLE - 1 :]
    sound = [each for each in newest if each.checkpoint_id not in record.damaged]
    there = [each for each in sound if each.checkpoint_id in stand]
    whole = [each for each in there if not problems_of(store, log, each, deep=False)]
    given_up = [each for each in sound if each.checkpoint_id not in stand] if whole else []
    return {
        "steps": [each.step for each in whole + given_up if each.attempt == record.attempt],
        "whole": bool(whole),
    }
