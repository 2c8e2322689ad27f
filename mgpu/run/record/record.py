"""A run's record on the operator's machine: what is remembered of it, readable after the machines are gone.

    <backend>/mgpu/runs/<run id>/     (without a backend of the user's: <state>/runs/<run id>/)
        record.json     this module's `Record`, replaced atomically
        mgpu.yaml       the run file as it was
        logs/           node-<rank>.<n>.<instance>.log, byte for byte what that instance's log holds
        journal/        one file per writing process
        work/           the code, as every attempt gets it (with `command:`)
        metrics/        rank-<rank>.jsonl, of all attempts (`mgpu.run.supervision.metrics`)
        pulumi/         configuration and logs of the engine, for a stack that `mgpu launch` made
        lock            held by the one process that supervises (`mgpu.run.record.supervisor_lock`)
        stop            exists when `mgpu stop` asked for the end

Plain dataclasses and JSON, no pydantic: `mgpu status` and `mgpu ls` read them in a few milliseconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu.backend import location
from mgpu.errors import InputError, TakenOver
from mgpu.fields import Document, known_fields, plain
from mgpu.run.record import shared
from mgpu.run.record.folder import Folder, runs
from mgpu.run.record.supervisor_lock import Holder, held, hold, holder, taken_from

if TYPE_CHECKING:
    from mgpu.iac.outputs import StackOutput

_PUSH_EVERY_S = 10.0  # a record that changes all the time, to a backend that is a bucket


class State(StrEnum):
    """Where a run is. The first five are alive; the others are final."""

    QUEUED = "queued"  # submitted: nothing is rented, and nobody has begun with it
    PROVISIONING = "provisioning"
    RUNNING = "running"
    REPAIRING = "repairing"
    STOPPING = "stopping"
    TEARDOWN = "teardown"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """True when the run is over."""
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED)


# what may follow what; a final state is never left, but `--resume` opens the run again
_NEXT = {
    State.QUEUED: {State.PROVISIONING, State.TEARDOWN},
    # back to the queue: the kept fleet that it was put on is gone
    State.PROVISIONING: {State.QUEUED, State.RUNNING, State.REPAIRING, State.TEARDOWN, State.FAILED, State.STOPPED},
    State.RUNNING: {
        State.QUEUED,
        State.REPAIRING,
        State.STOPPING,
        State.TEARDOWN,
        State.SUCCEEDED,
        State.FAILED,
        State.STOPPED,
    },
    State.REPAIRING: {State.RUNNING, State.STOPPING, State.TEARDOWN, State.FAILED, State.STOPPED},
    State.STOPPING: {State.REPAIRING, State.TEARDOWN, State.FAILED, State.STOPPED, State.SUCCEEDED},
    State.TEARDOWN: {State.SUCCEEDED, State.FAILED, State.STOPPED},
}


@dataclass
class Interruption(Document):
    """One end of an attempt that was not the run's end, and the way back. Times are UNIX seconds; None: not reached."""

    attempt: int
    reason: str
    fault: str | None
    nodes: list[int]  # ranks whose machines were lost, or were about to be
    step: int  # the newest step that was seen
    heard_at: float  # when a lost node was last heard from; without one, when the end was seen
    noticed_at: float
    ended_at: float | None = None  # nothing of the attempt runs any more
    repaired_at: float | None = None  # the fleet is whole again
    started_at: float | None = None  # all agents have started the next attempt
    resumed_at: float | None = None  # its first new step, by the node's clock
    resumed_step: int | None = None  # of the checkpoint that it went on from; -1: from zero
    starved: bool = False  # a machine was out of memory

    @property
    def steps_lost(self) -> int | None:
        """Steps that were done again; None: not known yet."""
        return None if self.resumed_step is None else max(0, self.step - max(0, self.resumed_step))


