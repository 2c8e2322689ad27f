"""The tasks that are installed: entries of the group `mgpu_train.tasks`, ours and anybody's.

An entry is read without importing the task, which needs torch.

    [project.entry-points."mgpu_train.tasks"]
    lm = "mgpu_train.tasks.entry:LM"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from mgpu_train import entries
from mgpu_train.config import LmOptions
from mgpu_train.data.order import Chunks
from mgpu_train.entries import Entries
from mgpu_train.tasks.diffusion_config import DiffusionOptions
from mgpu_train.tasks.hf_config import HfOptions
from mgpu_train.tasks.recommender_config import RecommenderOptions
from mgpu_train.tasks.vision_config import VisionOptions

GROUP = "mgpu_train.tasks"


def _never(_options: Any, _tensor: int, _pipeline: int) -> str | None:
    return None


def _no_sequences(_options: Any, _context: int) -> str | None:
    return "it has no sequences that ranks could share: ddp, fsdp and hsdp spread its batches"


@dataclass(frozen=True)
class TaskEntry:
    """What an entry of the group names. The entry's own name is what a run file says in `train.task`."""

    task: str  # "package.module:Class", a `mgpu_train.tasks.base.Task`; imported on nodes
    options: type[BaseModel]  # what `train.options` may say: the class's own `Options`
    # why its model cannot be shared by so many ranks a layer and cut into so many stages
    refuse: Callable[[Any, int, int], str | None] = _never
    # why its sequences cannot be shared by so many ranks, two or more; by default it has none
    refuse_context: Callable[[Any, int], str | None] = _no_sequences
    metrics: tuple[str, ...] = ()  # all names that a run of it reports: a run file expects no other; empty: any


# of every task, beside its loss, values and speed
COMMON = (
    *("loss", "validation_loss", "first_validation_loss", "validation_step", "lr", "grad_norm", "samples"),
    *("host_share", "data_share", "memory_gib", "micro_batch"),
)


def _lm(options: LmOptions, tensor: int, pipeline: int) -> str | None:
    model = options.model
    if model.heads % tensor or (model.kv_heads or model.heads) % tensor or model.hidden % tensor:
        return f"{tensor} ranks cannot share {model.heads} heads ({model.kv_heads or model.heads} of keys and values)"
    if model.layers < pipeline:
        return f"{model.layers} layers are no {pipeline} stages"
    if model.tied and pipeline > 1:
        return "a tied head has the weights of the embedding, which is on another stage of the pipeline"
    return None


def _shared(options: LmOptions | HfOptions, context: int) -> str | None:
    why = Chunks(0, context).refuse(options.seq_len)
    return why and f"`seq_len`: {why}"


def _replicas(_options: Any, tensor: int, pipeline: int) -> str | None:
    return (
        "its layers are not shared, nor cut into stages: ddp, fsdp and hsdp spread it"
        if tensor * pipeline > 1
        else None
    )


def _no_stages(_options: Any, _tensor: int, pipeline: int) -> str | None:
    return "it has no blocks that stages could have; tensor_parallel parts its tables" if pipeline > 1 else None


LM = TaskEntry(
    "mgpu_train.tasks.lm:LM",
    LmOptions,
    refuse=_lm,
    refuse_context=_shared,
    metrics=(
        *COMMON,
        *("tokens_per_s", "mfu", "unigram_entropy", "bigram_entropy", "bytes_per_token"),
        *("validation_bits_per_byte", "first_validation_bits_per_byte"),
    ),
)

VISION = TaskEntry(
    "mgpu_train.tasks.vision:Vision",
    VisionOptions,
    refuse=_replicas,
    metrics=(
        *COMMON,
        *("accuracy", "top5_accuracy", "images_per_s", "classes"),
        *(f"{first}validation_{name}" for first in ("", "first_") for name in ("accuracy", "top5_accuracy")),
    ),
)


def _hf(options: HfOptions, tensor: int, pipeline: int) -> str | None:
    if tensor * pipeline == 1:
        return None
    return "task hf has models that are not written to be shared by a layer or cut into stages: `strategy: fsdp`"


def _hf_shared(options: HfOptions, context: int) -> str | None:
    if options.kind == "classifier":
        return "ranks share the sequences of kinds causal and masked; a classifier reads a text as a whole"
    if not options.packed:
        return "ranks share sequences of one length: cut them out of all documents (`pack: true`, without `prompt_key`)"
    return _shared(options, context)


HF = TaskEntry(
    "mgpu_train.tasks.hf:HuggingFace",
    HfOptions,
    refuse=_hf,
    refuse_context=_hf_shared,
    metrics=(
        *COMMON,
        *("accuracy", "tokens_per_s", "samples_per_s", "documents", "classes"),
        *("validation_accuracy", "first_validation_accuracy"),
    ),
)

RECOMMENDER = TaskEntry(
    "mgpu_train.tasks.recommender:Recommender",
    RecommenderOptions,
    refuse=_no_stages,
    metrics=(
        *COMMON,
        *("rmse", "validation_rmse", "first_validation_rmse", "ratings_per_s", "users", "items", "constant_rmse"),
    ),
)


def _diffusion(options: DiffusionOptions, tensor: int, pipeline: int) -> str | None:
    if tensor > 1:
        return "its layers are not shared: ddp, fsdp, hsdp and pipeline_parallel spread it"
    return f"{options.layers} layers are no {pipeline} stages" if options.layers < pipeline else None


DIFFUSION = TaskEntry(
    "mgpu_train.tasks.diffusion:Diffusion",
    DiffusionOptions,
    refuse=_diffusion,
    metrics=(*COMMON, "images_per_s", "mfu", "pixel_loss"),
)

# by name, since a node has no entry points of ours
OURS = {"diffusion": DIFFUSION, "hf": HF, "lm": LM, "recommender": RECOMMENDER, "vision": VISION}


@functools.cache
def installed() -> Entries[TaskEntry]:
    """The tasks of this environment."""
    return entries.read(GROUP, TaskEntry)


def told(name: str) -> str:
    """What nodes are told of `train.task`: one of ours by its name, any other by its import path."""
    return name if name in OURS or ":" in name else entries.need(installed(), name, "train.task").task
