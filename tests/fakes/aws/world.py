"""The network that a fake AWS with machines lives in: a namespace of its own, so that the host's is never touched.

Every address is routed by itself, as in a VPC: a machine has its address as a /32 on `eth0`, the world's end of that
wire (`m1`, `m2`, ...) has none, and a route leads to it. So any address of any subnet will do, and a machine with a
second, public address needs one more route. The world itself owns the gateway and the metadata service's address, on
its loopback. Packets to a machine that is gone fall into `void`: nobody answers, as when a real one is lost.

`enter` is called once, in the server's main thread before any other starts. Sockets that the process bound before
stay with the host: a server that listens on 127.0.0.1 there and again in the world is reached from both.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

GATEWAY = "10.99.0.1"
METADATA = "169.254.169.254"
MACHINES = ("10.99.0.0/16", "172.31.0.0/16", "198.51.100.0/24")  # private ones, moto's default VPC, public ones

# a command after these words has namespaces of its own, and dies with the process that they start
NAMESPACES = (
    "unshare",
    "--net",
    "--mount",
    "--pid",
    "--uts",
    "--ipc",
    "--fork",
    "--kill-child",
    "--propagation=private",
)

_PROGRAMS = ("ip", "unshare", "nsenter", "mount", "pivot_root", "setpriv")
_SECONDS = 20.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def missing() -> str | None:
    """Why no machines can run here, or None: tries once what each of them needs."""
    if os.geteuid() != 0:  # within a user's own namespace the kernel refuses an overlay over the host's root
        return "fake machines need root (namespaces, an overlay over the root file system)"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    with tempfile.TemporaryDirectory() as folder:
        script = (
            'set -e; mount -t tmpfs none "$1"; cd "$1"; mkdir u w r; ip link add name m1 type veth peer name eth0; '
            "mount -t overlay overlay -o lowerdir=/,upperdir=u,workdir=w r; mkdir r/before; pivot_root r r/before"
        )
        tried = subprocess.run(
            [*NAMESPACES, "sh", "-c", script, "sh", folder], capture_output=True, text=True, timeout=_SECONDS
        )
    return None if tried.returncode == 0 else f"a machine's namespaces cannot be made: {tried.stderr.strip()}"


def enter() -> None:
    """Moves the calling thread, and so all that start after it, into a network of their own. OSError: not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace cannot be made")
    for name, value in {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    ip(
        "link set lo up",
        f"addr add {GATEWAY}/32 dev lo",
        f"addr add {METADATA}/32 dev lo",
        "link add void type veth peer name void-end",
        "link set void arp off up",
        "link set void-end up",
        *(f"route add {network} dev void" for network in MACHINES),
    )


def prefix(pid: int) -> list[str]:
    """The words before a command that run it in the network of the process `pid`."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def ip(*commands: str, inside: int | None = None) -> None:
    """Runs `ip` commands, all or up to the first that fails, also in the network of another process. RuntimeError."""
    words = [*(prefix(inside) if inside else ()), "ip", "-batch", "-"]
    done = subprocess.run(words, input="\n".join(commands), capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")


def attach(link: str, pid: int, address: str) -> None:
    """Lays a wire from the world to the `eth0` of the process `pid`'s network, and leads `address` to it."""
    ip(f"link add {link} type veth peer name eth0 netns {pid}", f"link set {link} up")
    lead(address, link)


def lead(address: str, link: str) -> None:
    """From now on packets to `address` go to `link`."""
    ip(f"route replace {address}/32 dev {link} src {GATEWAY}")


def lose(*addresses: str) -> None:
    """From now on packets to `addresses` vanish."""
    ip(*(f"route replace {address}/32 dev void" for address in addresses))
