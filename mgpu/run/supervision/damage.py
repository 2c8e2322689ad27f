"""A checkpoint that a node calls damaged: is it, or is the node? Decided before anything is given up for its word.

Two who have read it are believed. One machine alone may have bad memory, a bad disk or a bad network, so the operator
reads every byte itself, where that takes no longer than a few minutes of machines that wait. If it finds the checkpoint
whole, the machine is at fault and is replaced. If it cannot tell, it believes the machine once: if a second checkpoint
is damaged for it alone, the machine is what both have in common.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from mgpu.errors import InputError, ProviderError
from mgpu.events import Note, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job import operator_store
from mgpu.run.nodes import agent_client
from mgpu.run.record.session import Session
from mgpu.run.supervision.background_calls import BackgroundCalls
from mgpu.run.supervision.limits import Limit, StopReason
from mgpu.run.supervision.supervisor import Damage, Ended

OPERATOR = "operator"
READ_S = 300.0  # for the operator to read a checkpoint whose damage one machine alone has told


def judge(
    session: Session,
    fleet: StackOutput,
    nodes: NodeSet,
    ended: Ended,
    limits: Sequence[Limit],
    clock: Callable[[], float] = time.monotonic,
) -> Ended:
    """The end of an attempt in which nodes have called checkpoints damaged. The record has those that are, from which
    no attempt begins; machines whose word is not believed are among the lost ones, to be replaced. After what a limit
    has stopped no attempt begins at all: its machines do not wait for it, nor for more than what was read until then.
    """
    if ended.stopped_by:
        return ended

    def reached() -> StopReason | None:
        asked = StopReason.USER if session.asked_to_end else None
        found = (limit.check(time.time(), session.record) for limit in limits)
        return asked or next(filter(None, found), None)

    by_id = defaultdict[str, list[Damage]](list)
    for each in ended.damaged:
        by_id[each.checkpoint_id].append(each)
    for checkpoint_id, told in by_id.items():
        problem = _fault_of(session, fleet, nodes, checkpoint_id, told, reached, clock)
        if problem is None:
            session.record.damaged[checkpoint_id] = f"node {told[0].rank}: {told[0].problem}"
            continue
        rank = told[0].rank
        session.emit(Warned(f"node {rank}: {told[0].problem}; {problem}: its machine is at fault, not the checkpoint"))
        ended = replace(ended, lost=(*sorted({*ended.lost, rank}),), reason=f"{ended.reason}; {problem}")
    if ended.interruption is not None:
        interruption = replace(ended.interruption, nodes=list(ended.lost), reason=ended.reason)
        ended = replace(ended, interruption=interruption)
    session.save()
    if stopped_by := reached():
        session.emit(Note(f"stopping: {stopped_by.words}"))
        return replace(ended, stopped_by=stopped_by)
    return ended


def _fault_of(
    session: Session,
    fleet: StackOutput,
    nodes: NodeSet,
    checkpoint_id: str,
    told: list[Damage],
    reached: Callable[[], StopReason | None],
    clock: Callable[[], float],
) -> str | None:
    """Why the one machine that calls a checkpoint damaged is not believed; None: it is damaged."""
    record = session.record
    ids = {node.rank: node.id for node in fleet.nodes}
    by = record.damage_told.setdefault(checkpoint_id, [])
    by += sorted({ids[each.rank] for each in told} - {*by})
    if len(by) > 1:
        return None
    whole = _whole(session, nodes, checkpoint_id, reached, clock)
    if whole:
        return f"read from here {checkpoint_id} is whole"
    if whole is None:
        others = [name for name, who in record.damage_told.items() if who == by and name != checkpoint_id]
        if not others:
            return None
        for name in others:  # noted on this machine's word alone
            record.damaged.pop(name, None)
        return f"it has called {', '.join(others)} damaged before, and nobody else has"
    by.append(OPERATOR)
    return None


class _Enough(Exception):
    """Reading on is not worth the wait."""


def _whole(
    session: Session,
    nodes: NodeSet,
    checkpoint_id: str,
    reached: Callable[[], StopReason | None],
    clock: Callable[[], float],
) -> bool | None:
    """Whether the operator finds every byte of a checkpoint as it was committed; None: it cannot tell, or not soon."""
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.newest import problems_of
    from mgpu_train.store import StoreError

    record, times, until = session.record, session.timeouts, clock() + READ_S
    found, enough, calls = list[bool | None](), threading.Event(), BackgroundCalls()
    url = record.store
    if url is None:
        return None

    def progress(_count: int) -> None:
        if enough.is_set():
            raise _Enough

    def read() -> None:
        store = operator_store.for_record(url, record)
        log = CommitLog(store, record.run_id)
        commits = [commit for commit in log.checkpoints() if commit.checkpoint_id == checkpoint_id]
        found.append(not problems_of(store, log, commits[0], deep=True, progress=progress) if commits else None)

    agent_client.hold(nodes, times)  # its agents have ended
    with session.phase("verifying", checkpoint_id):
        try:
            calls.begin(checkpoint_id, read)  # a store may say nothing for minutes
            while not found:
                if clock() > until or reached():
                    raise _Enough
                calls.wait(times.poll_s)
            return found[0]
        except (_Enough, StoreError, InputError, ProviderError) as error:
            why = str(error) or f"that takes longer than {READ_S:g} s, or the run is to end"
            session.emit(Warned(f"{checkpoint_id} could not be read here to see whether it is damaged: {why}"))
            return None
        finally:
            enough.set()
