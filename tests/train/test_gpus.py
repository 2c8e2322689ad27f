"""A node has the GPUs that were rented, or nothing trains on it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.gpus import Driver
from mgpu_train.agent.attempt import faults
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job
from mgpu_train.errors import MachineError, TrainError
from mgpu_train.health import gpus
from mgpu_train.health.gpus import Demand, Seen

STARTING = Seen(0, "CUDA error 802: system not yet initialized", starting=True)


class Machine:
    """Says one thing after the other, the last one for ever; its clock runs while it is waited for."""

    def __init__(self, *says: Seen) -> None:
        self.says, self.now, self.looks = list(says), 0.0, 0

    def look(self) -> Seen:
        self.looks += 1
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def demand(self, count: int = 8, wait_s: float = 120) -> Demand:
        return Demand(count, "node 1 (ip-10-0-0-7)", wait_s, self.look, lambda: self.now, self.sleep)


def test_a_driver_that_still_starts_is_waited_for():
    machine = Machine(STARTING, Seen(0, "CUDA error 100: none", starting=True), Seen(8))
    assert machine.demand().unmet() is None
    assert machine.looks == 3


def test_it_is_not_waited_for_without_end_and_the_node_is_named_with_what_it_has():
    machine = Machine(STARTING)
    lack = machine.demand().unmet()
    assert lack is not None
    assert lack.machine
    assert lack.words.startswith("node 1 (ip-10-0-0-7) has 0 of 8 GPUs: CUDA error 802: system not yet initialized")
    assert 120 <= machine.now < 130


def test_a_gpu_that_is_missing_does_not_come_by_waiting():
    machine = Machine(Seen(7))
    lack = machine.demand().unmet()
    assert lack is not None
    assert lack.words == "node 1 (ip-10-0-0-7) has 7 of 8 GPUs"
    assert machine.looks == 1


def test_more_than_is_demanded_is_enough():
    assert Machine(Seen(8)).demand(4).unmet() is None


@pytest.fixture
def driver(tmp_path: Path, require, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(tmp_path / "driver", require)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


def test_what_the_driver_says(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # for a program, not for what was rented
    driver.says(0, 2)
    assert gpus.ask_driver(devices).count == 2
    driver.says(802, 0)
    seen = gpus.ask_driver(devices)
    assert (seen.count, seen.starting) == (0, True)
    assert seen.why == f"CUDA error 802: not ready; 2 device files {devices}/nvidia*"
    driver.says(100, 0)
    assert gpus.ask_driver(devices).starting
    driver.says(214, 0)  # uncorrectable ECC
    assert not gpus.ask_driver(devices).starting


def test_without_a_driver_the_machine_is_at_fault_and_where_an_image_hides_it_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "libcuda.so.1").touch()  # no library: also where this machine has one
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    lack = Demand(1, "node 0", 0, lambda: gpus.ask_driver(tmp_path)).unmet()
    assert lack is not None
    assert lack.machine
    assert "there is no driver" in lack.words
    (tmp_path / "nvidia0").touch()
    lack = Demand(1, "node 0", 0, lambda: gpus.ask_driver(tmp_path)).unmet()
    assert lack is not None
    assert not lack.machine
    assert "NVIDIA_DRIVER_CAPABILITIES" in lack.words


@pytest.mark.parametrize(
    ("script", "why", "starting"),
    [
        (None, "the driver cannot be asked: ", False),
        ("exec sleep 60", "the driver did not answer within 0.01 s; 1 device files", True),
        ("exit 7", "the driver gave no answer (exit status 7); 1 device files", False),
        ("echo '{\"gpus\": 8}'", "the driver gave no answer (exit status 0); 1 device files", False),
    ],
)
def test_a_driver_that_gives_no_answer_has_no_gpus_and_says_why(tmp_path, monkeypatch, script, why, starting):
    """The process that asks is a program of the test's."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755 if script else 0o644)
    monkeypatch.setattr(gpus.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(gpus, "LOOK_S", 0.01 if starting else 60)
    seen = gpus.ask_driver(tmp_path)
    assert (seen.count, seen.starting, seen.hidden) == (0, starting, False)
    assert seen.why.startswith(why), seen.why


@pytest.mark.parametrize(
    ("init", "count", "seen"),
    [
        (0, 0, Seen(8)),
        (802, 0, Seen(0, "CUDA error 802: in words", starting=True)),
        (100, 0, Seen(0, "CUDA error 100: no CUDA-capable device is detected", starting=True)),
        (0, 214, Seen(0, "CUDA error 214: unknown")),
        (None, 0, Seen(0, "there is no driver: no such function", hidden=True)),
    ],
)
def test_what_its_library_answers(monkeypatch, init, count, seen):
    def counted(to):
        to._obj.value = 8
        return count

    def named(code, to):
        to._obj.value = b"in words"
        return code != 802

    def begun(_flags):
        if init is None:
            raise AttributeError("no such function")
        return init

    library = SimpleNamespace(cuInit=begun, cuDeviceGetCount=counted, cuGetErrorString=named)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    assert gpus._ask() == seen


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_where_gpus_were_rented_a_rank_never_takes_the_cpu(monkeypatch: pytest.MonkeyPatch):
    import torch
    from mgpu_train import parallel

    joined: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: joined.append(backend))
    with pytest.raises(MachineError, match=r"^node 1 .* has 7 of 8 GPUs$"):
        parallel.join(60, 60, Machine(Seen(7)).demand())
    with pytest.raises(TrainError, match="has its 8 GPUs, but PyTorch sees none of them") as caught:
        parallel.join(60, 60, Machine(Seen(8)).demand())
    assert not isinstance(caught.value, MachineError), "another machine would not help"
    assert joined == []


