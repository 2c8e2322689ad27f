"""The Python that the nodes of provider `local` have: found when they are made, and asked for torch before that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from mgpu.errors import InvalidRequest
from mgpu.paths import expanded

_CHECK_S = 60.0  # for the nodes' Python to answer
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def find(named: str | None) -> str:
    """The program that `local.python` names, absolute; by default this process's own. Raises `InvalidRequest`."""
    asked = named or sys.executable
    found = shutil.which(expanded(asked)) if asked.startswith("~") else shutil.which(asked)
    if found is None:
        raise InvalidRequest(
            f"local.python: {asked} is not a program",
            f"looked for it from {Path.cwd()} and on the PATH",
            "Name a Python interpreter that has torch: `local: {python: /path/to/python}`.",
        )
    return str(Path(found).absolute())  # not resolved: a link may belong to a virtual environment


def require_torch(python: str) -> None:
    """Raises `InvalidRequest` when it does not run, or has no torch."""
    cure = "pip install 'mgpu-train[torch]' there, or name another: `local: {python: /path/to/python}`."
    try:
        # -I: as on a node, where neither PYTHONPATH nor the operator's own packages are seen
        answer = subprocess.run([python, "-I", "-c", _HAS_TORCH], capture_output=True, timeout=_CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest(f"local.python: {python} does not run", str(error), cure) from error
    if answer.returncode:
        why = answer.stderr.decode(errors="replace").strip() or "it has no torch, which training needs"
        raise InvalidRequest(f"local.python: {python} cannot train", why, cure)
