"""What a fake that was killed might have left: looked for in the kernel's own lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def processes_of(namespace: str) -> list[int]:
    """The processes whose pid namespace this is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if str(link.readlink()) == namespace:
                found.append(int(link.parts[2]))
        except OSError:
            continue
    return found


@contextmanager
def held(namespace: str) -> Iterator[None]:
    """While the block runs nobody else's namespace gets this one's number, which the kernel would give away at once."""
    descriptor = os.open(f"/proc/{processes_of(namespace)[0]}/ns/pid", os.O_RDONLY)
    try:
        yield
    finally:
        os.close(descriptor)


def mounts_below(folder: Path) -> list[str]:
    """What is mounted there, in the eyes of any process."""
    found = []
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            found += [line for line in table.read_text().splitlines() if str(folder) in line]
        except OSError:
            continue
    return found
