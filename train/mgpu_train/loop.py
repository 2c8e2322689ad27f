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
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import mgpu_train
from mgpu_train import memory, parallel, stacks
from mgpu_train.checkpoint.distributed.dcp import Checkpointer, Progress, differences
from mgpu_train.checkpoint.distributed.saver import Outcome, Saver
from mgpu_train.config import Job, TrainConfig
from mgpu_train.data.loader import Loader
from mgpu_train.data.order import Order, Slices
from mgpu_train.engines import of as engine_of
from mgpu_train.errors import TrainError
from mgpu_train.metrics.flops import mfu
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.patience import Patience
from mgpu_train.metrics.pulse import Pulse
from mgpu_train.metrics.sums import Sums
from mgpu_train.optim import base as optim
from mgpu_train.optim.ema import Average
from mgpu_train.optim.schedule import learning_rate
from mgpu_train.parallel import Place
from mgpu_train.signals import SaveClock, StopRequest, Stopwatch, Wishes
from mgpu_train.step import Heard, Pending, Span, exchange, set_streams
from mgpu_train.strategies import base as strategies
from mgpu_train.strategies import initial, precision
from mgpu_train.strategies.entry import Sizes
from mgpu_train.tasks import base as tasks
from mgpu_train.tasks.base import Batch

log = logging.getLogger("mgpu_train")

MUCH, LONG = 0.2, 20  # a share of the time in steps that is worth a warning, once so many lines in a row have it

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


