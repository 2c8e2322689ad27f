"""Can a machine's driver and GPU run an image? Said from the image's labels, before anything is rented.

Three rules of NVIDIA's (https://docs.nvidia.com/deploy/cuda-compatibility/): a driver runs every older CUDA; of its own
major release a newer one, too; and one of the next only where the image brings the compatibility package for just that
branch of drivers, and the GPU is a data centre's. What the table does not know is no problem: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mgpu.image.compat_table import ARCHITECTURES, FAMILIES, TOOLKITS, WHEELS
from mgpu.spec.gpus import GPUS, Gpu, Version

# what images/trainer/Dockerfile says of itself
TORCH = "dev.mgpu.torch"
CUDA = "dev.mgpu.cuda"  # what PyTorch was built with; "cpu": with none
CUDA_COMPAT = "dev.mgpu.cuda-compat"
PYTHON = "dev.mgpu.python"

OLDEST_PYTHON = (3, 11)
# of these capabilities there are only data centres' GPUs, but for one workstation card of Volta's
_DATA_CENTER = frozenset({(7, 0), (8, 0), (9, 0), (10, 0), (10, 3)})


@dataclass(frozen=True)
class Mismatch:
    """Why an image does not run on a machine. `of_driver`: with another driver it might."""

    what: str
    why: str
    next_step: str
    of_driver: bool = False

    def __str__(self) -> str:
        return "\n".join((self.what, self.why, self.next_step))


@dataclass(frozen=True)
class _Pair:
    """An image and a machine, as far as they are known."""

    torch: Version | None
    cuda: Version | None
    compat: Version | None
    python: Version | None
    cpu_only: bool
    driver: Version | None
    gpu: Gpu | None
    gpu_name: str


@dataclass(frozen=True)
class Fit:
    """What an image runs on. `driver`: the oldest one of NVIDIA's; `compat_branches`: older branches that do on data
    centres' GPUs; `architectures`: compute capabilities that its PyTorch has code for; `gpus`: those that are known."""

    driver: str
    compat_branches: tuple[int, ...]
    architectures: tuple[str, ...]
    gpus: tuple[str, ...]


def fit(labels: Mapping[str, str]) -> Fit | None:
    """What an image with these labels runs on; None: it has no CUDA, or does not say which, or says what is none."""
    try:
        cuda = None if labels.get(CUDA) == "cpu" else _label(labels, CUDA)
        torch, package = _label(labels, TORCH), _label(labels, CUDA_COMPAT)
    except ValueError:
        return None
    if cuda is None:
        return None
    codes, least = machine_code(torch, cuda), FAMILIES.get(cuda[0])
    known = TOOLKITS.get(package[:2]) if package else None
    return Fit(
        driver=_text(least) if least else "",
        compat_branches=known.compat_on if known and least and _reaches(known.driver, least) else (),
        architectures=tuple(map(_text, codes)),
        gpus=tuple(name for name, gpu in GPUS.items() if runs_on(codes, gpu.capability)),
    )


def said(labels: Mapping[str, str]) -> dict[str, str]:
    """Of an image's labels those that say what it fits."""
    return {name: labels[name] for name in (TORCH, CUDA, CUDA_COMPAT, PYTHON) if labels.get(name)}


def has_cuda(labels: Mapping[str, str]) -> bool:
    """Whether an image with these labels says that it has CUDA: a driver has to fit it."""
    return labels.get(CUDA, "cpu") not in ("", "cpu")


def check(labels: Mapping[str, str], driver: str | None, gpu: str | None) -> list[Mismatch]:
    """All that keeps an image with these labels from running on such a machine; empty: nothing that is known.

    `driver` is NVIDIA's, as nvidia-smi prints it (`580.105.08`) or its branch alone (`580`); `gpu` is a name as in run
    files (`A100-80GB`) or a compute capability (`8.0`). None: not known, or there is none.
    """
    try:
        pair = _Pair(
            torch=_label(labels, TORCH),
            cuda=None if labels.get(CUDA) == "cpu" else _label(labels, CUDA),
            compat=_label(labels, CUDA_COMPAT),
            python=_label(labels, PYTHON),
            cpu_only=labels.get(CUDA) == "cpu",
            driver=version(driver) if driver else None,
            gpu=gpu_of(gpu) if gpu else None,
            gpu_name=gpu or "",
        )
    except ValueError as error:
        return [Mismatch("an image or a driver says of itself what is no version", str(error), "Build the image anew.")]
    rules: tuple[Callable[[_Pair], Mismatch | None], ...] = (_python, _no_cuda, _old_driver, _new_driver, _machine_code)
    return [problem for rule in rules if (problem := rule(pair))]


