"""Refuses an image of which its labels are not true: whether a machine can run it is said from them alone."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def facts() -> dict[str, str]:
    """What is in the image, by the name of the ARG that says so."""
    compat = os.environ["CUDA_COMPAT"]
    there = Path(f"/usr/local/cuda-{compat}/compat/libcuda.so.1").exists()
    return {
        "PYTHON_VERSION": ".".join(map(str, sys.version_info[:2])),
        "CUDA_COMPAT": compat if there else "",
        **torch(),
    }


def torch() -> dict[str, str]:
    """The release, and the CUDA that it was built with. Imported: a library that the base lacks is found here."""
    try:
        release = version("torch")
    except PackageNotFoundError:
        return {"TORCH": "", "CUDA": ""}
    import torch

    return {"TORCH": release, "CUDA": torch.version.cuda or "cpu"}


wrong = [
    f"{name} is {os.environ[name]!r}, but the image has {found!r}: build with --build-arg {name}={found}"
    for name, found in facts().items()
    if os.environ[name] != found
]
sys.exit("\n".join(wrong) or None)
