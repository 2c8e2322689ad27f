"""What hosts are made of, and whether they are free: offers, findings, and words for both."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu.errors import MgpuError
from mgpu.plan.model import Obstacle, Offer, Requirements
from mgpu.providers.base import Finding
from mgpu.providers.hosts.options import Host
from mgpu.words import count

REGION = "on-site"
Answer = dict[str, Any] | MgpuError  # of a host
_OLDEST = (3, 11)  # of a program's Python; in a container it is the image's
_SKEW_S = 5.0
_SIZED = ("V100", "A100", "H100")  # those that come in several sizes have the size in their name
_BRANDS, _FORMS = "NVIDIA|GeForce|Tesla|Blackwell|Server|Workstation|Edition|Generation", r"SXM\d*|PCIe|NVL|HBM.*|\d+GB"
_LEFT_OUT = re.compile(f"{_BRANDS}|{_FORMS}", re.IGNORECASE)


def gpu_name(gpu: Mapping[str, str]) -> str:
    """As run files name it: `NVIDIA A100-SXM4-80GB` is A100-80GB, `NVIDIA GeForce RTX 4090` RTX-4090."""
    words = [word for word in re.split(r"[ -]", gpu["name"]) if not _LEFT_OUT.fullmatch(word)]
    size = [f"{round(int(gpu['memory_mib']) / 1024)}GB"] if words[:1] and words[0] in _SIZED else []
    return "-".join(words + size)


def kind(host: Host, facts: Mapping[str, Any]) -> str:
    """What equal hosts have in common: GPUs, and the price."""
    gpus = facts["gpus"]
    name = f"{len(gpus)}x{'+'.join(sorted({gpu_name(gpu) for gpu in gpus}))}" if gpus else "cpu"
    return f"{name}-at-{host.price_usd_per_hour:g}" if host.price_usd_per_hour else name


def used_by(answer: Answer) -> str:
    """Why a host is not free, in words; empty: it is."""
    if isinstance(answer, MgpuError):
        return answer.what.split(" ", 2)[-1]  # behind `host NAME`
    holder = answer["held"] or answer["busy"]
    if holder is not None:
        who = holder.get("by") or holder.get("user") or "somebody"
        since, until = (_clock(holder.get(key)) for key in ("since", "hard_cap_at"))
        return f"is held by {who} (fleet {holder.get('fleet') or 'unknown'}) since {since}, until {until} at the latest"
    programs = answer.get("gpu_programs", 0)
    return f"has {count(programs, 'program')} of somebody else's on its GPUs" if programs else ""


def _clock(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "?"


def offers(needed: Requirements, found: Sequence[tuple[Host, Answer]]) -> tuple[Offer, ...]:
    """One for each kind of host, free or not. Those that somebody has come back: they are waited for where there are
    enough of the kind; where there are not, the offer says why."""
    kinds: dict[str, list[tuple[Host, dict[str, Any]]]] = {}
    for host, answer in found:
        if isinstance(answer, dict):
            kinds.setdefault(kind(host, answer), []).append((host, answer))
    told = [f"{host.address} {why}" for host, answer in found if (why := used_by(answer))]
    return tuple(_offer(name, members, needed, told) for name, members in kinds.items())


def _offer(name: str, members: list[tuple[Host, dict[str, Any]]], needed: Requirements, told: list[str]) -> Offer:
    gpus = members[0][1]["gpus"]
    free, enough = sum(not used_by(answer) for _, answer in members), len(members) >= needed.nodes
    short = Obstacle(
        reason="; ".join((f"{count(len(members), 'such host')} in the list, {needed.nodes} needed", *told)),
        cure="Ask for fewer `nodes`, or name more hosts.",
    )
    return Offer(
        provider="hosts",
        instance_type=name,
        gpu=gpu_name(gpus[0]) if gpus else None,
        gpus=len(gpus),
        gpu_memory_gib=min((round(int(gpu["memory_mib"]) / 1024, 1) for gpu in gpus), default=0),
        vcpus=min(answer["vcpus"] for _, answer in members),
        memory_gib=min(answer["memory_gib"] for _, answer in members),
        market="on-demand",
        price_usd_per_hour=members[0][0].price_usd_per_hour,
        region=REGION,
        stock=None if enough and free < needed.nodes else free,
        obstacle=None if enough else short,
        fetched_at=time.time(),
    )


def findings(needed: Requirements | None, found: Sequence[tuple[Host, Answer]]) -> tuple[Finding, ...]:
    """One line a host: what it is, who has it, and what is missing."""
    return tuple(_finding(needed, host, answer) for host, answer in found)


def _finding(needed: Requirements | None, host: Host, answer: Answer) -> Finding:
    subject = f"host {host.address}"
    if isinstance(answer, MgpuError):
        return Finding.of(subject, answer)
    wrong = _missing(needed, host, answer)
    driver = f", driver {answer['gpus'][0]['driver']}" if answer["gpus"] else ""
    size = f"{answer['vcpus']} CPUs, {answer['memory_gib']:g} GiB"
    what = f"{kind(host, answer)}{driver}, {size}, {used_by(answer) or 'free'}"
    detail, cure = "; ".join([what, *(each for each, _ in wrong)]), " ".join(dict.fromkeys(cure for _, cure in wrong))
    return Finding(subject=subject, status="failed" if wrong else "ok", detail=detail, cure=cure)


def _skew_s(answer: dict[str, Any]) -> float:
    """How much its clock is ahead of this one's, at the least: it was read between two looks at this one."""
    before, after = answer["between"]
    return max(answer["now"] - after, 0.0) or min(answer["now"] - before, 0.0)


def _missing(needed: Requirements | None, host: Host, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong, each with its cure."""
    skew_s = _skew_s(answer)
    found = list[tuple[str, str]]()
    version = tuple(int(part) for part in answer["python"].split(".") if part)
    if version < _OLDEST:
        has = f"is {answer['python']}" if version else "does not run"
        cure = "Name a Python 3.11 or newer, with torch: `hosts: {python: /path/to/python}`; or an `image:`."
        found.append((f"{host.python} {has}", cure))
    wanted = needed.disk_gib if needed else 1
    if answer["disk_gib"] < wanted:
        cure = "Name another folder (`hosts: {folder: /scratch}`), make room, or lower `disk_gib`."
        found.append((f"{answer['disk_gib']:g} GiB to be had in {host.folder}, {wanted} needed", cure))
    if needed and len(answer["gpus"]) != needed.gpus_per_node:
        cure = "Look at `nvidia-smi` there, or change `gpus_per_node`."
        found.append((f"{count(len(answer['gpus']), 'GPU')}, {needed.gpus_per_node} needed", cure))
    if abs(skew_s) > _SKEW_S:
        found.append((f"its clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}", "Set it (NTP)."))
    if answer["kills_at_logout"]:
        cure = "Ask its administrator for this user in `KillExcludeUsers` of logind.conf."
        found.append(("it ends what a user leaves running at logout (KillUserProcesses)", cure))
    if answer["unreached"]:
        away = ", ".join(f"{address}:{port}" for address, port in answer["unreached"])
        found.append((f"it does not reach {away}", "Open the network between the hosts, or give `private_address`."))
    return found
