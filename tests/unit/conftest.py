"""A world in memory for runs: nodes, a provider, stacks. What is doubled is the outside; all of `mgpu.run` is real."""

from __future__ import annotations

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine.procs import Process
from mgpu_train.agent.status.status import AgentStatus, Fault, Phase
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Job
from mgpu_train.store import open_store
from mgpu_train.timeouts import Timeouts

from mgpu import acquire, paths
from mgpu.cli import main
from mgpu.cli.common import wiring
from mgpu.context import Context
from mgpu.errors import ConnectionFailed, MgpuError, ProviderError
from mgpu.events import Emit, Event, ignore
from mgpu.iac.engine.project import project_name
from mgpu.iac.naming import fleet_name, unmarked
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.plan.model import Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.base import FleetState, Handle, MachineDriver, NodePhase, NodeState, Offers
from mgpu.providers.local.provider import LocalProvider
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.targets import Result, SyncReport, Target
from mgpu.run.fleet import stack
from mgpu.run.record import record
from mgpu.run.record.record import Record

HOST_KEY = "ssh-ed25519 " + base64.b64encode(b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20" + b"k" * 32).decode()
NOT_CONNECTED = "the connection was lost"


ENDLESS = b"endless"  # a file that is fetched until somebody ends it,
ENDLESS_S = 20.0  # but not for ever: no test ends while a thread of it goes on


class Node:
    """A node over SSH: files in memory, an agent that answers, a connection that can be lost."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.target = Target(rank, "127.0.0.1", 22, "u", HOST_KEY)
        self.files: dict[str, bytes] = {}
        self.agent: list[list[str]] = []  # what the agent was asked, without the program's name
        self.secrets = b""
        self.renewed: dict[str, str] = {}
        self.reachable = True  # False: every call fails, and so does a new connection
        self.closed = False
        self.ends_when_stopped = True
        self.agent_lives = True
        self.equipped = Result(0, b'{"python": "/bin/python3", "installed": false}', b"")
        self.containers: list[tuple[str, dict[str, Any]]] = []  # what was asked of `container.py`
        self.cleared: list[list[str]] = []  # what `leftovers.py` was told: run, attempt, seconds, parts
        self.contained = {
            "up": Result(0, b'{"pulled": true, "installed": false, "capped": false}', b""),
            "down": Result(0, b'{"removed": 1}', b""),
        }
        self.facts: dict[str, Any] = {}
        self.faults: dict[str, list[Exception]] = {}  # method -> what its next calls raise

    # --- what a test does to it

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.world.run_id)

    def says(self, phase: Phase, *, attempt: int = 1, **more: Any) -> None:
        """Replaces the node's status file."""
        status = AgentStatus(
            run_id=self.world.run_id, attempt=attempt, node_rank=self.target.rank, phase=phase, agent_pid=1,
            started_at=0, updated_at=1, **more,
        )  # fmt: skip
        self.files[str(self.layout.status)] = status.model_dump_json().encode()

    def prints(self, data: bytes) -> None:
        """Appends to the node's log."""
        self.files[str(self.layout.log)] = self.files.get(str(self.layout.log), b"") + data

    @property
    def log(self) -> bytes:
        return self.files[str(self.layout.log)]

    @property
    def stops(self) -> int:
        return sum(argv[0] == "stop" for argv in self.agent)

    # --- the interface of mgpu.remote.node.Node

    def reconnect(self) -> None:
        if not self.reachable:
            raise ConnectionFailed(NOT_CONNECTED)
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: str) -> bytes:
        self._fail("read")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def read_from(self, path: str, offset: int, limit: int) -> bytes | None:
        self._fail("read_from")
        shorter = path in self.files and len(self.files[path]) < offset
        return None if shorter else self.files.get(path, b"")[offset : offset + limit]

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        self._fail("write")
        self.files[path] = data

    def fetch(self, path: str, dest: Path, go_on: Callable[[], object] = lambda: None) -> None:
        data = self.read(path)
        go_on()
        until = time.monotonic() + ENDLESS_S
        while data == ENDLESS:
            go_on()
            assert time.monotonic() < until, "nobody has ended it"
        dest.write_bytes(data)

    def sync(self, _folder: object, dest: str, **_how: object) -> SyncReport:
        self._fail("sync")
        self.world.calls.append(f"sync {dest.split('/')[0]}")
        return SyncReport(1, 1, 0, 1)

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout: float, check: bool = True) -> Result:
        assert timeout > 0
        if argv[0] == "cat":
            return Result(0, b"1000.0 900.0\n", b"")
        if argv[0] == "docker":
            return Result(1, b"", b"no such image")
        if argv[1] == "-I":
            program = argv[2].rpartition("/mgpu_train/agent/host/")[2]
            assert program in ("python_env.py", "container.py", "leftovers.py"), argv
            self._fail({"python_env.py": "equip", "leftovers.py": "leftovers"}.get(program, "container"))
            if program == "leftovers.py":
                self.cleared.append(argv[3:])
                return Result(0, b'{"removed": []}', b"")
            return self.equipped if program == "python_env.py" else self._container(argv[3], stdin)
        assert argv[2].endswith("/python3" if argv[-1] == "facts" else "/python"), argv
        assert argv[3:5] == ["-m", "mgpu_train"], argv
        asked = argv[6:]
        self._fail(asked[0])
        self.agent.append(asked)
        return Result(0, json.dumps(getattr(self, f"_{asked[0].replace('-', '_')}")(stdin)).encode(), b"")

    def _container(self, verb: str, stdin: bytes) -> Result:
        self.containers.append((verb, json.loads(stdin)))
        return self.contained[verb]

    def _facts(self, _stdin: bytes) -> dict[str, Any]:
        return self.facts

    def _free_ports(self, _stdin: bytes) -> dict[str, list[int]]:
        return {"ports": [29500, 29501, 29502]}

    def _start(self, stdin: bytes) -> dict[str, Any]:
        self.secrets = stdin
        self.world.program(self, Job.model_validate_json(self.files[str(self.layout.job)]))
        return {}

    def _renew(self, stdin: bytes) -> dict[str, Any]:
        self.renewed = json.loads(stdin)["store"]
        return {"renewed": True}

    def _status(self, _stdin: bytes) -> dict[str, Any]:
        return {**json.loads(self.files[str(self.layout.status)]), "alive": self.agent_lives}

    def _stop(self, _stdin: bytes) -> dict[str, Any]:
        if self.ends_when_stopped and self.agent_lives and str(self.layout.status) in self.files:
            newest = AgentStatus.model_validate_json(self.files[str(self.layout.status)])
            if not newest.phase.final:
                self.says(
                    Phase.FAILED, attempt=newest.attempt, fault=Fault.STOPPED, reason="this node was asked to stop"
                )
        return {}

    def _fail(self, method: str) -> None:
        if not self.reachable:
            self.closed = True
        if self.closed:
            raise ConnectionFailed(NOT_CONNECTED)
        if self.faults.get(method):
            raise self.faults[method].pop(0)


