"""The bundled trainer, from the first line to the last step. `mgpu_train.environment` says what it is started with.

SIGTERM ends it after the step under way, with a checkpoint and exit code 0; a validation is left for that. A mistake, a
loss that is no number or a lost peer ends it with one clear line and exit code 1.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NoReturn

from mgpu_train import parallel, stacks
from mgpu_train.checkpoint.distributed import meta
from mgpu_train.checkpoint.distributed.dcp import Checkpointer, Progress, copied_bytes
from mgpu_train.checkpoint.distributed.saver import Outcome, Saver
from mgpu_train.config import Job
from mgpu_train.data.loader import Loader
from mgpu_train.data.order import Order, Slices
from mgpu_train.engines import of as engine_of
from mgpu_train.engines.fit import Fit
from mgpu_train.environment import Folders, read_job, trainable
from mgpu_train.errors import TrainError
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.patience import Patience
from mgpu_train.metrics.pulse import Pulse
from mgpu_train.metrics.sums import Sums
from mgpu_train.metrics.timing import Span, Stopwatch
from mgpu_train.optim import base as optim
from mgpu_train.optim.ema import Average
from mgpu_train.optim.schedule import learning_rate
from mgpu_train.parallel import Place
from mgpu_train.report import Report
from mgpu_train.signals import SaveClock, StopRequest, Wishes
from mgpu_train.step import Heard, Pending, exchange, set_streams
from mgpu_train.strategies import base as strategies
from mgpu_train.strategies import initial, precision
from mgpu_train.strategies.entry import Sizes
from mgpu_train.tasks import base as tasks
from mgpu_train.tasks.base import Batch

log = logging.getLogger("mgpu_train")

HALVINGS = 24  # steps that change nothing until the scale of a loss in fp16 fits, which halves in each: 2^16 to 2^-8


class _Asked(Exception):
    """A rank was asked to stop, all agree."""


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
        self.pulse.enter("building")
        self.config = config = trainable(job, folders)
        self.policy = precision.policy(config.precision, place.device)
        precision.allow(self.policy, place.device)
        self.task = tasks.load(config)
        sizes = Sizes.of(config, place.world_size, job.nodes)
        self.strategy = strategies.load(config.strategy, place, sizes, self.policy)
        self.place = place = self.strategy.place
        self.job, self.folders, self.stop = job, folders, stop
        self.late = int(gpu if late is None else late)
        self.threads = parallel.pin_threads(place, config.threads)

        # Data: which samples come next depends on how many were consumed, and on nothing else.
        self.data, self.validation_data = self.task.data("train"), self.task.data("validation")
        if not (len(self.data) and len(self.validation_data)):
            raise TrainError(f"task {config.task} has no samples: {len(self.data)} and {len(self.validation_data)}")
        fingerprints = self.data.fingerprint, self.validation_data.fingerprint
        if len(set(place.gather(fingerprints))) > 1:
            raise TrainError("the nodes hold different data: give all of them the same files, and the same Python")
        self.order = Order(len(self.data), config.seed)
        self.slices = Slices(config.global_batch, config.micro_batch, place.dp_rank, place.dp_size)
        if why := self.slices.refuse(place.pipeline):
            raise TrainError(f"`train.global_batch`: {why}")
        self.loader = Loader(place.device, config.seed, config.loader_threads or self._loader_threads())
        self.report = Report(self.pulse.metrics, config, self.task, place, self.policy, self.loader)

        # Model: the seed is the same on all ranks, so that replicas begin equal.
        first_seed = meta.first_seed(folders.resume, config, place)
        begun = config.model_copy(update={"seed": first_seed})
        self.model, layout = initial.spread(self.strategy, self.task, begun)
        self.parameters = sum(each.numel() for each in self.model.parameters())  # an engine may empty them
        optimizers = optim.make(self.model, layout, config)
        self.ema = Average(self.model, config.ema) if config.ema else None
        learned = (each for each in self.model.parameters() if each.requires_grad)
        weights = sum(each.numel() * each.element_size() for each in learned)
        state = weights + optimizers.state_bytes + (self.ema.nbytes if self.ema else 0)
        writers, save_s = job.checkpoint.writers if job.checkpoint else "all", job.timeouts.save_s
        if config.micro_batch == "auto":
            read = partial(self.loader.read, self.data, self.order.__getitem__)
            fit = Fit(self.task, self.model, self.strategy, read, self.pulse.did, compiled=config.compile)
            copied = 0 if gpu or job.checkpoint is None else copied_bytes(state, place, writers)
            found = fit.largest(self.slices.size, optimizers.held_bytes + copied)
            self.slices, self.loader.waited_s = replace(self.slices, micro_batch=found), 0.0
        self.engine = engine_of(self.strategy)(
            self.task,
            self.model,
            self.strategy,
            optimizers,
            clip_norm=config.clip_norm,
            micro_batches=self.slices.count,
            did=self.pulse.did,
        )
        self.patience = Patience(config.early_stopping) if config.early_stopping else None

        # From zero, or from the one checkpoint that all nodes were given. Beside a GPU another process writes.
        self.save_clock = SaveClock(job.checkpoint)
        outside = job.checkpoint is not None and (gpu if outside is None else outside)
        others = {"ema": self.ema, "patience": self.patience}
        parts = {**self.engine.parts(), **{name: part for name, part in others.items() if part is not None}}
        self.meta = meta.of_run(config, place, *fingerprints, self.slices.size, first_seed)
        self.checkpointer = Checkpointer(parts, place, writers, self.meta, outside_s=save_s if outside else None)
        if job.checkpoint is not None:
            self.checkpointer.require_memory(state)
        self.progress = self.checkpointer.load(folders.resume) if folders.resume else Progress()
        if self.progress.step > config.steps:
            raise TrainError(
                f"the checkpoint is of step {self.progress.step}, and `train.steps` is {config.steps}: there is "
                "nothing left to train. Set `train.steps` to more, or begin another run."
            )
        if self.ema is not None and "ema" in self.checkpointer.absent:
            self.ema.restart()
        self.saver = (
            Saver(self.checkpointer, folders.checkpoints, save_s) if job.checkpoint and folders.checkpoints else None
        )
        self.saved: Progress | None = None  # what stands on disk, on every node
        self.heard: Heard | None = None  # the newest step that the device is through with
        self.pending: deque[Pending] = deque()  # those after it
        self.laid_out = False  # the memory of saves is taken, or none is ahead of them
        self.skipped = 0  # steps in a row that changed nothing
        self.stopping = self.wanted = False  # all ranks stop; all make a checkpoint, whatever the step is
        self.left = False  # the validation of this step was left for that
        self.early = True  # one checkpoint ahead of time may be asked for
        self.watch = Stopwatch()
        self.before: Span | None = None  # of the step before, where nothing was in between
        self.pulse.stepped(self.progress.step)

    def run(self) -> Progress:
        """Train to the last step, or until any rank is asked to stop; returns how far it came.

        Raises TrainError when training cannot go on.
        """
        self._announce()
        if self._owes_validation():
            self._validate(stoppable=self.progress.step > 0)  # without a step there is no checkpoint to be made
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
        self.report.end(self.progress.step, reason)
        return self.progress

    def _owes_validation(self) -> bool:
        """At the begin, and where an earlier attempt was stopped at a step that validates, before it did."""
        step, steps, folder = self.progress.step, self.config.steps, self.folders.resume
        due = step == steps or step % self.config.validate_every == 0
        return step == 0 or (due and folder is not None and not meta.validated(folder))

    def _train(self) -> None:
        self.batches = self._batches()
        self.watch.lap()
        while not self._over() and not self.stopping:
            self.pending.append(self._step())
            self._hear(behind=self.late)
            if self.pulse.phase == "first_step" and self.saver is not None:
                self.watch.leave_out(self.saver.prepare())
                self.before = None
            if self.pulse.phase != "training":
                self.pulse.enter("training")
            if not self.laid_out and self.heard is not None and not self.heard.skipped:  # optimizers have their state
                self.checkpointer.lay_out()
                self.laid_out, self.before = True, None
            step = self.progress.step
            last, due = step == self.config.steps, self.wanted or self.save_clock.due(step)
            validates = last or step % self.config.validate_every == 0
            if validates or due or self.stopping:
                self._hear(behind=0)
            if validates and (last or not self.stopping):
                self._validate(stoppable=True)
                self.pulse.enter("training")
            if self.saver is not None:
                self._tell(self.saver.poll())
            if due and not (self._over() or self.stopping or self.skipped):  # what changed nothing is not worth a save
                self._save()
            if validates or due:
                self.before = None
            self.watch.lap()

    def _over(self) -> bool:
        patient = self.patience is None or not self.patience.over
        return not self.left and (self.progress.step == self.config.steps or not patient)

    def _step(self) -> Pending:
        """One optimizer step, as far as the host has a part in it."""
        step = self.progress.step + 1
        lr = learning_rate(step, self.config)
        set_streams(self.config.seed, step, self.place.copy)
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
            self.report.spent(self.watch.lap())
            if pending is None or heard is None:
                return
            self.heard = heard
            idle_s = 0.0 if self.before is None else pending.span.after(self.before)
            self.report.spent(idle_s=idle_s, units=heard.weight)
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
            self.report.step(heard)
            return
        self.skipped += 1
        why, most = self.report.skipped(heard), self.config.max_skipped
        if self.policy.scaled and math.isfinite(heard.means["loss"]):
            most += HALVINGS
        if self.skipped > most:
            raise TrainError(
                f"training has diverged at step {heard.step - self.skipped + 1}: {why}, and no step since then has "
                "changed anything (`train.max_skipped`). Lower `train.lr`, or take `precision: fp32`."
            )
        log.warning("step %d: skipped, it would have changed all to no numbers: %s", heard.step, why)

    def _batches(self) -> Iterator[Batch | None]:
        """The micro-batches of all steps to come."""
        size = self.config.global_batch
        rest = size * (self.config.steps - self.progress.step)
        steps = range(self.progress.samples, self.progress.samples + rest, size)
        wanted = (positions for consumed in steps for positions in self.slices.of(consumed))
        return self.loader.read(self.data, self.order.__getitem__, wanted)

    def _validate(self, *, stoppable: bool = False) -> None:
        """Mean loss over all ranks, on the same samples every time, spread evenly over the validation data, or on each
        of them once. No forward pass is larger than one of training: it would not fit into the memory of a GPU that
        training fills.

        A `stoppable` one is left when any rank is asked to stop: the checkpoint that is to be made may have no time to
        wait for its end. Whoever resumes from that owes it."""
        self.pulse.enter("validation")
        parallel.mean_statistics(self.model, self.place)
        self.model.eval()
        try:
            means = self._means(stoppable)
            if self.ema is not None:
                with self.ema.in_place():
                    means |= {f"ema_{name}": value for name, value in self._means(stoppable).items()}
        except _Asked:
            self.left = self.stopping = True
            log.info("step %d: the validation is left, to save and stop", self.progress.step)
            return
        finally:
            self.model.train()
        if self.patience is not None and not self.patience.take(means):
            known = ", ".join(sorted(means))
            raise TrainError(f"`train.early_stopping`: no validation has a `{self.patience.metric}`, only {known}")
        if self.patience is not None and self.patience.over:
            log.info(
                "step %d: validation is no better than %d validations before", self.progress.step, self.patience.worse
            )
        self.report.validation(self.progress.step, means)

    def _means(self, stoppable: bool) -> dict[str, float]:
        """Of the model as it is. Raises _Asked: on all ranks, if it is `stoppable` and a stop was asked for."""
        config, samples, size = self.config, len(self.validation_data), self.config.global_batch
        set_streams(config.seed, 0, self.place.copy)
        wanted = min(config.validate_batches * size, max(samples, self.place.dp_size))  # one for each replica at least
        if self.place.pipeline > 1 or config.compile:
            # all passes are of one size: after another one, training would be compiled for sizes that vary, which a
            # resume without a validation before it is not
            wanted = -(-wanted // size) * size
        parts = ((first, min(size, wanted - first)) for first in range(0, wanted, size))
        slices = (replace(self.slices, global_batch=count).of(first) for first, count in parts)
        positions = chain.from_iterable(slices)
        batches = self.loader.read(self.validation_data, lambda number: number * samples // wanted, positions)
        waited_s = self.loader.waited_s
        try:
            sums = self.engine.evaluate(self._unless_asked(batches) if stoppable else batches)
            totals = exchange(self.place, sums, Wishes())
        finally:
            self.loader.waited_s = waited_s  # what is told is training's share
        means = totals.means(totals.vector.tolist())
        return {**means, **self.task.derived(means)}

    def _unless_asked(self, batches: Iterator[Batch | None]) -> Iterator[Batch | None]:
        """The batches, until a rank is asked to stop: all come to the same mind before each global batch. By gloo, so
        that no GPU is waited for."""
        for number, batch in enumerate(batches):
            if number % self.slices.count == 0 and any(self.place.gather(self.stop.asked)):
                raise _Asked
            yield batch

    def _save(self) -> None:
        """Begin a save; training goes on while it is made. One that is still under way is not joined by another."""
        if self.saver is None:
            return
        self.save_clock.restart()
        self.wanted = False
        if self.heard is not None and self.heard.wishes.saving:
            self.report.no_save(self.progress.step)
            return
        self._tell(self.saver.wait())  # it has ended on every rank, since the last step
        parallel.mean_statistics(self.model, self.place)
        self.saver.begin(self.progress, self.report.losses(self.progress.step))

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
            self.saver.begin(self.progress, self.report.losses(self.progress.step))
            last = self.saver.wait()
            assert last is not None  # noqa: S101 - it was just begun
            self._tell(replace(last, stall_s=last.stall_s + waited))
            if last.reason is not None:
                raise TrainError(last.reason)
        self.saver.close()

    def _tell(self, save: Outcome | None) -> None:
        if save is None:
            return
        if save.reason is None:
            self.saved = save.progress
        self.report.save(save)

    def _announce(self) -> None:
        resumed = self.progress.step if self.folders.resume else None
        kind = f"{self.config.strategy} on {self.place.world_size} x {self.place.device.type}"
        log.info("%s, %d threads each, %s, %d samples a pass", kind, self.threads, self.policy.name, self.slices.size)
        samples = len(self.data), len(self.validation_data)
        self.report.start(self.parameters, samples, self.job.attempt, resumed, self.slices.size)
        if self.folders.resume is not None:
            log.info("resumed at step %d from %s", resumed, self.folders.resume)
            for change in meta.differences(self.folders.resume, self.meta):
                log.warning("changed since the checkpoint was saved: %s", change)


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


def run() -> NoReturn:
    """`main`, and the end of this process.

    All is written then. What is left of torch's threads may abort a process that tears itself down (gloo: "terminate
    called without an active exception"), and a run that is done would count as failed.
    """
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
