"""TCP ports on which a launcher will listen, seconds after they were chosen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # from which the kernel takes ports of its own choice
LOWEST = 10_000  # services that are configured by hand are mostly below


def free(count: int) -> list[int]:
    """Ports that are free now, each another one.

    They are outside of the range from which the kernel serves connections and `bind(0)`: else any connection that
    another process opens may take one, while the launcher still imports torch. Where that leaves none, the kernel
    chooses.
    """
    ports: list[int] = []
    with ExitStack() as held:  # all at once: no two are the same
        for port in _candidates():
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            probe.bind(("", 0))
            ports.append(probe.getsockname()[1])
    return ports


def _candidates() -> list[int]:
    try:
        first, last = map(int, EPHEMERAL.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return []
    fixed = [port for port in range(LOWEST, 1 << 16) if not first <= port <= last]
    return random.sample(fixed, min(len(fixed), 200))
