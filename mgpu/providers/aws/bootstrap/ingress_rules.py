"""The rules of a security group, one source each: as AWS lists them, as it takes them, and in words."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from mgpu.errors import InputError

SSH = 22
_LISTS = {
    "IpRanges": "CidrIp",
    "Ipv6Ranges": "CidrIpv6",
    "PrefixListIds": "PrefixListId",
    "UserIdGroupPairs": "GroupId",
}
# Prefixes this short are the world, in one piece or in two; 10.0.0.0/8 is somebody's own network
_WORLD = {4: 7, 6: 15}


def cidr(text: str) -> str:
    """An address or network as AWS writes it; an address alone is the network of it alone.

    Raises:
        InputError: it is neither.
    """
    try:
        return str(ipaddress.ip_network(text.strip(), strict=False))
    except ValueError as error:
        why = f"{error}"
        raise InputError(f"{text!r} is no network", why, "Give it as CIDR: 203.0.113.7/32.") from error


def is_world(network: str) -> bool:
    """Whether a network is so wide that it names nobody."""
    found = ipaddress.ip_network(network)
    return found.prefixlen <= _WORLD[found.version]


def rules(permissions: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every source by itself: its name, and the permission that lets it alone in."""
    for permission in permissions:
        ports = {key: permission[key] for key in ("IpProtocol", "FromPort", "ToPort") if key in permission}
        for kind, key in _LISTS.items():
            for source in permission.get(kind, ()):
                keys = (key, "UserId", "VpcPeeringConnectionId") if kind == "UserIdGroupPairs" else (key,)
                yield str(source.get(key, "")), {**ports, kind: [{k: source[k] for k in keys if source.get(k)}]}


def is_ssh(rule: dict[str, Any]) -> bool:
    """Whether it is SSH, and nothing else, from a network."""
    ports = (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"))
    return ports == ("tcp", SSH, SSH) and ("IpRanges" in rule or "Ipv6Ranges" in rule)


def is_all(rule: dict[str, Any]) -> bool:
    """Whether it is every protocol and port."""
    return rule["IpProtocol"] == "-1"


def is_within(rule: dict[str, Any], group: str) -> bool:
    """Whether it is everything from members of the group itself."""
    return is_all(rule) and rule.get("UserIdGroupPairs", [{}])[0].get("GroupId") == group


def ports_of(rule: dict[str, Any]) -> str:
    """In words: `tcp 443`."""
    if is_all(rule):
        return "everything"
    first, last = rule.get("FromPort"), rule.get("ToPort")
    ports = "all" if first is None else f"{first}" if first == last else f"{first}-{last}"
    return f"{rule['IpProtocol']} {ports}"


def ssh_from(network: str) -> dict[str, Any]:
    """SSH from this network."""
    kind, key = ("Ipv6Ranges", "CidrIpv6") if ":" in network else ("IpRanges", "CidrIp")
    return {"IpProtocol": "tcp", "FromPort": SSH, "ToPort": SSH, kind: [{key: network}]}


def everything(group: str = "") -> dict[str, Any]:
    """All protocols and ports, for the members of a group, or to anywhere."""
    where = {"UserIdGroupPairs": [{"GroupId": group}]} if group else {"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    return {"IpProtocol": "-1", **where}
