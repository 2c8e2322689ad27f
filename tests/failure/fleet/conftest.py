"""A fleet of real nodes with real SSH, agents and supervisor, but no Pulumi engine; and the judge.

`new_line(...)` rents the machines as the engine's plugin does (`mgpu.acquire`), and runs `program.py` on them as
`mgpu launch` does (`mgpu.run`). What is judged is the provider's bill, the store's commit log, and the book in which
the ranks themselves note what they do, on no node's disk.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import AttemptEntry
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.config import Secrets
from mgpu_train.store import open_store
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu import acquire, paths
from mgpu.events import Event
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.journal import Journal
from mgpu.plan import rank as ranking
from mgpu.providers.base import FleetRequest, FleetState, Handle, NodeState
from mgpu.providers.local import bill
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.procs import Process, marked
from mgpu.providers.local.provider import LocalProvider
from mgpu.run.job.request import Request, resolve
from mgpu.run.lifecycle.attempt import conduct, watch_again
from mgpu.run.lifecycle.recovery import Attempts
from mgpu.run.record.record import Interruption, Record, State, load, new_run_id
from mgpu.run.record.session import Session
from mgpu.run.supervision.supervisor import Ended
from mgpu.spec.load import loads
from mgpu.spec.model import RunSpec

PROGRAM = Path(__file__).with_name("program.py")
TIMES = Timeouts(
    provision_s=60, destroy_s=30, describe_every_s=0.2, connect_s=20, ssh_banner_s=5, keepalive_s=0.5, command_s=20,
    sync_s=30, prepare_s=30, resume_s=30, first_step_s=60, stall_s=30, collective_s=30, stop_grace_s=5, kill_s=5,
    drain_s=15, peers_s=5, lease_s=60, lease_renew_s=1, poll_s=0.25, silence_s=30,
)  # fmt: skip
HOST = (
    b"mgpu.providers.local.node_process",
    b"lease.sh",
)  # what of a node's processes is its host, and not the machine
UNSEEN_S = 1.2  # the supervisor's newest look at a machine that is gone may be so old
ROUNDING_S = 0.005  # of the bill's times


@dataclass
class Fleet:
    """Machines of provider local, rented and repaired as the plugin does it."""

    folder: Path
    spec: RunSpec
    times: Timeouts
    provider: LocalProvider = field(default_factory=LocalProvider)
    links: dict[int, Any] = field(default_factory=dict)  # node_rank -> the way that is taken to its first machine
    abandon: bool = False  # a repair leaves the old machine alone, as a provider that only says that it stops it

    def __post_init__(self) -> None:
        self.key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        self.journal = Journal(self.folder / "fleet.jsonl")
        self.name = f"fleet-{self.folder.name}"
        self.handle: Handle | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        assert self.handle is not None
        return self.handle.ids

    def rent(self) -> StackOutput:
        needed = ranking.requirements(self.spec)
        offers = ranking.plan(needed, self.provider.offers(needed).offers).offers
        made = acquire.acquire(self.provider, self._request(1), offers, self.journal, timeouts=self.times)
        return self._output(made.handle, made.state)

    def repair(self, lost: tuple[int, ...] = ()) -> StackOutput:
        """New machines for the ranks that are lost, by the caller's word or the provider's."""
        assert self.handle is not None
        handle = self.handle
        missing = tuple(sorted({*lost, *self.provider.describe(handle).lost}))
        if self.abandon:
            ids = tuple("" if rank in missing else name for rank, name in enumerate(handle.ids))
            handle = handle.model_copy(update={"ids": ids})
        for rank in missing:
            self.links.pop(rank, None)  # a new machine has a way of its own
        if not missing:
            return self._output(handle, self.provider.describe(handle))
        needed = ranking.requirements(self.spec).model_copy(update={"nodes": len(missing)})
        offers = ranking.plan(needed, self.provider.offers(needed).offers).offers
        request = self._request(handle.generation + 1)
        made = acquire.repair(
            self.provider, handle, missing, request, offers, self.journal, timeouts=self.times
        )  # fmt: skip
        return self._output(made.handle, made.state)

    def end(self) -> None:
        """Whatever there was of it is given back."""
        for handle in self.provider.list_owned(paths.owner()):
            for name in filter(None, handle.ids):
                self.wake(name)
            acquire.destroy(self.provider, handle, timeouts=self.times)

    def instance(self, rank: int) -> Instance:
        """The machine of a rank, for `mgpu.providers.local.control`."""
        return Instance(self.provider.root, self.ids[rank])

    # --- what a test does to a machine, by its id

    def machine(self, name: str) -> list[Process]:
        """The processes that run on it: none of its node process and its lease, which are its host."""
        found = [p for p in marked().get(name, ()) if not any(word in _command(p.pid) for word in HOST)]
        return [p for p in found if not any(word in _command(_parent(p.pid)) for word in HOST[1:])]

    def freeze(self, name: str) -> None:
        """Its link is down: nothing of it moves any more, and nothing of it is gone."""
        frozen: set[Process] = set()
        while fresh := set(self.machine(name)) - frozen:
            for process in fresh:
                process.send(signal.SIGSTOP)
            frozen |= fresh

    def wake(self, name: str) -> None:
        for process in self.machine(name):
            process.send(signal.SIGCONT)

    def server(self, name: str) -> Process:
        """Its SSH server."""
        return next(p for p in self.machine(name) if b"mgpu.providers.local.sshd" in _command(p.pid))

    def agent(self, name: str) -> bool:
        """True while a run's agent is on it."""
        return any(b"\0agent\0start\0" in _command(process.pid) for process in self.machine(name))

    def lose_power(self, name: str) -> None:
        """All of it at once, its host too: every process, then the disk."""
        for process in sorted(marked().get(name, ()), key=lambda p: HOST[0] not in _command(p.pid)):
            process.send(signal.SIGKILL)
        shutil.rmtree(self.provider.root / "nodes" / name, ignore_errors=True)

    def _request(self, generation: int) -> FleetRequest:
        return FleetRequest(
            fleet=self.name, generation=generation, owner=paths.owner(),
            requirements=ranking.requirements(self.spec), ssh_public_key=self.key.with_suffix(".pub").read_text(),
            lease_s=self.times.lease_s, hard_cap_s=self.spec.max_hours * 3600,
        )  # fmt: skip

    def _port(self, node: NodeState) -> int:
        link = self.links.get(node.rank)
        if link is None:
            return node.port
        link.target = node.port
        return link.port

    def _output(self, handle: Handle, state: FleetState) -> StackOutput:
        self.handle = handle
        return StackOutput(
            version=1, fleet=handle.fleet, generation=handle.generation, owner=paths.owner(), token=handle.token,
            provider="local", region=handle.region, private_key_file=str(self.key),
            hard_cap_at=min(node.hard_cap_at for node in state.nodes), processes_per_node=self.spec.processes,
            nodes=tuple(
                NodeOutput(rank=node.rank, id=node.id, address=node.address, user=node.user, host_key=node.host_key,
                           port=self._port(node), private_address=node.private_address)
                for node in state.nodes
            ),
        )  # fmt: skip


