"""What the agent does next, and how an attempt ended: decided from plain values, without I/O or a clock of its own."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from mgpu_train.agent.attempt import faults
from mgpu_train.agent.attempt.save_budget import Going
from mgpu_train.agent.machine import procs
from mgpu_train.agent.status.log import peer_lost
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job
from mgpu_train.timeouts import Timeouts


class AttemptFailed(Exception):
    """The attempt cannot go on; `fault` says whose fault it is, `reason` what happened, in one line. `suspect`: this
    machine seems to be broken, and is to be replaced; `starved`: the kernel has ended the program, as it was out of
    memory; `damaged`: the id of the checkpoint that it was to go on from, where that is not what was committed."""

    def __init__(
        self,
        fault: Fault,
        reason: str,
        *,
        suspect: bool = False,
        starved: bool = False,
        damaged: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason
        self.suspect = suspect
        self.starved = starved
        self.damaged = damaged


@dataclass(frozen=True)
class Cause:
    """Why the agent ends a launcher that still runs. `since` is when it was known; `grace_s` until SIGKILL."""

    fault: Fault
    reason: str
    since: float
    grace_s: float

    @property
    def outside(self) -> bool:
        """True when it is not about what the program does: one that finishes all the same has finished."""
        return self.grace_s > 0 or self.fault in (Fault.STOPPED, Fault.PROVIDER)


class Act(StrEnum):
    """What is done to the launcher."""

    WATCH = "watch"
    TERMINATE = "terminate"  # SIGTERM: save and exit
    KILL = "kill"  # SIGKILL, the whole tree


@dataclass(frozen=True)
class Watched:
    """A launcher that runs, as one pass of the agent sees it. All times are of one monotonic clock."""

    now: float
    hung: str | None = None  # no node has shown progress in time: in which words
    silent: bool = False  # ... and one of them is heard no more
    asked: float | None = None  # when a stop was first asked for
    asked_now: bool = False  # ... without grace
    going: Going | None = None  # this machine goes
    fenced: str | None = None  # a newer attempt was met at the commit log
    resumed_step: int = -1  # what the attempt went on from; -1: from zero
    saved_step: int = -1  # newest finished on local disk
    save_s: float = 0.0  # what a last save would take, by what the earlier ones took
    ending: Cause | None = None  # what is being done already


def look(seen: Watched, times: Timeouts) -> tuple[Act, Cause | None]:
    """What to do about the launcher, and why. The first cause stands; only the grace may be cut short."""
    cause = seen.ending or _cause(seen, times)
    if cause is None:
        return Act.WATCH, None
    over = seen.asked_now or seen.now >= cause.since + cause.grace_s
    over = over or (seen.going is not None and seen.now >= seen.going.save_by)
    return (Act.KILL if over else Act.TERMINATE), cause


def asked_to_stop(asked: float, times: Timeouts, save_s: float = 0.0) -> Cause:
    """The operator's request, made at `asked`."""
    return Cause(Fault.STOPPED, "this node was asked to stop", asked, times.grace_s(save_s))


def gone(going: Going, now: float, times: Timeouts, save_s: float = 0.0) -> Cause:
    """The end of a machine that goes. A save that does not fit is not begun: the steps since the last one are lost
    anyway, and the repair begins the sooner."""
    return Cause(going.fault, going.reason, now, times.grace_s(save_s) if going.fits else 0)


def _cause(seen: Watched, times: Timeouts) -> Cause | None:
    if seen.fenced is not None:
        return Cause(Fault.INFRASTRUCTURE, f"this attempt is over: {seen.fenced}", seen.now, 0)
    if seen.asked is not None:
        return asked_to_stop(seen.asked, times, seen.save_s)
    if seen.going is not None:
        return gone(seen.going, seen.now, times, seen.save_s)
    if (why := _went_back(seen.saved_step, seen.resumed_step)) is not None:
        return Cause(Fault.USER, why, seen.now, 0)
    if seen.hung is None:
        return None
    if seen.silent:
        why = f"{seen.hung}; a node that was heard before is heard no more"
        return Cause(Fault.INFRASTRUCTURE, why, seen.now, 0)
    return Cause(Fault.USER, seen.hung, seen.now, 0)  # every machine answers: what hangs is the program


def _went_back(saved: int, resumed: int) -> str | None:
    """The proof that the program began anew where it was to go on: its checkpoints must not replace better ones."""
    if not 0 <= saved < resumed:
        return None
    return f"the program saved step-{saved}, but was to go on from step {resumed}: it has to load MGPU_RESUME_DIR"


@dataclass(frozen=True)
class Ended:
    """All that is known when the launcher has ended and the uploads are over. Steps are -1 where there is none."""

    exit_code: int  # the launcher's
    last_words: str = ""
    lines: tuple[str, ...] = ()  # the end of its log
    kernel: tuple[str, ...] = ()  # what the kernel has said meanwhile
    rank: int | None = (
        None  # that failed first, as torchrun knows it; None: there is none, or it is the launcher itself
    )
    rank_code: int = 0  # that rank's exit code, negative for a signal
    full: bool = False  # the disk has no room left: what a program said last may be lost
    starved: int = 0  # processes that the kernel killed meanwhile, because this machine was out of memory
    hang: str = ""  # where its ranks were, and which of them the others waited for
    peers_answer: bool = False  # every other node's agent has been heard, and lately
    cause: Cause | None = None  # set when the agent ended it
    said: str | None = None  # the trainer's own last metrics line: "done" or "stopped"
    resumed_step: int = -1
    saved_step: int = -1  # newest finished on local disk
    durable_step: int = -1  # node 0: committed; others: uploaded
    problem: str | None = None  # why the final checkpoint is not durable
    unkept: int = -1  # newest of which the program has left what cannot be kept


