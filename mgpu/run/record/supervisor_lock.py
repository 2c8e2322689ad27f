"""One supervisor of a run at a time, on this machine: who holds it, and how one that is stuck is dispossessed.

The lock is a file that is held by flock: a process that dies lets go of it, whatever it died of. In it stands who holds
it, with a random token. By force the file is replaced by another one that is held already: the old holder finds another
token in its place, and leaves. Nothing heavy is imported: `mgpu status` and `mgpu ls` look at it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from mgpu_train.agent.machine.procs import Process

TRIES, PAUSE_S = 5, 0.02


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, or held it last."""

    token: str
    pid: int
    start_ticks: int
    boot_id: str
    host: str

    @property
    def process(self) -> Process:
        """The process; on this machine, if it is one of this machine's (`lives`)."""
        from mgpu_train.agent.machine.procs import Process

        return Process(self.pid, self.start_ticks, self.boot_id)

    @property
    def lives(self) -> bool:
        """True while this very process runs here; of another host nobody knows."""
        return self.host == os.uname().nodename and self.process.alive

    @property
    def suspended(self) -> bool:
        """True while it lives, but does nothing: it was stopped by a signal."""
        return self.lives and self.process.suspended

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def hold(path: Path, *, force: bool = False) -> Iterator[str]:
    """Holds the lock while the block runs, and yields the token of this hold; "" where another process holds it.

    `force` takes it from that process. Raises OSError.
    """
    token = secrets.token_hex(12)
    handle = _take(path, token) or (_seize(path, token) if force else None)
    if handle is None:
        yield ""
        return
    with handle:
        yield token


@contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Nobody takes the lock while the block runs, which has to be over in a moment, as takers wait no longer; False:
    some process holds it already. Raises OSError."""
    with path.open("a", encoding="utf-8") as handle:
        yield _locked(handle, path, fcntl.LOCK_SH)


def holder(path: Path) -> Holder | None:
    """Who holds the lock, or held it last; None: nobody has yet, or it cannot be read."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def held(path: Path) -> bool:
    """True while some process holds the lock."""
    try:
        with path.open(encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def taken_from(path: Path, token: str) -> Holder | None:
    """Who has taken the lock since `token` held it; None: nobody has."""
    now = holder(path)
    return now if now is not None and token and now.token != token else None


def _take(path: Path, token: str) -> TextIO | None:
    # `held` has the lock for an instant while it looks: that must not turn a supervisor away
    for _ in range(TRIES):
        handle = path.open("a+", encoding="utf-8")
        if _locked(handle, path):
            with suppress(OSError):  # a full disk: nobody else holds it, so nobody has to read whose it is
                _sign(handle, token)
            return handle
        handle.close()
        time.sleep(PAUSE_S)
    return None


def _locked(handle: TextIO, path: Path, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())  # else it was replaced meanwhile
    except (BlockingIOError, FileNotFoundError):
        return False


def _seize(path: Path, token: str) -> TextIO:
    aside = path.with_name(f".{path.name}.{token}")
    handle = aside.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(handle, token)
        aside.replace(path)
    except BaseException:
        handle.close()
        aside.unlink(missing_ok=True)
        raise
    return handle


def me(token: str) -> Holder:
    """This process, as a holder with this token."""
    from mgpu_train.agent.machine.procs import me

    process = me()
    return Holder(token, process.pid, process.start_ticks, process.boot_id, os.uname().nodename)


def replace_holder(path: Path, now: Holder) -> None:
    """Writes down that another machine's process has the lock, which nobody here holds from now on. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as handle:
        _write(handle, now)
    aside.replace(path)


def _sign(handle: TextIO, token: str) -> None:
    _write(handle, me(token))


def _write(handle: TextIO, holder: Holder) -> None:
    os.fchmod(handle.fileno(), 0o600)
    handle.truncate(0)
    os.write(handle.fileno(), json.dumps(asdict(holder)).encode() + b"\n")  # unbuffered: what does not fit is not kept