def test_a_rank_says_its_gpu_when_it_joins(monkeypatch: pytest.MonkeyPatch):
    import torch
    from mgpu_train import parallel

    class Joined(Exception):
        pass

    def joins(backend, *, device_id=None, **_):
        raise Joined(backend, str(device_id))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", joins)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(Joined) as caught:
        parallel.join(60, 60, Machine(Seen(2)).demand(2))
    assert caught.value.args == ("nccl", "cuda:1")


def test_the_agent_knows_a_ranks_word_for_a_machine_without_gpus():
    line = "[rank9]: MachineError: node 1 (ip-10-0-0-7) has 7 of 8 GPUs"
    found = faults.find((line,), last_words=line, nodes=2)
    assert found is not None
    assert (found.sign.fault, found.sign.machine, found.rank) == (Fault.INFRASTRUCTURE, True, 9)
    assert "has 7 of 8 GPUs" in found.line


# --- the agent --------------------------------------------------------------------------------------------------------


def test_nothing_is_started_on_a_node_that_lacks_gpus(node, driver):
    node.env |= driver.env
    driver.says(0, 1)
    node.program("import pathlib; pathlib.Path('started').touch()")
    node.job(checkpoint=None, gpus=2)
    node.start()
    ended = node.ended()
    assert (ended["phase"], ended["fault"], ended["suspect"]) == ("failed", "infrastructure", True)
    assert ended["reason"].startswith("node 0 (")
    assert "has 1 of 2 GPUs" in ended["reason"]
    assert not (node.run / "work" / "started").exists()


def test_a_node_whose_driver_starts_late_trains(node, driver):
    node.env |= driver.env
    driver.says(802, 0)
    node.program("print('trained')")
    node.job(checkpoint=None, gpus=2)
    node.start()
    node.until(lambda: node.said["beat"] > 2)
    assert node.said["phase"] == "preparing"
    driver.says(0, 2)
    assert node.ended()["phase"] == "done"


def test_a_job_without_gpus_demands_none():
    job = {"run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 2}
    where = {"master_addr": "h", "master_port": 1, "command": ["x.py"]}
    assert Job.model_validate({**job, **where}).demand is None
