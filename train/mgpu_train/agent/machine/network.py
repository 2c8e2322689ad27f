"""Through which of this machine's network interfaces the other nodes are reached; what NCCL and gloo are told of it.

Gloo takes the one that the machine's own host name leads to, which on many images is the loopback; NCCL takes the first
that is up, which may be a bridge of Docker's. Ranks of several machines would wait for each other in vain.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from mgpu_train.agent.host.layout import AMAZON, AMAZON_OF_MACHINE

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent
_IF_INET6 = Path("/proc/net/if_inet6")
_INFINIBAND = Path("/sys/class/infiniband")
_CARDS = Path("/sys/bus/pci/devices")
_AMAZON = "0x1d0f"  # its vendor id; the cards are those of Linux's drivers/infiniband/hw/efa/efa_main.c
_EFA_CARDS = ("0xefa0", "0xefa1", "0xefa2", "0xefa3")
EFA = "AWS Libfabric"  # as the plugin aws-ofi-nccl calls itself to NCCL
INFINIBAND = "IB"  # as NCCL calls its own plugin for it
DIRECT = {EFA: "EFA", INFINIBAND: "InfiniBand"}  # without TCP
_PLUGINS = "*ofi-nccl/lib*/**/libnccl-net*.so"
_VIRTUAL = re.compile(r"docker|br-|veth|virbr|cni|flannel|tailscale|wg|tun|tap")


class Route(NamedTuple):
    """How this machine speaks to another one."""

    interface: str
    family: str  # AF_INET or AF_INET6, as NCCL calls it


def route_to(address: str) -> Route | None:
    """The interface with the address from which this machine speaks to `address`; None: not known, or the loopback.

    Of several with that address one that is a card comes first.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(target)
            mine = ipaddress.ip_address(probe.getsockname()[0])
            found = [name for _, name in socket.if_nameindex() if mine in _addresses_of(probe, name)]
    except (OSError, ValueError):
        return None
    if not found or mine.is_loopback:
        return None
    first = min(found, key=lambda name: bool(_VIRTUAL.match(name)))
    return Route(first, "AF_INET6" if mine.version == 6 else "AF_INET")


def settings(
    nodes: int, gpus: int, master_addr: str, infiniband: Path = _INFINIBAND, cards: Path = _CARDS
) -> Mapping[str, str]:
    """What NCCL and gloo are told on a node of several."""
    if nodes == 1:
        return {}
    told: dict[str, str] = {}
    if route := route_to(master_addr):
        told |= {
            "GLOO_SOCKET_IFNAME": route.interface,
            "NCCL_SOCKET_IFNAME": f"={route.interface}",  # exactly this one: eth1 is also the beginning of eth10
            "NCCL_SOCKET_FAMILY": route.family,
        }
    # these or nothing: without its plugin, or with a port that fails, NCCL would take TCP in silence
    if gpus and has_efa(infiniband, cards):
        told["NCCL_NET"] = EFA
    elif gpus and has_infiniband(infiniband):
        told["NCCL_NET"] = INFINIBAND
    return told


def efa_plugin(
    given: Mapping[str, str],
    homes: Sequence[Path] = (AMAZON, AMAZON_OF_MACHINE),
    found: Callable[[str], str | None] = ctypes.util.find_library,
) -> Mapping[str, str]:
    """Where NCCL finds its plugin for EFA, for programs with the environment `given`; nothing where somebody has said
    it, the loader finds one by itself, or none is there.

    A path in NCCL_NET_PLUGIN is taken as it is:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net-plugin
    """
    searched = list(filter(None, given.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    known = (path for folder in searched for path in Path(folder).glob("libnccl-net*.so"))
    if "NCCL_NET_PLUGIN" in given or any(known) or found("nccl-net"):
        return {}
    for home in homes:
        if plugin := min(home.glob(_PLUGINS), default=None):
            folders = [str(plugin.parent), *map(str, sorted(home.glob("efa/lib*")))]
            return {"NCCL_NET_PLUGIN": str(plugin), "LD_LIBRARY_PATH": os.pathsep.join([*searched, *folders])}
    return {}


def has_infiniband(infiniband: Path = _INFINIBAND) -> bool:
    """True where a port of InfiniBand is up; one for Ethernet may be any card's."""
    ports = infiniband.glob("*/ports/*")
    return any(_says(port / "link_layer", "InfiniBand") and _says(port / "state", "4: ACTIVE") for port in ports)


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8").strip() == text
    except OSError:
        return False


def has_efa(infiniband: Path = _INFINIBAND, cards: Path = _CARDS) -> bool:
    """True where this machine was given a network card of AWS that has EFA: its driver says so, or, where a machine
    image brings no driver for it, the card itself."""
    if any(driver.resolve().name == "efa" for driver in infiniband.glob("*/device/driver")):
        return True
    kinds = (card for card in cards.glob("*") if _says(card / "vendor", _AMAZON))
    return any(_says(card / "device", kind) for card in kinds for kind in _EFA_CARDS)


def _addresses_of(probe: socket.socket, name: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """All that `probe` may have got its address from: IPv4's first one, or those of IPv6."""
    if probe.family == socket.AF_INET6:
        return _sixes_of(name)
    address = _address_of(probe, name)
    return {ipaddress.ip_address(address)} if address else set()


def _address_of(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


def _sixes_of(name: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    lines = (line.split() for line in _IF_INET6.read_text(encoding="utf-8").splitlines())
    return {ipaddress.IPv6Address(int(fields[0], 16)) for fields in lines if fields[-1] == name}
