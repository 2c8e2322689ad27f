"""What commands print with --json: one object each, with the version of this format. The tables in docs/json.md are
written from here."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mgpu.plan.model import CheckpointRoom, Cost, Offer, Refusal, Requirements, Reservation, Value
from mgpu.providers.base import ReservationOffer
from mgpu.run.record.record import known
from mgpu.run.view import CheckView, RunView

if TYPE_CHECKING:
    from mgpu.run.budget.costs import Sum
    from mgpu.schedule.model import DueTime, Schedule
    from mgpu.schedule.queue import Queued

VERSION = 1
_STALE = (
    "the backend does not answer: what this machine knew so many seconds ago; who supervises, and what is billed, is "
    "not known"
)


class Result(Value):
    """What every result has. Keys may come; none goes or changes its meaning within a version."""

    version: Literal[1] = VERSION


class Failure(Result):
    """A command that fails, and has no result of its own."""

    error: dict[str, Any] = Field(
        description="as on stderr: `type`, `what`, `why`, `next_step`, `exit_code`; of a run file `problems` by "
        "`line`; of a sweep `queued`, the runs that were queued before it"
    )


class Initialised(Result):
    """`mgpu init`."""

    folder: str
    wrote: list[str]
    kept: list[str] = Field(description="that were there already")


class Backend(Result):
    """`mgpu backend show` and `move`."""

    url: str = Field(description="its address, as Pulumi takes it")
    place: str = Field(description="where mgpu's own is in it")
    shared: bool = Field(description="other machines that name it see the same: it is a bucket")
    owner: str = Field(description="the tag of all that is rented from it")
    secrets_provider: str = Field(description="who encrypts the secrets of new stacks, as Pulumi names it")
    runs: int
    stacks: int = Field(description="that have a state")


class Run(Result, RunView):
    """`mgpu launch`, `run`, `submit`, `attach`, `stop`, `down`, `queue mv`, `queue rm`: the run as it is then."""


class Status(Run):
    """`mgpu status`."""

    supervised: bool = Field(description="a process looks after it")
    live: list[dict[str, Any]] | None = Field(
        description="with --live, a node each: `rank`, `id`, `phase` of its machine as the provider says, `agent`: "
        "what it says itself, null where it does not answer"
    )
    stale_s: float | None = Field(None, description=_STALE)


class Due(Value):
    """A time of a schedule, and what became of it. Times are UNIX seconds."""

    schedule: str
    due_at: float
    outcome: str = Field(
        description="waiting, starting or running; at the end succeeded, failed, stopped, replaced, skipped or missed"
    )
    run_id: str | None
    code: str | None = Field(description="the commit that its run has; null: what the schedule has kept")
    reason: str | None
    by_hand: bool = Field(description="by `mgpu schedule run-now`")
    ended_at: float | None = Field(description="of its run, as all that follows")
    exit_code: int | None
    spent_usd: float | None
    owes: bool = Field(description="its machines are not known to be gone: `spent_usd` may grow until they are")
    recoveries: int
    step: int | None
    metrics: dict[str, float]
    as_expected: bool | None = Field(description="as of a run")
    checks: list[CheckView]

    @classmethod
    def of(cls, schedule: str, due: DueTime) -> Due:
        """As it is shown."""
        plain = {name: getattr(due, name, None) for name in cls.model_fields}
        shown = {"schedule": schedule, "due_at": due.at, "outcome": str(due.outcome), "step": known(due.step)}
        shown |= {"as_expected": not due.unmet if due.checks else None, "checks": [*map(CheckView.of, due.checks)]}
        return cls.model_validate(
            plain | shown | {"run_id": due.run_id or None, "reason": due.reason or None, "code": due.code or None}
        )


class ScheduleView(Value):
    """A schedule. Times are UNIX seconds."""

    name: str
    cron: str
    timezone: str
    if_running: str = Field(description="skip, queue or replace")
    start_within_s: float = Field(description="of its time; later it is missed")
    if_missed: str = Field(description="none or latest: which of the times that were missed is started after all")
    jitter_s: float
    code_from: str | None = Field(description="git+URL@REF whose code each run has; null: what was kept")
    paused: bool
    created_at: float
    created_by: str = Field(description="user and host")
    run_file: str
    expect: dict[str, dict[str, Any]] = Field(description="what is expected of each run, by metric: the run file's")
    next: list[float] = Field(description="the next five times")
    history: list[Due] = Field(description="newest last")

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleView:
        """As it is shown."""
        plain = {name: getattr(schedule, name, None) for name in cls.model_fields}
        history = [Due.of(schedule.name, due) for due in schedule.history]
        coming = list(islice(schedule.times.after(time.time()), 5))
        shown = {
            "if_running": str(schedule.if_running),
            "if_missed": str(schedule.if_missed),
            "run_file": str(schedule.run.get("run_file")),
            "code_from": schedule.code_from or None,
        }
        return cls.model_validate(plain | shown | {"next": coming, "history": history})


class OneSchedule(Result, ScheduleView):
    """`mgpu schedule add`, `show`, `pause`, `resume`, `run-now`, `rm`."""


class Schedules(Result):
    """`mgpu schedule ls`."""

    schedules: list[ScheduleView]


class Installed(Result):
    """`mgpu schedule install` and `uninstall`."""

    way: str = Field(description="systemd, cron, github, gitlab, kubernetes or aws")
    files: dict[str, str] = Field(description="that were written, or removed: what is in each, by path")
    commands: list[list[str]] = Field(description="that were run")
    changes: list[str] = Field(description="with --aws: what was changed in the account")
    by_hand: list[str] = Field(description="what is left to the user")
    dry_run: bool


class LookedAfter(Value):
    """A run that needed somebody."""

    run_id: str
    why: str
    state: str | None = Field(default=None, description="afterwards; null: with --dry-run, or it could not be done")
    exit_code: int | None = Field(default=None, description="of the process that has looked after it")
    error: dict[str, Any] | None = Field(default=None, description="why it could not be done")


class QueuedRun(Value):
    """A run that nobody has begun with."""

    run_id: str
    waits_for: str | None = Field(description="null: for nothing, the next pass begins with it")
    starts_on: str | None = Field(description="the stack of the kept fleet that it begins on; null: on new machines")
    priority: int = Field(description="the highest begins first")
    created_by: str | None = Field(description="user and host")
    submitted_at: float
    sweep: str | None = Field(description="that it is one run of")
    setting: dict[str, str] = Field(description="by which it differs from others of its sweep")

    @classmethod
    def of(cls, queued: Queued) -> QueuedRun:
        """As it is shown."""
        record = queued.record
        return cls(
            run_id=record.run_id,
            waits_for=queued.waits_for or None,
            starts_on=queued.starts_on or None,
            priority=record.priority,
            created_by=record.created_by or None,
            submitted_at=record.created_at,
            sweep=record.sweep or None,
            setting=record.setting,
        )


class Queue(Result):
    """`mgpu queue ls`."""

    queued: list[QueuedRun] = Field(description="in the order in which they begin")


class Submitted(Result):
    """`mgpu submit` of a sweep."""

    sweep: str
    runs: list[RunView]


class Reconciled(Result):
    """`mgpu reconcile`."""

    dry_run: bool
    due: list[Due] = Field(description="times of schedules of which something has become")
    stopped: list[str] = Field(description="runs that were asked to end, to make room for a later time")
    told: list[str] = Field(description="runs that are over, of which nobody was told by whoever ended them")
    runs: list[LookedAfter]
    queued: list[QueuedRun] = Field(description="that stay queued, in their order")
    swept: list[str] = Field(description="fleets that nothing stood for: gone, confirmed by their provider")
    failures: list[dict[str, Any]] = Field(description="what could not be done")


class Fleet(Value):
    """Machines that a provider bills."""

    name: str
    provider: str
    ids: list[str]
    usd_per_hour: float
    used_by: str = Field(description="the run or stack that stands for it; empty: nothing does")
    left_by: str = Field(description="the run whose supervisor died before it gave them back; empty: none")


class Runs(Result):
    """`mgpu ls`."""

    runs: list[RunView] = Field(description="newest last")
    fleets: list[Fleet]
    stale_s: float | None = Field(None, description=_STALE)


class CostView(Value):
    """What belongs together. Dollars are those whose price is known."""

    key: str = Field(description="the project, run, provider, owner or month")
    runs: int
    hours: float = Field(description="in which a run had machines")
    machines_usd: float
    other_usd: float = Field(description="disks and public addresses")
    usd: float = Field(description="all of it")
    unpriced: list[str] = Field(description="runs on machines whose price is not known")
    other_unpriced: list[str] = Field(description="runs of which it is not known what their disks and addresses cost")

    @classmethod
    def of(cls, found: Sum) -> CostView:
        """As it is shown."""
        dollars = {name: round(getattr(found, name), 4) for name in ("hours", "machines_usd", "other_usd", "usd")}
        unknown = {name: sorted(getattr(found, name)) for name in ("unpriced", "other_unpriced")}
        return cls.model_validate({"key": found.key, "runs": len(found.runs), **dollars, **unknown})


class Costs(Result):
    """`mgpu costs`."""

    by: str = Field(description="project, run, provider, owner or month")
    since: float | None = Field(description="UNIX seconds; null: all that is known")
    until: float
    rows: list[CostView]
    total: CostView


class Limits(Result):
    """`mgpu limits set`, `show` and `unset`."""

    usd_per_month: float | None = Field(description="that all runs may spend in a month of UTC; null: no limit")
    usd_per_hour: float | None
    runs: int | None = Field(description="at once")
    month: str = Field(description="2026-11")
    spent_usd: float = Field(description="in this month")
    in_use_usd_per_hour: float
    running: list[str] = Field(description="the runs that count")
    unpriced: list[str] = Field(description="those of them whose price is not known")


class Fleets(Result):
    """`mgpu gc`."""

    fleets: list[Fleet] = Field(description="all that were found")
    ended: list[str] = Field(description="names of those that are gone now, confirmed by their provider")


class StackDown(Result):
    """`mgpu down --stack`."""

    stack: str
    teardown: Literal["confirmed"]


class Removed(Result):
    """`mgpu rm`."""

    runs: list[str]
    bytes: int = Field(description="freed; 0 with --dry-run")
    dry_run: bool


class Planned(Result):
    """`mgpu plan`."""

    requirements: Requirements
    offers: list[Offer] = Field(description="that will be asked for, best first")
    refused: list[Refusal] = Field(description="that will not, each with its `reason`")
    notes: list[str] = Field(description="what the provider could not tell")
    price_usd_per_hour: float = Field(description="of all nodes, at the dearest offer that may be taken")
    max_cost_usd: float = Field(description="the most that the machines can cost until the hard cap")
    hours: float = Field(description="until the hard cap: `max_hours`, or the end of a reservation before that")
    costs: list[Cost] = Field(description="what is billed beside the machines of the first offer")
    checkpoints: CheckpointRoom | None = Field(
        description="what they take of a machine; null: the model's size is not known, or nodes run on this machine"
    )
    image: dict[str, Any] | None = Field(description="`name`, `in_registry`, `reference`; null: the run file has none")


class Offers(Result):
    """`mgpu offers`."""

    offers: list[Offer]


class OnSale(Value):
    """What can be reserved, with what follows from it."""

    offer: ReservationOffer
    hours: float = Field(description="from its beginning to its end")
    usd_per_gpu_hour: float

    @classmethod
    def of(cls, offer: ReservationOffer) -> OnSale:
        """An offer of a provider's."""
        return cls(offer=offer, hours=offer.hours, usd_per_gpu_hour=offer.usd_per_gpu_hour)


