"""What is told of a training while it goes on: lines of metrics, the log, and what checkpoints say of their step."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_train.checkpoint.distributed.saver import Outcome
from mgpu_train.config import TrainConfig
from mgpu_train.data.loader import Loader
from mgpu_train.metrics.flops import mfu
from mgpu_train.metrics.lines import MetricLines, finite
from mgpu_train.parallel import Place
from mgpu_train.step import Heard
from mgpu_train.strategies.precision import Policy
from mgpu_train.tasks.base import Task

log = logging.getLogger("mgpu_train")

MUCH, LONG = 0.2, 20  # a share of the time in steps that is worth a warning, once so many lines in a row have it


@dataclass
class Spent:
    """Of several steps."""

    busy_s: float = 0.0  # seconds in them
    idle_s: float = 0.0  # of these, between what the device computed of one and of the next
    units: float = 0.0  # trained on


class Report:
    """One rank's. What it says of a step or a validation is of all ranks together."""

    def __init__(
        self, lines: MetricLines, config: TrainConfig, task: Task, place: Place, policy: Policy, loader: Loader
    ) -> None:
        self._lines, self._config, self._task, self._loader = lines, config, task, loader
        self._device, self._world_size = place.device, place.world_size
        # of products in 16 bits alone is the peak known
        computes = policy.low is not None and place.device.type == "cuda"
        self._gpu = torch.cuda.get_device_name(place.device) if computes else None
        self._spent, self._waits = Spent(), 0  # since the last line, and lines in a row with much waiting
        self._losses: tuple[int, dict[str, Any]] = (0, {})  # the newest step with its loss, and its validation

    def start(
        self, parameters: int, samples: tuple[int, int], attempt: int, resumed_step: int | None, micro_batch: int
    ) -> None:
        """Training begins; `parameters` are the model's numbers, `samples` those of training and of validation."""
        facts = self._task.facts()
        of_run = {"steps": self._config.steps, "world_size": self._world_size, "resumed_step": resumed_step}
        self._lines.write("start", **{**facts, "attempt": attempt, **of_run, "micro_batch": micro_batch})
        log.info("%d parameters, %d + %d samples", parameters, *samples)
        if facts:
            log.info("%s", ", ".join(f"{name} {value:g}" for name, value in facts.items()))

    def spent(self, busy_s: float = 0.0, idle_s: float = 0.0, units: float = 0.0) -> None:
        """In steps, since the last line."""
        self._spent.busy_s += busy_s
        self._spent.idle_s += idle_s
        self._spent.units += units

    def step(self, heard: Heard) -> None:
        """A step has changed something."""
        step, steps = heard.step, self._config.steps
        self._losses = (step, {"loss": heard.means["loss"]})
        if step % self._config.log_every and step != steps:
            return
        spent, self._spent = self._spent, Spent()
        waited_s, self._loader.waited_s = self._loader.waited_s, 0.0
        self._warn(step, waited_s, spent)
        speed, unit = spent.units / spent.busy_s, self._task.unit
        own = {
            "lr": heard.lr,
            "grad_norm": heard.norm,
            f"{unit}_per_s": round(speed, 1),
            "samples": heard.samples,
            "host_share": round(spent.idle_s / spent.busy_s, 4),
            "data_share": round(waited_s / spent.busy_s, 4),
            "memory_gib": round(_peak_bytes(self._device) / (1 << 30), 3),
            **self.mfu(speed),
        }
        derived = self._task.derived(heard.means)
        self._lines.write("step", **{**heard.means, **derived, **own, "step": step, "steps": steps})
        loss = heard.means["loss"]
        log.info("step %d/%d: loss %.4f, lr %.2e, %d %s/s", step, steps, loss, heard.lr, speed, unit)

    def skipped(self, heard: Heard) -> str:
        """A step has changed nothing; returns why."""
        self._losses = (heard.step, {})
        why = f"loss {heard.means['loss']}, gradient norm {heard.norm}"
        self._lines.write("step_skipped", step=heard.step, reason=why)
        return why

    def validation(self, step: int, means: dict[str, float]) -> None:
        """The validation data's means, with the parameters of this step."""
        of_step = self._losses[1] if self._losses[0] == step else {}
        known = finite(means)
        self._losses = (step, {**of_step, **{f"validation_{name}": value for name, value in known.items()}})
        self._lines.write("validation", **known, step=step)
        told = "".join(f", {name} {value:.4f}" for name, value in means.items() if name != "loss")
        log.info("step %d: validation loss %.4f%s", step, means["loss"], told)
        if lost := [name for name in means if name not in known]:
            log.warning("step %d: no finite number in validation: %s", step, ", ".join(lost))

    def losses(self, step: int) -> dict[str, Any]:
        """What a checkpoint's `meta.json` says of its step: only what was measured at this very one."""
        return self._losses[1] if self._losses[0] == step else {}

    def save(self, save: Outcome) -> None:
        """A checkpoint stands, or could not be made."""
        step = save.progress.step
        if save.reason is not None:
            self._lines.write("save_failed", step=step, reason=save.reason)
            log.warning("step %d: no checkpoint: %s", step, save.reason)
            return
        self._lines.write("checkpoint", step=step, stall_s=round(save.stall_s, 4), save_s=round(save.save_s, 3))
        log.info(
            "step %d: checkpoint saved in %.2f s, training stood still for %.3f s", step, save.save_s, save.stall_s
        )

    def no_save(self, step: int) -> None:
        """One was due, and was not begun."""
        self._lines.write("save_skipped", step=step)
        log.warning("step %d: no checkpoint, the one before is still being written", step)

    def end(self, step: int, reason: str) -> None:
        """Training is over: `done` or `stopped`."""
        self._lines.write("end", step=step, reason=reason)
        log.info("step %d: %s", step, reason)

    def mfu(self, speed: float) -> dict[str, float]:
        """Of `speed` units a second, where it is known: the share of all GPUs' peak."""
        share = None if self._gpu is None else mfu(self._task.flops(), speed, self._world_size, self._gpu)
        return {} if share is None else {"mfu": round(share, 4)}

    def _warn(self, step: int, waited_s: float, spent: Spent) -> None:
        self._waits = self._waits + 1 if waited_s > MUCH * spent.busy_s else 0
        if self._waits == LONG:
            log.warning(
                "step %d: training waits for its data %d %% of the time, %.3f s of it since the last line "
                "(`train.loader_threads` is %d, and this process computes with %d threads)",
                *(step, 100 * waited_s / spent.busy_s, waited_s, self._loader.threads, torch.get_num_threads()),
            )


def _peak_bytes(device: torch.device) -> int:
    """The most that this process has had so far: of tensors on its GPU, or of a CPU's memory in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
