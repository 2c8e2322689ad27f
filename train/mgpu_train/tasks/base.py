"""What a task is: what is trained, and nothing of how it is spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from mgpu_train import entries
from mgpu_train.config import TrainConfig
from mgpu_train.data.base import Batch, Data
from mgpu_train.errors import TrainError
from mgpu_train.tasks import entry

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from mgpu_train.models.context import Context

__all__ = ["Batch", "Data", "Layout", "Loss", "SharesSequences", "Split", "Task", "load"]

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Loss:
    """Sums over samples, so that any split of a batch has the same mean: that of the batch is total / weight."""

    total: Tensor  # its gradient is what is trained by
    weight: Tensor | float  # how many tokens or samples are in it: what the task's `unit` says
    values: Mapping[str, Tensor | float] = field(default_factory=dict)  # other sums, told as means by their names

    @property
    def detached(self) -> Loss:
        """The numbers alone."""
        values = {name: each.detach() if isinstance(each, Tensor) else each for name, each in self.values.items()}
        return Loss(self.total.detach(), self.weight, values)

    @property
    def nothing(self) -> Loss:
        """Of no sample: no gradient, no weight."""
        return Loss(0 * self.total, 0 * self.weight, {name: 0 * value for name, value in self.values.items()})


@dataclass(frozen=True)
class Layout:
    """What a strategy has to know of a model: names of its modules."""

    # run one after the other: FSDP gathers one at a time, activations are kept by block, a pipeline is cut between them
    blocks: tuple[str, ...] = ()
    # run before the first block and after the last one; each takes what the one before gave as its first argument, as
    # blocks do: so a stage of a pipeline runs the model's own `forward` without the modules of others
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    # how ranks share a layer (tensor parallelism): by what it gives ("columns"), by what it takes ("rows"), whole for
    # each of the heads in dimension 1 that a rank has ("heads"), or in a style of torch's; names that are none are left
    tensor: Mapping[str, str | ParallelStyle] = field(default_factory=dict)


class Task(ABC):
    """What is trained. `options` is what the run file says in `train.options`, checked."""

    Options: ClassVar[type[BaseModel]]
    unit: ClassVar[str] = "samples"  # what is counted per second

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def data(self, split: Split) -> Data:
        """What is learned from, and what is validated on. Raises TrainError when it is not to be had."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The model, made without values (on the meta device)."""

    @abstractmethod
    def initialise(self, model: nn.Module) -> None:
        """Gives every parameter and buffer its value; torch's generator stands at the run's seed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch on the model's device; `model` is called, and not looked into: it may be wrapped."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """The same for validation, where nothing is learned."""
        return self.loss(model, batch)

    def layout(self, model: nn.Module) -> Layout:
        """What a strategy has to know of the model."""
        return Layout()

    def compile(self) -> None:  # noqa: B027 - most losses are small beside their model
        """`train.compile`: compiles what `loss` does beside the model, whose blocks are compiled anyway."""

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """What is told beside the means, and follows from them: a root, an exponential. A mean of these, taken batch by
        batch or rank by rank, would be another number."""
        return {}

    def flops(self) -> float | None:
        """Of one `unit`, forward and backward, where it is known: `mfu` follows from it."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Numbers that are told once, when training begins."""
        return {}


@runtime_checkable
class SharesSequences(Protocol):
    """A task whose samples are sequences that several ranks can share, for `train.context_parallel`."""

    def share_sequences(self, model: nn.Module, context: Context) -> None:
        """From now on `loss` and `evaluate` are of this rank's part of each sequence (`Context.part`), and the model's
        attention sees all of it (`Context.attention`). It is called once, with the whole model or a stage of it, before
        that is spread. All ranks of a group are given the same batches; a `Loss` is the sum over this rank's tokens.

        Raises TrainError: this task's sequences cannot be shared by so many ranks.
        """
        ...


def load(config: TrainConfig) -> Task:
    """The task, with its options.

    Raises:
        TrainError: it cannot be imported, or refuses its options.
    """
    ours = entry.OURS.get(config.task)
    kind: type[Task] = entries.load(ours.task if ours else entry.told(config.task), Task, "train.task")
    try:
        options = kind.Options.model_validate(config.task_options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors())
        raise TrainError(f"`train.options` of task {config.task}: {wrong}") from error
    return kind(options)
