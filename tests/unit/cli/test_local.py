"""`mgpu local`: which machine it finds, what it orders, what it says. A `sleep` stands for each machine's node
process.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mgpu import paths
from mgpu.cli import main
from mgpu.providers.local import bill, control, files, procs
from mgpu.providers.local.nodes import Instance, NodeSpec
from mgpu.run.record import record
from mgpu.run.record.record import Record, State


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def mgpu(xdg: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `mgpu ...` in this process."""

    def call(*args: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def root(xdg: Path) -> Path:
    folder = paths.state_dir() / "local"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def machine(root: Path) -> Iterator[Callable[..., Instance]]:
    """Makes a machine of a fleet; `alive=False`: one that ended before."""
    node_processes: list[subprocess.Popen] = []

    def make(name: str, fleet: str = "mine-run-1", *, alive: bool = True, owner: str = "") -> Instance:
        instance, rank = Instance(root, name), int(name[-1])
        owner = owner or paths.owner()
        instance.register(NodeSpec(rank, fleet, 1, owner, "key", "python", 300, 600, 0.03, "spot"))
        node_process = subprocess.Popen(["sh", "-c", "trap '' USR1; echo; exec sleep 60"], stdout=subprocess.PIPE)
        assert node_process.stdout is not None
        node_process.stdout.readline()
        node_processes.append(node_process)
        process = procs.of(node_process.pid)
        assert process is not None
        assert instance.claim(process)
        who = (process.pid, process.start_ticks, process.boot_id)
        bill.write_start(root, bill.Start(time.time(), name, fleet, 1, owner, *who, 0.03, "spot"))
        if not alive:
            node_process.kill()
            node_process.wait()
            instance.ask_to_end("its folder is gone")
            assert instance.settle()
        return instance

    yield make
    for node_process in node_processes:
        node_process.kill()
        node_process.communicate()


def run(name: str = "run-1", created_at: float = 1.0, state: State = State.RUNNING, **more: Any) -> None:
    record.save(
        Record(
            **{
                "run_id": name,
                "name": "a",
                "project": "/p",
                "project_base": "/p",
                "run_file": "/p/mgpu.yaml",
                "stack": name,
                "own_stack": True,
                "fleet_name": f"mine-{name}",
                "provider": "local",
                "nodes": 2,
                "created_at": created_at,
                "state": state,
            }
            | more
        )
    )


def ordered(instance: Instance) -> dict[str, Any] | None:
    return files.load(instance.record / control.FILE)


def test_a_rank_is_the_newest_runs_that_goes_on(mgpu, machine):
    other, mine = machine("aaaaaaaaaa-1"), machine("bbbbbbbbbb-1", "mine-run-2")
    run("run-1")
    run("run-2", created_at=2.0)
    run("run-3", created_at=3.0, state=State.SUCCEEDED)
    run("run-4", created_at=4.0, provider="elsewhere")
    done = mgpu("local", "kill", "1")
    assert done.code == 0
    assert ordered(mine) == {"action": "kill"}
    assert ordered(other) is None
    assert "node 1 of run run-2 (machine bbbbbbbbbb-1): taken now" in done.err
    assert "mgpu attach run-2" in done.err


@pytest.mark.parametrize("node", ["run-1/1", "run-/1", "aaaaaaaaaa-1"])
def test_a_node_is_named_by_its_run_or_by_its_machine(mgpu, machine, node: str):
    wanted, other = machine("aaaaaaaaaa-1"), machine("aaaaaaaaaa-0")
    run("run-1")
    assert mgpu("local", "kill", node).code == 0
    assert ordered(wanted) == {"action": "kill"}
    assert ordered(other) is None


def test_the_machine_of_a_rank_is_the_one_that_replaced_the_lost(mgpu, machine):
    machine("aaaaaaaaaa-0", alive=False)
    replaced = machine("bbbbbbbbbb-0")
    machine("cccccccccc-0", owner="somebody else")
    run("run-1")
    assert mgpu("local", "kill", "0").code == 0
    assert ordered(replaced) == {"action": "kill"}


def test_a_fleet_of_the_users_own_program_is_known_by_what_it_exports(mgpu, machine):
    exported = machine("aaaaaaaaaa-0", "theirs")
    run("run-1", fleet={"fleet": "theirs"})
    assert mgpu("local", "kill", "0").code == 0
    assert ordered(exported) == {"action": "kill"}


@pytest.mark.parametrize(("options", "seconds"), [((), 120), (("--notice", "10"), 10), (("--notice", "0.5"), 0.5)])
def test_a_notice_says_when_the_machine_goes(mgpu, machine, options: tuple[str, ...], seconds: float):
    instance = machine("aaaaaaaaaa-1")
    run("run-1")
    before = time.time()
    done = mgpu("local", "interrupt", "1", *options)
    order = ordered(instance)
    assert order is not None
    assert order["action"] == "notice"
    assert before + seconds <= order["at"] <= time.time() + seconds
    assert f"in {seconds:g} s, at {time.strftime('%H:%M:%S', time.localtime(order['at']))}" in done.err


def test_a_machine_without_a_run_is_taken_too(mgpu, machine):
    machine("aaaaaaaaaa-0")
    done = mgpu("local", "interrupt", "aaaaaaaaaa-0", "--notice", "5")
    assert done.code == 0
    assert "machine aaaaaaaaaa-0" in done.err
    assert "mgpu ls" in done.err


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("2", "nodes 0 to 1"),
        ("run-1/7", "nodes 0 to 1"),
        ("run-9/0", "no run `run-9`"),
        ("one", "node_rank"),
        ("/1", "node_rank"),
        ("1.5", "node_rank"),
        ("9" * 5000, "node_rank"),
        ("../../etc", "node_rank"),
        ("0123456789-3", "no machine 0123456789-3"),
        ("aaaaaaaaaa-0", "gone already"),
        ("0", "its folder is gone"),
        ("1", "none was made yet"),
    ],
)
def test_a_node_that_is_not_there_is_bad_input(mgpu, machine, root: Path, node: str, said: str):
    machine("aaaaaaaaaa-0", alive=False)
    run("run-1")
    for command in ("kill", "interrupt"):
        done = mgpu("local", command, node)
        assert done.code == 2
        assert said in done.err
    assert not list(root.glob(f"**/{control.FILE}"))