@dataclass
class Spent:
    """Of several steps."""

    busy_s: float = 0.0  # seconds in them
    idle_s: float = 0.0  # of these, between what the device computed of one and of the next
    units: float = 0.0  # trained on


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
        late: bool | None = None,
    ) -> None:
        """`pulse` says where this rank is (default: its changes alone). Default where there is a GPU, and only there:
        `outside`, shards are written by a process of their own; `late`, what comes of a step is read a step later."""
        gpu = place.device.type == "cuda"
        self.pulse = pulse or Pulse(MetricLines(folders.metrics, place.rank))
        self.metrics = self.pulse.metrics
        self.pulse.enter("building")
        self.config = config = trainable(job, folders)
        self.policy = precision.policy(config.precision, place.device)
        precision.allow(self.policy, place.device)
        self.task = tasks.load(config)
        sizes = Sizes(place.world_size, job.nodes, config.tensor_parallel, config.pipeline_parallel, config.replicas)
        self.strategy = strategies.load(config.strategy, place, sizes, self.policy)
        self.place = place = self.strategy.place
        self.job, self.folders, self.stop = job, folders, stop
        self.late = int(gpu if late is None else late)
        self.threads = parallel.pin_threads(place, config.threads)

        # Data: which samples come next depends on how many were consumed, and on nothing else.
        self.data, self.validation_data = self.task.data("train"), self.task.data("validation")
        if not (len(self.data) and len(self.validation_data)):
            raise TrainError(f"task {config.task} has no samples: {len(self.data)} and {len(self.validation_data)}")
        if len(set(place.gather(self.data.fingerprint))) > 1:
            raise TrainError("the nodes hold different data: give all of them the same files, and the same Python")
        self.order = Order(len(self.data), config.seed)
        self.slices = Slices(config.global_batch, config.micro_batch, place.dp_rank, place.dp_size)
        if why := self.slices.refuse(place.pipeline):
            raise TrainError(f"`train.global_batch`: {why}")
        self.loader = Loader(place.device, config.seed, config.loader_threads or self._loader_threads())

        # Model: the seed is the same on all ranks, so that replicas begin equal.
        self.model, layout = initial.spread(self.strategy, self.task, config)
        optimizers = optim.make(self.model, layout, config)
        self.engine = engine_of(place)(
            self.task,
            self.model,
            self.strategy,
            optimizers,
            clip_norm=config.clip_norm,
            micro_batches=self.slices.count,
            did=self.pulse.did,
        )
        self.ema = Average(self.model, config.ema) if config.ema else None
        self.patience = Patience(config.early_stopping) if config.early_stopping else None

        # From zero, or from the one checkpoint that all nodes were given. Beside a GPU another process writes.
        self.save_clock = SaveClock(job.checkpoint)
        writers, save_s = job.checkpoint.writers if job.checkpoint else "all", job.timeouts.save_s
        outside = job.checkpoint is not None and (gpu if outside is None else outside)
        others = {"ema": self.ema, "patience": self.patience}
        parts = {**self.engine.parts(), **{name: part for name, part in others.items() if part is not None}}
        self.checkpointer = Checkpointer(parts, place, writers, self._meta(), outside_s=save_s if outside else None)
        if job.checkpoint is not None:
            learned = (each for each in self.model.parameters() if each.requires_grad)
            weights = sum(each.numel() * each.element_size() for each in learned)
            self.checkpointer.require_memory(weights + optimizers.state_bytes + (self.ema.nbytes if self.ema else 0))
        self.progress = self.checkpointer.load(folders.resume) if folders.resume else Progress()
        self.saver = (
            Saver(self.checkpointer, folders.checkpoints, save_s) if job.checkpoint and folders.checkpoints else None
        )
        self.saved: Progress | None = None  # what stands on disk, on every node
        self.heard: Heard | None = None  # the newest step that the device is through with
        self.pending: deque[Pending] = deque()  # those after it
        self.skipped = 0  # steps in a row that changed nothing
        self.stopping = self.wanted = False  # all ranks stop; all make a checkpoint, whatever the step is
        self.early = True  # one checkpoint ahead of time may be asked for
        self.validation: tuple[int, dict[str, float]] | None = None  # step and means
        self.watch, self.spent, self.waits = Stopwatch(), Spent(), 0  # since the last line of metrics
        self.before: Span | None = None  # of the step before, where nothing was in between
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
        reason = "done" if self._over() else "stopped"
        self.metrics.write("end", step=self.progress.step, reason=reason)
        log.info("step %d: %s", self.progress.step, reason)
        return self.progress

    def _train(self) -> None:
        self.batches = self._batches()
        self.watch.lap()
        while not self._over() and not self.stopping:
            self.pending.append(self._step())
            self._hear(behind=self.late)
            if self.pulse.phase != "training":
                self.pulse.enter("training")
            step = self.progress.step
            last, due = step == self.config.steps, self.wanted or self.save_clock.due(step)
            if last or self.stopping or due or step % self.config.validate_every == 0:
                self._hear(behind=0)
            if last or (step % self.config.validate_every == 0 and not self.stopping):
                self._validate()
                self.pulse.enter("training")
            if self.saver is not None:
                self._tell(self.saver.poll())
            if due and not (self._over() or self.stopping or self.skipped):  # what changed nothing is not worth a save
                self._save()
            if last or due or step % self.config.validate_every == 0:
                self.before = None
            self.watch.lap()

    def _over(self) -> bool:
        patient = self.patience is None or not self.patience.over
        return self.progress.step == self.config.steps or not patient

    def _step(self) -> Pending:
        """One optimizer step, as far as the host has a part in it."""
        step = self.progress.step + 1
        lr = learning_rate(step, self.config)
        set_streams(self.config.seed, step, self.place.dp_rank)
        totals = exchange(self.place, self._gradients(), self._wishes())
        if self.saver is not None:
            self.watch.leave_out(self.saver.settle())
        update = self.engine.update(lr, totals)
        if self.ema is not None:
            self.ema.update(step, update.skipped)
        self.span.end()
        self.progress = Progress(step, self.progress.samples + self.config.global_batch)
        self.pulse.stepped(step)
        return Pending(self.progress, lr, totals, update, self.span)

    def _gradients(self) -> Sums:
        first = next(self.batches)  # what is computed begins once it is there
        self.span = Span(self.place.device)
        return self.engine.gradients(chain([first], islice(self.batches, self.slices.count - 1)))

    def _loader_threads(self) -> int:
        """Beside a GPU half of this process's cores, which it does not compute on; 8 at most."""
        return min(8, max(1, self.threads // 2)) if self.place.device.type == "cuda" else 1

    def _wishes(self) -> Wishes:
        request, saver = self.folders.save_request, self.saver
        return Wishes(
            stop=self.stop.asked,
            save=self.early and request is not None and request.exists(),
            overdue=self.place.rank == 0 and self.save_clock.overdue(),
            saving=saver is not None and saver.busy,
            lost=saver is not None and saver.lost,
        )

    def _hear(self, behind: int) -> None:
        """What the device is through with, but for the newest `behind` steps. Raises TrainError: it was in vain."""
        while True:
            pending = self.pending.popleft() if len(self.pending) > behind else None
            heard = pending and pending.heard()
            self.spent.busy_s += self.watch.lap()
            if pending is None or heard is None:
                return
            self.heard = heard
            self.spent.units += heard.weight
            if self.before is not None:  # and nothing but steps was in between
                self.spent.idle_s += pending.span.after(self.before)
            self.before = pending.span
            wishes = heard.wishes
            if wishes.lost:  # an attempt that starts anew loses less than one that trains on and keeps nothing
                raise TrainError(
                    "no checkpoint can be made any more: a rank is gone, or did not write its part in "
                    f"{self.job.timeouts.save_s:g} s (save_s)"
                )
            self.stopping |= wishes.stop
            # what is wanted ahead of time is not skipped, it is made as soon as it can be
            early = self.early and wishes.save and not wishes.saving
            self.early &= not early
            self.wanted |= early or wishes.overdue
            self._judge(heard)

    def _judge(self, heard: Heard) -> None:
        """Tells of a step. Raises TrainError after too many that changed nothing."""
        if not heard.skipped:
            self.skipped = 0
            self._report(heard)
            return
        self.skipped += 1
        loss = heard.means["loss"]
        words = f"loss {loss}, gradient norm {heard.norm}"
        self.metrics.write("step_skipped", step=heard.step, reason=words)
        if self.skipped > self.config.max_skipped:
            raise TrainError(
                f"training has diverged at step {heard.step - self.config.max_skipped}: {words}, and no step since "
                "then has changed anything (`train.max_skipped`). Lower `train.lr`, or take `precision: fp32`."
            )
        log.warning("step %d: skipped, it would have changed all to no numbers: %s", heard.step, words)

    def _batches(self) -> Iterator[Batch | None]:
        """The micro-batches of all steps to come."""
        size = self.config.global_batch
        rest = size * (self.config.steps - self.progress.step)
        steps = range(self.progress.samples, self.progress.samples + rest, size)
        wanted = (positions for consumed in steps for positions in self.slices.of(consumed))
        return self.loader.read(self.data, self.order.__getitem__, wanted)

    def _validate(self) -> None:
        """Mean loss over all ranks, on the same samples every time, spread evenly over the validation data. No forward
        pass is larger than one of training: it would not fit into the memory of a GPU that training fills."""
        self.pulse.enter("validation")
        parallel.mean_statistics(self.model, self.place)
        self.model.eval()
        means = self._means()
        if self.ema is not None:
            with self.ema.in_place():
                means |= {f"ema_{name}": value for name, value in self._means().items()}
        self.model.train()
        if self.patience is not None and not self.patience.take(means):
            known = ", ".join(sorted(means))
            raise TrainError(f"`train.early_stopping`: no validation has a `{self.patience.metric}`, only {known}")
        if self.patience is not None and self.patience.over:
            log.info(
                "step %d: validation is no better than %d validations before", self.progress.step, self.patience.worse
            )
        self.validation = (self.progress.step, means)
        self.metrics.write("validation", **means, step=self.progress.step)
        told = "".join(f", {name} {value:.4f}" for name, value in means.items() if name != "loss")
        log.info("step %d: validation loss %.4f%s", self.progress.step, means["loss"], told)

    def _means(self) -> dict[str, float]:
        """Of the model as it is."""
        config, samples = self.config, len(self.validation_data)
        set_streams(config.seed, 0, self.place.dp_rank)
        wanted = config.validate_batches * config.global_batch
        positions = (each for first in range(0, wanted, config.global_batch) for each in self.slices.of(first))
        batches = self.loader.read(self.validation_data, lambda number: number * samples // wanted, positions)
        totals = exchange(self.place, self.engine.evaluate(batches), Wishes())
        means = totals.means(totals.vector.tolist())
        return {**means, **self.task.derived(means)}

    def _save(self) -> None:
        """Begin a save; training goes on while it is made. One that is still under way is not joined by another."""
        if self.saver is None:
            return
        self.save_clock.restart()
        self.wanted = False
        if self.heard is not None and self.heard.wishes.saving:
            self.metrics.write("save_skipped", step=self.progress.step)
            log.warning("step %d: no checkpoint, the one before is still being written", self.progress.step)
            return
        self._tell(self.saver.wait())  # it has ended on every rank, since the last step
        parallel.mean_statistics(self.model, self.place)
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
            parallel.mean_statistics(self.model, self.place)
            waited = time.perf_counter() - began
            self.saver.begin(self.progress, self._meta_of_step())
            last = self.saver.wait()
            assert last is not None  # noqa: S101 - it was just begun
            self._tell(replace(last, stall_s=last.stall_s + waited))
            if last.reason is not None:
                raise TrainError(last.reason)
        self.saver.close()

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
        log.info("%s, %d threads each, %s", kind, self.threads, self.policy.name)
        log.info("%d parameters, %d + %d samples", parameters, len(self.data), len(self.validation_data))
        if facts:
            log.info("%s", ", ".join(f"{name} {value:g}" for name, value in facts.items()))
        if self.folders.resume is not None:
            log.info("resumed at step %d from %s", resumed, self.folders.resume)
            for change in differences(self.folders.resume, self.checkpointer.meta):
                log.warning("changed since the checkpoint was saved: %s", change)

    def _report(self, heard: Heard) -> None:
        step = heard.step
        if step % self.config.log_every and step != self.config.steps:
            return
        spent, self.spent = self.spent, Spent()
        waited_s, self.loader.waited_s = self.loader.waited_s, 0.0
        self.waits = self.waits + 1 if waited_s > MUCH * spent.busy_s else 0
        if self.waits == LONG:
            log.warning(
                "step %d: training waits for its data %d %% of the time, %.3f s of it since the last line "
                "(`train.loader_threads` is %d, and this process has %d cores)",
                *(step, 100 * waited_s / spent.busy_s, waited_s, self.loader.threads, self.threads),
            )
        speed, unit = spent.units / spent.busy_s, self.task.unit
        own = {
            "lr": heard.lr,
            "grad_norm": heard.norm,
            f"{unit}_per_s": round(speed, 1),
            "samples": heard.samples,
            "host_share": round(spent.idle_s / spent.busy_s, 4),
            "data_share": round(waited_s / spent.busy_s, 4),
            "memory_gib": round(memory.peak_bytes(self.place.device) / (1 << 30), 3),
            **self._mfu(speed),
        }
        self.metrics.write(
            "step", **{**heard.means, **self.task.derived(heard.means), **own, "step": step, "steps": self.config.steps}
        )
        loss, steps = heard.means["loss"], self.config.steps
        log.info("step %d/%d: loss %.4f, lr %.2e, %d %s/s", step, steps, loss, heard.lr, speed, unit)

    def _mfu(self, speed: float) -> dict[str, float]:
        """Where it is known: of products in 16 bits, on GPUs of a known peak."""
        if self.policy.low is None or self.place.device.type != "cuda":
            return {}
        device = torch.cuda.get_device_name(self.place.device)
        share = mfu(self.task.flops(), speed, self.place.world_size, device)
        return {} if share is None else {"mfu": round(share, 4)}

    def _meta(self) -> dict[str, Any]:
        """What `meta.json` says of all checkpoints of this attempt."""
        config, place = self.config.model_dump(), self.place
        return {
            "seed": self.config.seed,
            "world_size": self.place.world_size,
            "strategy": self.config.strategy,
            "mesh": f"dp={place.dp_size}" + (f",tp={place.tensor},pp={place.pipeline}" if place.parted else ""),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "mgpu_train": mgpu_train.__version__,
            "data": self.data.fingerprint,
            "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
            "config": config,
        }

    def _meta_of_step(self) -> dict[str, Any]:
        """What it says of this step alone; a loss only where it was measured at this very step."""
        losses: dict[str, Any] = {}
        if self.heard is not None and not self.heard.skipped:
            losses = {"loss": self.heard.means["loss"]}
        if self.validation is not None and self.validation[0] == self.progress.step:
            losses |= {f"validation_{name}": value for name, value in self.validation[1].items()}
        return losses


def trainable(job: Job, folders: Folders) -> TrainConfig:
    """The `train` section; raises TrainError for a request that cannot be carried out here."""
    config = job.train
    if config is None:
        raise TrainError("job.json has no `train` section: the bundled trainer has nothing to do")
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