@dataclass
class Spent(Document):
    """What the machines of one generation cost this run, and how long it has had them. Times are UNIX seconds, prices
    US dollars per hour for all nodes."""

    generation: int
    price_usd_per_hour: float | None  # None: not known, of machines that another program has rented
    since: float
    until: float | None = None  # given back, kept, or replaced by the next generation; None: the run has them
    other_usd_per_hour: float | None = None  # disks and public addresses; None: not known
    provider: str = ""  # whose machines they are; empty: an earlier mgpu has not written it down

    @property
    def usd_per_hour(self) -> float:
        """All of it, as far as it is known."""
        return (self.price_usd_per_hour or 0.0) + (self.other_usd_per_hour or 0.0)

    def usd(self, now: float) -> float:
        """US dollars until `now`."""
        return self.usd_per_hour * max(0.0, (now if self.until is None else self.until) - self.since) / 3600


@dataclass
class Check(Document):
    """A metric of a run that has succeeded, and whether it is as its run file expects (`expect`)."""

    metric: str
    met: bool
    said: str  # with what it was compared, in words
    value: float | None = None  # None: the run has never reported it
    median: float | None = None  # of earlier runs; None: it was not compared with any
    runs: int = 0  # that were there to compare it with


@dataclass
class Record(Document):
    """What is remembered of a run. Times are UNIX seconds, prices US dollars per hour for all nodes."""

    run_id: str
    name: str
    project: str
    project_base: str  # the run file's folder
    run_file: str
    stack: str
    own_stack: bool
    fleet_name: str  # under which the provider lists the machines
    provider: str
    nodes: int
    project_name: str = ""  # the Pulumi project's; empty: an earlier mgpu has not written it down
    options: dict[str, str] = field(default_factory=dict)  # settings of the provider; nothing secret
    # by name, with their settings, all providers that its machines may be of; empty: `provider` alone
    candidates: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # those of them that were asked for machines
    asking: str = ""  # the one that is asked for a fleet now
    up_to: list[float] = field(default_factory=list)  # for offers up to this `mgpu.plan.rank.Rank`; empty: for any
    searches: int = 0  # for its machines that have come to their end: granted, or refused with nothing left
    moves: bool = False  # its machines are being given back, to be made anew wherever the run file allows
    state: State = State.QUEUED
    attempt: int = 0
    recoveries: int = 0  # attempts after the first of this launch, whoever supervised them
    idle: int = 0  # attempts in a row that committed nothing new
    idle_step: int = -1  # the newest committed step when they began
    interruptions: list[Interruption] = field(default_factory=list)
    writer: str = ""
    supervisor: str = ""  # token of the supervising process in the commit log
    created_at: float = 0.0
    submitted_at: float = 0.0  # by whom it was resumed last; 0: an earlier mgpu has not written it down
    created_by: str = ""  # user and host
    updated_at: float = 0.0
    ended_at: float | None = None
    price_usd_per_hour: float = 0.0
    spending: list[Spent] = field(default_factory=list)  # by generation, oldest first
    begun_at: float = 0.0  # since when its max_hours count: its first attempt trains; 0: none does yet
    max_hours: float = 0.0
    max_usd: float = 0.0  # that it may spend in all; 0: no limit
    month_usd: float = 0.0  # that the month's budget left it in all when its machines were made; 0: no limit
    told_of: dict[str, float] = field(default_factory=dict)  # of each budget the part that was told to be spent
    hard_cap_at: float = 0.0
    sold_out_since: float = 0.0  # there has been no capacity for it since then; 0: there is, or nobody has asked
    lease_until: float = 0.0  # of a fleet that was kept
    store: str | None = None
    store_granted: bool = False  # its machines were given rights there, or may have been, and have them still
    granted_by: list[str] = field(default_factory=list)  # the providers that were; empty: those of its machines
    step: int = -1
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the newest values, by the program's own names
    first_metrics: dict[str, float] = field(default_factory=dict)  # the first ones of what validations measure
    checkpoint_id: str | None = None
    checkpoint_step: int = -1
    damaged: dict[str, str] = field(default_factory=dict)  # checkpoints by id, what is wrong: no attempt begins there
    damage_told: dict[str, list[str]] = field(default_factory=dict)  # by checkpoint: machines, damage.OPERATOR
    saves: dict[str, float] = field(default_factory=dict)  # node 0's newest: `stall_s`, `save_s`; `failed`, `skipped`
    node_phases: list[str] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    agent_seconds: dict[str, float] = field(default_factory=dict)  # node 0's own phases, within `training`
    reason: str = ""
    fault: str | None = None
    stop_reason: str | None = None  # the limit that ended it (`mgpu.run.supervision.limits`)
    exit_code: int | None = None
    verdict: int | None = None  # what the exit code will be if the teardown succeeds; known before it begins
    image: str | None = None  # repository@sha256:..., of every attempt; None: the agent runs without a container
    image_bytes: int | None = None  # of its layers, compressed
    image_workdir: str = ""  # the folder in it that holds the code, with `code.mode: image`
    image_labels: dict[str, str] = field(default_factory=dict)  # those of mgpu's: what it fits
    fleet: dict[str, Any] | None = None  # the stack output `mgpu`, as it was read
    outputs: dict[str, Any] | None = None  # of the newest attempt: `folder`, `files`, `bytes`, how many are `missing`
    trials: list[dict[str, Any]] = field(default_factory=list)  # of `--smoke`, `--tune`, `--lr-range`: see run.view
    teardown: str = "none"  # none | asked | confirmed | kept | not ours
    supervisor_pid: int = 0
    schedule: str = ""  # that has started it; empty: somebody did
    due_at: float = 0.0  # at which time of the schedule
    expect: dict[str, dict[str, Any]] = field(default_factory=dict)  # the run file's, by metric
    earlier: dict[str, list[float]] = field(default_factory=dict)  # what that is compared with, newest first
    checks: list[Check] = field(default_factory=list)  # what came of it, once the run has succeeded
    has_sinks: bool = False  # somebody besides the console hears of it
    end_told: bool = False  # these have, or will: that it is over waits in the backend until it is delivered
    code: str = ""  # the commit that its code is of, git+URL@SHA; empty: it was sent from a folder
    priority: int = 0  # in the queue: the higher, the sooner
    after: list[str] = field(default_factory=list)  # runs that have to succeed before it begins
    sweep: str = ""  # that it is one run of
    setting: dict[str, str] = field(default_factory=dict)  # by which it differs from others of its sweep
    max_parallel: int = 0  # of its sweep's runs, that may be at work; 0: all
    needs: dict[str, Any] = field(default_factory=dict)  # what it asks of machines: `mgpu.plan.model.Requirements`
    machines: str = "any"  # a queued run's, see `mgpu.run.fleet.reuse`: any | kept | new
    kept_by: str = ""  # the run whose kept fleet it was put on; empty: it was put on none
    share: bool = False  # it may have a part of each node, beside others that may
    slots: list[int] = field(default_factory=list)  # that part: numbers of GPUs, or of places; empty: all
    slots_of: int = 0  # of so many
    avoid: list[str] = field(default_factory=list)  # kept fleets that were gone when it was to begin on them

    @property
    def settled(self) -> bool:
        """True when nothing of it is left to do: it is over, and has left nothing that somebody has to take away."""
        left = self.teardown == "asked" or (self.teardown == "confirmed" and self.store_granted)
        return self.state.final and not left

    @property
    def sellers(self) -> dict[str, dict[str, str]]:
        """By name, with their settings, the providers where machines of it may be."""
        return {name: self.candidates[name] for name in self.asked} | {self.provider: self.options}

    def goes_to(self, provider: str, up_to: Sequence[float] = ()) -> None:
        """From here on its machines are asked for at this one of its candidates; `up_to` that rank, empty: any."""
        self.provider, self.options, self.asking = provider, self.candidates[provider], provider
        self.up_to = [*up_to]
        if provider not in self.asked:
            self.asked.append(provider)

    def fleet_output(self) -> StackOutput:
        """The stack output of its fleet. Raises InputError: it has none."""
        from mgpu.iac.outputs import StackOutput  # pydantic: most readers of records do without

        if self.fleet is None:
            raise InputError(f"run {self.run_id} has no machines", "", "See `mgpu ls`.")
        return StackOutput.model_validate(self.fleet)

    @property
    def deadline_at(self) -> float:
        """When its max_hours are over, on whichever machines, whoever supervised it; 0: they have not begun."""
        return self.begun_at + self.max_hours * 3600 if self.begun_at else 0.0

    @property
    def ends_at(self) -> float:
        """Until when it may have machines, whichever and however long it is without any; 0: not settled yet."""
        return min((at for at in (self.hard_cap_at, self.deadline_at) if at), default=0.0)

    @property
    def untold(self) -> bool:
        """True when it is over, and nobody has made sure that its sinks hear of it: whoever ended it may have died."""
        return self.state.final and self.has_sinks and not self.end_told

    @property
    def part(self) -> float:
        """How much of its fleet's nodes it has: 1, but where it shares them."""
        return len(self.slots) / self.slots_of if self.slots else 1.0

    @property
    def unmet(self) -> list[Check]:
        """What is not as the run file expects."""
        return [each for each in self.checks if not each.met]

    @property
    def file_argument(self) -> str:
        """The run file as a command in this folder is given it, with a blank before it; empty for `mgpu.yaml` here."""
        try:
            here = os.path.relpath(self.run_file)
        except FileNotFoundError:  # this process's own folder was deleted
            here = self.run_file
        return "" if here == "mgpu.yaml" else f" {shlex.quote(min(here, self.run_file, key=len))}"

    @property
    def under_repair(self) -> Interruption | None:
        """The newest interruption, while its fleet is not whole again; a supervisor may have died in it."""
        newest = self.interruptions[-1] if self.interruptions else None
        return newest if newest is not None and newest.repaired_at is None else None

    def costs(self, generation: int, price: float | None, since: float, other: float | None = None) -> None:
        """From `since` on the run has the machines of this generation, at this price for all nodes, and `other` for
        what they have beside them."""
        newest = self.spending[-1] if self.spending else None
        if newest is not None and newest.until is None:
            if newest.generation == generation and newest.provider in ("", self.provider):
                return
            newest.until = since
        self.spending.append(Spent(generation, price, since, None, other, self.provider))

    def costs_no_more(self, now: float) -> None:
        """The run has no machines from now on."""
        if self.spending and self.spending[-1].until is None:
            self.spending[-1].until = now

    def billed_until(self, now: float) -> float:
        """Until when machines are billed that nobody is known to have given back: their hard cap ends them."""
        return min(now, self.hard_cap_at or now)

    def spent_usd(self, now: float) -> float:
        """What the run has spent until `now`, in US dollars, by the prices that its fleets were told: on machines, and
        on their disks and public addresses."""
        return sum(each.usd(self.billed_until(now)) for each in self.spending)

    @property
    def priced(self) -> bool:
        """True when a price of it is known: what `spent_usd` says means something."""
        return any(each.price_usd_per_hour is not None for each in self.spending)

    def to(self, state: State) -> None:
        """Moves on to `state`.

        Raises:
            ValueError: the state cannot follow the present one; a bug.
        """
        if state is self.state:
            return
        if state not in _NEXT.get(self.state, set()):
            raise ValueError(f"a run cannot go from {self.state} to {state}")
        self.state = state
        if state.final:
            self.ended_at = time.time()