class Cloud:
    """A provider: machines by id, with the phase that it tells."""

    name = "local"
    capabilities = LocalProvider.capabilities

    def __init__(self) -> None:
        self.is_configured = True
        self.repository: str | None = None  # where images go
        self.driver: MachineDriver | None = None  # that machines boot with
        self.asked_for_driver: list[tuple[str, ...] | Handle] = []
        self.granted: list[tuple[str, list[str], list[str]]] = []  # run, what its machines may read, and write
        self.revoked: list[str] = []  # runs whose machines may nothing any more
        self.handles: dict[str, Handle] = {}
        self.phases: dict[str, NodePhase] = {}
        self.stuck: set[str] = set()  # machines that no `destroy` ends
        self.refuses: dict[str, list[ProviderError]] = {}  # call -> what it raises, the last one for ever
        self.described = 0
        self.ended: list[str] = []  # fleets that `destroy` was called for
        self.on_sale: list[Offer] = []

    def rent(self, fleet: str, nodes: int = 1) -> Handle:
        """Machines that run, as if some `pulumi up` had made them."""
        ids = tuple(f"{fleet}-{rank}" for rank in range(nodes))
        self.phases |= dict.fromkeys(ids, NodePhase.RUNNING)
        handle = Handle(provider="local", region="", fleet=fleet, generation=1, token="t", ids=ids)
        self.handles[fleet] = handle
        return handle

    @property
    def billed(self) -> set[str]:
        return {name for name, phase in self.phases.items() if phase is not NodePhase.TERMINATED}

    def configured(self) -> bool:
        return self.is_configured

    def check(self) -> None:
        self._refuse("check")

    def offers(self, requirements: Requirements) -> Offers:
        self._refuse("offers")
        return Offers(offers=tuple(self.on_sale), source="live")

    def image_repository(self, regions: Sequence[str]) -> str | None:
        return self.repository

    def pulled_by_role(self, registry: str) -> Mapping[str, str]:
        return {}

    def registry_login(self, registry: str) -> tuple[str, str, float]:
        raise AssertionError("no registry of these tests is a provider's")

    def machine_driver(self, regions: Sequence[str]) -> MachineDriver | None:
        return self._driver(tuple(regions))

    def driver_of(self, handle: Handle) -> MachineDriver | None:
        return self._driver(handle)

    def _driver(self, of: tuple[str, ...] | Handle) -> MachineDriver | None:
        self.asked_for_driver.append(of)
        self._refuse("driver")
        return self.driver

    def require_store(self, urls: Sequence[str]) -> None:
        self._refuse("store")

    def grant_store(self, run_id: str, reads: Sequence[str], writes: Sequence[str]) -> Mapping[str, str]:
        self._refuse("store")
        self.granted.append((run_id, list(reads), list(writes)))
        return {"MGPU_STORE_ROLE": f"role-of-{run_id}"}

    def revoke_store(self, run_id: str) -> None:
        self._refuse("revoke")
        self.revoked.append(run_id)

    def describe(self, handle: Handle) -> FleetState:
        self.described += 1
        self._refuse("describe")
        nodes = (
            NodeState(rank=rank, id=name, phase=self.phases.get(name, NodePhase.TERMINATED), price_usd_per_hour=0.5)
            for rank, name in enumerate(handle.ids)
        )
        return FleetState(nodes=tuple(nodes))

    def describe_all(self, handles: Sequence[Handle]) -> tuple[FleetState, ...]:
        return tuple(map(self.describe, handles))

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        assert owner == paths.owner()
        self._refuse("list_owned")
        return tuple(h for h in self.handles.values() if any(name in self.billed for name in h.ids))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        self._refuse("destroy")
        self.ended.append(handle.fleet)
        for name in handle.ids if nodes is None else nodes:
            if name not in self.stuck:
                self.phases[name] = NodePhase.TERMINATED
        return not any(name in self.billed for name in handle.ids)

    def _refuse(self, call: str) -> None:
        errors = self.refuses.get(call)
        if errors:
            raise errors[0] if len(errors) == 1 else errors.pop(0)


