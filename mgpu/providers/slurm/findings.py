"""What a request is to sbatch, and what `mgpu check slurm` looks at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mgpu.errors import MgpuError, NoOffer
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import Finding, Offers
from mgpu.providers.slurm.login import Login
from mgpu.providers.slurm.options import SlurmOptions


def sbatch(options: SlurmOptions, needed: Requirements, offer: Offer) -> list[str]:
    """The arguments that say which nodes: the same for a request and for a test of it."""
    gpus = f"gpu:{offer.gpu}:{offer.gpus}" if offer.gpu else f"gpu:{offer.gpus}"
    gres = options.gres or (gpus if needed.gpus_per_node else None)
    given = {
        "partition": offer.zone,
        "nodes": needed.nodes,
        "ntasks-per-node": 1,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "reservation": options.reservation,
        "gres": gres,
        "cpus-per-task": options.cpus_per_node,
        "mem": f"{options.memory_gib}G" if options.memory_gib else None,
        "tmp": f"{options.tmp_gib}G" if options.tmp_gib else None,
        "signal": f"URG@{options.notice_s}" if options.notice_s else None,  # nobody but the keeper minds it
    }
    arguments = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*arguments, "--no-requeue", *(["--exclusive"] if options.exclusive else [])]


def words(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show partition -o`."""
    found = (word.partition("=") for word in line.removeprefix("partition|").split())
    return {name: value for name, _, value in found}


@dataclass(frozen=True)
class NodeShape:
    """Nodes of one partition that are alike; `gpus` are their types (None: Slurm names none) and counts."""

    partition: str
    cpus: int
    memory_gib: float
    gpus: tuple[tuple[str | None, int], ...]
    count: int
    idle: bool

    @classmethod
    def of(cls, line: str) -> NodeShape:
        """From a line of `on_sale` in login.sh: `nodes|main|32+|4000|gpu:h100:8(S:0-1),nvme:1|2|idle`."""
        name, cpus, memory, gres, count, state = line.removeprefix("nodes|").split("|")
        found = re.findall(r"\bgpu(?::([^:,()]+))?:(\d+)", gres)
        gpus = tuple((kind or None, int(each)) for kind, each in found)
        return cls(name, int(cpus.rstrip("+")), int(memory.rstrip("+")) / 1024, gpus, int(count), state == "idle")

    def gpus_for(self, wanted: int) -> list[tuple[str | None, int]]:
        """The types, with their counts, that have so many GPUs a node; one without a type where none are wanted."""
        return [each for each in self.gpus if each[1] >= wanted] if wanted else [(None, 0)]


def limit_s(partition: dict[str, str]) -> float:
    """The longest time of a job: `[days-]hours:minutes:seconds`, or UNLIMITED."""
    said = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", partition.get("MaxTime", ""))
    if not said:
        return float("inf")
    days, hours, minutes, seconds = (int(each or 0) for each in said.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def look(login: Login, needed: Requirements | None, offers: Callable[[], Offers | None]) -> tuple[Finding, ...]:
    """One line for each thing that renting needs."""
    where = f"slurm at {login.name}"
    try:
        names = [each["PartitionName"] for each in map(words, login.said("on_sale")) if each.get("State") == "UP"]
        found = [Finding(subject=where, status="ok", detail=f"answers; partitions: {', '.join(names)}")]
        missing = [name for name in (login.options.partition or "").split(",") if name and name not in names]
        if missing:
            cure = f"Partitions that are up: {', '.join(names)}."
            found.append(Finding(subject="slurm.partition", status="failed", detail=f"no {missing[0]}", cure=cure))
        found.append(_node(login))
    except MgpuError as error:
        return (Finding.of(where, error),)
    if needed:
        found.append(_request(login, needed, offers))
    return tuple(found)


def _request(login: Login, needed: Requirements, offers: Callable[[], Offers | None]) -> Finding:
    """What Slurm says to the request, without making it: partition, account, QOS, time, constraint, GPUs."""
    subject = "the request"
    try:
        sold = offers()
        wanted = {gpu.casefold() for gpu in needed.gpu}
        typed = [each for each in (sold.offers if sold else ()) if not wanted or (each.gpu or "").casefold() in wanted]
        fits = [offer for offer in typed if offer.obstacle is None]
        if not fits:
            why = [offer.obstacle.reason for offer in typed if offer.obstacle]
            raise NoOffer("no partition has such nodes", "; ".join(dict.fromkeys(why)), "`mgpu offers` lists all.")
        minutes = f"--time={max(1, round(needed.max_hours * 60))}"
        arguments = sbatch(login.options, needed, fits[0])
        said = login.said('try_request "$@"', minutes, *arguments, doing="make this request")
    except MgpuError as error:
        return Finding.of(subject, error)
    return Finding(subject=subject, status="ok", detail=" ".join(said))


def _node(login: Login) -> Finding:
    """A node sees the work folder, and has what the keeper needs; a warning where no node is free for it at once."""
    options, subject = login.options, "a node"
    given = {"partition": options.partition, "account": options.account, "qos": options.qos}
    chosen = {**given, "constraint": options.constraint, "reservation": options.reservation}
    arguments = [f"--{name}={value}" for name, value in chosen.items() if value]
    try:
        said = dict(line.split(" ", 1) for line in login.said('try_node "$@"', *arguments, doing="try a node"))
    except MgpuError as error:
        return Finding.of(subject, error)
    if "name" not in said:
        why = said.get("why", "none was free")
        return Finding(subject=subject, status="warning", detail=f"not tried: {why}", cure="Look again later.")
    if said.get("shared") != "yes":
        why = f"{said['name']} does not see {options.work_folder} of the login node"
        return Finding(subject=subject, status="failed", detail=why, cure="Name a shared `slurm.work_folder`.")
    lacks = said.get("lacks", "").strip()
    if lacks:
        why, cure = f"{said['name']} lacks {lacks}", "Have it installed, or load it in `slurm.prologue`."
        return Finding(subject=subject, status="failed", detail=why, cure=cure)
    detail = f"{said['name']} sees the work folder, and has an SSH server and Python {said.get('python', '')}"
    return Finding(subject=subject, status="ok", detail=detail)
