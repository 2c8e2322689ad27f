"""The types that a model is computed in: one policy for all strategies.

Parameters and the optimizer's state are float32 whatever the policy is. `bf16` and `fp16` compute matrix products and
what lies between them in 16 bits, where torch's autocast does; reductions, losses and norms stay float32. Under a
strategy that gathers shards, these are gathered in 16 bits, too. `fp8` is bf16 whose blocks have linear layers of 8
bits (`mgpu_train.strategies.fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mgpu_train.config import Precision
from mgpu_train.strategies import fp8


@dataclass(frozen=True)
class Policy:
    """What `train.precision` comes to on this device."""

    name: str = "fp32"
    compute: torch.dtype = torch.float32
    fp8: bool = False  # linear layers of blocks are computed in 8 bits
    tf32: bool = False  # what is computed in float32 may lose bits of its mantissa in a GPU's matrix units

    @property
    def low(self) -> torch.dtype | None:
        """The type of 16 bits, if there is one."""
        return None if self.compute == torch.float32 else self.compute

    @property
    def scaled(self) -> bool:
        """Whether small gradients would vanish unless the loss is scaled up."""
        return self.compute == torch.float16


POLICIES = {
    "fp32": Policy(),
    "tf32": Policy("tf32", tf32=True),
    "bf16": Policy("bf16", torch.bfloat16, tf32=True),
    "fp16": Policy("fp16", torch.float16, tf32=True),
    "fp8": Policy("fp8", torch.bfloat16, fp8=True, tf32=True),
}


def policy(precision: Precision, device: torch.device) -> Policy:
    """The policy of this name; `auto` is bf16 where a GPU has it, fp16 on an older one with matrix units, else fp32.

    Raises TrainError: the device does not have it.
    """
    if precision == "auto":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        precision = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    found = POLICIES[precision]
    if found.fp8:
        fp8.require(device)
    return POLICIES["fp32"] if found.name == "tf32" and device.type != "cuda" else found


def allow(policy: Policy, device: torch.device) -> None:
    """Sets what torch keeps for the whole process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = policy.tf32  # convolutions, in which torch allows it unless told otherwise
