"""The provider contract over Slurm: a gang is one job, with one task a node. Nothing is remembered but on the cluster.

sbatch is not idempotent: a token stands in the job's name, and the create, which holds a lock on the login node, looks
for it before it asks; a job that finds another one's number in its gang's folder ends itself (login.sh, batch.sh).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mgpu.errors import Conflict, NoOffer, Transient
from mgpu.plan.model import Obstacle, Offer, Requirements
from mgpu.providers import slurm
from mgpu.providers.base import (
    Finding,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    Offers,
    Provider,
    ProxyCommand,
)
from mgpu.providers.shipped import packed
from mgpu.providers.slurm import findings
from mgpu.providers.slurm.login import ENDED, Login
from mgpu.providers.slurm.options import ENTRY, SlurmOptions

# Slurm's reasons of jobs that wait for ever, where a site takes such jobs (EnforcePartLimits), and what would help
_NEVER = (
    (
        r"PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJobLimit",
        "Lower `max_hours`, or name another partition, QOS.",
    ),
    (r"(Assoc|QOS)Max\w+PerJob(Limit)?|QOSMin\w+", "Ask for what the account and the QOS let one job have."),
    (r"BadConstraints", "Mend `slurm.constraint`, `gres`, or what is asked for of a node: no node has all of it."),
    (r"InvalidAccount|InvalidQOS|ReservationDeleted", "Name an account, a QOS and a reservation of yours in `slurm:`."),
)
_SETTINGS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


class SlurmProvider(Provider):
    """Asks a cluster's scheduler for nodes, waits in its queue, and gives them back."""

    name = SlurmOptions.block
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = SlurmOptions.of(options or {})
        self._login = Login(self._options)

    def check(self) -> None:
        """Slurm answers. Raises AuthError, Transient, InvalidRequest: why it does not; NoOffer: there is none."""
        self._require()
        self._login.said("on_sale")

    def configured(self) -> bool:
        """A login node is named, or this is one."""
        known = "SLURM_CONF" in os.environ or any(Path(path).exists() for path in _SETTINGS)
        return bool(self._options.login) or (known and shutil.which("sbatch") is not None)

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """Commands, partitions, the request itself by `sbatch --test-only`, and a node, where one is free at once."""
        wanted = self._of(requirements) if requirements else self._options
        try:
            self._require()
        except NoOffer as error:
            return (Finding.of(self.name, error),)
        return findings.look(Login(wanted), requirements, lambda: self.offers(requirements) if requirements else None)

    def queue_s(self) -> float:
        """As `slurm.queue_hours` allows."""
        return self._options.queue_s()

    def offers(self, requirements: Requirements) -> Offers:
        """The nodes of each partition that is up, by their shape; how many are idle is said, and none has to be."""
        options = self._of(requirements)
        self._require()
        said = self._login.said("on_sale", doing="list partitions")
        partitions = {each["PartitionName"]: each for each in map(findings.words, said) if "PartitionName" in each}
        nodes = [findings.NodeShape.of(line) for line in said if line.startswith("nodes|")]
        up = [name for name, each in partitions.items() if each.get("State") == "UP"]
        asked = options.partition.split(",") if options.partition else up
        groups: dict[tuple[str, str | None], list[tuple[findings.NodeShape, int]]] = {}
        for node in nodes:
            if node.partition in asked and node.partition in up:
                for gpu, count in node.gpus_for(requirements.gpus_per_node):
                    groups.setdefault((node.partition, gpu), []).append((node, count))
        found = list[Offer]()
        notes = [f"no partition {name} is up; up: {', '.join(up) or 'none'}" for name in asked if name not in up]
        for (name, gpu), group in groups.items():
            offer = self._offer(requirements, options, partitions[name], gpu, group)
            found.append(offer)
            all_of_them = sum(node.count for node, _ in group)
            free = sum(node.count for node, _ in group if node.idle)
            notes.append(f"{offer.instance_type}: {free} of {all_of_them} nodes are idle")
        return Offers(offers=tuple(found), source=f"slurm at {self._login.name}", notes=tuple(notes))

    def _offer(
        self,
        needed: Requirements,
        options: SlurmOptions,
        partition: dict[str, str],
        gpu: str | None,
        group: list[tuple[findings.NodeShape, int]],
    ) -> Offer:
        # Slurm may give any of these nodes: what the smallest has is what is promised
        cpus, memory = min(node.cpus for node, _ in group), min(node.memory_gib for node, _ in group)
        count = min(count for _, count in group)
        name, limit_s = partition["PartitionName"], findings.limit_s(partition)
        obstacle = None
        if limit_s < needed.max_hours * 3600:
            hours = f"{limit_s * 1000 // 3600 / 1000:.10g}"  # rounded up, it would be refused again
            why = f"partition {name} lets no job run longer than {hours} h"
            obstacle = Obstacle(reason=why, cure=f"Lower `max_hours` to {hours}, or take another partition.")
        shape = f"{cpus}cpu" + (f"-{count}x{gpu or 'gpu'}" if count else "")
        return Offer(
            provider=self.name,
            instance_type=f"{name}/{shape}",
            gpu=gpu if needed.gpus_per_node else None,
            gpus=needed.gpus_per_node,
            vcpus=options.cpus_per_node or cpus,
            memory_gib=round(options.memory_gib or memory, 1),
            market="on-demand",
            price_usd_per_hour=options.price_usd_per_hour,
            region=self._login.name,
            zone=name,
            stock=None,  # the queue admits them, sooner or later
            obstacle=obstacle,
            fetched_at=time.time(),
        )

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Submits one job, or finds the one that this token has made; it waits in the queue, and `describe` says so.

        Raises:
            Conflict: the token was used with other parameters, or given up.
            AmbiguousCreate: the answer was lost; `find` knows.
            NoOffer, QuotaExceeded, PermissionDenied, InvalidRequest: Slurm refused.
        """
        options = self._of(request.requirements)
        asked = {
            **request.model_dump(include={"lease_s", "hard_cap_s", "ends_by", "ssh_public_key"}),
            **options.model_dump(include={"node_folder", "notice_s", "python", "price_usd_per_hour"}),
            "token": token,
            "nodes": request.requirements.nodes,
        }
        about = {"owner": request.owner, "fleet": request.fleet, "generation": request.generation}
        about["nodes"] = request.requirements.nodes
        arguments = [
            f"--job-name=mgpu-{token}",
            f"--comment={json.dumps(about)}",
            f"--time={max(1, math.ceil(request.hard_cap_s / 60))}",
            *findings.sbatch(options, request.requirements, offer),
        ]
        arguments = [token, request.digest(offer), *arguments]
        said = self._login.said('submit "$@"', *arguments, files=_files(options, asked), doing="submit a job")
        if said == ["conflict"]:
            what = f"slurm: token {token} was used with other parameters, or given up"
            raise Conflict(what, scope="offer")
        return self._handle(token, about, made_at=float(said[-1].split()[1]))

    def find(self, intent: Intent) -> Handle | None:
        """The gang whose job has this token in its name, or had."""
        return self._found("look", intent)

    def recall(self, request: FleetRequest, intent: Intent, ranks: tuple[int, ...]) -> Handle | None:
        """The same; and where there is none, none comes: the token is given up under the lock that a create takes."""
        return self._found("give_up", intent)

    def describe(self, handle: Handle) -> FleetState:
        """The job as Slurm has it, and what its nodes say of themselves. A node is gone when the job has ended and is
        not completing any more; one that Slurm calls DOWN may go on working, and is only billed no more."""
        said = self._login.said('tell "$@"', handle.token, doing="look at a job")
        gang = Gang.of(said, f"{self._options.work_folder}/gangs/{handle.token}")
        return FleetState(nodes=tuple(self._node(gang, rank, name) for rank, name in enumerate(handle.ids)))

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """All jobs of this user that mgpu's comment gives this owner and that have not ended."""
        jobs = [line.partition("|")[::2] for line in self._login.said("owned", doing="list jobs")]
        named = [(name.removeprefix("mgpu-"), _about(said)) for name, said in jobs]
        return tuple(self._handle(token, about) for token, about in named if about and about["owner"] == owner)

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Cancels the job: a gang ends as one. True when Slurm says that it has ended on every node."""
        if nodes is not None and not any(nodes):
            return True
        self._login.said('give_back "$@"', handle.token, doing="cancel a job")
        state = self.describe(handle)
        return all(node.phase is NodePhase.TERMINATED for node in state.nodes)

    def _require(self) -> None:
        if not self.configured():
            why = "it has no sbatch with a slurm.conf, and the run file names no login node"
            cure = "Name your cluster's login node: `slurm: {login: user@host}`."
            raise NoOffer("there is no Slurm on this machine", why, cure)

    def _of(self, requirements: Requirements) -> SlurmOptions:
        return SlurmOptions.of({**self._options.flat(), **requirements.provider_options})

    def _found(self, how: str, intent: Intent) -> Handle | None:
        said = self._login.said(f'{how} "$@"', intent.token, doing="look for a job")
        if not said:
            return None
        about = {"fleet": intent.fleet, "generation": intent.generation, "nodes": int(said[-1].split()[2])}
        return self._handle(intent.token, about, made_at=float(said[-1].split()[1]))

    def _handle(self, token: str, about: Mapping[str, Any], made_at: float = 0.0) -> Handle:
        return Handle(
            provider=self.name,
            region=self._login.name,
            fleet=about["fleet"],
            generation=about["generation"],
            token=token,
            ids=tuple(f"{token[:10]}-{rank}" for rank in range(about["nodes"])),
            made_at=made_at,
        )

    def _node(self, gang: Gang, rank: int, name: str) -> NodeState:
        phase, reason = gang.phase(rank) if name else (NodePhase.TERMINATED, "no machine was made for this rank")
        here = phase is NodePhase.RUNNING
        needed = phase in (NodePhase.PENDING, NodePhase.RUNNING)  # of one that ends nobody asks any more
        asked, node = (gang.told(each, needed=needed) or {} for each in ("asked.json", f"node-{rank}.json"))
        return NodeState(
            rank=rank,
            id=name,
            phase=phase,
            queued=bool(name) and gang.waits,
            address=node.get("address", ""),
            port=node.get("port", 22),
            user=node.get("user", ""),
            host_key=node.get("host_key", "") if here else "",
            via=self._via(node) if here and self._options.login else None,
            python=asked.get("python", "python3"),
            private_address=node.get("address", ""),
            price_usd_per_hour=asked.get("price_usd_per_hour", 0.0),
            began_at=node.get("began_at", 0.0),
            hard_cap_at=node.get("hard_cap_at", 0.0),
            reason=reason,
            cure=gang.cure if name else "",
            cure_scope="zone",  # limits are a partition's, too
        )

    def _via(self, node: Mapping[str, Any]) -> ProxyCommand:
        # the run's key opens the nodes alone: to the login node it is the user's own ssh that gets there
        to = f"{node['address']}:{node['port']}"
        return ProxyCommand(command=self._login.ssh("-W", to, str(self._options.login)))


@dataclass(frozen=True)
class Gang:
    """What Slurm and the nodes say of one gang. `state` is empty where Slurm has forgotten the job, or never had it."""

    state: str
    reason: str
    nodes: str
    down: frozenset[str]
    files: dict[str, tuple[float, str]]  # when it was written, UNIX seconds, and what stands in it
    folder: str = "its folder"

    @classmethod
    def of(cls, said: list[str], folder: str = "its folder") -> Gang:
        """From what `tell` of login.sh says."""
        lines = [line.partition("|")[::2] for line in said]
        job = next((rest.split("|") for kind, rest in lines if kind == "job"), ["", "", "", ""])
        files = [rest.split("|", 2) for kind, rest in lines if kind == "file"]
        down = frozenset(rest for kind, rest in lines if kind == "down")
        named = {name: (float(at or 0), text) for name, at, text in files}
        return cls(job[1], job[2], job[3], down, named, folder)

    def told(self, name: str, *, needed: bool = True) -> dict[str, Any] | None:
        """What a file of the gang's folder says; None: there is none. Raises Transient: it cannot be read now; where it
        is not `needed`, that is as if there were none."""
        try:
            return json.loads(self.files[name][1]) if name in self.files else None
        except ValueError as error:  # empty: the file system did not give it
            if not needed:
                return None
            cure = "Is the file system of `slurm.work_folder` well?"
            raise Transient(f"slurm: {name} of a gang cannot be read", str(error), cure) from error

    @property
    def waits(self) -> bool:
        """Whether the job is in the queue: it has no nodes yet, and may get some."""
        return self.state not in ("", "COMPLETING", *ENDED) and self.nodes in ("", "(null)")

    @property
    def cure(self) -> str:
        """What would let a job start that waits, where no time does; empty: its turn may come."""
        return next((cure for words, cure in _NEVER if self.waits and re.fullmatch(words, self.reason)), "")

    def phase(self, rank: int) -> tuple[NodePhase, str]:
        """A node's phase, and why it is not running."""
        node, ended = f"node-{rank}.json", self.told(f"ended-{rank}.json", needed=False)
        has_ended = f"ended-{rank}.json" in self.files
        said = (ended or {}).get("why") or "all that ran there has ended"
        if self.waits:
            why = self.reason if self.reason not in ("None", "") else "its turn comes"
            return NodePhase.PENDING, f"Slurm: {self.state.lower()}, {why}"
        if self.state not in ("", "COMPLETING", *ENDED):
            if has_ended:
                return NodePhase.STOPPING, said
            if node in self.files:
                return NodePhase.RUNNING, ""
            return NodePhase.PENDING, f"Slurm: {self.state.lower()}, its task has not begun"
        why = said if has_ended else f"Slurm: {self.state.lower() or 'it knows this job no more'}"
        if self.state == "COMPLETING":
            return NodePhase.STOPPING, why
        if node in self.files and not has_ended and (lives_on := self._lives_on(node)):
            return NodePhase.ENDING, f"{why}; {lives_on}"
        return NodePhase.TERMINATED, why

    def _lives_on(self, name: str) -> str:
        """What keeps a node's processes from being over with their job; empty: nothing. Where the node's own file stays
        unreadable, any node that is down may be the one, for as long after the file's last change as a gang lives."""
        if not self.down:
            return ""
        if node := self.told(name, needed=False):
            is_down = node["node"] in self.down and time.time() < node["hard_cap_at"]
            return f"node {node['node']} is down, and its processes may live on" if is_down else ""
        try:
            asked = self.told("asked.json") or {}
        except Transient as error:  # nothing says until when: it would be asked for ever
            down = ", ".join(sorted(self.down))
            cure = f"{error.next_step} If it is, and nothing of the run lives on {down}, remove {self.folder}/{name}."
            raise Transient(error.what, error.why, cure) from error
        if time.time() >= self.files[name][0] + asked.get("hard_cap_s", 0.0):
            return ""
        return f"{name} cannot be read, and its node may be one that is down: {', '.join(sorted(self.down))}"


def _about(comment: str) -> dict[str, Any] | None:
    """What a comment of ours says; None: it is not ours, for a site may write its own, and a user's job have any."""
    try:
        said = json.loads(comment)
    except ValueError:
        return None
    kinds = {"owner": str, "fleet": str, "generation": int, "nodes": int}
    ours = isinstance(said, dict) and all(isinstance(said.get(name), kind) for name, kind in kinds.items())
    return said if ours else None


def _files(options: SlurmOptions, asked: Mapping[str, Any]) -> str:
    """What the gang's folder begins with."""
    own = resources.files(slurm)
    files = {
        "batch.sh": "#!/bin/bash\n" + own.joinpath("batch.sh").read_text(encoding="utf-8"),
        "node.py": own.joinpath("node.py").read_text(encoding="utf-8"),
        "prologue.sh": "\n".join((*options.prologue, ":")),
        "asked.json": json.dumps(asked),
    }
    return "\n".join(textwrap.wrap(packed(files), 76))
