"""Processes that are forked by a server which has imported what they need: a start costs milliseconds, no seconds.

`python -m forks FD MODULE ...` is the server, which `Forks` starts with the first process. All workers of a run share
it; it ends with the last of them. What it forks is a process of its own, with an environment, a folder, arguments,
input and output of its own, by which /proc knows it, too.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import stand_in
from stand_in import Forked

SERVER = "MGPU_TESTS_SERVER"  # where the server listens, in its own environment while it imports
_ROOM = " " * (1 << 16)  # bytes that /proc shows of a process's arguments, and of its environment
_START_S = 120.0  # for all that is imported, on a busy machine
_SHARED = "MGPU_TESTS_FORKS"
_TESTS = Path(__file__).parent
_MEASURES = "mgpu_coverage_hook"  # scripts/measure_coverage.py


class Forks:
    """Forks processes that have imported `modules`; `env` is laid over the environment in which they are imported."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._modules, self._env = modules, dict(env or {})
        self._lock, self._control = threading.Lock(), None

    def start(
        self,
        what: Path | str,
        arguments: Sequence[object],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int,
        stderr: int,
        cwd: Path | None = None,
    ) -> Forked:
        """Forks a process that runs the script of this path, or the module of this name as `python -m` would, in a
        session of its own. `env` is the whole environment; without `stdin` there is no input."""
        said = {"what": str(what), "script": isinstance(what, Path), "arguments": [str(each) for each in arguments]}
        said |= {"env": dict(env), "cwd": str(cwd or Path.cwd())}
        null = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
        try:
            with self._lock:
                return stand_in.ask(self._running(), said, [null, stdout, stderr])
        except (RuntimeError, ConnectionError) as error:  # the server has ended
            error.add_note(self._errors.read_text())
            raise
        finally:
            if stdin is None:
                os.close(null)

    def behind(self, program: Path | str) -> tuple[str, ...]:
        """The words that run this program, which arguments may follow: it is forked, and a process where they are typed
        stands for it. The server lives as long as this object."""
        with self._lock:
            return sys.executable, stand_in.__file__, self._running().getpeername(), str(program)

    def run(
        self,
        what: Path | str,
        arguments: Sequence[object],
        env: Mapping[str, str],
        *,
        cwd: Path,
        timeout: float,
        stdin: bytes = b"",
    ) -> subprocess.CompletedProcess[str]:
        """`start`, to its end; what it has started may go on, and write where it has written.

        Raises:
            subprocess.TimeoutExpired: it ran for longer, and was killed.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            files = {"stdin": given.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
            process = self.start(what, arguments, env, cwd=cwd, **files)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            printed = []
            for file in (out, err):
                file.seek(0)
                printed.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess([str(what), *map(str, arguments)], code, *printed)

    def _running(self) -> socket.socket:
        if self._control is None:
            control = socket.socket(socket.AF_UNIX)
            control.settimeout(_START_S)
            self._reach(control)
            self._control = control
        return self._control

    def _reach(self, control: socket.socket) -> None:
        """Connects to the server of these modules; the first one to ask starts it."""
        env = {**self._env, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])}
        what = json.dumps([sys.executable, self._modules, env])
        address = share() / hashlib.sha256(what.encode()).hexdigest()[:16]
        self._errors = address.with_suffix(".err")
        with _locked(address):
            try:
                control.connect(str(address))
            except (FileNotFoundError, ConnectionRefusedError):  # none yet, or killed
                address.unlink(missing_ok=True)
                with socket.socket(socket.AF_UNIX) as listener, self._errors.open("w") as errors:
                    listener.bind(str(address))
                    listener.listen(64)
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "forks", str(listener.fileno()), *self._modules, _ROOM],
                        env={**os.environ, **env, SERVER: str(address), "MGPU_TESTS_ROOM": _ROOM},
                        cwd=_TESTS,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,  # who has started it may be read until all have closed its own
                        pass_fds=[listener.fileno()],
                        start_new_session=True,  # Ctrl-C is the test's, which ends what it has started
                    )
                control.connect(str(address))


@functools.cache
def share() -> Path:
    """The folder of the servers' sockets. All processes that are started from now on share them."""
    if _SHARED not in os.environ:
        os.environ[_SHARED] = tempfile.mkdtemp(prefix="mgpu-forks-")
        atexit.register(_remove, os.environ[_SHARED], os.getpid())
    return Path(os.environ[_SHARED])


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # and no process that was forked since
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(address: Path) -> Iterator[None]:
    """Who starts, reaches or ends the server there."""
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _serve(listener: socket.socket) -> None:
    """Until nobody is connected any more."""
    address = Path(listener.getsockname())
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and where its end is told
    clients = {listener.accept()[0]}
    while clients:
        for ready in select.select([listener, *clients, *children], [], [])[0]:
            if ready is listener:
                clients.add(listener.accept()[0])
            elif ready in clients:
                if not _answer(ready, [listener, *clients], children):
                    clients.remove(ready)
                    ready.close()
            else:
                pid, told = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):  # nobody wants to know
                    os.write(told, b"%d" % code)
                os.close(told)
                os.close(ready)
        if not clients:
            with suppress(FileNotFoundError), _locked(address):  # the folder is gone with the run
                if select.select([listener], [], [], 0)[0]:
                    clients.add(listener.accept()[0])
                else:
                    address.unlink()