def known(step: int) -> int | None:
    """A step as others are told it: -1, which means none here, is None there."""
    return None if step < 0 else step


def new_run_id(name: str, now: float | None = None, mark: bytes | None = None) -> str:
    """`<name>-<date>-<5 characters>`: unique without asking anybody. They are random, or follow from the first bytes of
    `mark`."""
    alphabet = "abcdefghjkmnpqrstuvwxyz23456789"
    tail = "".join(alphabet[each % len(alphabet)] for each in (mark or secrets.token_bytes(5))[:5])
    return f"{name}-{time.strftime('%m%d', time.gmtime(now))}-{tail}"


_pushed: dict[str, float] = {}  # by run, when its record was written to the backend last


def save(record: Record, *, soon: bool = False) -> None:
    """Replaces `record.json` atomically, and the record in a backend that is a bucket. `soon`: there it may come a few
    seconds later.

    Raises:
        TakenOver: another process supervises the run now; nothing was written that others see.
        OSError: it could not be written; the record on disk is as it was.
        StackError: it is on this machine's disk, and the backend does not answer.
    """
    other = taken_from(Folder(record.run_id).lock, record.supervisor)
    if other is not None:
        raise taken_over(record.run_id, other)
    text, full = _text(record), None
    try:
        _keep(record.run_id, text)
    except OSError as error:  # others may see it all the same
        full = error
    if not soon or time.monotonic() - _pushed.get(record.run_id, -_PUSH_EVERY_S) >= _PUSH_EVERY_S:
        try:
            shared.push(record.run_id, text, settled=record.settled and not record.untold)
        except shared.Lost:
            raise taken_over(record.run_id, supervisor_of(record.run_id) or "another machine") from None
        _pushed[record.run_id] = time.monotonic()
    if full is not None:
        raise full


