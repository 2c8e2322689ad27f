"""Driver -> CUDA -> PyTorch -> GPU architecture, as their makers publish it. Read on 2026-11-22; a version is a tuple.

Nothing is computed here; tests hold every row against its neighbours. mgpu.image.compat reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgpu.spec.gpus import Version


@dataclass(frozen=True)
class Toolkit:
    """A release of CUDA: the Linux driver made with it, and the older branches its compatibility package runs on."""

    driver: Version
    compat_on: tuple[int, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A compute capability: the CUDA that first and (major) last builds for it, the last driver branch that has it."""

    since: Version
    last_cuda: int | None = None
    last_branch: int | None = None


# Drivers: "CUDA Toolkit and Corresponding Driver Versions", the first release of each,
#   https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html
# 13.4 comes without one; R615 is its branch:
#   https://docs.nvidia.com/datacenter/tesla/drivers/615/supported-drivers-and-cuda-toolkit-versions.html
# Branches: NVIDIA_REQUIRE_CUDA of NVIDIA's own base images, https://gitlab.com/nvidia/container-images/cuda (dist/), as
#   far as those were read; without the branches that minor version compatibility covers anyhow.
TOOLKITS: dict[Version, Toolkit] = {
    (11, 8): Toolkit((520, 61, 5)),
    (12, 0): Toolkit((525, 60, 13)),
    (12, 1): Toolkit((530, 30, 2)),
    (12, 2): Toolkit((535, 54, 3)),
    (12, 3): Toolkit((545, 23, 6)),
    (12, 4): Toolkit((550, 54, 14), (470,)),
    (12, 5): Toolkit((555, 42, 2)),
    (12, 6): Toolkit((560, 28, 3), (470,)),
    (12, 8): Toolkit((570, 26), (470,)),  # there is no 12.7
    (12, 9): Toolkit((575, 51, 3)),
    (13, 0): Toolkit((580, 65, 6), (535, 550, 565, 570, 575)),
    (13, 1): Toolkit((590, 44, 1)),
    (13, 2): Toolkit((595, 45, 4), (535, 570)),
    (13, 3): Toolkit((610, 43, 2)),
    (13, 4): Toolkit((615,)),
}

# Major release -> the oldest driver that runs any of its releases: "CUDA Toolkit 11.x, 12.x, and 13.x Driver Version
# Ranges", with the numbers of the release notes,
#   https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
FAMILIES: dict[int, Version] = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}

# When nvcc learned to build for each: the release notes of that CUDA, "New Features". CUDA 13 builds for no Volta, and
# R580 is the last branch that drives one: "Deprecated Architectures",
#   https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/index.html
ARCHITECTURES: dict[Version, Architecture] = {
    (7, 0): Architecture(since=(9, 0), last_cuda=12, last_branch=580),
    (7, 5): Architecture(since=(10, 0)),
    (8, 0): Architecture(since=(11, 0)),
    (8, 6): Architecture(since=(11, 1)),
    (8, 9): Architecture(since=(11, 8)),
    (9, 0): Architecture(since=(11, 8)),
    (10, 0): Architecture(since=(12, 8)),
    (10, 3): Architecture(since=(12, 9)),
    (12, 0): Architecture(since=(12, 8)),
}

# What the wheels of PyTorch hold machine code for, by the CUDA they were built with, down to Volta. Releases and their
# CUDAs: "Release Compatibility Matrix"; machine code: "PyTorch CUDA Support Matrix", both in
#   https://github.com/pytorch/pytorch/blob/main/RELEASE.md
# and before 2.9, where that table begins: .ci/manywheel/build_cuda.sh of the release's branch. Volta with CUDA 12.8:
#   https://dev-discuss.pytorch.org/t/3128 (2.8: back), https://github.com/pytorch/pytorch/issues/172352 (2.11: gone)
# 2.15: https://github.com/pytorch/pytorch/issues/190385, and `torch._C._cuda_getArchFlags()` of its wheel.
_AMPERE: tuple[Version, ...] = ((7, 5), (8, 0), (8, 6), (9, 0))
_VOLTA: tuple[Version, ...] = ((7, 0), *_AMPERE)
_BLACKWELL: tuple[Version, ...] = (*_AMPERE, (10, 0), (12, 0))
_ALL: tuple[Version, ...] = (*_VOLTA, (10, 0), (12, 0))
WHEELS: dict[Version, dict[Version, tuple[Version, ...]]] = {
    (2, 4): {(11, 8): _VOLTA, (12, 1): _VOLTA, (12, 4): _VOLTA},
    (2, 5): {(11, 8): _VOLTA, (12, 1): _VOLTA, (12, 4): _VOLTA},
    (2, 6): {(11, 8): _VOLTA, (12, 4): _VOLTA, (12, 6): _VOLTA},
    (2, 7): {(11, 8): _VOLTA, (12, 6): _VOLTA, (12, 8): _BLACKWELL},
    (2, 8): {(12, 6): _VOLTA, (12, 8): _ALL, (12, 9): _ALL},
    (2, 9): {(12, 6): _VOLTA, (12, 8): _ALL, (13, 0): _BLACKWELL},
    (2, 10): {(12, 6): _VOLTA, (12, 8): _ALL, (13, 0): _BLACKWELL},
    (2, 11): {(12, 6): _VOLTA, (12, 8): _BLACKWELL, (13, 0): _BLACKWELL},
    (2, 12): {(12, 6): _VOLTA, (13, 0): _BLACKWELL, (13, 2): _BLACKWELL},
    (2, 13): {(12, 6): _VOLTA, (13, 0): _BLACKWELL, (13, 2): _BLACKWELL},
    (2, 14): {(12, 6): _VOLTA, (13, 0): _BLACKWELL, (13, 2): _BLACKWELL},
    (2, 15): {(13, 0): _BLACKWELL, (13, 2): _BLACKWELL},
}