def _answer(client: socket.socket, own: Sequence[socket.socket], children: dict[int, tuple[int, int]]) -> bool:
    """Forks what a client asks for. Whether it is still there."""
    try:
        head = client.recv(12, socket.MSG_WAITALL)
        if len(head) < 12:
            return False
        said, fds, _, _ = socket.recv_fds(client, int(head), 4)
        while len(said) < int(head):
            said += client.recv(int(head) - len(said))
    except ConnectionError:
        return False
    pid = os.fork()
    if pid == 0:
        for each in own:
            each.close()
        _become(marshal.loads(said), fds)  # noqa: S302 - of this run
    children[os.pidfd_open(pid)] = pid, fds.pop()
    for fd in fds:
        os.close(fd)
    with suppress(ConnectionError):  # it has ended meanwhile
        client.sendall(b"%d" % pid)
    return True


def _become(said: dict[str, Any], fds: list[int]) -> NoReturn:
    """In the forked process."""
    os.setsid()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > 2:
            with suppress(OSError):  # of what lists them
                os.close(int(path.name))
    if measures := sys.modules.get(_MEASURES):
        measures.serve(said["test"])  # which its ancestors do not show: another worker may have started the server
    os.environ.clear()
    os.environ.update(said["env"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    tempfile.tempdir = None  # the server's, if it has asked for it
    what = said["what"]
    sys.argv = [what, *said["arguments"]]
    sys.path[:0] = [path for path in said["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    code: object = 1
    try:
        _show([sys.executable, *sys.argv], [f"{name}={value}" for name, value in said["env"].items()])
        if "behind" in said:
            _stand_behind(said["behind"])
        os.chdir(said["cwd"])
        if said["script"]:
            sys.path.insert(0, str(Path(what).parent))
            runpy.run_path(what, run_name="__main__")
        else:
            sys.modules.pop(what, None)  # runpy warns of one that was imported
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 - to go on would be to serve
        sys.excepthook(*sys.exc_info())
    # what an interpreter does at its end, but for its memory: threads first; one may have the last words to write
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _show(arguments: Sequence[str], environment: Sequence[str]) -> None:
    """Has /proc show these for this process, where the server's were: it reads them from the process's memory.

    The rest of the room is one word without a name: as many empty ones take who looks through all processes longer
    than all else there is in /proc.
    """
    bounds = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49])  # proc(5): 48 to 51
    for words, begins, ends in zip((arguments, environment), bounds, bounds, strict=True):
        shown = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(shown) >= ends - begins:
            raise ValueError(f"{len(shown)} bytes of arguments or environment are more than there is room for")
        ctypes.memmove(begins, shown.ljust(ends - begins - 1) + b"\0", ends - begins)


def _stand_behind(pid: int) -> None:
    """In the namespaces of the process that stands for this one, with its parent, and no longer than it lives."""
    lives = os.pidfd_open(pid)
    for kind in ("net", "uts", "mnt"):
        theirs = Path(f"/proc/{pid}/ns/{kind}")
        if not theirs.samefile(f"/proc/self/ns/{kind}"):
            with theirs.open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"it cannot enter {theirs}")
    os.getppid = lambda: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def end_with_it() -> None:
        select.select([lives], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_it, daemon=True).start()


if __name__ == "__main__":
    del os.environ["MGPU_TESTS_ROOM"]
    for name in sys.argv[2:-1]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each process goes through what all share, and copies it: 0.2 s
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # what was imported may have threads
