"""What the checkpoints of a run take of a machine's memory and disk, where the model's size is known beforehand.

Figures are those of the bundled trainer: parameters, AdamW's two moments (of Muon's matrices one) and the moving
average, 4 bytes each, the moments of adamw8bit one; and of its agent, which keeps the newest checkpoints beside the one
that is written (`mgpu_train.agent.uploads.saves`). Data, environment, image and the system come on top: their sizes are
not known here.
"""

from __future__ import annotations

import math

from mgpu_train.config import LmOptions, TrainConfig
from mgpu_train.launchers import PYTHON, TORCHRUN, installed
from mgpu_train.optim.blocks import moments_bytes

from mgpu.errors import InputError
from mgpu.plan.model import CheckpointRoom
from mgpu.spec.model import DEFAULT_EVERY_STEPS, Checkpoint, RunSpec

_GIB = 2**30
_STEP_GIB = 10  # what a proposed disk is rounded up to


def save_gib(spec: RunSpec) -> float:
    """GiB of a checkpoint that one machine has, in its memory while it is saved and then on its disk; 0: not known."""
    if spec.train is None or spec.train.task != "lm" or not isinstance(spec.checkpoint, Checkpoint):
        return 0
    return _bytes(spec.train) / (1 if spec.checkpoint.writers == "rank0" else spec.nodes) / _GIB


def of(spec: RunSpec) -> CheckpointRoom | None:
    """What a machine needs; None: not known, or its disk is this machine's, of which `disk_gib` says nothing."""
    part = save_gib(spec)
    if not part or spec.train is None or not isinstance(spec.checkpoint, Checkpoint) or spec.on_this_machine:
        return None
    count = _count(spec, spec.train, spec.checkpoint)
    # ranks of these read their shards; where that is not known beforehand, a node fetches all of a checkpoint
    parted = spec.train.tensor_parallel * spec.train.pipeline_parallel > 1
    known = spec.train.strategy == "fsdp" and not parted and _finds_shards(spec.launcher)
    again = part if known or spec.nodes == 1 else _bytes(spec.train) / _GIB
    resumed = again if spec.recovery.attempts > 1 else 0.0
    return CheckpointRoom(save_gib=round(part, 1), count=count, resumed_gib=round(resumed, 1), disk_gib=spec.disk_gib)


def too_small(spec: RunSpec) -> InputError | None:
    """That the disk is smaller than the checkpoints which come to lie on it; None: it is not, as far as is known."""
    room = of(spec)
    if room is None or room.kept_gib <= room.disk_gib or spec.train is None:
        return None
    parameters = LmOptions.model_validate(spec.train.task_options).model.parameters
    least = math.ceil((room.kept_gib + room.resumed_gib) / _STEP_GIB) * _STEP_GIB
    share = " of each machine" if spec.nodes > 1 else ""
    return InputError(
        f"disk_gib: {room.disk_gib} GiB do not hold the checkpoints{share}, {room.kept_gib:.4g} GiB",
        f"`train.model` has {parameters:.3g} parameters, and a checkpoint {room.save_gib:g} GiB{share}; {room.count} "
        "of them lie on the disk, the one that is being written among them. Nothing was rented.",
        f"Write `disk_gib: {least}`, and more by what data, environment and system take; or take a smaller "
        "`train.model`, or more `nodes`, which share a checkpoint with `checkpoint: {writers: all}`.",
    )


def words(room: CheckpointRoom) -> str:
    """What is said of it beside the price; empty: less than a GiB."""
    if room.kept_gib < 1:
        return ""
    later = f", {room.resumed_gib:g} GiB more after a restart" if room.resumed_gib else ""
    return (
        f"checkpoints take up to {room.kept_gib:.4g} of the {room.disk_gib} GiB of a machine's disk{later}; each save "
        f"{room.save_gib:g} GiB of its memory"
    )


def doubt(room: CheckpointRoom) -> str:
    """What may come to lack; empty: nothing that is known here."""
    whole = room.kept_gib + room.resumed_gib
    if whole <= room.disk_gib:
        return ""
    return (
        f"after a restart the disk does not hold what is resumed from beside the checkpoints, {whole:.4g} GiB: raise "
        f"`disk_gib` ({room.disk_gib})"
    )


def _bytes(train: TrainConfig) -> float:
    """Of a whole checkpoint of task lm."""
    model = LmOptions.model_validate(train.task_options).model
    in_blocks = model.matrices - model.padded_vocabulary * model.dim
    numbers = (4 if train.ema else 3) * model.parameters - (in_blocks if train.optimizer == "muon" else 0)
    if train.optimizer != "adamw8bit":
        return 4.0 * numbers
    matrices = in_blocks + (1 if model.tied else 2) * model.padded_vocabulary * model.dim
    # of a number, in the rows that have the smaller blocks
    moments = max(moments_bytes((width, width)) / width**2 for width in (model.dim, model.hidden))
    return 4.0 * (numbers - 2 * matrices) + moments * matrices


def _count(spec: RunSpec, train: TrainConfig, wanted: Checkpoint) -> int:
    """Checkpoints on a disk at a time: the finished ones that stay, and one that is being written."""
    from mgpu_train.agent.uploads.saves import ALONE_IDLE, KEPT_IDLE

    stay = ALONE_IDLE if spec.nodes == 1 or wanted.writers == "rank0" else KEPT_IDLE
    every = 1 if wanted.every_minutes else wanted.every_steps or DEFAULT_EVERY_STEPS  # a step may take a minute
    return min(stay + 1, math.ceil(train.steps / every))


def _finds_shards(launcher: str) -> bool:
    return installed().found.get(launcher) in (TORCHRUN, PYTHON)