class FoundReservations(Result):
    """`mgpu reservations find`."""

    offers: list[OnSale] = Field(description="the earliest first")
    failed: dict[str, str] = Field(description="regions of which nothing is known, with the reason")


class BoughtReservation(Result):
    """`mgpu reservations buy`."""

    reservation: Reservation
    run_file: list[str] = Field(description="lines of a run file that rents in it")


class ReservationList(Result):
    """`mgpu reservations ls`."""

    reservations: list[Reservation] = Field(description="that are not over, by their beginning")
    failed: dict[str, str] = Field(description="regions of which nothing is known, with the reason")


class Checks(Result):
    """`mgpu check`."""

    checks: list[dict[str, Any]] = Field(
        description="`subject`, `status` (ok, warning or failed), `detail`; where it is not ok `cure`, and `document`: "
        "what the cure says to paste"
    )


class Outputs(Result):
    """`mgpu outputs`."""

    run_id: str
    folder: str
    files: int
    bytes: int


class Checkpoint(Value):
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    attempt: int
    seq: int = Field(description="its number in the commit log")
    committed_at: float
    nodes: int
    world_size: int
    files: int
    bytes: int
    manifest_sha256: str
    meta: dict[str, Any] = Field(description="the program's own meta.json")
    kept_because: str | None = Field(description="the rule that keeps it; null: it would be pruned, or nobody knows")


