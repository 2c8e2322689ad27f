"""One SSH session of a node: a command by `/bin/sh -c`, or a shell, with or without a terminal."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import asyncssh

from mgpu.providers.local.nodes import Instance, login_environment

_SHELL = "/bin/sh"
# a session leader that opens a terminal makes it its controlling one
_ON_TERMINAL = 'exec <>"$0" >&0 2>&0 && exec "$@"'


async def run_session(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> None:
    """Runs what the client asked for, and reports how it ended.

    As with OpenSSH a session lasts until its command has ended and nobody holds its output any more; a client that goes
    away ends nothing but the pipes, and on a terminal the kernel hangs up.
    """
    child = await (_on_terminal if process.term_type else _on_pipes)(process, instance)
    process.set_redirect_pid(-child.pid)  # signals go to the whole group
    returncode = await child.wait()
    await _drained(process)
    if returncode < 0:
        process.exit_with_signal(signal.Signals(-returncode).name.removeprefix("SIG"))
    else:
        process.exit(returncode)
    await process.wait_closed()


async def _on_pipes(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> asyncio.subprocess.Process:
    (stdin, to), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    program = [_SHELL] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(process, instance, *program, stdio=(stdin, stdout, stderr))
    finally:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
    await process.redirect(stdin=to, stdout=out, stderr=err, send_eof=False)
    return child


async def _on_terminal(process: asyncssh.SSHServerProcess[bytes], instance: Instance) -> asyncio.subprocess.Process:
    ours, theirs = os.openpty()
    shell = shutil.which("bash") or _SHELL
    program = [shell, "-l"] if process.command is None else [_SHELL, "-c", process.command]
    try:
        child = await _spawn(
            process, instance, _SHELL, "-c", _ON_TERMINAL, os.ttyname(theirs), *program, stdio=(None, None, None)
        )
        await process.redirect(stdin=ours, stdout=ours, send_eof=False, recv_eof=False)
    finally:
        os.close(theirs)
    return child


async def _spawn(
    process: asyncssh.SSHServerProcess[bytes],
    instance: Instance,
    *program: str,
    stdio: tuple[int | None, int | None, int | None],
) -> asyncio.subprocess.Process:
    stdin, stdout, stderr = stdio
    environment = login_environment(instance, os.environ)
    if process.term_type:
        environment["TERM"] = process.term_type
    return await asyncio.create_subprocess_exec(
        *program, stdin=stdin, stdout=stdout, stderr=stderr, cwd=instance.home, env=environment, start_new_session=True
    )


async def _drained(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Returns when all output has been handed to the channel, or the client is gone."""
    output = asyncio.gather(process.stdout.drain(), process.stderr.drain())
    gone = asyncio.ensure_future(process.wait_closed())
    await asyncio.wait({output, gone}, return_when=asyncio.FIRST_COMPLETED)
    for future in (output, gone):
        future.cancel()
    await asyncio.gather(output, gone, return_exceptions=True)
