"""The finished checkpoints on this node's disk: which there are, and which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_STEP = re.compile(r"^step-(0|[1-9][0-9]{0,17})$")
_KEPT = 2  # newest ones that stay on local disk


def finished(folder: Path) -> dict[int, Path]:
    """Step -> folder of all finished checkpoints, oldest first. Anything else in there is none of ours."""
    try:
        entries = [(match, path) for path in folder.iterdir() if (match := _STEP.match(path.name))]
    except FileNotFoundError:
        return {}
    return dict(sorted((int(match[1]), path) for match, path in entries if path.is_dir() and not path.is_symlink()))


def superfluous(steps: Iterable[int], uploading: int | None) -> list[int]:
    """The steps that nobody will ask for while `uploading` is under way: all but that one and the newest two."""
    kept = {*sorted(steps)[-_KEPT:], uploading}
    return [step for step in steps if step not in kept]


def remove(path: Path) -> None:
    """Deletes a checkpoint; what is half deleted never has a checkpoint's name. Absent is done."""
    aside = path.with_name(f".old-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def clear(folder: Path) -> None:
    """Empties the folder, unfinished checkpoints of older attempts included."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
