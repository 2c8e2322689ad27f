"""One SSH session of a node: a command by `/bin/sh -c`, or a shell, with or without a terminal.

Bytes are carried by hand. asyncssh's own redirection loses some of what a client sends faster than the command reads:
it resumes from within asyncio's write callback, which then closes the pipe with data in its buffer (asyncssh 2.24).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import struct
import termios
from contextlib import suppress

import asyncssh

from mgpu.providers.local.nodes import Instance, login_environment

_Started = tuple[asyncio.subprocess.Process, int, tuple[int, ...]]  # the command, its input, its outputs
_SHELL = "/bin/sh"
_CHUNK = 1 << 16
# a session leader that opens a terminal makes it its controlling one
_ON_TERMINAL = 'exec <>"$0" >&0 2>&0 && exec "$@"'


async def run_session(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> None:
    """Runs what the client asked for, and reports how it ended.

    As with OpenSSH a session lasts until its command has ended and nobody holds its output any more; a client that goes
    away ends nothing but the pipes, and on a terminal the kernel hangs up.
    """
    child, stdin, outputs = await (_on_terminal if process.term_type else _on_pipes)(process, instance)
    feeding = asyncio.ensure_future(_feed(process, child.pid, stdin))
    carrying = asyncio.gather(
        *(_carry(fd, to) for fd, to in zip(outputs, (process.stdout, process.stderr), strict=False))
    )
    gone = asyncio.ensure_future(process.wait_closed())
    await asyncio.wait({carrying, gone}, return_when=asyncio.FIRST_COMPLETED)
    for future in (carrying, gone):
        future.cancel()
    returncode = await child.wait()
    feeding.cancel()
    if returncode < 0:
        process.exit_with_signal(signal.Signals(-returncode).name.removeprefix("SIG"))
    else:
        process.exit(returncode)


async def _on_pipes(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> _Started:
    (stdin, ours), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    program = [_SHELL] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(process, instance, program, stdin, stdout, stderr)
    finally:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
    return child, ours, (out, err)


async def _on_terminal(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> _Started:
    ours, theirs = os.openpty()
    _set_size(ours, *process.term_size)
    shell = [shutil.which("bash") or _SHELL, "-l"] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(process, instance, [_SHELL, "-c", _ON_TERMINAL, os.ttyname(theirs), *shell], *[theirs] * 3)
    finally:
        os.close(theirs)
    return child, os.dup(ours), (ours,)


async def _spawn(
    process: asyncssh.SSHServerProcess[bytes],
    instance: Instance,
    program: list[str],
    stdin: int,
    stdout: int,
    stderr: int,
) -> asyncio.subprocess.Process:
    environment = login_environment(instance, os.environ)
    if process.term_type:
        environment["TERM"] = process.term_type
    return await asyncio.create_subprocess_exec(
        *program,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=instance.home,
        env=environment,
        start_new_session=True,
    )


async def _feed(process: asyncssh.SSHServerProcess[bytes], group: int, fd: int) -> None:
    """Carries the client's bytes, signals and window sizes to the command; closes `fd`, its standard input."""
    try:
        os.set_blocking(fd, False)
        while True:
            try:
                data = await process.stdin.read(_CHUNK)
            except asyncssh.TerminalSizeChanged as change:
                _set_size(fd, *change.term_size)
            except asyncssh.SignalReceived as received:
                _signal(group, getattr(signal, f"SIG{received.signal}", None))
            except asyncssh.BreakReceived:
                _signal(group, signal.SIGINT)
            else:
                if not data:
                    return
                await _write(fd, data)
    except (OSError, asyncssh.Error):
        return  # the connection was lost
    finally:
        os.close(fd)


async def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await _writable(fd)
        except BrokenPipeError:
            return  # the command reads no more; signals may still come


async def _writable(fd: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(fd)


async def _carry(fd: int, to: asyncssh.SSHWriter[bytes]) -> None:
    """Carries the command's output to the client until nobody holds it any more; closes `fd`."""
    try:
        os.set_blocking(fd, False)
        while data := await _read(fd):
            to.write(data)
            await to.drain()
    except (OSError, asyncssh.Error):
        return  # the client is gone, or (EIO) the last program on the terminal has ended
    finally:
        os.close(fd)


async def _read(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            await _readable(fd)


async def _readable(fd: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _signal(group: int, signum: int | None) -> None:
    if signum is not None:
        with suppress(ProcessLookupError):
            os.killpg(group, signum)


def _set_size(terminal: int, columns: int, rows: int, width: int, height: int) -> None:
    """Sets the window size (characters, pixels); the kernel tells the foreground programs."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))
