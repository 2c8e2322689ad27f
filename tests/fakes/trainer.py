"""What the trainer's image is built from without a network: see scripts/make-base-image.sh and its neighbour."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BASE = "trainer-base:1"
# Debian's base has Python 3.11; torch is not built in, which would be 5 GB, but mounted where the image has its place
ARGS = {"BASE": BASE, "PYTHON_VERSION": "3.11", "TORCH": "", "CUDA": "", "CUDA_COMPAT": ""}


def base(require: Callable[[str, bool, str], None]) -> Path:
    """The base's file system, for `docker import`."""
    return _kept("make-base-image.sh", require)


def wheels(require: Callable[[str, bool, str], None]) -> Path:
    """The folder of the lock file's packages."""
    return _kept("fetch-image-wheels.sh", require)


def buildx(require: Callable[[str, bool, str], None]) -> Path:
    """Docker's program for BuildKit."""
    return _kept("setup-go-tools.sh", require, "buildx", "docker-buildx")


def _kept(script: str, require: Callable[[str, bool, str], None], capability: str = "trainer", *what: str) -> Path:
    """What a script of set-up has made; nothing is made or fetched here."""
    done = subprocess.run(["sh", _SCRIPTS / script, "--kept", *what], capture_output=True, text=True, check=False)
    require(capability, done.returncode == 0, f"run `{' '.join([f'scripts/{script}', *what])}` first")
    return Path(done.stdout.strip())