class Stack:
    """A Pulumi stack of the world: `up` rents at the cloud, `destroy` ends it there."""

    def __init__(self, world: World, project: Path, name: str, _run_file: Path, **_: Any) -> None:
        self.world, self.project, self.name = world, project, name
        self.chosen = ""

    @property
    def _cloud(self) -> Cloud:
        return self.world.elsewhere.get(self.chosen, self.world.cloud)

    @property
    def fleet(self) -> str:
        project, made = project_name(self.project), self.world.stacks.get(self.name)
        before = unmarked(project, self.name)
        return before if made is not None and made.fleet == before else fleet_name(project, self.name)

    def init(self) -> None:
        self._call("init")
        self.world.stacks.setdefault(self.name, None)

    @contextmanager
    def telling(self, hear: Emit) -> Iterator[None]:
        self.world.heard = hear
        yield

    def choose(self, provider: str) -> None:
        self.chosen = provider

    def up(
        self,
        hard_cap_at: float = 0.0,
        image: str = "",
        max_usd: float = 0.0,
        ranked_up_to: Sequence[float] = (),
        searches: int = 0,
    ) -> None:
        self.world.searches.append(searches)
        self._call(f"up at {self.chosen}" if self.chosen else "up")
        self.world.ranked_up_to.append(ranked_up_to)
        self.world.capped.append(hard_cap_at)
        self.world.paid.append(max_usd)
        self.world.brought_up_with.append(image)
        handle = self._cloud.rent(self.fleet, len(self.world.nodes))
        self.world.stacks[self.name] = self.world.output(handle, self.chosen or "local")
        self._call("up is done")

    def exists(self) -> bool:
        return self.name in self.world.stacks

    def outputs(self) -> StackOutput | None:
        return self.world.stacks.get(self.name)

    def destroy(self) -> None:
        self._call("destroy")
        fleet = self.fleet
        if self.name in self.world.stacks:
            self.world.stacks[self.name] = None
        if fleet in self._cloud.handles:
            self._cloud.destroy(self._cloud.handles[fleet])

    def remove(self) -> None:
        self._call("remove")
        assert self.world.stacks.get(self.name) is None, "a stack with resources is never forgotten"
        self.world.stacks.pop(self.name, None)

    def interrupt(self) -> None:
        self.world.calls.append("interrupt")

    def abandon(self) -> None:
        self.world.calls.append("abandon")

    def oust(self, driver: Process, host: str, others: Collection[str] = ()) -> None:
        self.world.ousted.append(driver)

    def _call(self, name: str) -> None:
        self.world.calls.append(f"{name} {self.name}" if name in ("destroy", "remove") else name)
        hook = self.world.hooks.get(name)
        if isinstance(hook, MgpuError):
            raise hook
        if hook is not None:
            hook()


