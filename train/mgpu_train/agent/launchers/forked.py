"""Ranks that torchrun forks instead of starting each anew.

A rank of the bundled trainer needs 3 s of a processor to import torch, the trainer and its task. Here torchrun's own
process imports them, once for all ranks of its node, and forks these before it does anything else: no thread of it has
begun, and no GPU was touched, neither of which a fork carries over. Each waits for the environment that torchrun starts
it with; where torchrun ends before that, it ends too.

Where it cannot be so, torchrun starts ranks as it always does: what cannot be imported fails there again, and says why.
So it does where a launcher of one's own has it bind them to cores or keep their output in files.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

TRAINER = ("-m", "mgpu_train.loop")
_COUNT = "--nproc-per-node"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_LOOK_S = 0.05


class Rank:
    """What torchrun asks of a process that it has started, by the names of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or -signal; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended. Raises subprocess.TimeoutExpired after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return code


class Ranks:
    """Processes that wait to become ranks of the trainer."""

    def __init__(self, count: int, usual: tuple[int, int, int]) -> None:
        """Forks them. `usual`: how often they look for reference cycles."""
        self._waiting: list[tuple[int, socket.socket]] = []
        gc.freeze()  # what was imported is looked through by none of them: its memory stays shared
        for _ in range(count):
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for each in (here, *(other for _, other in self._waiting)):
                    each.close()
                _be_a_rank(there, usual)
            there.close()
            self._waiting.append((pid, here))
        gc.unfreeze()

    def start(self, environment: Mapping[str, str]) -> Rank | None:
        """The next one begins, also if it is gone: its exit code is told then; None: all have."""
        if not self._waiting:
            return None
        pid, here = self._waiting.pop(0)
        with closing(here), suppress(OSError):
            here.recv(1)  # it has a session of its own: a signal to its group reaches it
            here.sendall(json.dumps(dict(environment)).encode())
        return Rank(pid)

    def dismiss(self) -> None:
        """Those that have not begun end."""
        while self._waiting:
            pid, here = self._waiting.pop()
            here.close()
            Rank(pid).wait()


def prepare(words: Sequence[str], usual: tuple[int, int, int]) -> None:
    """Forks the ranks that torchrun with these arguments will start, if they are the trainer's and can be forked; from
    here on torchrun has them. In each of them this never returns: it is a rank.

    `usual`: how often ranks look for reference cycles.
    """
    if tuple(words[-2:]) != TRAINER or _COUNT not in words:
        return
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        start: Any = SubprocessHandler._popen  # where another torch has none, nothing is forked
        _import_all()
    except Exception:  # noqa: BLE001 - whatever it is: a rank that is started tells it
        return
    if threading.active_count() > 1 or _has_a_device():
        return
    ranks = Ranks(int(words[words.index(_COUNT) + 1]), usual)

    def begin(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        if not as_usual(handler, args):
            ranks.dismiss()
        return ranks.start(env) or start(handler, args, env)

    SubprocessHandler._popen = begin  # pyright: ignore[reportAttributeAccessIssue] - a rank is no Popen, but like one


def as_usual(handler: Any, args: Sequence[str]) -> bool:
    """Whether torchrun starts a rank of the trainer by this Python, nothing in front of it (`--numa-binding`), with its
    own output (`--redirects`, `--tee`)."""
    return tuple(args) == (sys.executable, "-u", *TRAINER) and handler._stdout is None and handler._stderr is None


def _import_all() -> None:
    """All that ranks of this job import before their first step, if it is ours: a user's own may do anything."""
    from mgpu_train import loop  # noqa: F401
    from mgpu_train.environment import read_job
    from mgpu_train.strategies import entry as strategies
    from mgpu_train.tasks import entry as tasks

    if config := read_job().train:
        task, strategy = tasks.OURS.get(config.task), strategies.OURS.get(config.strategy)
        for path in (task and task.task, strategy and strategy.strategy):
            if path:
                import_module(path.partition(":")[0])


def _has_a_device() -> bool:
    """Whether a driver of GPUs was begun in this process: CUDA, and what NVML has opened, do not outlive a fork."""
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith(_DEVICES):
                return True
    return False


def _be_a_rank(there: socket.socket, usual: tuple[int, int, int]) -> NoReturn:
    os.setsid()
    told = b""
    with there, suppress(OSError):
        there.send(b".")
        told = b"".join(iter(partial(there.recv, 1 << 16), b""))
    if not told:  # torchrun has ended
        os._exit(1)
    os.environ.clear()
    os.environ.update(json.loads(told))
    gc.set_threshold(*usual)
    from mgpu_train import loop

    sys.argv = [loop.__file__]
    loop.run()