@dataclass
class Line:
    """One run on one fleet, from its first attempt to its end, with what happened on the way."""

    fleet: Fleet
    request: Request
    book: Path
    events: list[Event] = field(default_factory=list)
    deadlines: Timeouts = TIMES

    def __post_init__(self) -> None:
        spec = self.request.spec
        record = Record(
            state=State.PROVISIONING,
            run_id=self.request.run_id, name=spec.name, project=str(self.fleet.folder),
            project_base=str(self.request.base), run_file="mgpu.yaml", stack="none", own_stack=True,
            fleet_name="none", provider="local", nodes=spec.nodes, created_at=time.time(), max_hours=spec.max_hours,
        )  # fmt: skip
        self.session = Session(record, self.events.append, self.deadlines)
        self.output: StackOutput | None = None
        self._thread: threading.Thread | None = None
        self._result: list[Ended | BaseException] = []

    @property
    def run_id(self) -> str:
        return self.request.run_id

    @property
    def going(self) -> bool:
        """Its supervisor is at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def record(self) -> Record:
        """As it stands on disk."""
        return load(self.run_id)

    # --- going

    def start(self) -> None:
        """Rents the machines, and goes on in a thread of its own."""
        self.output = self.output or self.fleet.rent()
        self.session.record.fleet = self.output.model_dump(mode="json")
        self._begin(lambda: self._conduct(self.output))

    def again(self) -> None:
        """Another supervisor takes the run over in this one's place."""
        self.session = Session(self.record, self.events.append, self.deadlines)
        self._begin(lambda: watch_again(self.session, self.output, self.fleet.provider, self.request))

    def leave(self) -> None:
        """The supervisor goes, the run stays."""
        self.session.interrupts.hung_up = True
        self.session.interrupts.count += 1
        assert self.end(20).left

    def end(self, seconds: float = 90) -> Ended:
        """How it ended; raises what it raised."""
        assert self._thread is not None
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no end in {seconds} s: {self.events[-5:]}"
        self._thread, result = None, self._result.pop()
        if isinstance(result, BaseException):
            raise result
        return result

    def _begin(self, first: Callable[[], Ended]) -> None:
        attempts = Attempts(
            self.session, self.request.spec.recovery, self._conduct, self._repair,
            sleep=lambda seconds: time.sleep(min(seconds, 0.05)),
        )  # fmt: skip

        def run() -> None:
            try:
                self._result.append(attempts.run(first))
            except BaseException as error:  # noqa: BLE001 - raised again by `end`
                self._result.append(error)

        self._thread = threading.Thread(target=run, name="line", daemon=True)
        self._thread.start()

    def _conduct(self, fleet: StackOutput | None) -> Ended:
        assert fleet is not None
        return conduct(self.session, self.request, fleet, self.fleet.provider, Secrets())

    def _repair(self, lost: tuple[int, ...] = ()) -> StackOutput:
        self.output = self.fleet.repair(lost)
        self.session.record.fleet = self.output.model_dump(mode="json")
        return self.output

    # --- looking

    def entries(self) -> list[dict[str, Any]]:
        """The book: what the ranks did."""
        path = self.book / "book.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def done(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        found = [entry for entry in self.entries() if entry["kind"] == kind]
        return [entry for entry in found if all(entry[name] == value for name, value in wanted.items())]

    def commits(self) -> list[Any]:
        """The commit log."""
        if self.request.checkpoint is None:
            return []
        return CommitLog(open_store(self.request.checkpoint.to), self.run_id).entries()

    def committed(self) -> list[Commit]:
        return [entry for entry in self.commits() if isinstance(entry, Commit)]

    def attempts(self) -> list[AttemptEntry]:
        return [entry for entry in self.commits() if isinstance(entry, AttemptEntry)]

    def wait(self, what: Callable[[], Any], seconds: float = 40) -> Any:
        """What `what` answers as soon as that is anything; fails when the run ends before."""

        def asked() -> Any:
            over = self._thread is not None and not self.going  # first: what happens at its very end has happened
            found = what()
            assert found or not over, f"it is over: {self._result}"
            return found

        return until(asked, seconds, lambda: self.entries()[-3:])

    def copied(self, rank: int) -> int:
        """Bytes of a node's log on the operator's machine."""
        path = self.session.folder.log(rank, self.fleet.ids[rank])
        return path.stat().st_size if path.exists() else 0

    def logs_agree(self, rank: int) -> bool:
        """The copy of a node's log on the operator's machine is what the node has, byte for byte."""
        name = self.fleet.ids[rank]
        there = self.fleet.provider.root / "nodes" / name / "home" / str(RunLayout(self.run_id).log)
        return filecmp.cmp(self.session.folder.log(rank, name), there, shallow=False)

    # --- judging

    def judge(self) -> None:
        """Invariants I2 to I5 by bill, book and commit log; I1 when everything was given back."""
        nodes, log = bill.read(self.fleet.provider.root).nodes, self.commits()
        nodes = tuple(node for node in nodes if node.start.fleet == self.fleet.name)
        assert most_alive(nodes) <= self.request.spec.nodes, "I2: more machines than asked for"
        newest = dict.fromkeys((0,), -1)
        attempt, writer, durable = 0, "", -1
        for entry in log:
            if isinstance(entry, AttemptEntry):
                assert entry.attempt > attempt, "I5: attempts go on"
                attempt, writer = entry.attempt, entry.writer
                newest[attempt] = durable
            elif isinstance(entry, Commit):
                assert (entry.attempt, entry.writer) == (attempt, writer), "I5: a stale attempt has committed"
                assert entry.step >= durable, "I5: the durable step went back"
                durable = entry.step
        for begun in self.done("start"):
            assert begun["step"] == max(0, newest[begun["attempt"]]), "I3: not from the newest checkpoint"
        self._judge_losses(newest)
        assert self.request.checkpoint is not None
        store = open_store(self.request.checkpoint.to)
        log = CommitLog(store, self.run_id)
        for entry in log.checkpoints():
            assert verify(store, self.run_id, log.manifest(entry), deep=True) == (), "half a checkpoint is committed"

    def _judge_losses(self, newest: dict[int, int]) -> None:
        every = self.request.spec.checkpoint.every_steps  # type: ignore[union-attr]
        for attempt in sorted({begun["attempt"] for begun in self.done("start")} - {1}):
            before = [entry["step"] for entry in self.done("step") if entry["attempt"] < attempt]
            lost = max(before, default=0) - max(0, newest[attempt])
            assert lost <= 2 * every, f"I4: attempt {attempt} lost {lost} steps"
        for interruption in self.record.interruptions:
            self._judge_words(interruption)

    def _judge_words(self, interruption: Interruption) -> None:
        """What is said to be lost is what was, but for steps that nobody could see any more."""
        done = self.done("step", attempt=interruption.attempt)
        if interruption.steps_lost is None or not done:
            return
        last = max(entry["at"] for entry in done)
        seen = [entry["step"] for entry in done if entry["at"] < last - UNSEEN_S]
        most, least = max(entry["step"] for entry in done), max(seen, default=0)
        resumed = max(0, interruption.resumed_step or 0)
        assert least - resumed <= interruption.steps_lost <= max(0, most - resumed), "I4: another number is told"

    def steps_lost(self, attempt: int) -> int:
        """Steps that this attempt did again, by the book."""
        before = max(entry["step"] for entry in self.done("step") if entry["attempt"] < attempt)
        return before - self.done("start", attempt=attempt)[0]["step"]


