"""GPUs as run files name them, and what each can compute, as NVIDIA publishes it. Read on 2026-11-22."""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU as run files name it. Compatibility packages are for data centres' GPUs alone."""

    capability: Version
    data_center: bool = True


# https://developer.nvidia.com/cuda-gpus and .../cuda-legacy-gpus; the A10G is AWS's A10
GPUS: dict[str, Gpu] = {
    "V100-16GB": Gpu((7, 0)),
    "V100-32GB": Gpu((7, 0)),
    "T4": Gpu((7, 5)),
    "A100-40GB": Gpu((8, 0)),
    "A100-80GB": Gpu((8, 0)),
    "A10G": Gpu((8, 6)),
    "A10": Gpu((8, 6)),
    "A40": Gpu((8, 6)),
    "RTX-3090": Gpu((8, 6), data_center=False),
    "L4": Gpu((8, 9)),
    "L40": Gpu((8, 9)),
    "L40S": Gpu((8, 9)),
    "RTX-4090": Gpu((8, 9), data_center=False),
    "H100-80GB": Gpu((9, 0)),
    "H200": Gpu((9, 0)),
    "B200": Gpu((10, 0)),
    "B300": Gpu((10, 3)),
    "RTX-PRO-4500": Gpu((12, 0)),
    "RTX-PRO-6000": Gpu((12, 0)),
    "RTX-5090": Gpu((12, 0), data_center=False),
}


def capability_of(gpu: str | None) -> float:
    """Compute capability of a GPU of this name, however it is written: 8.9; 0: not known."""
    folded = (gpu or "").casefold()
    found = next((each.capability for name, each in GPUS.items() if name.casefold() == folded), (0, 0))
    return found[0] + found[1] / 10