def version(text: str) -> Version:
    """`2.15.0+cu132` -> (2, 15, 0). Raises ValueError: it does not begin with a number."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    if not found:
        raise ValueError(f"{text!r} is no version")
    return tuple(map(int, found[0].split(".")))


def gpu_of(name: str) -> Gpu | None:
    """The GPU of that name or compute capability; None: not known."""
    if re.fullmatch(r"\d+\.\d", name):
        return Gpu(version(name), data_center=version(name) in _DATA_CENTER)
    return GPUS.get(name)


def machine_code(torch: Version | None, cuda: Version) -> tuple[Version, ...]:
    """The capabilities that PyTorch, built with this CUDA, has code for: of its own wheels as published, of any other
    build all that this CUDA can build for."""
    if torch is not None and (found := WHEELS.get(torch[:2], {}).get(cuda[:2])):
        return found
    return tuple(
        capability
        for capability, known in ARCHITECTURES.items()
        if known.since <= cuda and (known.last_cuda is None or cuda[0] <= known.last_cuda)
    )


def runs_on(codes: Iterable[Version], capability: Version) -> bool:
    """Machine code runs on its own capability, and on later ones of the same major number, and on no other,
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility"""
    return any(code[0] == capability[0] and code[1] <= capability[1] for code in codes)


def _label(labels: Mapping[str, str], name: str) -> Version | None:
    try:
        return version(labels[name]) if labels.get(name) else None
    except ValueError as error:
        raise ValueError(f"label {name}: {error}") from error


def _reaches(driver: Version, least: Version) -> bool:
    return driver >= least[: len(driver)]  # a branch alone counts as its newest driver


def _python(pair: _Pair) -> Mismatch | None:
    if pair.python is None or pair.python >= OLDEST_PYTHON:
        return None
    return Mismatch(
        f"the image's Python is {_text(pair.python)}",
        "The node's agent needs 3.11 or newer.",
        "Set another base: `image: {args: {BASE: ...}}`.",
    )


def _no_cuda(pair: _Pair) -> Mismatch | None:
    if not (pair.cpu_only and pair.gpu_name):
        return None
    return Mismatch(
        f"the image's PyTorch cannot use the {pair.gpu_name}",
        "It was built without CUDA.",
        "Install a build with CUDA into the image; PyPI's own has one.",
    )


def _old_driver(pair: _Pair) -> Mismatch | None:
    if pair.cuda is None or pair.driver is None:
        return None
    least = FAMILIES.get(pair.cuda[0])
    if least is None or _reaches(pair.driver, least) or _compatibility_package(pair, least):
        return None
    runs = [major for major, oldest in FAMILIES.items() if _reaches(pair.driver, oldest)]
    newest = f"CUDA {max(runs)}" if runs else "no CUDA that PyTorch is built with"
    return Mismatch(
        f"the image's CUDA {_text(pair.cuda)} needs a newer NVIDIA driver than {_text(pair.driver)}",
        f"CUDA {_text(pair.cuda)} runs on {_text(least)} or newer; the newest that this driver runs is {newest}.",
        "Take a machine image with a newer driver, or build the image with a PyTorch for an older CUDA.",
        of_driver=True,
    )


def _compatibility_package(pair: _Pair, least: Version) -> bool:
    package = TOOLKITS.get(pair.compat[:2]) if pair.compat else None
    if package is None or pair.driver is None or pair.gpu is None or not pair.gpu.data_center:
        return False
    return pair.driver[0] in package.compat_on and _reaches(package.driver, least)


def _new_driver(pair: _Pair) -> Mismatch | None:
    known = ARCHITECTURES.get(pair.gpu.capability) if pair.gpu else None
    if known is None or known.last_branch is None or pair.driver is None or pair.driver[0] <= known.last_branch:
        return None
    return Mismatch(
        f"NVIDIA's driver {_text(pair.driver)} does not know the {pair.gpu_name} any more",
        f"Branch {known.last_branch} is the last one that has it.",
        f"Take a machine image with a driver of branch {known.last_branch}, or another GPU.",
        of_driver=True,
    )


def _machine_code(pair: _Pair) -> Mismatch | None:
    if pair.cuda is None or pair.gpu is None:
        return None
    codes = machine_code(pair.torch, pair.cuda)
    if runs_on(codes, pair.gpu.capability):
        return None
    built = f"PyTorch {_text(pair.torch)}" if pair.torch else "PyTorch"
    return Mismatch(
        f"the image's PyTorch has no code for the {pair.gpu_name} (compute capability {_text(pair.gpu.capability)})",
        f"{built} with CUDA {_text(pair.cuda)} has code for {', '.join(map(_text, codes)) or 'none that is known'}.",
        _newest_for(pair.gpu.capability),
    )


def _newest_for(capability: Version) -> str:
    fitting = [
        (torch, cuda)
        for torch, builds in WHEELS.items()
        for cuda, codes in builds.items()
        if runs_on(codes, capability)
    ]
    if not fitting:
        return "Take another GPU."
    torch, cuda = map(_text, max(fitting))
    return f"Take another GPU, or build the image with PyTorch {torch} for CUDA {cuda}, the newest for it."


def _text(numbers: Version) -> str:
    """As NVIDIA writes them: a driver's last part has two digits."""
    first, *rest = numbers
    return ".".join([str(first), *(f"{part:02}" if first >= 100 and at else str(part) for at, part in enumerate(rest))])
