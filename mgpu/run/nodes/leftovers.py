"""What a run that has succeeded leaves on machines that stay, and nobody needs there: its checkpoints that the store
has, what it went on from, what was fetched for it alone. All stays of a run that was stopped, for it may go on there,
and of one that has failed, for who looks for the cause."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

from mgpu_train.agent.host.python_env import ProblemKind

from mgpu.errors import RemoteError
from mgpu.events import Warned
from mgpu.remote.node import Node
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
    """Removes it from these nodes, once the run's newest checkpoint has been judged good. What cannot be removed now
    stays, and is told; a node that has not done it within `command_s` is not waited for."""
    from mgpu_train.store import StoreError

    stored: dict[int, list[str]] = {}
    try:
        if request.checkpoint is not None:
            stored = _stored(session.record, request.checkpoint.to)
    except StoreError as error:
        session.emit(Warned(f"the run's checkpoints are left on the fleet, for its store cannot be asked: {error}"))
    record, limit_s = session.record, session.timeouts.command_s
    argv = (record.run_id, str(record.attempt), f"{limit_s:g}")

    def ask(node: Node) -> None:
        parts = stored.get(node.target.rank, [])
        host_script.ask(node, "leftovers.py", *argv, *parts, seconds=limit_s, cures=_CURES, mute=_MUTE)

    try:
        nodes.each(ask)
    except RemoteError as error:
        session.emit(Warned(f"what the run leaves behind may still be on the fleet: {error.what}"))


def _stored(record: Record, to: str) -> dict[int, list[str]]:
    """By node: its parts of the attempt's checkpoints that are whole in the store, or were given up there by the run
    file's own rule, each as `STEP:FILES:BYTES`. Raises StoreError."""
    from mgpu_train.agent.uploads.saves import KEPT_IDLE
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.checkpoint.newest import problems_of
    from mgpu_train.store import Damaged, NotFound

    store = operator_store.for_record(to, record)
    log = CommitLog(store, record.run_id)
    stand = {each.checkpoint_id for each in log.checkpoints()}
    own = [line for line in log.read() if isinstance(line, Commit) and line.attempt == record.attempt]
    found = defaultdict[int, list[str]](list)
    # a disk has the newest alone, and one that was uploaded; what older attempts made goes when the next one begins
    for each in own[-KEPT_IDLE - 1 :]:
        if each.checkpoint_id in stand and problems_of(store, log, each, deep=False):
            continue
        with suppress(Damaged, NotFound):
            manifest = log.manifest(each)
            for rank in manifest.writers:
                sizes = [file.size for file in manifest.files if file.node == rank]
                found[rank].append(f"{each.step}:{len(sizes)}:{sum(sizes)}")
    return found
