"""What the kernel says of the hardware: `/dev/kmsg`, or `dmesg` where only root may read it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

KMSG = Path("/dev/kmsg")
DMESG_S = 5.0  # seconds that it is waited for
_RECORD = 8192  # bytes; a longer one is cut off by the kernel
_LINE = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")  # priority, number, microseconds, flags; words
_DMESG = re.compile(r"\[ *(\d+\.\d+)\] (.*)")


def since(uptime_s: float, path: Path = KMSG) -> list[str]:
    """Its lines after a time, in seconds since the machine began; none where it may not be read, as in containers."""
    try:
        records = list(_records(path))
    except OSError:
        records = list(_dmesg())
    return [text for at, text in records if at >= uptime_s]


def _records(path: Path) -> Iterator[tuple[float, str]]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(fd, _RECORD)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # that one was overwritten; the next read is of the oldest there is
                    raise
                continue
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if found := _LINE.match(line):
                    yield int(found[1]) / 1e6, found[2]
    finally:
        os.close(fd)


def _dmesg() -> Iterator[tuple[float, str]]:
    try:
        done = subprocess.run(
            ["sudo", "-n", "dmesg"], stdin=subprocess.DEVNULL, capture_output=True, timeout=DMESG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in done.stdout.decode(errors="replace").splitlines():
        if found := _DMESG.match(line):
            yield float(found[1]), found[2]
