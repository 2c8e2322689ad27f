"""What the trainer's tests look at: many small trainings in one process group, since torch starts slowly.

`scenarios.py OUT` trains each scenario of its world size in a folder of its own, and writes what failed beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from mgpu_train import parallel
from mgpu_train.checkpoint.distributed import dcp
from mgpu_train.checkpoint.distributed.staging import Staging
from mgpu_train.checkpoint.distributed.writers import SnapshotPlanner
from mgpu_train.config import Job
from mgpu_train.environment import Folders
from mgpu_train.errors import TrainError
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest
from mgpu_train.tasks import lm
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

STEPS = 6
TINY = {
    "steps": STEPS, "global_batch": 8, "seq_len": 16, "warmup_steps": 2, "lr": 0.01, "validate_every": 3,
    "validate_batches": 2, "threads": 1, "model": {"layers": 2, "dim": 32, "heads": 2},
}  # fmt: skip


def job(
    out: Path, every_steps: int | None = 3, minutes: float | None = None, writers: str = "all", **train: Any
) -> Job:
    """A job of the tiny model on the text under `out`."""
    target = {"to": "file:///x", "every_steps": every_steps, "every_minutes": minutes, "writers": writers}
    return Job.model_validate({
        "run_id": "test", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "train": {**TINY, "text": str(out / "text"), **train},
        "checkpoint": target if every_steps or minutes else None,
    })  # fmt: skip


class Signal(StopRequest):
    """A signal that comes in the middle of step `at`, on one rank; and a draw of random numbers in every step."""

    def __init__(self, place: parallel.Place, at: int = -1, rank: int = 0) -> None:
        self._left = at if place.rank == rank else -1
        self._draws = place.rank + 1

    @property
    def asked(self) -> bool:  # type: ignore[override] - counted instead of set
        """True once, in the given step."""
        torch.rand(self._draws)  # what the steps before have drawn is nothing to a resumed run
        self._left -= 1
        return self._left == 0


class Patient(Trainer):
    """Waits in every step for the save that the last one began, so that none is skipped because a disk is slow.

    A `Signal` counts the steps alone: validations do not ask it.
    """

    def _unless_asked(self, batches: Any) -> Any:
        return batches

    def _gradients(self) -> Any:
        sums = super()._gradients()
        if self.saver is not None:
            self._tell(self.saver.wait())
        return sums


class Held(Patient):
    """A disk that takes the shards of step 3 only in step 8, and memory that is copied as late as it may be.

    Rank 1 asks for a save ahead of time meanwhile.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.released, self.passed, self.stepped = threading.Event(), threading.Event(), threading.Event()

    def _gradients(self) -> Any:
        step = self.progress.step + 1
        if step == 5 and self.place.rank == 1:
            assert self.folders.save_request is not None
            self.folders.save_request.touch()
        if step == 8:
            self.released.set()
        sums = (super() if step >= 8 else super(Patient, self))._gradients()
        if step >= 4:
            self.passed.set()
        return sums

    def _judge(self, *given: Any) -> None:
        if self.progress.step >= 4:
            self.stepped.set()
        super()._judge(*given)

    def hold(self) -> Any:
        """While this trainer runs."""
        copy, write_data = Staging.copy, FileSystemWriter.write_data

        def late_copy(*given: Any, **named: Any) -> None:
            self.passed.wait(60)
            waits = self.released.is_set() or not self.stepped.wait(0.5)  # of the first save it is in vain
            assert waits, "the step does not wait for the copy"
            copy(*given, **named)

        def late_write(*given: Any, **named: Any) -> Any:
            self.released.wait(60)
            return write_data(*given, **named)

        held = ExitStack()
        held.enter_context(patch.object(Staging, "copy", late_copy))
        held.enter_context(patch.object(FileSystemWriter, "write_data", late_write))
        return held