def write(record: Record) -> None:
    """Replaces `record.json` atomically, whoever supervises: for a run that is over. One that somebody else has written
    meanwhile stays as it is. Raises OSError, StackError."""
    text = _text(record)
    _keep(record.run_id, text)
    try:
        shared.push(record.run_id, text, settled=record.settled and not record.untold)
    except shared.Lost:
        shared.pull_one(record.run_id)


def note_end_told(run_id: str) -> None:
    """Writes down that the sinks of a run that is over hear of its end. Raises InputError, OSError, StackError."""
    with opening():  # nobody begins it again meanwhile
        record = find(run_id)
        if record is not None and record.untold:
            write(replace(record, end_told=True))


def _text(record: Record) -> bytes:
    record.updated_at = time.time()
    return json.dumps(plain(record), indent=1).encode()


def _keep(run_id: str, text: bytes) -> None:
    folder = Folder(run_id)
    folder.make()
    aside = folder.record.with_name(f".record.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        aside.replace(folder.record)
    except OSError:
        aside.unlink(missing_ok=True)  # on a full disk it takes the room that others need
        raise


def load(run_id: str) -> Record:
    """Reads a record; a prefix of the id is enough where it is the only one; "last" is the newest run.

    Raises:
        InputError: no such run, or several, or its record cannot be read.
    """
    known = ids()
    if not run_id.strip():  # most often a variable of a script that is not set
        raise InputError(
            "RUN is empty", "It could mean any run.", "Name one (see `mgpu ls`), or `last` for the newest."
        )
    if run_id == "last":
        matches = known[-1:]
    else:
        matches = [run_id] if run_id in known else [each for each in known if each.startswith(run_id)]
    if not known:
        what = "there is no run yet" if run_id == "last" else f"no run `{run_id}`"
        raise InputError(
            what,
            f"Records of runs stand in {location.current().place}.",
            "Begin one with `mgpu launch`, in a folder with a run file; `mgpu init` writes one.",
        )
    if len(matches) != 1:
        what = f"no run `{run_id}`" if not matches else f"`{run_id}` fits {len(matches)} runs"
        some = ", ".join((matches or known)[-5:])
        raise InputError(what, f"Runs: {some}.", "See `mgpu ls`.")
    return _read(Folder(matches[0]).record)


def ids() -> list[str]:
    """All run ids, oldest first; a run whose record cannot be read is as old as its file."""
    return [run_id for run_id, _ in _all()]


def every(*, fresh: bool = False) -> list[Record]:
    """All records that can be read, oldest first: one that is damaged hides no other. `fresh`: as a backend that is a
    bucket has them now, not as a few seconds ago."""
    return [record for _, record in _all(fresh=fresh) if record is not None]


def find(run_id: str) -> Record | None:
    """The record of this very id, as the backend has it; None: there is none. Raises InputError: it cannot be read."""
    folder = Folder(run_id)
    there = held(folder.lock) or shared.pull_one(run_id)  # what is supervised here is newest here
    return _read(folder.record) if there and folder.record.exists() else None


def unsettled(failed: Callable[[InputError], None] = lambda _: None) -> list[Record]:
    """Records of runs that may need something, or of whose end nobody was told, oldest first; `failed` is told of those
    that cannot be read. Of a bucket with one request, and one for each of them."""
    ids, found = shared.unsettled(), list[Record]()
    for path in _paths() if ids is None else [Folder(run_id).record for run_id in ids]:
        try:
            found.append(_read(path))
        except InputError as error:
            if path.exists():  # else it was removed a moment ago
                failed(error)
    needy = (record for record in found if not record.settled or record.untold)
    return sorted(needy, key=lambda record: (record.created_at, record.run_id))


def _paths() -> list[Path]:
    return [path for path in runs().glob("*/record.json") if not path.parent.name.startswith(".")]


def _all(*, fresh: bool = False) -> list[tuple[str, Record | None]]:
    shared.pull(fresh=fresh)
    found: list[tuple[float, str, Record | None]] = []
    for path in _paths():
        try:
            found.append(((record := _read(path)).created_at, path.parent.name, record))
        except InputError:
            with suppress(FileNotFoundError):  # another command has removed it a moment ago
                found.append((path.stat().st_mtime, path.parent.name, None))
    return [(run_id, record) for _, run_id, record in sorted(found, key=lambda each: each[:2])]


def of_json(whole: dict[str, Any]) -> Record:
    """A record from its fields. Raises ValueError, TypeError, LookupError, AttributeError."""
    data = _of_0_1(whole) | known_fields(Record, whole)
    lists = {
        name: [of(**known_fields(of, each)) for each in data.get(name, ())]
        for name, of in (("interruptions", Interruption), ("spending", Spent), ("checks", Check))
    }
    return Record(**{**data, **lists, "state": State(data["state"])})


def _read(path: Path) -> Record:
    try:
        return of_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"the record of run {path.parent.name} cannot be read",
            f"{path}: {error}",
            shared.cure_of(path.parent.name),
        ) from error


