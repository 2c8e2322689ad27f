"""The bundled trainer, from the first line to the last step.

Started once per process: by the agent, by torchrun, or as `python -m mgpu_train.loop` for one process. It reads

    MGPU_JOB               path of job.json (`mgpu_train.config.Job`); `train`, `checkpoint` and `timeouts` matter here
    MGPU_CHECKPOINT_DIR    where `step-<n>` folders go, when job.json has `checkpoint`
    MGPU_METRICS_DIR       where `rank-<rank>.jsonl` goes; without it there is none
    MGPU_RESUME_DIR        a verified checkpoint to go on from; without it training begins at step 0
    MGPU_SAVE_REQUEST      a file; when it appears a checkpoint is made ahead of time, once
    MGPU_STACKS_DIR        where `rank-<rank>.txt` gets the stacks of all threads at SIGUSR2; without it there are none

and torchrun's own variables. It needs nothing else of mgpu:

    echo '{"run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
           "master_addr": "127.0.0.1", "master_port": 29500, "train": {"strategy": "fsdp", "steps": 100}}' > job.json
    MGPU_JOB=job.json torchrun --standalone --nproc-per-node 2 -m mgpu_train.loop

SIGTERM ends it after the step under way, with a checkpoint and exit code 0. A mistake, a loss that is no number or a
lost peer ends it with one clear line and exit code 1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

import mgpu_train
from mgpu_train import parallel, stacks
from mgpu_train.checkpoint.distributed.dcp import Checkpointer, Progress, differences
from mgpu_train.checkpoint.distributed.saver import Outcome, Saver
from mgpu_train.config import CheckpointTarget, Job, TrainConfig
from mgpu_train.data.order import Order
from mgpu_train.errors import TrainError
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.pulse import Pulse
from mgpu_train.metrics.sums import Sums
from mgpu_train.parallel import Place
from mgpu_train.strategies import base as strategies
from mgpu_train.strategies import initial
from mgpu_train.tasks import base as tasks
from mgpu_train.tasks.base import Batch, Data

log = logging.getLogger("mgpu_train")

USAGE = (
    "usage: MGPU_JOB=job.json [MGPU_CHECKPOINT_DIR=folder] [MGPU_METRICS_DIR=folder] [MGPU_RESUME_DIR=folder] "
    "torchrun --nproc-per-node N -m mgpu_train.loop"
)


@dataclass(frozen=True)
class Folders:
    """Where the trainer reads and writes; None where it does not."""

    checkpoints: Path | None = None
    metrics: Path | None = None
    resume: Path | None = None
    save_request: Path | None = None  # a file that appears when a checkpoint ahead of time is wanted

    @classmethod
    def of_environment(cls) -> Folders:
        """As the variables MGPU_* say."""
        names = ("MGPU_CHECKPOINT_DIR", "MGPU_METRICS_DIR", "MGPU_RESUME_DIR", "MGPU_SAVE_REQUEST")
        return cls(*(Path(os.environ[name]).absolute() if os.environ.get(name) else None for name in names))


class StopRequest:
    """Set by SIGTERM, read at step boundaries: a handler must not save or talk to other ranks itself."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.asked = True