class Gathered(Patient):
    """What is gathered to rank 0 is whole one tensor at a time, and copied once: to the memory that it is written from.

    All else that is written has a few bytes.
    """

    def hold(self) -> Any:
        """While this trainer runs."""
        staging, elsewhere = self.checkpointer._staging, [0]
        full_tensor, lookup_object, whole = DTensor.full_tensor, SnapshotPlanner.lookup_object, WeakSet[torch.Tensor]()

        def one_by_one(tensor: DTensor, **named: Any) -> torch.Tensor:
            assert not whole, "two tensors are whole at a time"
            made = full_tensor(tensor, **named)
            whole.add(made)
            return made

        def looked(planner: Any, index: Any) -> Any:
            found = lookup_object(planner, index)
            if isinstance(found, torch.Tensor) and not staging.slot(found):
                elsewhere[0] = max(elsewhere[0], found.nbytes)
            return found

        def compare() -> None:
            weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
            assert staging.size >= 3 * weights or self.place.rank != 0
            assert elsewhere[0] <= 8

        held = ExitStack()
        held.callback(compare)
        held.enter_context(patch.object(DTensor, "full_tensor", one_by_one))
        held.enter_context(patch.object(SnapshotPlanner, "lookup_object", looked))
        return held


class Dropout(Patient):
    """Every tenth value of the embedding is dropped; what each step draws is written down."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.drawn: list[float] = []
        self.model.get_submodule(self._embedding).register_forward_hook(self._drop)

    @property
    def _embedding(self) -> str:
        return next(name for name, _ in self.model.named_modules() if name.endswith("embed"))

    def _drop(self, module: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(out, 0.1, training=module.training)

    def _gradients(self) -> Any:
        state = torch.get_rng_state()
        self.drawn.append(torch.rand(()).item())
        torch.set_rng_state(state)
        return super()._gradients()

    def run(self) -> Any:
        """And then what was drawn."""
        done = super().run()
        assert self.folders.metrics is not None
        (self.folders.metrics.parent / f"drawn-{self.place.rank}.json").write_text(json.dumps(self.drawn))
        return done


class NoNumber(Patient):
    """The third step's loss is none on rank 1."""

    def _gradients(self) -> Any:
        if self.progress.step == 2 and self.place.rank == 1:
            loss, self.task.loss = self.task.loss, self._bad  # type: ignore[method-assign]
            sums = super()._gradients()
            self.task.loss = loss  # type: ignore[method-assign]
            return sums
        return super()._gradients()

    def _bad(self, model: nn.Module, batch: Any) -> Any:
        loss = type(self.task).loss(self.task, model, batch)
        return replace(loss, total=loss.total * float("nan"))


class NoValidation(Patient):
    """No validation comes to a number."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        evaluate = self.task.evaluate

        def bad(model: nn.Module, batch: Any) -> Any:
            loss = evaluate(model, batch)
            return replace(loss, total=loss.total * float("nan"))

        self.task.evaluate = bad  # type: ignore[method-assign]


class HighScale(Patient):
    """The loss's scale begins far above what fp16 can hold."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.engine._scale.value.fill_(2.0**30)


class LaidOut(Patient):
    """The memory of a save is there before the first one."""

    def _save(self) -> None:
        if not self.checkpointer._staging.size:
            raise TrainError("the first save has to take its memory itself")
        super()._save()


class SlowData(Patient):
    """The loader is waited for, and says for how long."""

    def _gradients(self) -> Any:
        sums = super()._gradients()
        self.loader.waited_s += 1000.0
        return sums


class SlowValidation(Patient):
    """The loader is waited for in validations alone."""

    def _means(self, stoppable: bool) -> dict[str, float]:
        evaluate = self.engine.evaluate

        def slow(batches: Any) -> Any:
            self.loader.waited_s += 1000.0
            return evaluate(batches)

        with patch.object(self.engine, "evaluate", slow):
            return super()._means(stoppable)


class LeavesValidation(Trainer):
    """The highest rank gets a signal in the first half of each validation but the very first."""

    def _unless_asked(self, batches: Any) -> Any:
        for number, batch in enumerate(super()._unless_asked(batches)):
            assert number < self.slices.count, "it was not left"
            self.stop.asked = self.place.rank == self.place.world_size - 1
            yield batch


class LeavesNext(LeavesValidation):
    """It gets none in the validation that it owes."""

    def _unless_asked(self, batches: Any) -> Any:
        return batches if self.heard is None else super()._unless_asked(batches)


