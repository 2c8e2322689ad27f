"""The plugin as the engine meets it: a servicer behind real gRPC, in this process; and projects for the real engine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import grpc
import pytest
from mgpu_train.agent.machine import procs
from mgpu_train.timeouts import Timeouts
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc
from waiting import until

from mgpu.backend import location
from mgpu.errors import Conflict, InputError, MgpuError, ProviderError
from mgpu.events import Event
from mgpu.iac import environment, tokens
from mgpu.iac.engine import install, operations
from mgpu.iac.engine.project import project_files, project_name
from mgpu.iac.engine.stack import Stack
from mgpu.iac.engine.state_file import state_key
from mgpu.iac.protocol import servicer
from mgpu.iac.protocol.handler import Handler
from mgpu.iac.protocol.wire import from_struct, to_struct
from mgpu.plan.model import Cost, Offer, Requirements, Saves
from mgpu.providers import registry
from mgpu.providers.base import (
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    MachineDriver,
    NodePhase,
    NodeState,
    Offers,
    Provider,
)
from mgpu.providers.local import bill
from mgpu.spec.provider import Capabilities

Properties = dict[str, object]


def urn(token: str, name: str = "it", stack: str = "dev", project: str = "mgpu") -> str:
    return f"urn:pulumi:{stack}::{project}::{token}::{name}"


class Wire:
    """Calls the plugin with plain data and answers with Pulumi's own messages."""

    def __init__(self, stub: provider_pb2_grpc.ResourceProviderStub) -> None:
        self.stub = stub

    def check(self, where: str, new: Properties, old: Properties | None = None) -> provider_pb2.CheckResponse:
        return self.stub.Check(provider_pb2.CheckRequest(urn=where, olds=to_struct(old or {}), news=to_struct(new)))

    def inputs(self, where: str, new: Properties, old: Properties | None = None) -> Properties:
        answer = self.check(where, new, old)
        assert not answer.failures, answer.failures
        return from_struct(answer.inputs)

    def create(self, where: str, inputs: Properties, preview: bool = False) -> provider_pb2.CreateResponse:
        return self.stub.Create(provider_pb2.CreateRequest(urn=where, properties=to_struct(inputs), preview=preview))

    def read(
        self, where: str, resource_id: str, old: Properties | None = None, inputs: Properties | None = None
    ) -> provider_pb2.ReadResponse:
        request = provider_pb2.ReadRequest(
            urn=where, id=resource_id, properties=to_struct(old or {}), inputs=to_struct(inputs or {})
        )
        return self.stub.Read(request)

    def diff(
        self, where: str, old_inputs: Properties, old: Properties, new: Properties, ignore: tuple[str, ...] = ()
    ) -> provider_pb2.DiffResponse:
        request = provider_pb2.DiffRequest(
            urn=where,
            id="x",
            old_inputs=to_struct(old_inputs),
            olds=to_struct(old),
            news=to_struct(new),
            ignoreChanges=ignore,
        )
        return self.stub.Diff(request)

    def update(
        self, where: str, resource_id: str, old: Properties, new: Properties, preview: bool = False
    ) -> Properties:
        request = provider_pb2.UpdateRequest(
            urn=where, id=resource_id, olds=to_struct(old), news=to_struct(new), preview=preview
        )
        return from_struct(self.stub.Update(request).properties)

    def delete(self, where: str, resource_id: str, old: Properties) -> None:
        self.stub.Delete(provider_pb2.DeleteRequest(urn=where, id=resource_id, properties=to_struct(old)))


Serve = Callable[..., Wire]


@pytest.fixture
def serve(xdg: Path) -> Iterator[Serve]:
    """`serve({token: handler})`: a plugin with these resource types, configured with what else is named."""
    servers: list[grpc.Server] = []

    def start(handlers: dict[str, Handler], **named: str) -> Wire:
        server, port = servicer.serve(servicer.Servicer(handlers, lambda: "{}", config=tokens.AWS_CONFIG))
        servers.append(server)
        stub = provider_pb2_grpc.ResourceProviderStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
        config = stub.CheckConfig(provider_pb2.CheckRequest(news=to_struct(named))).inputs
        stub.Configure(provider_pb2.ConfigureRequest(args=config))
        return Wire(stub)

    yield start
    for server in servers:
        server.stop(grace=None)


