"""The same targets for the system's ssh client and editors: pinned keys, our key, nothing of the user's set-up."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgpu.errors import InputError
from mgpu.remote.targets import ALGORITHMS, HostKey, Jump, ProxyCommand, Target

_ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def ssh_config(
    targets: Sequence[Target], key_file: Path, alias_prefix: str, known_hosts_file: Path = Path("known_hosts")
) -> tuple[str, str]:
    """Returns the texts of an ssh configuration and of its known_hosts file, which the caller writes.

    Node k is the host `<alias_prefix>-<k>`: `ssh -F <file> <host>`. `known_hosts_file` is where the second text will
    lie, an absolute path unless ssh is started in its folder. Raises InputError for names that ssh would misread.
    """
    if not _ALIAS.fullmatch(alias_prefix):
        raise InputError(f"not a prefix for host names: {alias_prefix[:80]!r}")
    blocks, known = [_common(key_file, known_hosts_file)], list[str]()
    for target in targets:
        alias = f"{alias_prefix}-{target.rank}"
        through: dict[str, str] = {}
        if isinstance(target.via, Jump):
            through = {"ProxyJump": f"{alias}-jump"}
            blocks.append(_host(f"{alias}-jump", target.via, {}))
            known.append(f"{alias}-jump {HostKey.parse(target.via.host_key).line}\n")
        elif isinstance(target.via, ProxyCommand):  # ssh hands the line to a shell, once it has put in its own `%h`
            through = {"ProxyCommand": shlex.join(target.via.argv).replace("%", "%%")}
        blocks.append(_host(alias, target, through))
        known.append(f"{alias} {HostKey.parse(target.host_key).line}\n")
    return "\n".join(blocks), "".join(known)


def _common(key_file: Path, known_hosts_file: Path) -> str:
    options = {
        "IdentityFile": _quoted(key_file),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ForwardAgent": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _quoted(known_hosts_file),
        "GlobalKnownHostsFile": "/dev/null",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "ConnectTimeout": "15",  # without it a machine that is gone takes two minutes of silence
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "4",
    }
    return "Host *\n" + "".join(f"    {name} {value}\n" for name, value in options.items())


def _host(alias: str, end: Target | Jump, through: Mapping[str, str]) -> str:
    options = {
        "HostName": end.address,
        "Port": str(end.port),
        "User": end.user,
        "HostKeyAlias": alias,
        "HostKeyAlgorithms": ",".join(ALGORITHMS[HostKey.parse(end.host_key).kind]),
        **through,
    }
    return f"Host {alias}\n" + "".join(f"    {name} {value}\n" for name, value in options.items())


def _quoted(path: Path) -> str:
    text = str(path)
    if not text.isprintable() or any(letter in text for letter in '"\\$~'):
        raise InputError(f"ssh cannot be given this path: {text!r}", 'It holds a control character or one of " \\ $ ~.')
    text = text.replace("%", "%%")
    return f'"{text}"' if " " in text or "'" in text else text
