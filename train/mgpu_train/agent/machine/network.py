"""Through which of this machine's network interfaces the other nodes are reached.

Gloo takes the one that the machine's own host name leads to, which on many images is the loopback: ranks of several
machines would wait for each other in vain.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import closing

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent


def interface_to(address: str) -> str | None:
    """The interface with the address from which this machine speaks to `address`; None: not known, or the loopback."""
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((address, _ANY_PORT))
            mine = probe.getsockname()[0]
            found = [name for _, name in socket.if_nameindex() if _address_of(probe, name) == mine]
    except OSError:
        return None
    return found[0] if found and not mine.startswith("127.") else None


def _address_of(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])