def most_alive(nodes: tuple[bill.BilledNode, ...]) -> int:
    """How many machines were paid for at once, at most."""
    moves = [(node.start.at, 1) for node in nodes] + [(node.end_at - ROUNDING_S, -1) for node in nodes]
    return max(itertools.accumulate(move for _, move in sorted(moves)), default=0)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


RUN_FILE = """
name: {name}
provider: local
nodes: {nodes}
market: spot
max_price_usd_per_hour: 1
max_hours: 0.2
launcher: python
command: {command}
checkpoint: {{to: "file://{folder}/store", every_steps: {every}, keep_last: 3, writers: {writers}}}
recovery: {{attempts: {attempts}, wait_minutes: 1}}
"""


@pytest.fixture
def new_line(tmp_path: Path, xdg: Path) -> Iterator[Callable[..., Line]]:
    """A run that has not begun; its machines are gone when the test ends, whatever it has proved."""
    made: list[Line] = []

    def line(
        *, nodes: int = 2, steps: int = 60, pause_s: float = 0.05, every: int = 10, save_s: float = 0,
        linger_s: float = 0, writers: str = "all", attempts: int = 5, command: list[str] | None = None,
        text: str = RUN_FILE, times: dict[str, float] | None = None,
    ) -> Line:  # fmt: skip
        name = f"f{len(made)}"
        folder = tmp_path / name
        book, code = folder / "book", folder / "code"
        for each in (book, code):
            each.mkdir(parents=True)
        shutil.copy(PROGRAM, code)
        ours = ["program.py", "BOOK", str(folder / "store"), *map(str, (steps, pause_s, every, save_s, linger_s))]
        started = json.dumps([part.replace("BOOK", str(book)) for part in command or ours])
        given = text.format(
            name=name, nodes=nodes, command=started, folder=folder, every=every, writers=writers, attempts=attempts
        )
        (folder / "mgpu.yaml").write_text(given)
        spec = loads(given, "mgpu.yaml")
        deadlines = TIMES.model_copy(update=times or {})
        request = resolve(spec, new_run_id(name), code, timeouts=deadlines)
        made.append(Line(Fleet(folder, spec, deadlines), request, book, deadlines=deadlines))
        return made[-1]

    yield line
    for each in made:
        with suppress(Exception):
            each.session.interrupts.hung_up = True
            each.session.interrupts.count += 1
        each.fleet.end()
    assert not bill.read(LocalProvider().root).alive, "I1: something is left"
