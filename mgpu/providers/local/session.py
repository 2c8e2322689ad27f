"""One SSH session of a node: a command by `/bin/sh -c`, or a shell, with or without a terminal."""

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

_SHELL = "/bin/sh"
_CHUNK = 1 << 16
# a session leader that opens a terminal makes it its controlling one
_ON_TERMINAL = 'exec <>"$0" >&0 2>&0 && exec "$@"'


async def run_session(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> None:
    """Runs what the client asked for, and reports how it ended.

    As with OpenSSH a session lasts until its command has ended and nobody holds its output any more; a client that goes
    away ends nothing but the pipes, and on a terminal the kernel hangs up.
    """
    child, stdin = await (_on_terminal if process.term_type else _on_pipes)(process, instance)
    feeding = asyncio.ensure_future(_feed(process, child.pid, stdin))
    returncode = await child.wait()
    await _drained(process)
    feeding.cancel()
    if returncode < 0:
        process.exit_with_signal(signal.Signals(-returncode).name.removeprefix("SIG"))
    else:
        process.exit(returncode)
    await process.wait_closed()


async def _on_pipes(
    process: asyncssh.SSHServerProcess[bytes], instance: Instance
) -> tuple[asyncio.subprocess.Process, int]:
    (stdin, ours), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    program = [_SHELL] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(process, instance, program, stdin, stdout, stderr)
    finally:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
    await process.redirect(stdout=out, stderr=err, send_eof=False)
    return child, ours


async def _on_terminal(
    process: asyncssh.SSHServerProcess[bytes], instance: Instance
) -> tuple[asyncio.subprocess.Process, int]:
    ours, theirs = os.openpty()
    _set_size(ours, *process.term_size)
    shell = [shutil.which("bash") or _SHELL, "-l"] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(process, instance, [_SHELL, "-c", _ON_TERMINAL, os.ttyname(theirs), *shell])
        await process.redirect(stdout=os.dup(ours), send_eof=False)
    finally:
        os.close(theirs)
    return child, ours


async def _spawn(
    process: asyncssh.SSHServerProcess[bytes],
    instance: Instance,
    program: list[str],
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
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
    """Carries the client's bytes, signals and window sizes to the command; closes `fd`, its standard input.

    asyncssh's own redirection loses bytes here: it resumes a full pipe from within asyncio's write callback, which then
    closes the pipe with data in its buffer.
    """
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


async def _drained(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Returns when all output has been handed to the channel, or the client is gone."""
    output = asyncio.gather(process.stdout.drain(), process.stderr.drain())
    gone = asyncio.ensure_future(process.wait_closed())
    await asyncio.wait({output, gone}, return_when=asyncio.FIRST_COMPLETED)
    for future in (output, gone):
        future.cancel()
    await asyncio.gather(output, gone, return_exceptions=True)


def _signal(group: int, signum: int | None) -> None:
    if signum is not None:
        with suppress(ProcessLookupError):
            os.killpg(group, signum)


def _set_size(terminal: int, columns: int, rows: int, width: int, height: int) -> None:
    """Sets the window size (characters, pixels); the kernel tells the foreground programs."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))
