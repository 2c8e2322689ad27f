"""How tests wait: `until` something has happened, and until a program serves."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from mgpu.testing.waiting import until as until


def until_it_serves(
    process: subprocess.Popen[bytes], serves: Callable[[], object], seconds: float, why: Callable[[], object]
) -> None:
    """Waits for a program that was started. Raises RuntimeError, with `why`: it has ended, or is too late."""
    try:
        until(lambda: process.poll() is not None or serves(), seconds)
    except AssertionError as error:
        raise RuntimeError(f"it did not start: {why()}") from error
    if process.poll() is not None:
        raise RuntimeError(f"it did not start: {why()}")
