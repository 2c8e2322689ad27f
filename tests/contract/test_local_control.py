"""Faults of provider `local` on request: what its control files do to machines and to answers. Real node processes."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import asyncssh
import pytest
from fakes.local import LocalWorld
from mgpu_train.agent.host.layout import NOTICE
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu import acquire
from mgpu.errors import AmbiguousCreate, InputError, InvalidRequest, NoCapacity, Transient
from mgpu.journal import Journal
from mgpu.plan.model import Offer
from mgpu.providers.base import Handle, Intent, NodePhase, create_token
from mgpu.providers.local import bill, control, files, procs
from mgpu.providers.local import provider as module
from mgpu.providers.local.nodes import Instance, NodeSpec, login_environment
from mgpu.providers.local.provider import LocalProvider

DEADLINE_S = 60.0
KEY = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
GARBAGE = [
    "",
    "{",
    "[]",
    "[" * 100_000,
    '"kill"',
    "{}",
    '{"action": "reboot"}',
    '{"action": "kill", "at": 5}',
    '{"action": "notice"}',
    '{"action": "notice", "at": "soon"}',
    '{"action": "notice", "at": true}',
    '{"action": "notice", "at": -1}',
    '{"action": "notice", "at": NaN}',
    '{"action": "notice", "at": 1e300}',
    b"\xff\xfe",
]


@dataclass
class World(LocalWorld):
    """With one offer, and a journal."""

    journal: Path

    @functools.cached_property
    def offer(self) -> Offer:
        return self.provider.offers(self.request(2).requirements).offers[0]

    @property
    def intent(self) -> Intent:
        token = create_token("o-1", "demo", 1, self.offer, 0)
        return Intent(fleet="demo", generation=1, owner="o-1", token=token, offer=self.offer)

    def create(self, nodes: int = 2) -> Handle:
        return self.provider.create(self.request(nodes), self.offer, self.intent.token)

    def up(self, nodes: int = 1) -> Handle:
        handle = self.create(nodes)
        until(lambda: self.provider.describe(handle).ready)
        return handle

    def repair(self, handle: Handle, rank: int) -> Handle:
        token = create_token("o-1", "demo", 2, self.offer, 0)
        return self.provider.repair(handle, (rank,), self.request(2, generation=2), self.offer, token)

    def acquire(self) -> acquire.Acquired:
        # the pauses of a backoff in seconds are for real providers
        sleep, times = lambda seconds: time.sleep(min(seconds, 0.05)), Timeouts(provision_s=DEADLINE_S)
        with Journal(self.journal) as journal:
            return acquire.acquire(self.provider, self.request(2), [self.offer], journal, timeouts=times, sleep=sleep)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(LocalProvider(root=tmp_path / "l"), KEY, tmp_path / "journal")
    yield world
    world.all_gone()


@pytest.fixture
def program() -> Iterator[Callable[[Instance, Path], subprocess.Popen]]:
    """Starts a program of a machine that notes every SIGTERM in a file, and ends by SIGKILL alone."""
    started: list[subprocess.Popen] = []

    def start(instance: Instance, noted: Path) -> subprocess.Popen:
        script = f"trap 'echo >>{noted}' TERM; echo; while :; do sleep 1; done"
        child = subprocess.Popen(
            ["sh", "-c", script], env={procs.MARK: instance.id, "PATH": os.environ["PATH"]}, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def ran(instance: Instance) -> list[procs.Process]:
    """All of a living node: its node process, what is below it, what carries its mark."""
    node_process = instance.node_process()
    assert node_process is not None
    return [node_process.process, *procs.descendants(node_process.process.pid), *instance.remains()]


# --- one machine


def test_a_machine_that_is_taken_is_gone_at_once_without_a_warning(world: World, program, tmp_path: Path):
    handle = world.up(2)
    instance = world.instance(handle)
    until(lambda: len(ran(instance)) >= 4)  # node process, SSH server, lease script, its sleep
    program(instance, tmp_path / "warned")
    everything = ran(instance)
    control.kill(instance)
    until(lambda: not any(process.alive for process in everything) and not instance.folder.exists())
    assert not (tmp_path / "warned").exists()
    state = world.provider.describe(handle)
    assert [node.phase for node in state.nodes] == [NodePhase.TERMINATED, NodePhase.RUNNING]
    assert state.nodes[0].reason == control.INTERRUPTED
    taken, other = sorted(bill.read(world.root).nodes, key=lambda node: node.start.instance)
    assert (taken.alive, taken.reason) == (False, "interrupted by the provider")
    assert (other.alive, other.reason) == (True, "")


def test_a_machine_with_a_notice_is_told_and_goes_at_its_time_not_before(world: World, program, tmp_path: Path):
    handle = world.up()
    instance, notice = world.instance(handle), world.instance(handle).home / NOTICE
    program(instance, tmp_path / "warned")
    before = time.time()
    at = control.notice(instance, 1.5)
    assert before + 1.5 <= at <= time.time() + 1.5
    until(notice.exists)
    assert notice.stat().st_mtime < at
    said = json.loads(notice.read_text())
    assert said.keys() == {"action", "time"}
    assert said["action"] == "terminate"
    assert said["time"].endswith("Z")
    assert 0 <= at - datetime.fromisoformat(said["time"]).timestamp() < 0.0011
    assert world.phase(handle) is NodePhase.RUNNING
    until(lambda: not bill.read(world.root).alive)
    (node,) = bill.read(world.root).nodes
    assert at <= node.end_at
    assert node.reason == control.INTERRUPTED
    assert not (tmp_path / "warned").exists()
    assert world.provider.describe(handle).nodes[0].reason == control.INTERRUPTED


def test_a_notice_of_no_seconds_takes_the_machine_now(world: World):
    handle = world.up()
    control.notice(world.instance(handle), 0)
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert bill.read(world.root).nodes[0].reason == control.INTERRUPTED


def test_a_node_process_looks_at_once_when_it_is_woken(world: World):
    handle = world.up()
    node_process, beat = world.instance(handle).node_process(), bill.heartbeat(world.root, handle.ids[0])
    assert node_process is not None
    seen = set()
    for _ in range(20):
        node_process.process.send(signal.SIGUSR1)
        time.sleep(0.05)
        seen.add(beat.stat().st_mtime_ns)
    assert len(seen) > 8
    assert node_process.process.alive


def test_who_gives_an_order_wakes_the_node_process(world: World, monkeypatch: pytest.MonkeyPatch):
    handle, sent = world.up(), []
    monkeypatch.setattr(procs.Process, "send", lambda _, signum: sent.append(signum))
    control.notice(world.instance(handle), 60)
    assert signal.SIGUSR1 in sent
    monkeypatch.undo()


def test_a_stopped_machine_is_taken_all_the_same(world: World):
    handle = world.up()
    for process in ran(world.instance(handle)):
        process.send(signal.SIGSTOP)
    control.kill(world.instance(handle))
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert bill.read(world.root).nodes[0].reason == control.INTERRUPTED


def test_an_order_that_is_there_before_the_node_process_is_carried_out(world: World, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_start", lambda _: None)
        handle = world.create(1)
    control.kill(world.instance(handle))
    world.create(1)
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert bill.read(world.root).nodes[0].reason == control.INTERRUPTED


def test_a_node_process_that_is_woken_before_it_listens_lives(world: World, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_start", lambda _: None)
        handle = world.create(1)
    instance = world.instance(handle)
    woken = """
