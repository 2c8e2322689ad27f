"""Typed progress events. Every layer emits them to an `Emit` it was given; only the console renders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 1  # of what leaves the process


@dataclass(frozen=True, slots=True)
class Event:
    """The base of all events."""

    def to_json(self) -> dict[str, Any]:
        """The event as plain data, with its type under `event`."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, slots=True)
class PhaseStarted(Event):
    """A phase of a run begins, e.g. `provisioning`, `connecting`, `training`, `teardown`."""

    phase: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PhaseFinished(Event):
    """A phase ended after `seconds`."""

    phase: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OfferTried(Event):
    """An offer was asked for; `refusal` is empty when it was granted."""

    offer: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Note(Event):
    """Something worth a line, from any layer."""

    text: str


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something the user should know and may have to act on."""

    text: str


@dataclass(frozen=True, slots=True)
class ImageStep(Event):
    """The build of an image has come to an instruction of its Dockerfile, `step` of `steps` (0: the builder does not
    say)."""

    step: int
    steps: int
    text: str


@dataclass(frozen=True, slots=True)
class LayerPushed(Event):
    """A layer of an image is under way to the registry: bytes before compression; `state` is `pushing`, `pushed` or
    `there`, when the registry had it."""

    layer: str
    state: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    """The base of what a run tells others: sinks get these alone. `at` is UNIX seconds; `attempt` 0: none has begun."""

    run_id: str
    attempt: int
    at: float

    def to_json(self) -> dict[str, Any]:
        """The event as plain data, with its type under `event` and the version of all of these under `version`."""
        return {"version": VERSION, "event": type(self).__name__, **asdict(self)}

    def identity(self) -> dict[str, Any]:
        """What makes it this event: of two that agree in it, whoever says them, somebody is told once."""
        return self.to_json()


@dataclass(frozen=True, slots=True)
class RunStateChanged(RunEvent):
    """The run is in another state: `provisioning`, `running`, `repairing`, `stopping`, `teardown`, `succeeded`,
    `failed` or `stopped`; `before` is empty for a run that begins."""

    state: str
    before: str


@dataclass(frozen=True, slots=True)
class AttemptEnded(RunEvent):
    """The launcher has ended on all nodes, or could not be started. `fault`: whose (`user`, `infrastructure`,
    `provider`, `stopped`), null: nobody's, or not known; `lost`: ranks of nodes that are gone."""

    succeeded: bool
    reason: str
    fault: str | None
    step: int | None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEnded(RunEvent):
    """The run is over, and its machines are gone or kept: what `mgpu status` says of it from here on. `stop_reason`:
    the limit that has ended it (`user`, `hard_cap`, `budget`, `month`, `deadline`); null: none. `submitted_at`: when it
    was submitted, UNIX seconds; a run that is resumed was so again."""

    state: str
    reason: str
    fault: str | None
    stop_reason: str | None
    exit_code: int
    teardown: str
    spent_usd: float
    step: int | None
    checkpoint_step: int | None
    submitted_at: float = 0.0

    def identity(self) -> dict[str, Any]:
        """Who ends it again, because the backend was away when it was over, finds another time, price and reason."""
        names = ("event", "run_id", "submitted_at", "state", "exit_code", "teardown")
        whole = self.to_json()
        return {name: whole[name] for name in names}


@dataclass(frozen=True, slots=True)
class RunRegressed(RunEvent):
    """The run has succeeded, and is not as its run file expects. `checks`: what is not, as `mgpu status --json` has it;
    `schedule`: whose run it is, empty: nobody's; `code`: the commit that it has trained, empty: it was sent from a
    folder; `submitted_at`: as of RunEnded."""

    schedule: str
    code: str
    checks: tuple[dict[str, Any], ...]
    submitted_at: float = 0.0

    def identity(self) -> dict[str, Any]:
        """As of RunEnded: what its machines cost may have been checked again."""
        names = [each["metric"] for each in self.checks]
        return {"event": "RunRegressed", "run_id": self.run_id, "submitted_at": self.submitted_at, "metrics": names}


@dataclass(frozen=True, slots=True)
class MetricsSampled(RunEvent):
    """Node 0 says how far it is: the newest value of each metric, by the program's own names."""

    step: int | None
    steps: int | None
    phase: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class SpendChanged(RunEvent):
    """Another part of a budget is spent: half, four fifths, all of it. US dollars. `limit`: the run's own `max_usd`, or
    `usd_per_month`, which all runs of the backend spend together (`mgpu limits`)."""

    spent_usd: float
    max_usd: float
    limit: str = "max_usd"


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(RunEvent):
    """A checkpoint is in the commit log: from here on it survives the loss of every node."""

    checkpoint_id: str
    step: int


@dataclass(frozen=True, slots=True)
class ScheduleMissed(Event):
    """Times of a schedule were missed: so many, the newest of them `due_at`, for this reason. UNIX seconds."""

    schedule: str
    at: float
    due_at: float
    times: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain data, with its type under `event` and the version."""
        return {"version": VERSION, "event": "ScheduleMissed", **asdict(self)}

    def identity(self) -> dict[str, Any]:
        """All of it."""
        return self.to_json()


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """The training goes on after an interruption. Seconds of each stretch: until it was noticed since the lost node was
    last heard from, until nothing of the old attempt ran, until the fleet was whole, until the first new step."""

    steps_lost: int
    detected_s: float
    stopped_s: float
    repaired_s: float
    resumed_s: float


@dataclass(frozen=True, slots=True)
class LogChunk(Event):
    """Bytes of a node's log, as they are on the node, from `offset` on. Untrusted: the console neutralises escapes."""

    node_rank: int
    offset: int
    data: bytes

    def to_json(self) -> dict[str, Any]:
        """As plain data; bytes that are not UTF-8 are replaced."""
        return {
            "event": "LogChunk",
            "node_rank": self.node_rank,
            "offset": self.offset,
            "data": self.data.decode("utf-8", "replace"),
        }


Emit = Callable[[Event], None]  # returns soon, whoever hears it: a supervisor calls it


def ignore(_event: Event) -> None:
    """An `Emit` for callers who do not want events."""
