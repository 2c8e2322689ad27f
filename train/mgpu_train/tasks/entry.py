"""The tasks that are installed: entries of the group `mgpu_train.tasks`, ours and anybody's.

An entry is read without importing the task, which needs torch.

    [project.entry-points."mgpu_train.tasks"]
    lm = "mgpu_train.tasks.entry:LM"
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pydantic import BaseModel

from mgpu_train import entries
from mgpu_train.config import LmOptions
from mgpu_train.entries import Entries

GROUP = "mgpu_train.tasks"


@dataclass(frozen=True)
class TaskEntry:
    """What an entry of the group names. The entry's own name is what a run file says in `train.task`."""

    task: str  # "package.module:Class", a `mgpu_train.tasks.base.Task`; imported on nodes
    options: type[BaseModel]  # what `train.options` may say: the class's own `Options`
    metrics: tuple[str, ...] = ()  # all names that a run of it reports: a run file expects no other; empty: any


# of every task, beside its loss, values and speed
COMMON = (
    *("loss", "validation_loss", "first_validation_loss", "validation_step", "lr", "grad_norm", "samples"),
    *("host_share", "data_share"),
)

LM = TaskEntry(
    "mgpu_train.tasks.lm:ByteLM",
    LmOptions,
    metrics=(
        *COMMON,
        *("tokens_per_s", "unigram_entropy", "bigram_entropy"),
    ),
)

OURS = {"lm": LM}  # by name, since a node has no entry points of ours


@functools.cache
def installed() -> Entries[TaskEntry]:
    """The tasks of this environment."""
    return entries.read(GROUP, TaskEntry)


def told(name: str) -> str:
    """What nodes are told of `train.task`: one of ours by its name, any other by its import path."""
    return name if name in OURS or ":" in name else entries.need(installed(), name, "train.task").task
