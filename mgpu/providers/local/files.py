"""Small files that two processes may write at once: each appears whole, or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the file, or replaces it, in one step."""
    aside = _write_aside(path, data)
    aside.replace(path)


def claim(path: Path, data: Mapping[str, Any]) -> bool:
    """Writes the file if there is none; of all who try, one gets True."""
    aside = _write_aside(path, data)
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    return True


def load(path: Path) -> dict[str, Any] | None:
    """What the file holds; None: there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _write_aside(path: Path, data: Mapping[str, Any]) -> Path:
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(data, file, separators=(",", ":"))
        file.flush()
        os.fsync(fd)
    return Path(aside)