@pytest.fixture
def at() -> Callable[..., str]:
    """`at("mgpu:index:Fleet")`: a URN of this type."""
    return urn


class FakeProvider(Provider):
    """A provider with the contract's memory: gangs by token, machines by id. `refuse` is raised by the next calls."""

    name = "fake"
    capabilities = Capabilities(spot=True, multi_node=True, idempotent_create=True)

    def __init__(self) -> None:
        self.price = 0.05
        self.gangs: dict[str, tuple[FleetRequest, Handle]] = {}
        self.phases: dict[str, NodePhase] = {}
        self.created: list[str] = []
        self.on_create: Callable[[tuple[str, ...]], None] = lambda ids: None
        self.refuse_describe: ProviderError | None = None
        self.refuse_repair: ProviderError | None = None
        self.zones: tuple[str | None, ...] = (None,)
        self.gpu: str | None = None
        self.driver: MachineDriver | None = None  # that machines boot with
        self.asked_for_driver: list[tuple[str, ...] | Handle] = []
        self.options: list[dict[str, str]] = []  # of every call for this provider

    def check(self) -> None: ...

    def offers(self, requirements: Requirements) -> Offers:
        places = [(market, zone) for market in ("spot", "on-demand") for zone in self.zones]
        offers = tuple(
            Offer(
                provider="fake",
                instance_type="m1",
                gpu=self.gpu,
                memory_gib=8,
                market=market,
                price_usd_per_hour=self.price,
                region="r1",
                zone=zone,
                fetched_at=time.time(),
            )
            for market, zone in places
        )
        return Offers(offers=offers, source="a test")

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        return self._make(request, token, range(request.requirements.nodes), ("",) * request.requirements.nodes)

    def machine_driver(self, regions: Sequence[str]) -> MachineDriver | None:
        self.asked_for_driver.append(tuple(regions))
        return self.driver

    def driver_of(self, handle: Handle) -> MachineDriver | None:
        self.asked_for_driver.append(handle)
        return self.driver

    def find(self, intent: Intent) -> Handle | None:
        return self.gangs[intent.token][1] if intent.token in self.gangs else None

    def describe(self, handle: Handle) -> FleetState:
        if self.refuse_describe:
            raise self.refuse_describe
        return FleetState(nodes=tuple(self._node(rank, name) for rank, name in enumerate(handle.ids)))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        if self.refuse_repair:
            raise self.refuse_repair
        self.destroy(handle, tuple(handle.ids[rank] for rank in missing))
        return self._make(request, token, missing, handle.ids)

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        return tuple(handle for request, handle in self.gangs.values() if request.owner == owner and self._left(handle))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        for name in handle.ids if nodes is None else nodes:
            self.phases[name] = NodePhase.TERMINATED
        return True

    @property
    def running(self) -> set[str]:
        return {name for name, phase in self.phases.items() if phase is NodePhase.RUNNING}

    def _left(self, handle: Handle) -> bool:
        return any(self.phases.get(name) is not NodePhase.TERMINATED for name in handle.ids if name)

    def _make(self, request: FleetRequest, token: str, ranks: Iterable[int], ids: tuple[str, ...]) -> Handle:
        if token in self.gangs:
            known, handle = self.gangs[token]
            if known != request:
                raise Conflict("the token was used with other parameters", scope="offer")
            return handle
        fresh = {rank: f"{token[:6]}-{rank}" for rank in ranks}
        handle = Handle(
            provider="fake",
            region="r1",
            fleet=request.fleet,
            generation=request.generation,
            token=token,
            ids=tuple(fresh.get(rank, name) for rank, name in enumerate(ids)),
        )
        self.gangs[token] = request, handle
        self.created += fresh.values()
        self.phases |= dict.fromkeys(fresh.values(), NodePhase.RUNNING)
        self.on_create(tuple(fresh.values()))
        return handle

    def other_costs(self, requirements: Requirements, offer: Offer, saves: Saves | None) -> tuple[Cost, ...]:
        return (Cost(what="disks", usd=requirements.nodes * self.price / 5, per="hour"),)

    def _node(self, rank: int, name: str) -> NodeState:
        phase = self.phases.get(name, NodePhase.TERMINATED)
        return NodeState(
            rank=rank,
            id=name,
            phase=phase,
            address="192.0.2.1",
            user="u",
            host_key=f"ssh-ed25519 {name}",
            price_usd_per_hour=self.price,
            hard_cap_at=time.time() + 3600,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    """A provider `fake`, known to the registry for this test."""
    provider = FakeProvider()
    real = registry.get

    def get(name: str, options: Mapping[str, str] | None = None) -> Provider:
        if name != "fake":
            return real(name, options)
        if "wrong" in (options or {}):
            raise InputError("aws.wrong: there is no such key")
        provider.options.append(dict(options or {}))
        return provider

    monkeypatch.setattr(registry, "get", get)
    return provider


# ---- the real engine

# Read by the plugin alone. While a file of this name is in the folder: `hold`: nodes never become ready; `keep`: they
# never end; `die-<kind>`: engine and plugin are killed as soon as a journal entry of this kind is on disk.
INJECTED = """
import os, signal, sys
from pathlib import Path
if any(arg.endswith("pulumi-resource-mgpu") for arg in sys.orig_argv):
    from mgpu.journal import Journal
    from mgpu.providers.base import FleetState, NodePhase
    from mgpu.providers.local.provider import LocalProvider
    here = Path({folder!r})
    describe, destroy, append = LocalProvider.describe, LocalProvider.destroy, Journal.append
    def held(self, handle):
        state = describe(self, handle)
        if not (here / "hold").exists():
            return state
        if not state.lost:
            (here / "holding").touch()
        pending = {{NodePhase.RUNNING: NodePhase.PENDING}}
        return FleetState(
            nodes=tuple(n.model_copy(update={{"phase": pending.get(n.phase, n.phase)}}) for n in state.nodes)
        )
    def kept(self, handle, nodes=None):
        if not (here / "keep").exists():
            return destroy(self, handle, nodes)
        (here / "keeping").touch()
        return False
    def dying(self, kind, **fields):
        number = append(self, kind, **fields)
        if (here / ("die-" + kind)).exists():
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return number
    LocalProvider.describe, LocalProvider.destroy, Journal.append = held, kept, dying
"""


def wait_until(condition: Callable[[], object], limit_s: float = 40) -> None:
    until(condition, limit_s)


class Held:
    """A call in a thread of its own, which a file keeps from ending."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._raised: list[MgpuError] = []
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except MgpuError as error:
            self._raised.append(error)

    def ended(self) -> MgpuError | None:
        """What it raised."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._raised[0] if self._raised else None


class Project:
    """A folder that `mgpu init` made, with one stack, and all that it emitted. Judged by the bill and the state."""

    def __init__(self, folder: Path, inject: Path, own_config: bool = True) -> None:
        self.folder = folder
        self.inject = inject
        self.events: list[Event] = []
        self.own_config = own_config
        project_files(folder)
        self.want()
        self.log_dir = folder.parent / "log"
        self.stack = self.open()
        inject.mkdir(exist_ok=True)
        (inject / "sitecustomize.py").write_text(INJECTED.format(folder=str(inject)))

    def open(self) -> Stack:
        """Another operator's view of the stack."""
        return Stack(
            self.folder,
            "demo-1",
            self.folder / "mgpu.yaml",
            log_dir=self.log_dir,
            emit=self.events.append,
            timeouts=Timeouts(),
            own_config=self.own_config,
        )

    def want(self, **changes: object) -> None:
        spec = {
            "name": "demo",
            "provider": "local",
            "nodes": 2,
            "market": "spot",
            "max_price_usd_per_hour": 0.5,
            "max_hours": 0.5,
            "train": {"task": "lm"},
        }
        (self.folder / "mgpu.yaml").write_text(json.dumps(spec | changes))

    @property
    def bill(self) -> bill.Bill:
        return bill.read(registry.get("local").root)

    @property
    def billed(self) -> dict[str, int]:
        """Instances that cost money now, and the pids of their node processes."""
        return {node.start.instance: node.start.pid for node in self.bill.alive}

    @property
    def started(self) -> int:
        """Machines that were ever started."""
        return len(self.bill.nodes)

    def ids(self) -> list[str]:
        output = self.stack.outputs()
        assert output is not None
        return [node.id for node in output.nodes]

    # ---- faults

    def hold(self, call: Callable[[], object], file: Literal["hold", "keep"] = "hold") -> Held:
        """Runs `call`, which does not come to its end: its machines are there, and are not seen to come, or go."""
        (self.inject / file).touch()
        held = Held(call)
        wait_until((self.inject / f"{file}ing").exists)
        return held

    def release(self, file: str = "hold") -> None:
        for path in (self.inject / file, self.inject / f"{file}ing"):
            path.unlink(missing_ok=True)

    def processes(self, name: str) -> list[int]:
        """Pids of the engine's processes with this word on their command line, of this test alone."""
        found = []
        for mark, processes in procs.carriers(operations.MARK).items():
            if str(self.folder.parent) in mark:
                found += [process.pid for process in processes if name.encode() in command(process.pid)]
        return found

    def kill(self, *names: str) -> None:
        """SIGKILL to all of them, before one can react to the end of another."""
        victims = [self.processes(name) for name in names]
        assert all(victims), names
        for pid in itertools.chain(*victims):
            with contextlib.suppress(ProcessLookupError):  # one of a name ends when another one does
                os.kill(pid, signal.SIGKILL)

    # ---- what is left

    @property
    def resources(self) -> dict[str, dict]:
        """State's resources, by their type's last word."""
        latest = self._state["checkpoint"]["latest"] or {}
        return {resource["type"].rpartition(":")[2]: resource for resource in latest.get("resources") or ()}

    @property
    def pending(self) -> list[str]:
        """What state says was cut off."""
        latest = self._state["checkpoint"]["latest"] or {}
        return [operation["type"] for operation in latest.get("pending_operations") or ()]

    @property
    def locks(self) -> list[Path]:
        return [*(location.current().folder / ".pulumi" / "locks").rglob("*.json")]

    @property
    def _state(self) -> dict:
        key = state_key(project_name(self.folder), "demo-1")
        assert key is not None
        return json.loads((location.current().folder / key).read_text())

    def assert_in_order(self) -> None:
        """The two machines of the output run, and no others; nothing is left of what was cut off."""
        assert set(self.ids()) == self.billed.keys()
        assert len(self.billed) == 2
        self.assert_nothing_left_at_work()

    def assert_nothing_left_at_work(self) -> None:
        assert self.pending == []
        assert self.locks == []
        wait_until(lambda: not self.processes(""), 5)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def new_project(
    require: Callable[[str, bool, str], None], xdg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Project]]:
    """`new_project()`: a folder with a stack; its machines are ended after the test."""
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inject"))
    yield lambda **options: Project(tmp_path / "project", tmp_path / "inject", **options)
    for process in procs.carrying(f"XDG_STATE_HOME={xdg / 'state'}"):
        process.send(signal.SIGKILL)  # what a killed `pulumi` of a shell's has left; nobody ends that
    for handle in registry.get("local").list_owned(environment.paths.owner()):
        while not registry.get("local").destroy(handle):
            time.sleep(0.05)


@pytest.fixture
def project(new_project: Callable[..., Project]) -> Project:
    """A folder that `mgpu init` made, with one stack of mgpu's own."""
    return new_project()
