"""The checkpoints on this node's disk: which may go, and when all of them go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mgpu_train.checkpoint.local import discard, finished, remove_tree

KEPT = 2  # newest ones that stay on the disk of one of several nodes, while one is uploaded
# ... while none is: node 0 may ask for one that it saw as the newest a moment ago; not all: it may be silent for long
KEPT_IDLE = 4
ALONE, ALONE_IDLE = 1, 2  # the same on the disk of the only node that has a part: nobody else asks for one


def superfluous(steps: Iterable[int], uploading: int | None, kept: int = KEPT) -> list[int]:
    """The steps that nobody will ask for while `uploading` is under way: all but that one and the newest `kept`."""
    ordered = sorted(steps)
    stay = {*ordered[-kept:], uploading}
    return [step for step in ordered if step not in stay]


def tidy(folder: Path, uploading: int | None, kept: int = KEPT) -> list[int]:
    """Deletes what is superfluous; returns the steps that were there before, oldest first."""
    found = dict(finished(folder))
    for step in superfluous(found, uploading, kept):
        with suppress(OSError):  # the next look tries again
            discard(found[step])
    return list(found)


def clear(folder: Path, but: Path | None = None) -> None:
    """Empties the folder, unfinished checkpoints of older attempts included, `but` for one of it. Absent is fine.

    Who is killed in the middle of it leaves nothing that looks like a whole checkpoint. Raises OSError.
    """
    for _, path in finished(folder):
        if path != but:
            discard(path)
    try:
        left = list(folder.iterdir())
    except FileNotFoundError:  # nobody was here before
        return
    for path in left:
        if path == but:
            continue
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
