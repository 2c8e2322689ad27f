"""What a machine of EC2 is given to run at its boot: the start script of every cloud, and its disks.

Power-off ends the bill: EC2 terminates what powers itself off. The script is not compressed. The one-use host key is
the only secret in it, and is worth nothing once first contact has replaced it.
"""

from __future__ import annotations

from pathlib import Path

from mgpu.errors import InvalidRequest
from mgpu.providers.base import FleetRequest
from mgpu.providers.start import HostKey, start_script

MAX_BYTES = 16384  # that EC2 takes, before base64


def user_data(request: FleetRequest, user: str, host_key: HostKey, hard_cap_at: int) -> str:
    """The script. `hard_cap_at`: UNIX seconds; the earlier of it and the request's `hard_cap_s` from the boot holds.

    Raises:
        InvalidRequest: the key that may log in is no OpenSSH public key line, or so long that EC2 refuses the script.
    """
    disks = Path(__file__).with_name("disks.sh").read_text(encoding="utf-8")
    text = start_script(request.model_copy(update={"ends_by": hard_cap_at}), user, host_key=host_key, more=disks)
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest(
            f"provider aws: the user data is too large ({len(text.encode())} bytes)",
            f"EC2 takes {MAX_BYTES}",
            "Use a shorter SSH key (ed25519).",
        )
    return text