import os, signal, sys
from mgpu.providers.local import bill, node_process
write_start = bill.write_start
bill.write_start = lambda *line: (os.kill(os.getpid(), signal.SIGUSR1), write_start(*line))
sys.exit(node_process.main(["", *sys.argv[1:]]))
"""
    environment = login_environment(instance, os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", woken, world.root, instance.id], env=environment, check=True, timeout=60)
    until(lambda: world.phase(handle) is NodePhase.RUNNING)


def test_a_machine_that_takes_its_starter_along_was_started(world: World, monkeypatch: pytest.MonkeyPatch):
    # as it happens when an order waits for the node process and its starter has not ended yet
    spawn = module._spawn

    def killed(instance: Instance) -> subprocess.Popen:
        starter = spawn(instance)
        until(instance.node_process)
        starter.wait()
        starter.returncode = -signal.SIGKILL
        return starter

    monkeypatch.setattr(module, "_spawn", killed)
    assert world.create(1).ids[0]


def test_garbage_changes_nothing_and_is_named_in_the_log(world: World):
    handle = world.up()
    instance = world.instance(handle)
    node_process = instance.node_process()
    assert node_process is not None
    for number, garbage in enumerate(GARBAGE):
        data = garbage if isinstance(garbage, bytes) else garbage.encode()
        aside = world.root / "aside"
        aside.write_bytes(data)
        aside.replace(instance.record / control.FILE)
        node_process.process.send(signal.SIGUSR1)
        until(lambda number=number: instance.log.read_text().count(f"{control.FILE}: n") > number)
    time.sleep(0.1)
    assert instance.log.read_text().count(control.FILE) == len(GARBAGE), "once each, not at every beat"
    assert world.phase(handle) is NodePhase.RUNNING
    assert not (instance.home / NOTICE).exists()


def test_nobody_interrupts_what_is_not_there(world: World):
    handle = world.up()
    world.gone(handle)
    for order in (control.kill, lambda instance: control.notice(instance, 5)):
        with pytest.raises(InputError, match="gone already"):
            order(world.instance(handle))
        with pytest.raises(InputError, match="no machine"):
            order(Instance(world.root, "0123456789-0"))


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, -math.inf, 1e300])
def test_a_notice_needs_a_time_to_come(tmp_path: Path, seconds: float):
    with pytest.raises(InputError, match="not a time"):
        control.notice(Instance(tmp_path, "0123456789-0"), seconds)


# --- a node process's orders, by clocks of the test's own


class Machine:
    """The files of an instance, and `Orders` that go by made-up clocks."""

    def __init__(self, root: Path) -> None:
        self.instance = Instance(root, "0123456789-0")
        self.instance.register(NodeSpec(0, "demo", 1, "o-1", KEY, "python", 1, 1, 1, "spot"))
        (self.instance.home / ".mgpu").mkdir(parents=True)
        self.wall, self.monotonic = 1_000_000.0, 50.0
        self.log: list[str] = []
        self.orders = control.Orders(
            self.instance, wall=lambda: self.wall, monotonic=lambda: self.monotonic, log=self.log.append
        )

    def order(self, **order: object) -> None:
        files.replace(self.instance.record / control.FILE, order)

    @property
    def told(self) -> dict[str, str] | None:
        return files.load(self.instance.home / NOTICE)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_an_order_a_machine_stays(machine: Machine):
    assert machine.orders.left_s() == math.inf
    assert machine.told is None


def test_the_time_of_a_notice_is_told_as_ec2_tells_it(machine: Machine):
    machine.order(action="notice", at=1_000_030.25)
    assert machine.orders.left_s() == pytest.approx(30.25)
    assert machine.told == {"action": "terminate", "time": "1970-01-12T13:47:10.250Z"}


@pytest.mark.parametrize("jump_s", [1200.0, -1200.0])
def test_a_clock_that_is_set_changes_no_end(machine: Machine, jump_s: float):
    machine.order(action="notice", at=1_000_030.0)
    machine.orders.left_s()
    machine.wall += jump_s
    machine.monotonic += 10
    assert machine.orders.left_s() == pytest.approx(20)
    machine.monotonic += 20
    assert machine.orders.left_s() <= 0


def test_a_notice_stays_until_it_is_replaced_or_taken_back(machine: Machine):
    machine.order(action="notice", at=1_000_030.0)
    machine.orders.left_s()
    (machine.instance.home / NOTICE).unlink()
    machine.orders.left_s()
    assert machine.told is not None
    machine.order(action="notice", at=1_000_010.0)
    assert machine.orders.left_s() == pytest.approx(10)
    assert machine.told == {"action": "terminate", "time": "1970-01-12T13:46:50.000Z"}
    (machine.instance.record / control.FILE).unlink()
    assert machine.orders.left_s() == math.inf
    assert machine.told is None


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_leaves_the_order_that_stands(machine: Machine, garbage: str | bytes):
    machine.order(action="notice", at=1_000_030.0)
    machine.orders.left_s()
    (machine.instance.record / control.FILE).write_bytes(garbage if isinstance(garbage, bytes) else garbage.encode())
    for _ in range(3):
        machine.monotonic += 1
        assert machine.orders.left_s() < 30
    assert machine.told is not None
    (line,) = machine.log
    assert control.FILE in line


def test_what_fails_at_every_look_is_named_once(machine: Machine):
    (machine.instance.home / ".mgpu").rmdir()
    machine.order(action="notice", at=1_000_030.0)
    for _ in range(3):
        machine.orders.left_s()
    assert len(machine.log) == 1
    (machine.instance.record / control.FILE).unlink()
    (machine.instance.record / control.FILE).mkdir()
    for _ in range(3):
        machine.orders.left_s()
    assert len(machine.log) == 2
    assert "Is a directory" in machine.log[1]


def test_a_machine_that_cannot_be_told_goes_all_the_same(machine: Machine):
    (machine.instance.home / ".mgpu").rmdir()
    machine.order(action="notice", at=1_000_030.0)
    assert machine.orders.left_s() == pytest.approx(30)
    machine.monotonic += 30
    assert machine.orders.left_s() <= 0
    assert machine.log


# --- the provider's answers


def test_without_capacity_nothing_new_is_made_and_offers_stay(world: World):
    handle = world.up(2)
    control.no_capacity(world.root, 60)
    assert world.provider.offers(world.request(2).requirements).offers
    assert world.create(2) == handle, "a create that was granted before is answered as before"
    world.gone(handle.model_copy(update={"ids": ("", handle.ids[1])}))
    with pytest.raises(NoCapacity, match="no capacity"):
        world.repair(handle, 1)
    other = create_token("o-1", "other", 1, world.offer, 0)
    with pytest.raises(NoCapacity):
        world.provider.create(world.request(2), world.offer, other)
    assert len(bill.read(world.root).nodes) == 2
    control.no_capacity(world.root, 0)
    assert world.repair(handle, 1).ids[0] == handle.ids[0]


def test_capacity_comes_back_by_itself(world: World):
    control.no_capacity(world.root, 0.3)
    until(lambda: _made(world))
    assert len(bill.read(world.root).nodes) == 2


def _made(world: World) -> bool:
    try:
        world.create()
    except NoCapacity:
        return False
    return True


def test_an_answer_that_is_lost_hides_machines_that_find_knows(world: World):
    control.next_creates(world.root, "lost")
    with pytest.raises(AmbiguousCreate):
        world.create()
    found = world.provider.find(world.intent)
    assert len(bill.read(world.root).alive) == 2
    assert world.create() == found, "one create was meant, not the next"
    assert len(bill.read(world.root).nodes) == 2


def test_an_answer_that_is_lost_before_the_create_hides_nothing(world: World):
    control.next_creates(world.root, "lost-before")
    with pytest.raises(AmbiguousCreate):
        world.create()
    assert world.provider.find(world.intent) is None
    assert bill.read(world.root).nodes == ()


def test_an_error_after_the_create_was_carried_out(world: World):
    control.next_creates(world.root, "error")
    with pytest.raises(Transient):
        world.create()
    assert len(bill.read(world.root).alive) == 2


def test_one_node_fewer_is_terminated_and_was_never_billed(world: World):
    control.next_creates(world.root, "fewer")
    handle = world.create()
    until(lambda: world.phase(handle, 0) is NodePhase.RUNNING)
    missing = world.provider.describe(handle).nodes[1]
    assert (missing.phase, missing.reason) == (NodePhase.TERMINATED, control.FEWER)
    assert world.create() == handle
    assert world.phase(handle, 1) is NodePhase.TERMINATED
    assert [node.start.instance for node in bill.read(world.root).nodes] == [handle.ids[0]]


def test_nothing_that_runs_is_one_fewer(world: World):
    handle = world.up(2)
    control.next_creates(world.root, "fewer")
    assert world.create() == handle
    assert world.provider.describe(handle).ready


def test_a_repair_loses_its_answer_too(world: World):
    handle = world.up(2)
    control.kill(world.instance(handle, 1))
    until(lambda: world.phase(handle, 1) is NodePhase.TERMINATED)
    control.next_creates(world.root, "lost", "error")
    with pytest.raises(AmbiguousCreate):
        world.repair(handle, 1)
    with pytest.raises(Transient):
        world.repair(handle, 1)
    world.repair(handle, 1)
    assert len(bill.read(world.root).nodes) == 3


def test_each_fault_happens_to_one_of_many_creates(tmp_path: Path):
    control.next_creates(tmp_path, "lost", "error")
    control.next_creates(tmp_path, "fewer")

    def create(_: int) -> str:
        try:
            with control.creating(tmp_path, known=False) as fault:
                return fault
        except AmbiguousCreate:
            return "lost"
        except Transient:
            return "error"

    with ThreadPoolExecutor(16) as pool:
        happened = [fault for fault in pool.map(create, range(64)) if fault]
    assert sorted(happened) == ["error", "fewer", "lost"]


def test_a_new_machine_is_not_known_yet_where_answers_are_late(world: World):
    control.stale(world.root, 30)
    handle = world.create(1)
    with pytest.raises(Transient, match="knows no node"):
        world.provider.describe(handle)
    assert world.provider.find(world.intent) == handle
    assert world.provider.list_owned("o-1") == (handle,)
    age(world.instance(handle).record / "spec.json", 31)
    assert world.phase(handle) in (NodePhase.PENDING, NodePhase.RUNNING)
    control.stale(world.root, 0)
    until(lambda: world.provider.describe(handle).ready)


@pytest.mark.parametrize("order", [control.kill, lambda i: i.terminate("destroyed", 15)])
def test_a_machine_that_went_just_now_still_runs_where_answers_are_late(world: World, order):
    handle = world.up()
    instance = world.instance(handle)
    age(instance.record / "spec.json", 31)
    control.stale(world.root, 30)
    before = world.provider.describe(handle)
    order(instance)
    until(lambda: not bill.read(world.root).alive)
    assert world.provider.describe(handle) == before
    assert world.provider.destroy(handle), "what is asked of one machine is answered with the truth"
    for name in ("stopping.json", "stopped.json"):
        data = files.load(instance.record / name)
        assert data is not None
        files.replace(instance.record / name, {**data, "at": data["at"] - 31})
    assert world.phase(handle) is NodePhase.TERMINATED


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_clock_that_was_set_back_makes_no_answer_late(world: World):
    handle = world.up()
    world.gone(handle)
    for name in ("stopping.json", "stopped.json"):
        data = files.load(world.instance(handle).record / name)
        assert data is not None
        files.replace(world.instance(handle).record / name, {**data, "at": data["at"] + 1200})
    assert world.phase(handle) is NodePhase.TERMINATED


@pytest.mark.parametrize(
    "garbage",
    [
        "{",
        "[]",
        '{"create": "lost"}',
        '{"create": ["gained"]}',
        '{"create": [{}]}',
        '{"no_capacity_until": "long"}',
        '{"describe_stale_s": -1}',
        '{"no_capacity_til": 5}',
        "[" * 100_000,
    ],
)
def test_garbage_is_named_by_check_and_changes_no_answer(tmp_path: Path, garbage: str):
    (tmp_path / control.FILE).write_text(garbage)
    with control.creating(tmp_path, known=False) as fault:
        assert fault == ""
    assert not control.unseen(tmp_path)(time.time())
    with pytest.raises(InvalidRequest, match=control.FILE):
        LocalProvider(root=tmp_path).check()


# --- acquire on top of it: exactly one gang, judged by the bill


@pytest.mark.parametrize("fault", ["lost", "error", "lost-before"])
def test_f6_f7_an_answer_that_did_not_come_makes_one_gang(world: World, fault: str):
    control.next_creates(world.root, fault)
    got = world.acquire()
    assert got.state.ready
    assert got.tried == ()
    assert sorted(node.start.instance for node in bill.read(world.root).nodes) == sorted(got.handle.ids)
    assert len(bill.read(world.root).alive) == 2


def test_f7_again_and_again(world: World):
    control.next_creates(world.root, "error", "lost-before", "error", "lost")
    assert world.acquire().state.ready
    assert len(bill.read(world.root).nodes) == 2


def test_f8_what_came_up_of_too_few_is_ended_and_the_gang_is_asked_for_again(world: World):
    control.next_creates(world.root, "fewer")
    got = world.acquire()
    assert got.state.ready
    assert control.FEWER in got.tried[0].reason
    nodes = bill.read(world.root).nodes
    assert sorted(node.start.instance for node in nodes if node.alive) == sorted(got.handle.ids)
    (extra,) = (node for node in nodes if not node.alive)
    assert all(extra.end_at <= node.start.at for node in nodes if node.alive), "ended before others were asked for"


def test_f8_too_few_every_time_leaves_nothing(world: World):
    control.next_creates(world.root, *["fewer"] * 20)
    with pytest.raises(NoCapacity, match="none of the offers"):
        world.acquire()
    assert bill.read(world.root).alive == ()
    assert world.provider.list_owned("o-1") == ()


def test_f9_late_answers_launch_nothing_again(world: World):
    control.stale(world.root, 1.0)
    got = world.acquire()
    assert got.state.ready
    assert got.tried == ()
    assert len(bill.read(world.root).nodes) == 2


def test_f12_without_capacity_it_is_named_and_nothing_is_made(world: World):
    control.no_capacity(world.root, 60)
    with pytest.raises(NoCapacity) as caught:
        world.acquire()
    assert "no capacity" in str(caught.value)
    assert bill.read(world.root).nodes == ()


def test_the_page_names_all_that_can_be_asked_for():
    page = (Path(__file__).parents[2] / "docs" / "local.md").read_text()
    for name in (*control.FAULTS, "no_capacity_until", "create", "describe_stale_s", control.INTERRUPTED, NOTICE.name):
        assert f"`{name}`" in page or f"/{name}`" in page, f"docs/local.md does not mention {name}"