def _of_0_1(data: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a record that was written while each had a field of its own."""
    names = ("loss", "tokens_per_s", "validation_loss", "unigram_entropy", "bigram_entropy")
    first = data.get("first_validation_loss")
    return {
        "metrics": {name: value for name in names if (value := data.get(name)) is not None},
        "first_metrics": {} if first is None else {"validation_loss": first},
    }


@contextmanager
def opening() -> Iterator[None]:
    """One process at a time opens a run: what it sees of the others' records stays so until its own is written."""
    path = runs() / ".opening"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def supervising(run_id: str, *, force: bool = False) -> Iterator[str]:
    """Makes this process the run's one supervisor while the block runs; yields its token, "": another one is alive.

    `force` takes the run from that one, which leaves as soon as it looks. Raises StackError: no answer of the backend.
    """
    folder = Folder(run_id)
    folder.make()
    with hold(folder.lock, force=force) as token:
        if not token:
            yield ""
            return
        with shared.holding(run_id, token, force=force) as mine:
            yield token if mine else ""


def supervised(run_id: str) -> bool:
    """True when some process supervises the run now."""
    return held(Folder(run_id).lock) or shared.holder(run_id)[1]


def supervisor_of(run_id: str) -> Holder | None:
    """Who supervises the run, or did last; None: nobody has."""
    return shared.holder(run_id)[0] or holder(Folder(run_id).lock)


def taken_over(run_id: str, by: Holder | str) -> TakenOver:
    """The error of a supervisor whose run another one has."""
    return TakenOver(
        f"run {run_id} was taken over by {by}",
        "One process at a time supervises a run: this one leaves it as it is.",
        f"Follow it with `mgpu attach {run_id}`, or end it with `mgpu stop {run_id}`.",
    )


def out_of_touch(run_id: str) -> TakenOver:
    """The error of a supervisor that could not keep its lock in the backend, which another one may have taken since."""
    return TakenOver(
        f"run {run_id} is left to whoever reaches the backend",
        "It did not answer this machine, so another one may supervise the run now, and this one leaves it as it is. "
        "Machines that nobody comes for end by themselves.",
        f"Once it answers, go on with `mgpu attach {run_id}`, or end it with `mgpu stop {run_id}`.",
    )


def busy(run_id: str) -> InputError:
    """The error for a second supervisor."""
    return InputError(
        f"run {run_id} has a supervisor already: {supervisor_of(run_id) or 'another process'}",
        "One process at a time supervises a run.",
        f"Follow it with `mgpu attach {run_id}`, or end it with `mgpu stop {run_id}`.",
    )
