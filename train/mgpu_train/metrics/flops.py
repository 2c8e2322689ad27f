"""How much of what GPUs can compute a training uses (MFU: PaLM, Chowdhery et al. 2022, appendix B)."""

from __future__ import annotations

import re

# Dense products of bf16 or fp16 matrices that are added up in fp32, in TFLOPS, from NVIDIA's data sheets (which show
# twice as much, for weights half of which are 0), by the words in a device's name; the first one holds
_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200|GH200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),  # SXM: "NVIDIA H100 80GB HBM3"
    ("A100", 312.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("A10G", 70.0),  # AWS's variant of the A10, by AWS's data sheet
    ("A10", 125.0),
    ("RTX 4090$", 165.2),  # not the ones for laptops
)


def peak(device: str) -> float | None:
    """FLOPS of a GPU of this name (`torch.cuda.get_device_name`); None: no data sheet of it is known here."""
    if "MIG" in device:  # a part of one
        return None
    return next((1e12 * tflops for words, tflops in _PEAKS if re.search(rf"\b({words})(?!\w)", device)), None)


def mfu(flops: float | None, units_per_s: float, devices: int, device: str) -> float | None:
    """The share of all devices' peak that `units_per_s` take, each of so many `flops`; None: one of both is unknown."""
    most = peak(device)
    return None if flops is None or most is None else flops * units_per_s / (devices * most)
