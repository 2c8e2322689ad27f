"""Who is reached, with which host key pinned, and what calls return. All is checked here, before a byte is sent."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu.errors import InputError

_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MODULE = ("{python}", "-P", "-m")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# what csh (a line break, "!") and fish (a backslash) read inside quotes otherwise than a POSIX shell
_DIFFERS = re.compile(r"[\\!\n]")
_QUOTED = re.compile(r"""[\\!\n'"$`]""")
# the host key algorithms that may prove a pinned key of each type; also the list of accepted types
ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}


@dataclass(frozen=True)
class HostKey:
    """A pinned public host key: its type and its exact bytes."""

    kind: str
    blob: bytes

    @classmethod
    def parse(cls, line: str) -> HostKey:
        """Reads an OpenSSH public key line, `<type> <base64> [comment]`. Raises InputError."""
        kind, _, rest = line.strip().partition(" ")
        try:
            blob = base64.b64decode(rest.split(" ")[0], validate=True)
        except binascii.Error:
            blob = b""
        if kind not in ALGORITHMS or _CONTROL.search(line.strip()) or not blob.startswith(_string(kind)):
            raise InputError(
                f"not a host key that can be pinned: {line[:80]!r}",
                "An OpenSSH public key line is needed, `<type> <base64>`, of type " + ", ".join(ALGORITHMS) + ".",
                "A node whose key is not known is never connected to.",
            )
        return cls(kind, blob)

    @property
    def line(self) -> str:
        """The key as one line without comment."""
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it: `<type> SHA256:...`."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest()).decode()
        return f"{self.kind} SHA256:{digest.rstrip('=')}"


def _string(text: str) -> bytes:
    # RFC 4251: a string is its length in four bytes, then its bytes; a key's blob begins with its type
    return len(text).to_bytes(4, "big") + text.encode()


@dataclass(frozen=True)
class Jump:
    """A jump host. Raises InputError for what ssh could take for an option, and for a key that cannot be pinned."""

    address: str
    port: int
    user: str
    host_key: str

    def __post_init__(self) -> None:
        _check_endpoint(self)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"jump host {self.address}:{self.port}"


@dataclass(frozen=True)
class ProxyCommand:
    """A program whose standard input and output are the connection to a node. Raises InputError for arguments that
    cannot stand on one line of ssh's configuration.

    `in_process`: it is a module of Python's whose `connect` makes the same connection here: lighter, where nodes are
    many."""

    command: tuple[str, ...]
    in_process: bool = False

    def __post_init__(self) -> None:
        check_arguments(self.command)
        if self.in_process and (self.command[:3] != _MODULE or not _DOTTED.fullmatch("".join(self.command[3:4]))):
            raise InputError(
                f"not a module that carries connections: {' '.join(self.command)[:120]!r}",
                f"With `in_process` a proxy command begins with {' '.join(_MODULE)} and the name of a module.",
            )
        for argument in filter(_CONTROL.search, self.command):
            raise InputError(f"not an argument of a proxy command: {argument[:80]!r}", "It holds a control character.")

    @property
    def argv(self) -> list[str]:
        """What is started here: `{python}` is this interpreter."""
        return [sys.executable if argument == "{python}" else argument for argument in self.command]

    @property
    def module(self) -> tuple[str, tuple[str, ...]]:
        """With `in_process`: the module, and what its `connect` is given."""
        return self.command[3], self.command[4:]


def hop(via: Mapping[str, Any] | None) -> Jump | ProxyCommand | None:
    """How a node is reached, from plain data: the `via` of a provider's node and of the stack output."""
    if via is None:
        return None
    if "command" in via:
        return ProxyCommand(tuple(via["command"]), in_process=bool(via.get("in_process", False)))
    return Jump(**via)


@dataclass(frozen=True)
class Target:
    """A node as the operator reaches it; `rank` is its node_rank, `python` its interpreter. With a proxy command the
    address is a name alone: nothing dials it. Raises InputError like `Jump`."""

    rank: int
    address: str
    port: int
    user: str
    host_key: str
    via: Jump | ProxyCommand | None = None
    python: str = "python3"

    def __post_init__(self) -> None:
        _check_endpoint(self)
        check_path(self.python)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"node {self.rank} ({self.address}:{self.port})"


@dataclass(frozen=True)
class Result:
    """A command's end. `status` is its exit status, -1 when a signal ended it.

    Of longer outputs than `max_output` only the end is kept; `dropped` counts the bytes of both streams that are not.
    """

    status: int
    stdout: bytes
    stderr: bytes
    dropped: int = 0


@dataclass(frozen=True)
class SyncReport:
    """What a sync did: files (links count) in the folder, those sent, those deleted on the node, bytes of contents."""

    files: int
    sent: int
    deleted: int
    bytes_sent: int


def check_path(path: str) -> str:
    """Returns a path on a node if it is one line, no option and no surprise. Raises InputError."""
    if not path or path.startswith("-") or _CONTROL.search(path) or not _is_text(path) or len(path) > 4000:
        raise InputError(
            f"not a path for a node: {path[:120]!r}",
            "Paths are UTF-8 on one line, without control characters, and do not begin with `-`.",
        )
    return path


def login_line(argv: Sequence[str]) -> str:
    """The argument list as one line, for whatever shell the user logs in with: bash, zsh, csh, fish, ... What shells
    differ in is sent in octal, for `sh` to read."""
    line = shlex.join(argv)
    if not _DIFFERS.search(line):
        return line
    octal = _QUOTED.sub(lambda found: f"\\0{ord(found[0]):03o}", line)
    return f"""sh -c 'eval "exec $(printf %b "{octal}")"'"""


def check_arguments(argv: Sequence[str]) -> None:
    """Raises InputError for an argument list that no shell could pass on exactly."""
    if isinstance(argv, str) or not argv or not argv[0]:
        raise InputError("a command is a list of arguments, its program first", f"Got {argv!r}.")
    for argument in argv:
        if "\0" in argument or not _is_text(argument):
            raise InputError(
                f"not an argument for a command on a node: {argument[:80]!r}", "It holds NUL or is not text."
            )


def _is_text(text: str) -> bool:
    # surrogates: what Python makes of file names that are not UTF-8
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _check_endpoint(end: Jump | Target) -> None:
    HostKey.parse(end.host_key)
    labels = end.address.removesuffix(".").split(".")  # of 1 to 63 characters, else no resolver is asked
    if not _ADDRESS.fullmatch(end.address) or not all(0 < len(label) < 64 for label in labels):
        raise InputError(f"not a host name or IP address: {end.address[:80]!r}")
    if not _USER.fullmatch(end.user):
        raise InputError(f"{end.address}: not a user name: {end.user[:80]!r}")
    if not 1 <= end.port <= 65535:
        raise InputError(f"{end.address}: not a port: {end.port}")