@dataclass
class World:
    """All that is outside of `mgpu.run`, and a project with a run file."""

    folder: Path
    run_id: str = ""
    calls: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    heard: Emit = ignore  # by whoever brings a stack up
    hooks: dict[str, MgpuError | Callable[[], None]] = field(
        default_factory=dict
    )  # a call of the stack -> what happens
    stacks: dict[str, StackOutput | None] = field(default_factory=dict)
    connect_error: Exception | None = None
    ours: bool = True  # False: a program of the user's own made the stack
    hard_cap_at: float = 0.0
    ousted: list[Process] = field(default_factory=list)
    capped: list[float] = field(default_factory=list)  # until when each `up` may have a fleet that it makes anew
    paid: list[float] = field(default_factory=list)  # what each of these may cost
    brought_up_with: list[str] = field(default_factory=list)  # the image of each `up`
    ranked_up_to: list[Sequence[float]] = field(default_factory=list)  # ... and what its offer has to come before
    searches: list[int] = field(default_factory=list)  # of each `up`, refused ones too, how many had ended before it

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "Pulumi.yaml").write_text("name: mine\nruntime: python\n")
        self.timeouts = Timeouts(poll_s=0.01, describe_every_s=0.01, destroy_s=0.3, stop_grace_s=0.2, drain_s=0.2)
        self.cloud = Cloud()
        self.elsewhere: dict[str, Cloud] = {}  # other providers, by name
        self.reached: list[tuple[str, dict[str, str]]] = []  # with which settings providers were reached
        self.nodes = [Node(self, 0)]
        self.program: Callable[[Node, Job], None] = self.succeed

    def provider(self, name: str, options: Mapping[str, str] | None = None) -> Cloud:
        self.reached.append((name, dict(options or {})))
        return self.elsewhere.get(name, self.cloud)

    @property
    def run_file(self) -> Path:
        return self.folder / "mgpu.yaml"

    def has_nodes(self, count: int) -> NodeSet:
        self.nodes = [Node(self, rank) for rank in range(count)]
        return NodeSet(self.nodes)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    def output(self, handle: Handle, provider: str = "local") -> StackOutput:
        return StackOutput(
            version=1,
            fleet=handle.fleet,
            owner=paths.owner() if self.ours else "",
            token=handle.token,
            provider=provider,
            private_key_file="~/key",
            price_usd_per_hour=0.5 * len(handle.ids),
            hard_cap_at=self.hard_cap_at,
            nodes=tuple(
                NodeOutput(rank=rank, id=name, address="127.0.0.1", user="u", host_key=HOST_KEY)
                for rank, name in enumerate(handle.ids)
            ),
        )

    def connect(self, *_: object) -> NodeSet:
        self.calls.append("connect")
        if self.connect_error:
            raise self.connect_error
        newest = record.ids()[::-1]
        self.run_id = next(filter(record.supervised, newest), *newest[:1])
        for node in self.nodes:
            node.closed = False
        return NodeSet(self.nodes)

    def reach(self, *_: object) -> NodeSet:
        """As `connect`, but nodes that cannot be reached stay closed."""
        nodes = self.connect()
        for node in self.nodes:
            node.closed = not node.reachable
        return nodes

    def connect_one(self, target: Target, _key: Path, _timeouts: Timeouts) -> Node:
        node = self.nodes[target.rank]
        node.reconnect()
        return node

    # --- programs

    def succeed(self, node: Node, job: Job) -> None:
        """Trains in no time, and commits one checkpoint where the run keeps any."""
        node.prints(b"trained\n")
        if node.target.rank == 0 and job.checkpoint:
            self.commit(job.checkpoint.to, job.run_id, attempt=job.attempt, writer=job.writer, step=10 * job.attempt)
        node.says(Phase.DONE, attempt=job.attempt, step=10 * job.attempt)

    def train_on(self, node: Node, job: Job) -> None:
        """Never ends by itself."""
        node.says(Phase.TRAINING, attempt=job.attempt, step=3, steps=10)

    def commit(
        self,
        url: str,
        run_id: str,
        *,
        attempt: int,
        writer: str,
        step: int,
        files: Mapping[str, bytes] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Commit:
        """One whole committed checkpoint of one node."""
        store, name, part = open_store(url), checkpoint_id(attempt, step), self.folder / run_id / f"step-{step}"
        part.mkdir(parents=True)
        for path, data in (files or {"weights": f"weights of step {step}".encode()}).items():
            (part / path).write_bytes(data)
        upload_part(
            store, run_id, name, folder=part, attempt=attempt, node=0, step=step, world_size=1, meta=dict(meta or {})
        )
        entry = commit_when_complete(store, run_id, name, writers=(0,), nodes=1, writer=writer)
        assert entry is not None
        return entry

    # --- records

    def record(self, run_id: str, **more: Any) -> Record:
        """A saved record of a run of this project."""
        self.run_id = run_id
        made = Record(
            **{
                "run_id": run_id, "name": "a", "project": str(self.folder), "project_base": str(self.folder),
                "run_file": str(self.run_file), "stack": run_id, "own_stack": True, "fleet_name": f"mine-{run_id}",
                "provider": "local", "nodes": len(self.nodes), "created_at": 1.0, "max_hours": 1.0,
                "state": record.State.PROVISIONING,
            } | more
        )  # fmt: skip
        record.save(made)
        return made


@pytest.fixture
def world(tmp_path: Path, xdg: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Nodes, provider and stacks in memory in the place of the real ones; folders of this test alone."""
    made = World(tmp_path / "project")
    monkeypatch.setattr(stack, "Stack", functools.partial(Stack, made))
    monkeypatch.setattr(NodeSet, "connect", made.connect)
    monkeypatch.setattr(NodeSet, "reach", made.reach)
    monkeypatch.setattr("mgpu.remote.node.connect", made.connect_one)
    monkeypatch.setattr(registry, "get", made.provider)
    monkeypatch.setattr(registry, "names", lambda: ("local", *sorted(made.elsewhere)))
    monkeypatch.setattr(wiring, "context", lambda console, **more: Context(console.emit, made.timeouts, **more))
    monkeypatch.setattr(acquire, "ANSWER_S", 0.0)  # who is silent here is so for ever
    return made


@pytest.fixture
def suspended() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """`suspended(run_id)`: another process supervises the run, and was stopped by a signal."""
    children: list[subprocess.Popen[bytes]] = []

    def hold(run_id: str) -> subprocess.Popen[bytes]:
        code = "import sys, time\nfrom pathlib import Path\nfrom mgpu.run.record.supervisor_lock import hold\n"
        code += "with hold(Path(sys.argv[1])):\n    print(flush=True)\n    time.sleep(60)\n"
        child = subprocess.Popen([sys.executable, "-c", code, record.Folder(run_id).lock], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        return child

    yield hold
    for child in children:
        child.kill()
        child.communicate()


@dataclass
class Done:
    """What a command has left behind: its exit code, stdout and stderr."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@pytest.fixture
def mgpu(
    world: World, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Runs `mgpu ...` in this process, in the project's folder."""
    monkeypatch.chdir(world.folder)

    def call(*args: str) -> Done:
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        assert end.value.code is None or isinstance(end.value.code, int)
        return Done(end.value.code or 0, out, err.decode())

    return call
