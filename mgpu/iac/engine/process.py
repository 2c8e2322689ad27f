"""One process of the Pulumi CLI at a time: started apart from its driver, followed, cancelled, ended when late."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from mgpu import paths
from mgpu.errors import StackError
from mgpu.iac import environment

_LOOK_S = 0.1
_KEPT_S = 90 * 86400.0  # of a CLI that has ended: a lock that was left may be met by the end of the longest run only


def note(pid: int) -> Path:
    """Where it is kept when this machine had a CLI of this number: a lock that is left says no more than that, a host
    name, which another machine may have, too, and a time. One that has ended well may leave it all the same."""
    return paths.state_dir() / "engines" / str(pid)


def was_here(pid: int, timestamp: str) -> bool:
    """Whether this machine had a CLI of this number at a lock's time, as RFC 3339 writes it."""
    try:
        began, until = map(float, note(pid).read_text(encoding="utf-8").split())
        return began <= datetime.fromisoformat(timestamp).timestamp() <= until
    except (OSError, ValueError):
        return False


def _keep(pid: int, began: float, until: float) -> None:
    """UNIX seconds. Those that are too old to be asked for go."""
    kept = note(pid)
    with suppress(OSError):  # a full disk: its lock will be one that nobody knows
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        environment.replace(kept, f"{began} {until}\n")
        for old in kept.parent.iterdir():
            if old.stat().st_mtime < began - _KEPT_S:
                old.unlink(missing_ok=True)


class CliProcess:
    """Runs the CLI. In a session of its own, with its output in files: a Ctrl-C on the terminal does not reach it, and
    when the driver dies it goes on, saves the state and releases the lock.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False  # that process
        self.interrupted = False

    def interrupt(self) -> None:
        """Asks the CLI, if one runs, to cancel: what is under way is undone and saved. For signal handlers too."""
        already, self.interrupted = self.interrupted, True
        if not already:
            self._cancel()

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
        limit_s: float,
        pass_fd: int | None = None,
        undone: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> int:
        """The exit status. `look` is called every tenth of a second. `undone`: an interrupt that came since the driver
        looked for one, when there was nothing to be cancelled yet, cancels it.

        Raises:
            StackError: it did not end within `limit_s` seconds: it was cancelled, and killed `grace_s` after that.
        """
        self._cancelled = False
        began = time.time()
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=() if pass_fd is None else (pass_fd,),
        )
        pid = self._process.pid
        _keep(pid, began, began + limit_s + self._grace_s)
        if undone and self.interrupted:
            self._cancel()
        try:
            return self._wait(self._process, limit_s, look)
        except Exception:  # of `look`: nobody else would look after what is under way
            self._obeys(self._process)
            raise
        finally:
            if self._process.poll() is not None:
                _keep(pid, began, time.time())
            self._process = None

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float, look: Callable[[], None]) -> int:
        status = self._until(process, time.monotonic() + limit_s, look)
        if status is not None:
            return status
        if not self._obeys(process, look):
            cure = "Run the same command again: it releases the lock, and finds what was made."
            raise StackError(f"pulumi did not end within {limit_s:.0f} s and was killed", "It did not obey.", cure)
        why = "It was cancelled, and has saved what it had done."
        raise StackError(f"pulumi did not end within {limit_s:.0f} s", why, "Run the same command again.")

    def _obeys(self, process: subprocess.Popen[bytes], look: Callable[[], None] = lambda: None) -> bool:
        """Cancels it; False: it did not end in time, and was killed."""
        self._cancel()
        if self._until(process, time.monotonic() + self._grace_s, look) is not None:
            return True
        process.kill()
        process.wait()
        return False

    def _until(self, process: subprocess.Popen[bytes], deadline: float, look: Callable[[], None]) -> int | None:
        """The exit status, or None at the deadline."""
        while time.monotonic() < deadline:
            try:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_S)
                look()
            except KeyboardInterrupt:
                # twice, or from a driver that counts signals itself: the driver leaves, the CLI goes on
                if self.interrupted or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                    raise
                self.interrupt()
        return process.poll()

    def _cancel(self) -> None:
        """Once: a second signal would make the CLI leave without saving."""
        if self._process is not None and self._process.poll() is None and not self._cancelled:
            self._cancelled = True
            os.kill(self._process.pid, signal.SIGINT)
