"""The provider contract for nodes that are processes of this machine. Everything is known from the files alone.

Faults can be asked for by control files (mgpu.providers.local.control): `creating` and `unseen` are where they happen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mgpu import paths, words
from mgpu.errors import InvalidRequest, MgpuError, NoCapacity, Transient
from mgpu.plan.model import BoughtAs, Offer, Requirements
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
)
from mgpu.providers.local import bill, control, interpreter, nodes, procs
from mgpu.providers.local.gangs import REGION, Gang, Gangs
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.options import ENTRY, Options

PRICES_USD_PER_HOUR: dict[BoughtAs, float] = {"on-demand": 0.10, "spot": 0.03}
_NODES_PER_CORE = 8
_KILL_AFTER_S = 15.0  # a node process that has not ended by then is killed
_START_S = 30.0  # for a node process to claim its instance, on a busy machine
_SOURCE = "this machine's price list"
_NO_GPUS = (
    "Its nodes are processes without a GPU. `provider: hosts` takes machines that you can log in to, this one among "
    "them, with their GPUs."
)


class LocalProvider(Provider):
    """Rents out this machine: CPU nodes on both markets, at made-up prices, with a true bill."""

    name = Options.block
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None, root: Path | None = None) -> None:
        self._options = dict(options or {})
        Options.of(self._options)
        self._root = root

    @property
    def root(self) -> Path:
        """The folder with all records, nodes and the bill (default: in mgpu's state folder)."""
        root = self._root or paths.state_dir() / "local"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return root.resolve()

    def check(self) -> None:
        """Tests that this machine can carry nodes.

        Raises:
            InvalidRequest: it is not Linux, the nodes' Python is missing or has no torch, or the control file asks for
                what there is not.
        """
        if not sys.platform.startswith("linux") or procs.of(os.getpid()) is None:
            raise InvalidRequest(
                "provider local needs Linux with /proc", f"this is {sys.platform}", "Choose another provider."
            )
        control.check(self.root)
        interpreter.require_torch(interpreter.find(self._python({})))

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """This machine, as far as nodes need it."""
        try:
            self.check()
        except MgpuError as error:
            return (Finding.of("this machine", error),)
        return (Finding(subject="this machine", status="ok", detail=f"its Python has torch; nodes lie in {self.root}"),)

    def offers(self, requirements: Requirements) -> Offers:
        """This machine's price list; it has no GPUs to offer and one region, `here`."""
        if requirements.gpus_per_node or requirements.gpu:
            return Offers(offers=(), source=_SOURCE, notes=(_NO_GPUS,))
        if requirements.regions and REGION not in requirements.regions:
            return Offers(offers=(), source=_SOURCE)
        stock = self._room()
        return Offers(offers=tuple(_offer(market, stock) for market in PRICES_USD_PER_HOUR), source=_SOURCE)

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Starts a node process per node and returns once each has claimed its node; SSH answers some tenths later.

        Raises:
            Conflict: the token was used with other parameters.
            NoCapacity: more nodes than this machine carries, or the control file says that there is none.
            InvalidRequest: the nodes' Python does not exist.
            Transient: a node process did not start; the same call again goes on from there.
            AmbiguousCreate: the control file wants the answer lost.
        """
        return self._make(request, offer, token, range(request.requirements.nodes))

    def find(self, intent: Intent) -> Handle | None:
        """The gang that was made from the intent's token."""
        gang = Gangs(self.root).get(intent.token)
        return gang.handle if gang else None

    def describe(self, handle: Handle) -> FleetState:
        """The nodes as the system has them; what is left of a node whose node process was killed is ended first.

        Raises:
            InvalidRequest: a node that this machine has no record of; nothing is known about it.
            Transient: a node that is too new to be known, where the control file wants late answers.
        """
        gangs = Gangs(self.root)
        gang, unseen = gangs.get(handle.token), control.unseen(self.root)
        states = (_describe(gangs, gang, rank, name, unseen) for rank, name in enumerate(handle.ids))
        return FleetState(nodes=tuple(states))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        """Replaces these ranks' nodes. Raises what `create` raises, and `Transient` while an old one still ends."""
        fresh = {rank: Gangs(self.root).node_id(token, rank) for rank in missing}
        lost = tuple(handle.ids[rank] for rank in missing if handle.ids[rank] != fresh[rank])
        if not self.destroy(handle, lost):
            raise Transient("a lost node has not ended yet", f"still there: {', '.join(lost)}", "Call again.")
        self._make(request, offer, token, missing)
        ids = tuple(fresh.get(rank, name) for rank, name in enumerate(handle.ids))
        return handle.model_copy(update={"ids": ids, "generation": request.generation, "token": token})

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """One handle a gang that has anything left; nodes that are gone have an empty id."""
        gangs = Gangs(self.root)
        owned = (_left(gangs, gang) for gang in gangs.all() if gang.request.owner == owner)
        return tuple(handle for handle in owned if any(handle.ids))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Asks the nodes to end; True when all are gone, folders and all."""
        gangs = Gangs(self.root)
        gang = gangs.get(handle.token)
        known = (gangs.instance(gang, name) for name in (handle.ids if nodes is None else nodes))
        gone = [instance.terminate("destroyed", _KILL_AFTER_S) for instance in known if instance is not None]
        return all(gone)

    def _python(self, options: Mapping[str, str]) -> str | None:
        return Options.of({**self._options, **options}).python

    def _make(self, request: FleetRequest, offer: Offer, token: str, ranks: range | tuple[int, ...]) -> Handle:
        gangs = Gangs(self.root)
        gang = Gang(
            token=token,
            ids=tuple(gangs.node_id(token, r) if r in ranks else "" for r in range(request.requirements.nodes)),
            request=request,
            offer=offer,
            python=interpreter.find(self._python(request.requirements.provider_options)),
            asked_at=time.time(),
        )
        known = gangs.get(token) is not None
        if not known:
            self._require_room(len(ranks))
        with control.creating(self.root, known=known) as fault:
            gang = gangs.claim(gang)  # from here on it can be found, completed and ended
            made = [gangs.instance(gang, name) for name in gang.ids if name]
            instances = [instance for instance in made if instance is not None]
            if fault == "fewer":
                instances[-1].forgo(control.FEWER)
            _start([instance for instance in instances if instance.node_process() is None])
        return gang.handle

    def _room(self) -> int:
        return max(0, _NODES_PER_CORE * (os.cpu_count() or 1) - len(bill.read(self.root).alive))

    def _require_room(self, count: int) -> None:
        room = self._room()
        if count > room:
            raise NoCapacity(
                f"provider local: {words.count(count, 'node')} asked for, this machine has room for {room}",
                f"it carries {_NODES_PER_CORE} nodes a core",
                "Ask for fewer nodes; `mgpu ls` shows what runs.",
            )


def _offer(market: BoughtAs, stock: int) -> Offer:
    return Offer(
        provider="local",
        instance_type="cpu-node",
        vcpus=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        market=market,
        price_usd_per_hour=PRICES_USD_PER_HOUR[market],
        region=REGION,
        stock=stock,
        fetched_at=time.time(),
    )


def _describe(gangs: Gangs, gang: Gang | None, rank: int, name: str, unseen: Callable[[float], bool]) -> NodeState:
    if not name:
        why = "no machine was made for this rank"
        return NodeState(
            rank=rank, id="", phase=NodePhase.TERMINATED, host_key="", private_address="", hard_cap_at=0, reason=why
        )
    instance = gangs.instance(gang, name)
    if instance is None:
        raise InvalidRequest(
            f"provider local has no record of node {name}",
            f"{gangs.root} was made anew, or the node belongs to another machine or user",
            "Run this where the node was made, with the same XDG_STATE_HOME.",
        )
    if unseen(instance.made_at):
        raise Transient(f"provider local knows no node {name} yet", "it was made just now", "Ask again.")
    phase, spec, node_process, endpoint = (
        _phase(instance, unseen),
        instance.spec(),
        instance.node_process(),
        instance.endpoint(),
    )
    port, host_key = endpoint if endpoint and phase is NodePhase.RUNNING else (22, "")
    return NodeState(
        rank=rank,
        id=name,
        phase=phase,
        address="127.0.0.1",
        port=port,
        user=nodes.USER,
        host_key=host_key,
        private_address="127.0.0.1",
        price_usd_per_hour=spec.price_usd_per_hour,
        hard_cap_at=(spec.asked_at or node_process.at) + spec.hard_cap_s if node_process and node_process.begun else 0,
        reason=instance.end_reason() if phase in (NodePhase.STOPPING, NodePhase.TERMINATED) else "",
    )


def _phase(instance: Instance, unseen: Callable[[float], bool]) -> NodePhase:
    gone, ending_at = instance.settle(), instance.ending_at
    if ending_at is not None and not unseen(ending_at):
        return NodePhase.TERMINATED if gone else NodePhase.STOPPING
    return NodePhase.RUNNING if instance.endpoint() else NodePhase.PENDING


def _left(gangs: Gangs, gang: Gang) -> Handle:
    def left(name: str) -> bool:
        instance = gangs.instance(gang, name)
        return instance is not None and not instance.settle()

    return gang.handle.model_copy(update={"ids": tuple(name if left(name) else "" for name in gang.ids)})


def _start(instances: list[Instance]) -> None:
    """Starts node processes, all at once, and waits until each instance is claimed: by its node process, or by
    another's.
    """
    starters = {instance: _spawn(instance) for instance in instances}
    deadline = time.monotonic() + _START_S
    for instance, starter in starters.items():
        try:
            failed = starter.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            starter.kill()
            failed = True
        if failed and instance.node_process() is None:  # a machine that is taken at once takes its starter along
            raise Transient(
                f"provider local: the node process of node {instance.id} did not start",
                instance.last_words() or f"it did not answer within {_START_S:.0f} s",
                "Call again; it goes on from there.",
            )


def _spawn(instance: Instance) -> subprocess.Popen[bytes]:
    environment = nodes.login_environment(instance, os.environ)
    # where this process finds mgpu and asyncssh, be it the user's own packages; HOME is another one there
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with instance.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "mgpu.providers.local.node_process", str(instance.root), instance.id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=instance.record,
            env=environment,
            start_new_session=True,
        )
