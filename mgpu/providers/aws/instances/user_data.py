"""What a machine is given to run at its boot: boot.sh with its settings before it, one script for cloud-init.

It begins with cloud-init's mark for a boothook, which `sh` takes for a comment, and is not compressed. The one-use host
key is the only secret in it, and is worth nothing once first contact has replaced it.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mgpu.errors import InvalidRequest

MAX_BYTES = 16384  # that EC2 takes, before base64
HOST_KEY_FILE = "/etc/ssh/mgpu_host_ed25519_key"  # on the machine; boot.sh writes it, first contact replaces it
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


def user_data(
    user: str, authorized_key: str, host_key: HostKey, *, lease_s: float, hard_cap_s: float, hard_cap_at: float
) -> str:
    """The script. `lease_s` and `hard_cap_s` count in seconds from the boot on, `hard_cap_at` is in UNIX seconds; the
    earlier of the two caps holds.

    Raises:
        InvalidRequest: the key that may log in is no OpenSSH public key line.
    """
    if not re.fullmatch(_PUBLIC_KEY, authorized_key.strip()):
        raise InvalidRequest(
            "provider aws: the key that may log in is not an OpenSSH public key line", "", "Use an ed25519 key."
        )
    settings = {
        "user": user,
        "authorized_key": authorized_key.strip(),
        "host_key": host_key.private.rstrip("\n"),
        "lease_s": str(math.ceil(lease_s)),
        "hard_cap_s": str(math.ceil(hard_cap_s)),
        "hard_cap_at": str(math.ceil(hard_cap_at)),
        "lease_script": (_HERE.parents[1] / "lease.sh").read_text().rstrip("\n"),
    }
    assignments = (f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    text = "".join(("#cloud-boothook\n#!/bin/sh\n", *assignments, (_HERE / "boot.sh").read_text()))
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest(
            f"provider aws: the user data is too large ({len(text.encode())} bytes)",
            f"EC2 takes {MAX_BYTES}",
            "Use a shorter SSH key (ed25519).",
        )
    return text
