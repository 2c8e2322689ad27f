"""A node's SSH host key, replaced over a connection that is pinned to the old one.

In between, the new public key has to be written down where every process finds it: from `install` on the node may show
either. Each call may be cut off anywhere and made again, by this process or another one.
"""

from __future__ import annotations

from pathlib import Path

from mgpu.errors import CommandFailed, InputError, RemoteError
from mgpu.remote.node import Node
from mgpu.remote.targets import HostKey

HOST_KEY_FILE = "/etc/ssh/mgpu_host_ed25519_key"  # where the boot script put the first one
_SCRIPT = Path(__file__).with_name("rekey.sh")
_AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec "$@"; fi; exec sudo -n "$@"'


def prepare(node: Node, timeout: float, file: str = HOST_KEY_FILE) -> str:
    """The public line of the key that the node will have, made there now or by an earlier call; nothing shows it yet.

    The connection has to be one that is pinned to the node's old key. `timeout` is seconds; `file` is the server's
    private host key on the node.

    Raises:
        RemoteError: the node has no ssh-keygen, or its user may not become root.
        ConnectionFailed: the connection was lost, or the time was over.
    """
    answer = _run(node, "prepare", file, HostKey.parse(node.target.host_key).line, timeout)
    try:
        return HostKey.parse(answer.decode("ascii", "replace")).line
    except InputError as error:
        raise RemoteError(f"{node.target.label}: its new host key cannot be read", error.what) from error


def install(node: Node, new: str, timeout: float, file: str = HOST_KEY_FILE) -> None:
    """Has the node's server show the key that `prepare` has made, to connections that begin from now on; the file of
    the old one is gone then. Raises what `prepare` raises."""
    _run(node, "install", file, HostKey.parse(new).line, timeout)


def _run(node: Node, what: str, file: str, key: str, timeout: float) -> bytes:
    try:
        return node.run(command(what, file, key), timeout=timeout).stdout
    except CommandFailed as error:
        cure = "The machine image needs ssh-keygen, and a user that may become root by `sudo` without a password."
        raise RemoteError(f"{node.target.label}: it did not get a host key of its own", error.why, cure) from error


def command(what: str, file: str, key: str) -> list[str]:
    """The argument list that does it, as root."""
    return ["sh", "-c", _AS_ROOT, "sh", "sh", "-c", _SCRIPT.read_text("utf-8"), "rekey", what, file, key]
