"""What a machine of a plain cloud runs at its start: who may log in, two clocks that end it, and the host key it shows.

For every cloud that runs a script of the user's as root on Linux, best by cloud-init (`user data`): before sshd
listens. start.sh is the script, its settings come before it, and clocks.sh is what it leaves for every other boot.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mgpu.errors import InvalidRequest
from mgpu.providers.base import FleetRequest

HOST_KEY_FILE = "/etc/ssh/mgpu_host_ed25519_key"  # on the machine; start.sh writes it, first contact replaces it
_HERE = Path(__file__).parent
_PUBLIC_KEY = r"(ssh-ed25519|ecdsa-sha2-nistp\d+|ssh-rsa|sk-\S+) [A-Za-z0-9+/]+={0,2}( [^\x00-\x1f]*)?"


@dataclass(frozen=True)
class HostKey:
    """An ed25519 pair in OpenSSH's formats; never printed."""

    public: str
    private: str

    @classmethod
    def make(cls) -> HostKey:
        """A new pair."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

        key = Ed25519PrivateKey.generate()
        return cls(
            public=key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
            private=key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(),
        )

    def __repr__(self) -> str:
        return f"HostKey({self.public!r})"


def start_script(
    request: FleetRequest, user: str, *, host_key: HostKey | None = None, end: str = "", more: str = ""
) -> str:
    """The script for each machine of this request, the same whenever it is asked for. It begins with cloud-init's mark
    for a boothook, which `sh` takes for a comment. What another boot has done it leaves as it is, and one run is
    enough: it installs what starts the clocks at each boot (a unit of systemd, or lines for cron, rc.local, local.d).

    The hard cap is `hard_cap_s` from the first boot, or `ends_by`, by the machine's wall clock, where that is sooner.
    After a reboot lease and hard cap go on at what was left of them: of the hard cap the time that the machine was off
    is gone too, as far as its wall clock knows. In a machine image of it the clocks do nothing until the
    new machine's script runs. No user logs in by a password any more.

    Args:
        user: who logs in with the request's key, and may become root; made where there is none. The lease is
            `.mgpu/lease` of its home.
        host_key: the only one that sshd shows, until first contact replaces it (`Rekeys`); others can read it here. The
            same for each call of one token. None: the machine's own, which the provider has to tell.
        end: lines of sh that end the machine and its bill when a clock runs out. They are called again until the
            machine is gone, and have to come back by themselves. Without: it powers itself off. No long-lived secret
            may stand here: whoever is on the machine reads it.
        more: lines of sh that run last, as root, with `$user` and `$home`.

    Raises:
        InvalidRequest: the key that may log in is no OpenSSH public key line.
    """
    authorized_key = request.ssh_public_key.strip()
    if not re.fullmatch(_PUBLIC_KEY, authorized_key):
        raise InvalidRequest("the key that may log in is not an OpenSSH public key line", "", "Use an ed25519 key.")
    settings = {
        "user": user,
        "authorized_key": authorized_key,
        "host_key": host_key.private.rstrip("\n") if host_key else "",
        # with a number that sh cannot calculate with the machine would have no clock at all
        "lease_s": str(math.ceil(min(request.lease_s, request.hard_cap_s))),
        "hard_cap_s": str(math.ceil(request.hard_cap_s)),
        "ends_by": str(math.ceil(request.ends_by)),
        "lease_script": (_HERE / "lease.sh").read_text(encoding="utf-8").rstrip("\n"),
        "clocks_script": (_HERE / "clocks.sh").read_text(encoding="utf-8").rstrip("\n"),
        "end": end,
    }
    assignments = (f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    return "".join(
        ("#cloud-boothook\n#!/bin/sh\n", *assignments, (_HERE / "start.sh").read_text(encoding="utf-8"), more)
    )
