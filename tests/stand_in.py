"""A process that stands for one which a server forks (forks.py): who has started it waits for it, signals it and kills
it as if it were that one.

    python stand_in.py ADDRESS PROGRAM ARGUMENTS    ADDRESS: the server's socket

It imports what Python has in itself, and no more, for it is there to start in no time: `json`, `signal`, `socket` and
`typing` take longer than all else that it does.
"""

from __future__ import annotations

import _signal as signal  # the same functions; the numbers are no enum
import _socket
import marshal
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn


class Forked:
    """A process like `subprocess.Popen`'s, as far as a test asks."""

    def __init__(self, pid: int, ends: int) -> None:
        self.pid, self._ends = pid, ends
        self.returncode: int | None = None

    def __del__(self) -> None:
        os.close(self._ends)

    def poll(self) -> int | None:
        """The exit code, or -signal; None while it runs."""
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.returncode = int(os.read(self._ends, 16) or -signal.SIGKILL)  # nothing: the server is gone
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or -signal.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        select.select([self._ends], [], [], timeout)
        code = self.poll()
        if code is None:
            from subprocess import TimeoutExpired

            raise TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        """Sends nothing to one that has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def ask(control: _socket.socket, what: Mapping[str, Any], files: Sequence[int]) -> Forked:
    """Has the server there fork `what`, with these files as input, output and errors.

    Raises:
        RuntimeError: the server has ended.
    """
    said = {**what, "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]}
    ends, told = os.pipe()
    try:
        control.sendall(b"%12d" % len(request := marshal.dumps(said)))
        fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in [*files, told])
        sent = control.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
        control.sendall(request[sent:])
        pid = int(control.recv(16) or 0)
    finally:
        os.close(told)
    if not pid:
        os.close(ends)
        raise RuntimeError("the server that forks has ended")
    return Forked(pid, ends)


def stand(address: str, program: str, arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """This process is from here on the one that runs this program in `env`, for whoever looks at it."""
    what = {"what": program, "script": True, "arguments": [*arguments], "env": dict(env), "cwd": os.getcwd()}  # noqa: PTH109
    control = _socket.socket(_socket.AF_UNIX)
    control.connect(address)
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # one that comes when it runs, and we do not know of it yet
    process = ask(control, {**what, "behind": os.getpid()}, [0, 1, 2])
    control.close()
    for each in passed_on:
        signal.signal(each, lambda signum, _: process.send_signal(signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = process.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    stand(sys.argv[1], sys.argv[2], sys.argv[3:], os.environ)
