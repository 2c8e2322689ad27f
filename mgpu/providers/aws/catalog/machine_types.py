"""What AWS tells of a machine type (`DescribeInstanceTypes`) -> a `Machine`, with the GPU named as users name it."""

from __future__ import annotations

import re
from typing import Any

from mgpu.providers.aws.catalog.snapshot import Machine

_GB_PER_GIB = 2**30 / 1e9
# AWS's name of a GPU -> how run files name it; those that come in several sizes have the size in their name
_NAMES = {"RTX PRO Server 6000": "RTX-PRO-6000", "RTX PRO 4500": "RTX-PRO-4500"}
_SIZED = ("V100", "A100", "H100")
# what DescribeInstanceTypes does not tell: how the GPUs of one machine are connected
_INTERCONNECTS = ((r"p(4|5|6)", "NVSwitch"), (r"p3", "NVLink"))
# What AWS says that its deep-learning images with PyTorch support (`supported_ec2_instances`; P4 is the P4d). Of 2.9 on
# Ubuntu 24.04, read on 2026-11-24; for newer images no page says more types that have whole GPUs:
# https://docs.amazonaws.cn/dlami/latest/devguide/aws-deep-learning-ami-gpupt29oss-ul2404-2026-01-08.md
_IN_DEFAULT_IMAGE = ("g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200")

# Seconds until a new machine answers by SSH, at the worst, by its type: seen by others, with room to spare. All other
# types take a minute or two.
_BOOT_S = ((r".*\.metal", 1500.0), (r"p\d", 900.0))


def boot_s(instance_type: str) -> float:
    """Seconds that a new machine of this type may take until it answers by SSH; 0: as any machine."""
    return next((seconds for types, seconds in _BOOT_S if re.match(types, instance_type)), 0.0)


def in_default_image(instance_type: str) -> bool:
    """Whether the machine image that is taken where the run file names none supports this type with GPUs."""
    return instance_type.partition(".")[0] in _IN_DEFAULT_IMAGE


def machine_of(entry: dict[str, Any]) -> Machine | None:
    """The machine type behind one entry of AWS's answer.

    None for what cannot be used: no GPU of NVIDIA's, a fraction of one, or another processor than x86-64, which the
    deep-learning machine images are for.
    """
    gpus = entry.get("GpuInfo", {}).get("Gpus", [])
    count = sum(gpu["Count"] for gpu in gpus)
    x86 = "x86_64" in entry["ProcessorInfo"]["SupportedArchitectures"]
    if not x86 or count < 1 or any(gpu["Manufacturer"] != "NVIDIA" for gpu in gpus):
        return None
    memory_mib = gpus[0]["MemoryInfo"]["SizeInMiB"]
    network = entry.get("NetworkInfo", {})
    disks = entry.get("InstanceStorageInfo", {}).get("Disks", [])
    return Machine(
        gpu=_gpu(gpus[0]["Name"], memory_mib),
        gpus=count,
        gpu_memory_gib=round(memory_mib / 1024, 1),
        vcpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_gib=entry["MemoryInfo"]["SizeInMiB"] / 1024,
        nvme_disks=sum(disk["Count"] for disk in disks),
        nvme_gib=int(sum(disk["Count"] * disk["SizeInGB"] for disk in disks) / _GB_PER_GIB),
        interconnect=_interconnect(entry["InstanceType"], count),
        network_gbit_s=_gbit_s(network.get("NetworkPerformance", "")),
        efa_cards=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
    )


def _gpu(name: str, memory_mib: int) -> str:
    if name in _SIZED:
        return f"{name}-{memory_mib // 1024}GB"
    return _NAMES.get(name, name.replace(" ", "-"))


def _interconnect(instance_type: str, gpus: int) -> str:
    if gpus == 1:
        return ""
    return next((name for family, name in _INTERCONNECTS if re.match(family, instance_type)), "PCIe")


def _gbit_s(words: str) -> float:
    """`4x 100 Gigabit` -> 400, `Up to 25 Gigabit` -> 25; 0 for words without a number."""
    found = re.search(r"(?:(\d+)x )?([\d.]+) (Gigabit|Megabit)", words)
    if not found:
        return 0
    return int(found[1] or 1) * float(found[2]) / (1 if found[3] == "Gigabit" else 1000)
