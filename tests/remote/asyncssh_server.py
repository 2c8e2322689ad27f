"""A node for tests: a real SSH server in a process of its own, so that it can be stopped, continued and killed.

`python asyncssh_server.py <folder> <port> <delay_s>`: <folder> holds host_key* and authorized_keys; home/ is the
node's home. It writes its port to <folder>/port, and to <folder>/seen one line for every connection, login and command.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import asyncssh

FOLDER = Path(sys.argv[1])
HOME = FOLDER / "home"


def saw(what: str) -> None:
    with (FOLDER / "seen").open("a") as out:
        out.write(what + "\n")


class Server(asyncssh.SSHServer):
    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        saw("connection")

    def begin_auth(self, username: str) -> bool:
        saw(f"auth {username}")
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        saw(f"tunnel {dest_port}")
        return True


class Sftp(asyncssh.SFTPServer):
    def __init__(self, channel: asyncssh.SSHServerChannel) -> None:
        saw("sftp")
        super().__init__(channel)

    def map_path(self, path: bytes) -> bytes:
        return os.fsencode(HOME / os.fsdecode(path))  # relative to the home, absolute as they are


async def pump(source, sink) -> None:
    """By hand: asyncssh's own redirection loses the connection when a client reads slowly."""
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error):
        pass  # the command has closed its input, or the client is gone
    finally:
        if isinstance(sink, asyncio.StreamWriter):
            sink.close()


async def run(process: asyncssh.SSHServerProcess) -> None:
    saw("command")
    command = process.command or "true"
    pipe = asyncio.subprocess.PIPE
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", command, cwd=HOME, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    feeding = asyncio.create_task(pump(process.stdin, shell.stdin))
    await asyncio.gather(pump(shell.stdout, process.stdout), pump(shell.stderr, process.stderr))
    process.stdout.write_eof()  # as OpenSSH does: output is over, whatever the command still reads
    status = await shell.wait()
    feeding.cancel()
    if status < 0:
        process.exit_with_signal("KILL" if status == -9 else "TERM")
    else:
        process.exit(status)


async def main() -> None:
    HOME.mkdir(exist_ok=True)
    await asyncio.sleep(float(sys.argv[3]))
    server = await asyncssh.create_server(
        Server,
        "127.0.0.1",
        int(sys.argv[2]),
        server_host_keys=[str(path) for path in FOLDER.glob("host_key*")],
        authorized_client_keys=str(FOLDER / "authorized_keys"),
        process_factory=run,
        sftp_factory=Sftp,
        encoding=None,
        line_editor=False,
        login_timeout=5,
    )
    fresh = FOLDER / "port.new"
    fresh.write_text(str(server.sockets[0].getsockname()[1]))
    fresh.rename(FOLDER / "port")
    await server.wait_closed()


asyncio.run(main())
