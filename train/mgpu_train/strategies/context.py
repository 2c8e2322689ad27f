"""Context parallelism: several ranks share each sequence (`mgpu_train.models.context`)."""

from __future__ import annotations

from torch import distributed as dist
from torch import nn

from mgpu_train.errors import TrainError
from mgpu_train.models.context import Context
from mgpu_train.parallel import Place
from mgpu_train.tasks.base import SharesSequences, Task


def share(model: nn.Module, task: Task, place: Place) -> None:
    """From now on the task's loss is that of this rank's tokens. All ranks call it together.

    Raises TrainError: the task has no sequences, or they cannot be parted so.
    """
    if not isinstance(task, SharesSequences):
        raise TrainError(
            f"`train.context_parallel`: {type(task).__name__} does not say how ranks share its sequences "
            "(`share_sequences`): leave it out, and take `strategy: fsdp`, which shares the model"
        )
    groups = [
        [(first + number) * place.tensor + layer for number in range(place.context)]
        for first in range(0, place.world_size // place.tensor, place.context)
        for layer in range(place.tensor)
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    task.share_sequences(model, Context(place.copy % place.context, place.context, group))