class SaveClock:
    """When the next checkpoint is due, by steps and by minutes; `now` is in seconds."""

    def __init__(self, target: CheckpointTarget | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps = target.every_steps if target else None
        self._seconds = target.every_minutes * 60 if target and target.every_minutes else math.inf
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now."""
        self._since = self._now()

    def overdue(self) -> bool:
        """True when the minutes are over by this rank's clock; rank 0's answer is everybody's."""
        return self._now() - self._since >= self._seconds

    def due(self, step: int) -> bool:
        """True when a checkpoint is due after this step, by count."""
        return self._steps is not None and step % self._steps == 0


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of the update that makes step `step` (from 1): linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, never on the gains of norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


class Trainer:
    """One training run on one rank. All ranks make one each and call the same methods together."""

    def __init__(
        self,
        job: Job,
        folders: Folders,
        place: Place,
        stop: StopRequest,
        *,
        pulse: Pulse | None = None,
        outside: bool | None = None,
    ) -> None:
        """`pulse` says where this rank is (default: its changes alone); `outside`: shards are written by a process of
        their own (default: where there is a GPU)."""
        self.pulse = pulse or Pulse(MetricLines(folders.metrics, place.rank))
        self.metrics = self.pulse.metrics
        self.pulse.enter("building")
        self.config = config = trainable(job, folders, place)
        self.task, self.strategy = tasks.load(config), strategies.load(config.strategy, place, config.precision)
        self.job, self.folders, self.place, self.stop = job, folders, place, stop
        self.threads = parallel.pin_threads(place, config.threads)

        # Data: which samples come next depends on how many were consumed, and on nothing else.
        self.data, self.validation_data = self.task.data("train"), self.task.data("validation")
        if not (len(self.data) and len(self.validation_data)):
            raise TrainError(f"task {config.task} has no samples: {len(self.data)} and {len(self.validation_data)}")
        if len(set(place.gather(self.data.fingerprint))) > 1:
            raise TrainError("the nodes hold different data: give all of them the same files, and the same Python")
        self.order = Order(len(self.data), config.seed)

        # Model: the seed is the same on all ranks, so that replicas begin equal.
        self.model = initial.spread(self.strategy, self.task, config.seed)
        self.optimizer = make_optimizer(self.model, config)

        # From zero, or from the one checkpoint that all nodes were given. Beside a GPU another process writes.
        self.save_clock = SaveClock(job.checkpoint)
        writers = job.checkpoint.writers if job.checkpoint else "all"
        save_s = job.timeouts.save_s
        outside = job.checkpoint is not None and (place.device.type == "cuda" if outside is None else outside)
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, place, writers, self._meta(), outside_s=save_s if outside else None
        )
        if job.checkpoint is not None:
            self.checkpointer.require_memory(moments=2)  # AdamW's
        self.progress = self.checkpointer.load(folders.resume) if folders.resume else Progress()
        self.saver = (
            Saver(self.checkpointer, folders.checkpoints, save_s) if job.checkpoint and folders.checkpoints else None
        )
        self.saved: Progress | None = None  # what stands on disk, on every node
        self.busy_saving = False  # any rank, as all agreed on in the step under way
        self.loss: float | None = None  # of the newest step
        self.validation: tuple[int, dict[str, float]] | None = None  # step and means
        self.early = True  # one checkpoint ahead of time may be asked for
        self.busy_s, self.units = 0.0, 0.0  # spent in steps, and trained on, since the last line of metrics
        self.pulse.stepped(self.progress.step)

    def run(self) -> Progress:
        """Train to the last step, or until any rank is asked to stop; returns how far it came.

        Raises TrainError when training cannot go on.
        """
        self._announce()
        if self.progress.step == 0:
            self._validate()
        self.pulse.enter("first_step")
        try:
            self._train()
        except TrainError:  # the save under way is of a step before it, which is worth having
            if self.saver is not None:
                self._tell(self.saver.wait())
            raise
        self._save_last()
        self.pulse.enter("finishing")
        reason = "done" if self.progress.step == self.config.steps else "stopped"
        self.metrics.write("end", step=self.progress.step, reason=reason)
        log.info("step %d: %s", self.progress.step, reason)
        return self.progress

    def _train(self) -> None:
        stopping = False
        while self.progress.step < self.config.steps and not stopping:
            stopping, wanted = self._step()
            step = self.progress.step
            if self.pulse.phase != "training":
                self.pulse.enter("training")
            if step == self.config.steps or (step % self.config.validate_every == 0 and not stopping):
                self._validate()
                self.pulse.enter("training")
            self._hear()
            if (wanted or self.save_clock.due(step)) and step < self.config.steps and not stopping:
                self._save()

    def _step(self) -> tuple[bool, bool]:
        """One optimizer step. Returns what all ranks agreed on: to stop now, and to save, whatever the step is."""
        began = time.perf_counter()
        step = self.progress.step + 1
        lr = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums = self._backward(self.order.batch(self.progress.samples, *self._slice()))
        # One exchange a step carries all that needs agreement: the loss, a signal or a request to save anywhere, the
        # minutes since a save.
        overdue = self.place.rank == 0 and self.save_clock.overdue()
        saving = self.saver is not None and self.saver.busy
        lost = self.saver is not None and self.saver.lost
        signals, overdue, early, saving, lost = sums.reduce(
            self.place, self.stop.asked, overdue, self._asked_early(), saving, lost
        )
        if lost:  # an attempt that starts anew loses less than one that trains on and keeps nothing
            raise TrainError(
                "no checkpoint can be made any more: a rank is gone, or did not write its part in "
                f"{self.job.timeouts.save_s:g} s (save_s)"
            )
        self.busy_saving = saving > 0
        early *= not self.busy_saving  # what is wanted ahead of time is not skipped, it is made as soon as it can be
        self.early = self.early and early == 0
        # the strategy has left the mean over ranks of the gradients of sums
        share = self.place.world_size / (sums.weight or math.nan)
        norm = parallel.mean_gradients(self.model, share, self.config.clip_norm)
        self.loss = loss = sums.means["loss"]
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainError(
                f"training has diverged at step {step}: loss {loss}, gradient norm {norm}. "
                "Nothing of this step was kept. Lower `train.lr`, or take `precision: fp32`."
            )
        waited = self.saver.settle() if self.saver else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress = Progress(step, self.progress.samples + self.config.global_batch)
        self.busy_s += time.perf_counter() - began - waited
        self.units += sums.weight
        self.pulse.stepped(step)
        self._report(sums.means, lr, norm)
        return signals > 0, overdue + early > 0

    def _asked_early(self) -> bool:
        request = self.folders.save_request
        return self.early and request is not None and request.exists()

    def _slice(self) -> tuple[int, int, int]:
        return self.config.global_batch, self.place.rank, self.place.world_size

    def _backward(self, samples: list[int]) -> Sums:
        """Accumulate the gradient of the loss of this rank's samples, micro-batch by micro-batch."""
        size = self.config.micro_batch or len(samples)
        sums = Sums()
        for first in range(0, len(samples), size):
            last = first + size >= len(samples)
            batch = self._batch(self.data, samples[first : first + size])
            with self.strategy.forward_pass(self.model, reduce=last):
                loss = self.task.loss(self.model, batch)
                loss.total.backward()
            sums.add(loss)
            self.pulse.did()
        return sums

    def _batch(self, data: Data, samples: list[int]) -> Batch:
        return {name: values.to(self.place.device) for name, values in data.batch(samples).items()}

    @torch.no_grad()
    def _validate(self) -> None:
        """Mean loss over all ranks, on the same samples every time, spread evenly over the validation data. No forward
        pass is larger than one of training: it would not fit into the memory of a GPU that training fills."""
        self.pulse.enter("validation")
        config, data = self.config, self.validation_data
        wanted = config.validate_batches * config.global_batch
        local = config.global_batch // self.place.world_size
        size = config.micro_batch or local
        sums = Sums()
        self.model.eval()
        for first in range(self.place.rank * local, wanted, config.global_batch):
            for begin in range(first, first + local, size):
                numbers = range(begin, min(begin + size, first + local))
                batch = self._batch(data, [number * len(data) // wanted for number in numbers])
                with self.strategy.forward_pass(self.model, reduce=False):
                    sums.add(self.task.evaluate(self.model, batch))
                self.pulse.did()
        self.model.train()
        sums.reduce(self.place)
        means = sums.means
        self.validation = (self.progress.step, means)
        self.metrics.write("validation", **means, step=self.progress.step)
        told = "".join(f", {name} {value:.4f}" for name, value in means.items() if name != "loss")
        log.info("step %d: validation loss %.4f%s", self.progress.step, means["loss"], told)

    def _save(self) -> None:
        """Begin a save; training goes on while it is made. One that is still under way is not joined by another."""
        if self.saver is None:
            return
        self.save_clock.restart()
        if self.busy_saving:
            self.metrics.write("save_skipped", step=self.progress.step)
            log.warning("step %d: no checkpoint, the one before is still being written", self.progress.step)
            return
        self._tell(self.saver.wait())  # it has ended on every rank, since the last step
        self.saver.begin(self.progress, self._meta_of_step())

    def _save_last(self) -> None:
        """The end has its checkpoint, also when nothing was left to do. Raises TrainError when it cannot be made."""
        if self.saver is None:
            return
        began = time.perf_counter()
        self.pulse.enter("saving")
        self._tell(self.saver.wait())
        if self.saved != self.progress:
            self.pulse.enter("saving")  # another one: its time begins now
            waited = time.perf_counter() - began
            self.saver.begin(self.progress, self._meta_of_step())
            last = self.saver.wait()
            assert last is not None  # noqa: S101 - it was just begun
            self._tell(replace(last, stall_s=last.stall_s + waited))
            if last.reason is not None:
                raise TrainError(last.reason)
        self.saver.close()

    def _hear(self) -> None:
        """What has become of the save in the background, if it has ended."""
        if self.saver is not None:
            self._tell(self.saver.poll())

    def _tell(self, save: Outcome | None) -> None:
        if save is None:
            return
        step = save.progress.step
        if save.reason is not None:
            self.metrics.write("save_failed", step=step, reason=save.reason)
            log.warning("step %d: no checkpoint: %s", step, save.reason)
            return
        self.saved = save.progress
        self.metrics.write("checkpoint", step=step, stall_s=round(save.stall_s, 4), save_s=round(save.save_s, 3))
        log.info(
            "step %d: checkpoint saved in %.2f s, training stood still for %.3f s", step, save.save_s, save.stall_s
        )

    def _announce(self) -> None:
        facts = self.task.facts()
        resumed = self.progress.step if self.folders.resume else None
        of_run = {"steps": self.config.steps, "world_size": self.place.world_size, "resumed_step": resumed}
        self.metrics.write("start", **{**facts, "attempt": self.job.attempt, **of_run})
        place, model = self.place, self.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        kind = f"{self.config.strategy} on {place.world_size} x {place.device.type}"
        log.info("%s, %d threads each, %s", kind, self.threads, self.config.precision)
        log.info("%d parameters, %d + %d samples", parameters, len(self.data), len(self.validation_data))
        if facts:
            log.info("%s", ", ".join(f"{name} {value:g}" for name, value in facts.items()))
        if self.folders.resume is not None:
            log.info("resumed at step %d from %s", resumed, self.folders.resume)
            for change in differences(self.folders.resume, self.checkpointer.meta):
                log.warning("changed since the checkpoint was saved: %s", change)

    def _report(self, means: dict[str, float], lr: float, norm: float) -> None:
        step = self.progress.step
        if step % self.config.log_every and step != self.config.steps:
            return
        speed, unit = self.units / self.busy_s, self.task.unit
        self.busy_s, self.units = 0.0, 0.0
        own = {"lr": lr, "grad_norm": norm, f"{unit}_per_s": round(speed, 1), "samples": self.progress.samples}
        self.metrics.write("step", **{**means, **own, "step": step, "steps": self.config.steps})
        log.info("step %d/%d: loss %.4f, lr %.2e, %d %s/s", step, self.config.steps, means["loss"], lr, speed, unit)

    def _meta(self) -> dict[str, Any]:
        """What `meta.json` says of all checkpoints of this attempt."""
        config = self.config.model_dump()
        return {
            "seed": self.config.seed,
            "world_size": self.place.world_size,
            "strategy": self.config.strategy,
            "mesh": f"dp={self.place.world_size}",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "mgpu_train": mgpu_train.__version__,
            "data": self.data.fingerprint,
            "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
            "config": config,
        }

    def _meta_of_step(self) -> dict[str, Any]:
        """What it says of this step alone; a loss only where it was measured at this very step."""
        losses: dict[str, Any] = {} if self.loss is None else {"loss": self.loss}
        if self.validation is not None and self.validation[0] == self.progress.step:
            losses |= {f"validation_{name}": value for name, value in self.validation[1].items()}
        return losses


def trainable(job: Job, folders: Folders, place: Place) -> TrainConfig:
    """The `train` section; raises TrainError for a request that cannot be carried out here."""
    config = job.train
    if config is None:
        raise TrainError("job.json has no `train` section: the bundled trainer has nothing to do")
    if config.global_batch % place.world_size:
        raise TrainError(
            f"`train.global_batch` is {config.global_batch}, which {place.world_size} processes cannot share evenly: "
            f"take a multiple of {place.world_size}"
        )
    if job.checkpoint is not None and folders.checkpoints is None:
        raise TrainError("job.json asks for checkpoints, but MGPU_CHECKPOINT_DIR does not say where to put them")
    return config


def read_job() -> Job:
    """The job that MGPU_JOB names; raises TrainError when there is none, or a wrong one."""
    path = os.environ.get("MGPU_JOB")
    if not path:
        raise TrainError(f"MGPU_JOB is not set: it names the job.json to train by. {USAGE}")
    try:
        return Job.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise TrainError(f"cannot read MGPU_JOB={path}: {error.strerror}") from error
    except ValidationError as error:
        mistakes = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'job'}: {e['msg']}" for e in error.errors())
        raise TrainError(f"{path} is no job.json of mgpu: {mistakes}") from error


def main() -> int:
    """Train as the environment says; returns the exit code."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if rank == "0" else logging.WARNING,  # one voice is enough while all is well
        format=f"[rank{rank}]: %(message)s",  # torch's own style
    )
    stacks.show_on_request()
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop)
    try:
        job = read_job()
        place = parallel.join(job.timeouts.collective_s, job.timeouts.save_s, job.demand)
        folders = Folders.of_environment()
        with Pulse(MetricLines(folders.metrics, place.rank)) as pulse:
            Trainer(job, folders, place, stop, pulse=pulse).run()
            parallel.leave()
    except Exception as error:  # what a user needs is one line, and it comes last
        if not isinstance(error, TrainError):
            log.exception("this is a bug, or a lost peer:")
        log.error("%s: %s", type(error).__name__, str(error).partition("\n")[0])
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # All is written. What is left of torch's threads may abort a process that tears itself down (gloo: "terminate
    # called without an active exception"), and a run that is done would count as failed.
    os._exit(code)
