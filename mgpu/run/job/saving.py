"""What of a run's work is saved, and how that is told before it is rented, while it runs and when it is to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.status.status import AgentStatus

from mgpu.remote.snapshot import Snapshot
from mgpu.run.job.request import Request
from mgpu.run.record import interruptions
from mgpu.run.record.record import Record
from mgpu.words import duration

VARIABLE = b"MGPU_CHECKPOINT_DIR"
READ = 1 << 20  # bytes of a file that are searched for it
OVERDUE_S = 3600.0  # of training without a checkpoint, where the run file does not say how often there is to be one
LATE = 2  # times the interval that it does say


@dataclass(frozen=True)
class Saving:
    """What a run file has saved. `own`: the program is the user's."""

    checkpoints: bool = True
    outputs: bool = False
    own: bool = False
    every_s: float | None = None
    every_steps: int | None = None

    @classmethod
    def of(cls, request: Request) -> Saving:
        """As this run's file says."""
        target = request.checkpoint
        return cls(
            checkpoints=target is not None,
            outputs=bool(request.spec.outputs),
            own=request.spec.command is not None,
            every_s=target.every_minutes * 60 if target and target.every_minutes else None,
            every_steps=target.every_steps if target else None,
        )

    def promise(self, record: Record) -> str:
        """What happens to the work when the run is stopped: no more than can."""
        home = "outputs come home" if self.outputs else ""
        if not self.checkpoints:
            return home or "nothing of it is saved"
        if self.own and record.checkpoint_id is None:
            first = "time for a first checkpoint: it has made none so far"
        else:
            first = "checkpoint"
        return f"{first}, {home}" if home else first

    def overdue(self, status: AgentStatus) -> str | None:
        """That the attempt should have saved long ago, and has not; None: all is well."""
        since, done = interruptions.training_since(status), status.checkpoint
        saves = self.checkpoints and self.own and since is not None
        if not saves or status.phase.final or max(done.saved_step, done.committed_step) >= 0 or done.problem:
            return None
        trained_s = status.updated_at - (since or 0.0)
        cure = "; it has to leave folders `step-<n>` in MGPU_CHECKPOINT_DIR, else a lost machine takes all of it along"
        if self.every_steps and status.step >= LATE * self.every_steps:
            return f"no checkpoint by step {status.step}, with `every_steps: {self.every_steps}`{cure}"
        if trained_s >= (LATE * self.every_s if self.every_s else OVERDUE_S):
            return f"no checkpoint after {duration(trained_s)} of training{cure}"
        return None


def doubts(request: Request, snapshot: Snapshot) -> Iterator[str]:
    """Where a program seems to save nothing that comes back, before anything is rented."""
    if request.spec.command is None:
        return
    if request.checkpoint is None:
        if not request.spec.outputs:
            yield (
                "nothing that the program writes comes back: `checkpoint: none`, and no `outputs:`. "
                'Name its files: `outputs: [runs/, "*.pt"]`'
            )
    elif not any(names_variable(snapshot.folder / path) for path in snapshot.entries):
        more = "" if request.spec.outputs else ', or name its files: `outputs: [runs/, "*.pt"]`'
        yield (
            f"no file of the code names {VARIABLE.decode()}, where checkpoints are looked for: a lost machine takes "
            f"the work along. Save there (docs/checkpoints.md), or say `checkpoint: none`{more}"
        )


def names_variable(path: Path) -> bool:
    """Whether a file of the code names the variable that says where checkpoints go."""
    try:
        with path.open("rb") as file:
            return VARIABLE in file.read(READ)
    except OSError:  # a link to nowhere, or a folder
        return False