class Checkpoints(Result):
    """`mgpu checkpoints ls`."""

    checkpoints: list[Checkpoint] = Field(description="newest first")
    gaps: list[str] = Field(description="entries of the commit log that are missing or damaged")


class Verified(Result):
    """`mgpu checkpoints verify`."""

    deep: bool = Field(description="every byte was read")
    checkpoints: dict[str, list[str]] = Field(description="problems by checkpoint_id; none: it verifies")
    gaps: list[str] = Field(description="entries of the commit log that are missing or damaged")


class Pulled(Result):
    """`mgpu checkpoints pull`."""

    checkpoint_id: str
    step: int
    folder: str
    files: int
    bytes: int
    reused: int = Field(description="files that were there already")
    passed_over: dict[str, str] = Field(description="newer checkpoints that do not verify, by id with the problem")


class Exported(Pulled):
    """`mgpu checkpoints export`."""

    names: list[str] = Field(description="of the files that were written")
    tensors: int


class Pruned(Result):
    """`mgpu checkpoints prune`."""

    keep: dict[str, str] = Field(description="by checkpoint_id, with the rule")
    drop: list[str]
    bytes: int = Field(description="that these have")
    damaged: dict[str, str] = Field(description="by checkpoint_id, with the first problem")
    gone: list[str] = Field(description="names of the objects that were removed")
    dry_run: bool


