"""The node's lease: a file with the second since boot at which the machine powers itself off, renewed in time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mgpu_train.agent.machine.procs import uptime_s


class Lease:
    """Renews the lease, at most every `renew_s` seconds. Without a file there is no lease, and nothing is written."""

    def __init__(
        self, path: Path | None, *, lease_s: float, renew_s: float, uptime: Callable[[], float] = uptime_s
    ) -> None:
        """`uptime` gives seconds since boot, as the script on the host reads them."""
        self._path = path
        self._lease_s, self._renew_s = lease_s, renew_s
        self._uptime = uptime
        self._renewed: float | None = None

    def renew(self) -> bool:
        """Prolongs the lease, unless that was done less than `renew_s` ago; True: it was written now.

        Raises:
            OSError: the file could not be written; the old lease stands.
        """
        now = self._uptime()
        if self._path is None or (self._renewed is not None and now - self._renewed < self._renew_s):
            return False
        _put(self._path, f"{int(now + self._lease_s)}\n")
        self._renewed = now
        return True

    def left_s(self) -> float | None:
        """Seconds until the lease that stands ends the machine; None: there is none, or it cannot be read."""
        try:
            return int(self._path.read_text(encoding="utf-8")) - self._uptime() if self._path else None
        except (OSError, ValueError):
            return None if self._renewed is None else self._renewed + self._lease_s - self._uptime()


def _put(path: Path, text: str) -> None:
    """Replaces the file. A full disk, which ends no training, has room for no second one: then the first, of a few
    bytes, is overwritten. Who reads half of a number takes the one before."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        with path.open("r+b", buffering=0) as file:
            file.write(text.encode())
            file.truncate()
