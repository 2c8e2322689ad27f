"""Backward and update by DeepSpeed's ZeRO, of which nothing is in a checkpoint (`mgpu_train.engines.zero`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_set_full_grad
from torch import Tensor, nn

from mgpu_train.checkpoint.state import Part
from mgpu_train.engines.base import Update
from mgpu_train.engines.plain import Plain
from mgpu_train.engines.zero import Model, Moments, ShardedModel
from mgpu_train.errors import TrainError
from mgpu_train.metrics.sums import WEIGHT, Sums, Totals
from mgpu_train.strategies.deepspeed import DeepSpeed as Strategy
from mgpu_train.tasks.base import Batch

# numbers that are exchanged at a time, at most: 0.8 GB that DeepSpeed takes at once, and twice where it overlaps
BUCKET = 200_000_000


class DeepSpeed(Plain):
    """For strategy deepspeed. Its update waits for the device, since DeepSpeed's own does."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As of any engine. Raises TrainError: DeepSpeed does not take a parameter."""
        super().__init__(*given, **named)
        strategy = self.strategy
        assert isinstance(strategy, Strategy)  # noqa: S101 - it has asked for this engine
        self._stage, (optimizer,) = strategy.zero_stage, self.optimizers.each
        learned = [each for each in self.model.parameters() if each.requires_grad]
        config = self._config(min(BUCKET, sum(each.numel() for each in learned)))
        self._first = min(learned, key=Tensor.numel)
        _refuse_scalars(self.model)
        if self._stage == 3:  # parameter by parameter: the device never has the whole model
            deepspeed.zero.Init(
                module=self.model, config_dict_or_path=config, dtype=torch.float32, mem_efficient_linear=False
            )
        self._left = 0  # micro-batches of this step
        made: Any = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self._called, self._zero = made[:2]

    def _config(self, bucket: int) -> dict[str, Any]:
        policy, gpu = self.strategy.policy, self.strategy.place.device.type == "cuda"
        return {
            "train_micro_batch_size_per_gpu": 1,  # it makes no batches
            "gradient_accumulation_steps": 1,  # it is told which one is the last
            "gradient_clipping": self._clip_norm,
            "zero_allow_untested_optimizer": True,  # it is torch's AdamW by another name
            "zero_optimization": {
                "stage": self._stage,
                "overlap_comm": gpu and self._stage > 1,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket + bucket % 2,
            },
            # the parameters are float32, and so is what is exchanged: of no layer are gradients in 16 bits
            "torch_autocast": {
                "enabled": policy.low is not None,
                "dtype": str(policy.compute).removeprefix("torch."),
                "lower_precision_safe_modules": [],
            },
        }

    def gradients(self, batches: Iterable[Batch | None]) -> Sums:
        """DeepSpeed exchanges them, with each micro-batch or with the last one's."""
        self._left = self._count
        self._called.training = self.model.training  # which a task may ask, and the loop sets of the model alone
        return super().gradients(batches)

    def evaluate(self, batches: Iterable[Batch | None]) -> Sums:
        """Forward passes alone."""
        self._called.training = self.model.training
        return super().evaluate(batches)

    def _backward(self, total: Tensor) -> None:
        self._left -= 1
        self._called.set_gradient_accumulation_boundary(self._left == 0)
        self._called.backward(total)

    def update(self, lr: float, totals: Totals) -> Update:
        """DeepSpeed divides by a loss scale, clips, and skips what is not finite: its scale is the global weight."""
        zero, device = self._zero, self.strategy.place.device
        loss, weight = torch.stack((totals["loss"], totals[WEIGHT])).tolist()
        if not (math.isfinite(loss) and weight > 0):  # which it does not know of
            safe_set_full_grad(self._first, torch.full(self._shape, math.nan, device=device))
        for group in zero.param_groups:
            group["lr"] = lr
        zero.override_loss_scale(weight / self.strategy.place.dp_size)
        self._called.step()
        zero.override_loss_scale(1.0)
        norm = torch.as_tensor(self._called.get_global_grad_norm(), dtype=torch.float64, device=device)
        skipped = torch.as_tensor(zero.overflow, dtype=torch.float32, device=device)
        self._buffers.put_back(skipped.bool())
        return Update(norm.reshape(()), skipped.reshape(()))

    @property
    def _shape(self) -> torch.Size:
        return getattr(self._first, "ds_shape", self._first.shape)

    def parts(self) -> Mapping[str, Part]:
        """As of any other strategy: model and optimizer."""
        place = self.strategy.place
        model = ShardedModel(self.model, self._zero, place) if self._stage == 3 else Model(self.model, self._zero)
        return {"model": model, "optimizer": Moments(self.model, self._zero, place)}


def _refuse_scalars(model: nn.Module) -> None:
    found = [f"`{name}`" for name, each in model.named_parameters() if not each.ndim]
    if found:
        raise TrainError(
            f"`train.strategy`: deepspeed takes no parameter without a dimension, as {', '.join(found)}: give it one "
            "in the task's model, or take ddp"
        )
