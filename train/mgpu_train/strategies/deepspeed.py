"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): ranks share out what the optimizer keeps, gradients, parameters."""

from __future__ import annotations

import logging
import os

from torch import nn

from mgpu_train import entries
from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place
from mgpu_train.strategies.base import Strategy
from mgpu_train.strategies.entry import Sizes
from mgpu_train.strategies.precision import Policy
from mgpu_train.tasks.base import Layout


class DeepSpeed(Strategy):
    """The model is whole on each rank until the engine has its optimizer: DeepSpeed spreads both together."""

    engine = "mgpu_train.engines.deepspeed:DeepSpeed"
    zero_stage = 2

    def __init__(self, place: Place, policy: Policy) -> None:
        """Raises TrainError: DeepSpeed is missing, or does not go with this precision."""
        super().__init__(place, policy)
        if policy.scaled:
            raise TrainError(
                "`train.precision`: fp16 does not go with `strategy: deepspeed`, which would have a loss scale of its "
                "own. Say `precision: fp32`, take GPUs that have bf16 (compute capability 8.0), or `strategy: fsdp`"
            )
        # both are read where DeepSpeed is imported or begins; it would guess the device by how it was installed
        os.environ["DS_ACCELERATOR"] = place.device.type
        os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # else a line a step on standard output
        library = entries.of_extra("deepspeed", "deepspeed", "`train.strategy`: deepspeed")
        library.ops.__compatible_ops__ = {}  # else it would compile one on a CPU, minutes long, which inference uses

    def groups(self, sizes: Sizes) -> tuple[int, int]:
        """All ranks share what is shared out."""
        self.zero_stage = sizes.zero_stage
        return super().groups(sizes)

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The whole model. Of stage 3 its parameters stay on the host, whose memory may hold what the device's does
        not, and DeepSpeed brings them; buffers it would leave there."""
        if self.zero_stage < 3:
            return model.to(self.place.device)
        for module in model.modules():
            for name, each in module.named_buffers(recurse=False):
                setattr(module, name, each.to(self.place.device))
        return model
