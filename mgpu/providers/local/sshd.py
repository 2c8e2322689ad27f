"""`python -m mgpu.providers.local.sshd <root> <instance>`: a node's SSH server, on loopback, for one user and one key.

It behaves as OpenSSH's sshd does where the operator can tell: commands run by `/bin/sh -c` in HOME with a login's clean
environment, SFTP paths are relative to HOME, a session ends when its command has ended and its output is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import asyncssh
from asyncssh.constants import OPEN_ADMINISTRATIVELY_PROHIBITED

from mgpu.providers.local import procs
from mgpu.providers.local.nodes import USER, Instance
from mgpu.providers.local.session import run_session
from mgpu.providers.local.sftp import HomeSFTP

_HOST = "127.0.0.1"
_LOOPBACK = frozenset({"localhost", _HOST, "::1"})
_LOGIN_S = 30


def main(argv: list[str]) -> None:
    """Serves until it is killed, or until its node process ends."""
    procs.die_with_parent(signal.SIGKILL, os.getppid())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s sshd %(message)s")
    asyncio.run(_serve(Instance(Path(argv[1]), argv[2])))


async def _serve(instance: Instance) -> None:
    key = _host_key(instance.host_key)
    client = asyncssh.import_public_key(instance.spec().ssh_public_key)
    endpoint = instance.endpoint()  # after a restart: the same port again
    server = await asyncssh.listen(
        _HOST,
        endpoint[0] if endpoint else 0,
        family=socket.AF_INET,
        backlog=128,
        server_factory=lambda: _Server(client),
        server_host_keys=[key],
        process_factory=lambda process: run_session(process, instance),
        sftp_factory=lambda channel: HomeSFTP(channel, instance.home),
        encoding=None,
        line_editor=False,
        agent_forwarding=False,
        x11_forwarding=False,
        login_timeout=_LOGIN_S,
    )
    public = key.export_public_key("openssh").decode().split()
    instance.publish(server.get_port(), f"{public[0]} {public[1]}")
    await server.wait_closed()


def _host_key(path: Path) -> asyncssh.SSHKey:
    """The node's own ed25519 host key; made at the first start, gone with the machine."""
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
        fresh.replace(path)
    return asyncssh.read_private_key(path)


class _Server(asyncssh.SSHServer):
    """Who may log in, and where a forwarded connection may go."""

    def __init__(self, client: asyncssh.SSHKey) -> None:
        self._client = client

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return False

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == USER and key == self._client

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        # a jump host for the nodes of this machine, and for nothing else
        if dest_host not in _LOOPBACK:
            raise asyncssh.ChannelOpenError(OPEN_ADMINISTRATIVELY_PROHIBITED, "only to this machine's loopback")
        return True


if __name__ == "__main__":
    main(sys.argv)
