"""Writes the lock files of the images from uv.lock, and what the trainer's Dockerfile says of torch. Run after changing
that.

Torch and what only torch needs have a file of their own: they are a layer of their own, and may be mounted instead. So
has each extra of mgpu-train, as an image has those alone that it is built with.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPERATOR, FOLDER = (ROOT / "images" / name for name in ("operator", "trainer"))
EXTRAS = ("deepspeed", "hf", "recommender", "timm", "torchao", "vision")  # mgpu-train's, beside torch
_HEAD = "# written by scripts/write_image_locks.py\n"
_EXPORT = (
    *("export", "--frozen", "--quiet", "--no-dev", "--no-emit-workspace"),
    *("--no-header", "--no-annotate", "--format", "requirements-txt"),
)


def exported(*more: str, package: str = "mgpu-train") -> list[str]:
    """The packages that one of ours needs, pinned and hashed, a string each."""
    done = subprocess.run(
        ["sh", "scripts/uv.sh", *_EXPORT, "--package", package, *more],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return re.findall(r"^\S.*?(?<!\\)\n", done.stdout, re.MULTILINE | re.DOTALL)


def said(dockerfile: str, name: str, value: str) -> str:
    """The Dockerfile with this default of an ARG."""
    return re.sub(rf"^ARG {name}=.*$", f"ARG {name}={value}", dockerfile, count=1, flags=re.MULTILINE)


def release(packages: list[str], name: str) -> str:
    """The version of one of the packages."""
    return next(found[1] for package in packages if (found := re.match(rf"{name}==([\d.]+)", package)))


def texts() -> dict[Path, str]:
    """Every file that is written, whole."""
    base = exported()
    torch = [package for package in exported("--extra", "torch") if package not in base]
    extras = {name: exported("--extra", name) for name in EXTRAS}
    there = {*base, *torch}
    cuda = ".".join(release(torch, "cuda-toolkit").split(".")[:2])
    dockerfile = said((FOLDER / "Dockerfile").read_text(encoding="utf-8"), "TORCH", release(torch, "torch"))
    return {
        OPERATOR / "requirements.lock": _HEAD + "".join(exported(package="mgpu")),
        FOLDER / "requirements.lock": _HEAD + "".join(base),
        FOLDER / "torch.lock": _HEAD + "".join(torch),
        FOLDER / "Dockerfile": said(dockerfile, "CUDA", cuda),
        **{
            FOLDER / "extras" / f"{name}.lock": _HEAD + "".join(each for each in packages if each not in there)
            for name, packages in extras.items()
        },
    }


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