def verdict(job: Job, end: Ended) -> AttemptFailed | None:
    """How the attempt ended on this node; None: DONE."""
    if end.cause is not None and not _finished(end, end.cause):
        return AttemptFailed(end.cause.fault, end.cause.reason)
    if end.said == "stopped":  # whatever the launcher makes of it
        why = "the program was stopped before its end, and not by this agent: a peer was stopped, or lost its agent"
        return AttemptFailed(Fault.INFRASTRUCTURE, why)
    if end.exit_code != 0:
        return _exited(job, end)
    if job.checkpoint is None or not has_part(job):
        return None
    failure = _durable(job, end)
    if failure is not None and end.cause is not None and end.cause.fault is Fault.PROVIDER:
        return AttemptFailed(end.cause.fault, f"{end.cause.reason}; {failure.reason}")
    return failure


def lost(end: Ended) -> bool:
    """True when nothing that the uploads may still do can make a success of it."""
    if end.cause is not None:
        return not _finished(end, end.cause)
    return end.exit_code != 0 or end.said == "stopped"


def _finished(end: Ended, cause: Cause) -> bool:
    # torchrun exits 1 after a clean stop, and a program may finish while it is asked to stop: believe its own word
    return cause.outside and end.exit_code == 0 and end.said == "done"


def has_part(job: Job) -> bool:
    """True when this node uploads a part of every checkpoint."""
    return job.checkpoint is not None and (job.node_rank == 0 or job.checkpoint.writers == "all")


def asks_peers(job: Job) -> bool:
    """True when only all nodes together know whether the attempt succeeded: a program of the user's that was stopped on
    one node may end with exit code 0 on all. The bundled trainer says what it did, and to which step."""
    return job.checkpoint is not None and job.command is not None and job.nodes > 1


def _exited(job: Job, end: Ended) -> AttemptFailed:
    """A machine is at fault where there is evidence, where a peer was lost, which its own agent explains, or where
    something else has the port that the attempt was given; the next one has another. All else a program can do to
    itself, and would do again on other machines: an exit code, a signal, more memory than there is."""
    code = end.exit_code if end.rank is None else end.rank_code
    found = faults.find(end.lines, end.kernel, last_words=end.last_words, code=code, nodes=job.nodes)
    rank = end.rank if found is None or found.rank is None else found.rank
    what = f"{'the program' if rank is None else f'rank {rank}'} {procs.ended(code)}"
    if found is not None:
        # every machine answers: what hangs is the program, as where an agent sees it first
        fault = Fault.USER if found.sign.hang and end.peers_answer else found.sign.fault
        where = f"; {end.hang}" if found.sign.hang and end.hang else ""
        return AttemptFailed(fault, f"{what}: {found.sign.means}: {found.line}{where}", suspect=found.sign.machine)
    if code == -signal.SIGKILL:
        return AttemptFailed(Fault.USER, f"{what}: {_killer(end)}", starved=end.starved > 0)
    if code == -signal.SIGBUS:
        what += f": {_CUT_OFF}"
    what += f": {end.last_words}" if end.last_words else ""
    what += f"; {DISK_FULL}" if end.full else ""
    lost = job.nodes > 1 and peer_lost(end.last_words)
    taken = "EADDRINUSE" in end.last_words and f"port: {job.master_port}," in end.last_words
    return AttemptFailed(Fault.INFRASTRUCTURE if lost or taken else Fault.USER, what)


DISK_FULL = "the disk is full: `disk_gib`"
# a page of mapped memory could not be had; where a disk has failed the kernel says so, and that weighs more
_CUT_OFF = "most often /dev/shm is full (a container's is small by default), or a mapped file was cut off"


def _killer(end: Ended) -> str:
    if end.starved:
        return "out of memory, the kernel says: a smaller batch, fewer workers of the data loader, or a larger machine"
    return "most often that is a limit of memory (a container's, for example); mgpu did not do it"


def _durable(job: Job, end: Ended) -> AttemptFailed | None:
    if (why := _went_back(end.saved_step, end.resumed_step)) is not None:
        return AttemptFailed(Fault.USER, why)
    safe = max(end.durable_step, end.resumed_step)
    if end.saved_step > safe:
        why = end.problem or "it was not uploaded in time"
        fault = Fault.USER if end.unkept == end.saved_step else Fault.INFRASTRUCTURE
        return AttemptFailed(fault, f"the final checkpoint, step-{end.saved_step}, is not safe: {why}")
    if job.train is not None and safe != job.train.steps:
        why = f"the program ended with exit code 0, but its last checkpoint is of step {safe}, not {job.train.steps}"
        return AttemptFailed(Fault.INFRASTRUCTURE, why)
    if safe < 0:
        why = (
            "the program ended with exit code 0, but left no folder `step-<n>` in MGPU_CHECKPOINT_DIR "
            "(one that saves none has `checkpoint: none`, and names its files in `outputs:`)"
        )
        return AttemptFailed(Fault.USER, why)
    return None