class AverageOfNow(Patient):
    """What is averaged begins as the parameters are that the checkpoint had."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        assert self.ema is not None
        with self.ema.in_place():
            averages = [each.detach().clone() for each in self.model.parameters()]
        assert all(map(torch.equal, averages, self.model.parameters()))


LEFT = {  # validations that are left
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp", "ema": 0.9, "micro_batch": 2},
    "pipeline": {"strategy": "single", "pipeline_parallel": 2, "micro_batch": 4},
}


class Runner:
    """Trains scenarios and keeps what went wrong by name, so that one failure hides no other."""

    def __init__(self, out: Path, place: parallel.Place) -> None:
        self.out, self.place = out, place
        self.failures: dict[str, str] = {}

    def train(
        self,
        name: str,
        resume: str | None = None,
        stop: StopRequest | None = None,
        outside: bool | None = None,
        late: bool | None = None,
        kind: type[Trainer] = Patient,
        **settings: Any,
    ) -> None:
        """One scenario: checkpoints and metrics go to OUT/name."""
        home = self.out / name
        asked = self.out / "asked" / f"rank-{self.place.rank}"  # nobody asks for a save but where a test did
        folders = Folders(home / "checkpoints", home / "metrics", self.out / resume if resume else None, asked)
        try:
            made = kind(
                job(self.out, **settings), folders, self.place, stop or Signal(self.place), outside=outside, late=late
            )
            with made.hold() if isinstance(made, Held | Gathered) else nullcontext():
                made.run()
        except TrainError as error:
            self.failures[name] = str(error)
        except Exception:  # noqa: BLE001 - it is written down, and the test that asks for this scenario fails
            self.failures[name] = traceback.format_exc()


def two_ranks(runner: Runner) -> None:
    """The scenarios of two processes."""
    for strategy in ("ddp", "fsdp"):
        runner.train(strategy, strategy=strategy)
        runner.train(f"{strategy}-cut", strategy=strategy, stop=Signal(runner.place, 4, 1), every_steps=100)
        runner.train(f"{strategy}-resumed", strategy=strategy, resume=f"{strategy}-cut/checkpoints/step-4")
        runner.train(f"{strategy}-micro-1", strategy=strategy, every_steps=None, micro_batch=1)
        runner.train(f"{strategy}-micro-3", strategy=strategy, every_steps=None, micro_batch=3)
        for precision in ("bf16", "fp16"):
            runner.train(f"{strategy}-{precision}", strategy=strategy, every_steps=None, precision=precision)
        for micro in (None, 1):
            name = f"{strategy}-odd" + ("-micro" if micro else "")
            runner.train(name, strategy=strategy, every_steps=None, global_batch=7, micro_batch=micro)
        no_number(runner, strategy)
        dropout = f"{strategy}-dropout"
        runner.train(dropout, strategy=strategy, kind=Dropout)
        runner.train(f"{dropout}-resumed", strategy=strategy, kind=Dropout, resume=f"{dropout}/checkpoints/step-3")
    no_number(runner, "ddp", precision="fp16")
    runner.train("fsdp-from-ddp", strategy="fsdp", resume="ddp/checkpoints/step-3")
    runner.train("ddp-from-one-rank", strategy="ddp", resume="single/checkpoints/step-3")
    runner.train("fsdp-rank0", strategy="fsdp", writers="rank0", kind=Gathered)
    runner.train("fsdp-rank0-outside", strategy="fsdp", writers="rank0", kind=Gathered, outside=True)
    runner.train("fsdp-from-rank0", strategy="fsdp", resume="fsdp-rank0/checkpoints/step-3")
    # the minutes are over by rank 0's clock alone, then by rank 1's alone
    for clock in (0, 1):
        minutes = 1e-9 if runner.place.rank == clock else 1e9
        runner.train(f"minutes-of-rank-{clock}", strategy="ddp", every_steps=None, minutes=minutes)
    ask(runner)
    runner.train("early", strategy="ddp", every_steps=100)
    runner.train("late-early", strategy="ddp", every_steps=100, late=True)
    shutil.rmtree(runner.out / "asked", ignore_errors=True)
    for strategy in ("ddp", "fsdp"):
        runner.train(f"{strategy}-long", strategy=strategy, steps=9)
        (runner.out / "asked").mkdir(exist_ok=True)
        runner.train(f"{strategy}-held", strategy=strategy, steps=9, kind=Held)
        shutil.rmtree(runner.out / "asked", ignore_errors=True)
        runner.train(f"{strategy}-outside", strategy=strategy, kind=LaidOut, outside=True)
    runner.train("finished", strategy="fsdp", resume="fsdp/checkpoints/step-6")
    litter(runner)
    runner.train("littered", strategy="fsdp")
    runner.train("other-model", resume="fsdp/checkpoints/step-3", model={"layers": 2, "dim": 16, "heads": 2})
    runner.train("not-single", strategy="single")
    runner.train("too-far", resume="ddp/checkpoints/step-6", steps=3)
    runner.train("average-of-now", resume="ddp/checkpoints/step-6", ema=0.9, kind=AverageOfNow)
    elsewhere = property(lambda data: str(len(data) < 100 and runner.place.rank))  # of the validation part alone
    with patch.object(lm.Sequences, "fingerprint", elsewhere):
        runner.train("other-validation")
    for name, settings in LEFT.items():
        runner.train(f"{name}-whole", every_steps=100, **settings)
        runner.train(f"{name}-left", every_steps=100, kind=LeavesValidation, stop=StopRequest(), **settings)
        left = f"{name}-left"
        for step in (3, 6):  # a resume leaves what it owes, the next one comes as far as the validation after that
            for kind in (LeavesValidation, LeavesNext):
                resume, left = f"{left}/checkpoints/step-{step}", f"{left}-on"
                runner.train(left, resume, StopRequest(), kind=kind, every_steps=100, **settings)
    runner.train("slow-validation", strategy="ddp", every_steps=None, kind=SlowValidation)
    with patch.object(dcp, "free_bytes", lambda: 1 << 16):
        runner.train("no-memory", strategy="fsdp", writers="rank0")
    runner.train("no-batch", global_batch=1)
    runner.train("diverged", strategy="fsdp", lr=1e30, every_steps=1, max_skipped=2)
    runner.train("slow-data", strategy="ddp", every_steps=None, kind=SlowData, steps=25)
    runner.train("no-validation", strategy="ddp", kind=NoValidation)
    runner.train("high-scale", strategy="ddp", precision="fp16", steps=30, max_skipped=2, kind=HighScale)
    runner.train("late", strategy="ddp", late=True)
    runner.train("late-cut", strategy="ddp", stop=Signal(runner.place, 4, 1), every_steps=100, late=True)
    runner.train("late-minutes", strategy="ddp", every_steps=None, minutes=1e-9, late=True)
    break_disk(runner)


def no_number(runner: Runner, strategy: str, **settings: Any) -> None:
    """A step that is no number, in the end; and what comes after it."""
    name = "-".join((strategy, *settings.values(), "nan"))
    # the schedule is that of all steps
    runner.train(name, strategy=strategy, kind=NoNumber, every_steps=2, stop=Signal(runner.place, 3), **settings)
    resume = f"{name}/checkpoints/step-3"
    runner.train(f"{name}-on", strategy=strategy, every_steps=None, resume=resume, **settings)


def ask(runner: Runner) -> None:
    """Asks rank 1 alone for a checkpoint ahead of time; the request stays where it is."""
    if runner.place.rank == 1:
        (runner.out / "asked").mkdir()
        (runner.out / "asked" / "rank-1").touch()


def one_rank(runner: Runner) -> None:
    """The scenarios of one process, before and after those of two."""
    if not (runner.out / "fsdp").exists():
        runner.train("single", strategy="single")
        runner.train("single-odd", strategy="single", every_steps=None, global_batch=7)
    else:
        runner.train("single-from-fsdp", strategy="single", resume="fsdp/checkpoints/step-3")
        runner.train("fsdp-on-one-rank", strategy="fsdp", resume="fsdp/checkpoints/step-3")


def litter(runner: Runner) -> None:
    """What a killed attempt leaves: half a checkpoint, and a whole one of a history that was given up."""
    if runner.place.rank == 0:
        for name in (".tmp-step-3", "step-6"):
            folder = runner.out / "littered" / "checkpoints" / name
            folder.mkdir(parents=True)
            (folder / "__7_0.distcp").write_bytes(b"litter")
    runner.place.barrier()


def break_disk(runner: Runner) -> None:
    """A save in which rank 1 cannot write."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if runner.place.rank == 1:
        FileSystemWriter.write_data = full  # type: ignore[method-assign]
    runner.train("full-disk", strategy="fsdp")


def main() -> None:
    """Run the scenarios of this world size."""
    out = Path(sys.argv[1])
    place = parallel.join(60, 60)
    runner = Runner(out, place)
    (one_rank if place.world_size == 1 else two_ranks)(runner)
    (out / f"failures-{os.getpid()}.json").write_text(json.dumps(runner.failures))
    parallel.leave()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    os._exit(0)  # as the trainer ends, and for its reason