class Built(Result):
    """`mgpu image build`."""

    name: str
    tag: str
    id: str = Field(description="the Docker engine's")
    inputs_hash: str


class BuiltAll(Result):
    """`mgpu image build` of a sweep whose runs have several images."""

    images: list[dict[str, Any]] = Field(description="what is said of one, of each")


class Pushed(Result):
    """`mgpu image push` and `operator`."""

    reference: str = Field(description="repository@sha256:...")
    tag: str
    built: bool
    pushed: bool
    bytes_pushed: int = Field(description="compressed")
    image_bytes: int = Field(description="all of it, compressed")
    labels: dict[str, str]


class PushedAll(Result):
    """`mgpu image push` of a sweep whose runs have several images, or one in several places."""

    images: list[dict[str, Any]] = Field(description="what is said of one, of each")


class Inspected(Result):
    """`mgpu image inspect`."""

    reference: str
    pushed: bool | None = Field(description="to its registry; null: that does not answer")
    digest: str = Field(description="of the manifest; of an image that is not pushed, the engine's id")
    platform: str
    bytes: int | None = Field(description="of its layers, compressed; null: not pushed")
    labels: dict[str, str]
    runs_on: dict[str, Any] | None = Field(
        description="the oldest `driver`, `compat_branches`, GPU `architectures` and `gpus`; null: no label says it"
    )
    layers: list[dict[str, Any]] = Field(description="`digest`, `bytes`")


class InspectedAll(Result):
    """`mgpu image inspect` of a sweep whose runs have several images, or one in several places."""

    images: list[dict[str, Any]] = Field(description="what is said of one, of each")
    failures: list[dict[str, Any]] = Field([], description="errors of those that cannot be looked at")


class Bases(Result):
    """`mgpu bootstrap aws`."""

    regions: list[dict[str, Any]] = Field(description="`account`, `region`; what was made, or `destroyed`")
