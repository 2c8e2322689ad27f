"""Checkpoints on the node's own disk: a folder named `step-<n>` is whole, every other name is work in progress."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.store.base import ASIDE
from mgpu_train.store.disk import make_folder, sync_folder

_THREADS = 8  # flushes in parallel: a disk takes several for little more than one
_FINISHED = re.compile(r"step-(0|[1-9][0-9]{0,14})")


def finished(folder: Path) -> list[tuple[int, Path]]:
    """The finished checkpoints of a folder as (step, path), oldest first; none when the folder does not exist."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # a program may remove it at any time
        return []
    named = [(_FINISHED.fullmatch(path.name), path) for path in paths]
    return sorted((int(name[1]), path) for name, path in named if name and path.is_dir() and not path.is_symlink())


def discard(path: Path) -> None:
    """Remove a folder; it loses its name before the first file goes. Absent is fine. Raises OSError."""
    doomed = _beside(path, "old")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    remove_tree(doomed)


def remove_tree(folder: Path) -> None:
    """Remove a folder; what somebody else removes meanwhile is gone, too. Raises OSError."""

    def unless_absent(_call: object, _path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    shutil.rmtree(folder, onerror=unless_absent)


@contextmanager
def write_aside(final: Path, *, durable: bool = True) -> Iterator[Path]:
    """An empty folder to fill; when the block ends it has the name `final`, see `publish`, or on an error is gone."""
    aside = _beside(final, "new")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed here
    make_folder(final.parent)
    aside.mkdir()
    try:
        yield aside
        publish(aside, final, durable=durable)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def publish(aside: Path, final: Path, *, durable: bool = True) -> None:
    """Give a folder its name, all that is in it flushed before; what had the name is gone. Raises OSError.

    Without `durable` nothing waits for the disk: after a crash of the machine the files may have any content.
    """
    if durable:
        in_threads(_sync, _entries(aside), _THREADS)
    if final.exists():
        discard(final)
    aside.rename(final)
    if durable:
        sync_folder(final.parent)


def _entries(folder: Path) -> Iterator[str]:
    for above, _, names in os.walk(folder):
        yield from (os.path.join(above, name) for name in names)  # noqa: PTH118 - many
        yield above


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{ASIDE}{kind}-{path.name}")