def test_without_a_run_in_progress_a_rank_is_nobodys(mgpu):
    run("run-1", state=State.FAILED)
    done = mgpu("local", "kill", "0")
    assert done.code == 2
    assert "no run of provider local is in progress" in done.err


@pytest.mark.parametrize("args", [("interrupt", "0", "--notice", "-1"), ("no-capacity", "-5"), ("no-capacity", "nan")])
def test_no_time_is_negative(mgpu, machine, root: Path, args: tuple[str, ...]):
    machine("aaaaaaaaaa-0")
    run("run-1")
    done = mgpu("local", *args)
    assert done.code == 2
    assert "not a time from now on" in done.err
    assert not list(root.glob(f"**/{control.FILE}"))


def test_no_capacity_for_a_time_and_again(mgpu, root: Path):
    before = time.time()
    done = mgpu("local", "no-capacity", "60")
    wanted = files.load(root / control.FILE)
    assert wanted is not None
    assert before + 60 <= wanted["no_capacity_until"] <= time.time() + 60
    assert "for 60 s, until" in done.err
    assert "has capacity" in mgpu("local", "no-capacity", "0").err
    assert files.load(root / control.FILE) == {}


def test_a_lost_answer_is_asked_for_once_a_call(mgpu, root: Path):
    for _ in range(2):
        assert mgpu("local", "lose-answer").code == 0
    assert files.load(root / control.FILE) == {"create": ["lost", "lost"]}


def test_the_group_says_what_a_node_is(mgpu):
    assert "node_rank" in mgpu("local", "--help").out
    assert os.linesep + "  interrupt" in mgpu("local", "--help").out
