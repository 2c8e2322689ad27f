"""Before a program is started the GPUs of its machines are examined; one that stands out is named and replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
from fakes.gpus import Driver
from fakes.nodes import Node
from mgpu_train.agent.attempt import faults, gpu_health
from mgpu_train.agent.launchers import torchrun
from mgpu_train.agent.machine import ports
from mgpu_train.agent.phases.preflight import by_launchers
from mgpu_train.agent.status.log import Log, last_words, tail
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Job
from mgpu_train.health import figures, preflight, processors
from mgpu_train.names import PREFLIGHT
from torch import distributed

XID = "NVRM: Xid (PCI:0000:b7:00): {}, pid=1234, name=python3"


def measured(rank: int, *, tflops: float = 700, right: bool = True, gb_per_s: float | None = 350) -> dict[str, Any]:
    both = {"right": right, "gb_per_s": gb_per_s}
    return {"rank": rank, "tflops": tflops, "inside": both, "between": {"right": True, "gb_per_s": 40}}


def judged(*, node_rank: int = 1, **odd: Any) -> str | None:
    """Of two nodes with two GPUs each; rank 3 is `odd`."""
    known = [measured(rank, **(odd if rank == 3 else {})) for rank in range(4)]
    return figures.by_figures(known, node_rank, 2)


def test_a_fleet_of_equals_is_fit():
    assert judged() is None
    assert judged(tflops=600, gb_per_s=300) is None, "GPUs of one kind are not all alike"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"tflops": 300}, "the GPU of rank 3 does 300 TFLOPS, and the fleet's median is 700 TFLOPS"),
        ({"right": False}, "a sum over its own GPUs is wrong on rank 3"),
        ({"gb_per_s": 20}, "between its GPUs go 20 GB/s, and the fleet's median is 350"),
    ],
)
def test_the_one_that_stands_out_is_named_by_its_own_node_alone(odd, words):
    assert judged(**odd) == words
    assert judged(node_rank=0, **odd) is None


def test_alone_a_gpu_is_compared_with_nothing():
    assert figures.by_figures([measured(0, tflops=3, gb_per_s=None)], 0, 1) is None


@pytest.mark.parametrize("known", [[], [{}], [{"rank": 0}], [{"rank": "x"}], [measured(0) | {"inside": None}]])
def test_figures_that_make_no_sense_say_nothing(known):
    assert figures.by_figures(known, 0, 1) is None
    assert figures.between(known) is None


def test_what_the_driver_knows():
    assert gpu_health.by_state("00000000:B7:00.0, 0, Disabled\n00000000:B9:00.0, [N/A], [N/A]\n") is None
    assert gpu_health.by_state("00000000:B7:00.0, 0, Disabled\n00000000:B9:00.0, 4, Disabled\n") == (
        "GPU 00000000:B9:00.0 has 4 uncorrectable ECC errors"
    )
    assert (gpu_health.by_state("00000000:B7:00.0, 0, Disabled\n00000000:B9:00.0, [N/A], Enabled\n") or "").startswith(
        "GPU 00000000:B9:00.0 is in MIG mode"
    )
    assert gpu_health.by_rows("00000000:B7:00.0, No, No\n00000000:B9:00.0, 0, 0\n") is None
    assert "has to be reset" in (gpu_health.by_rows("00000000:B7:00.0, Yes, No\n") or "")
    assert "no spare memory" in (gpu_health.by_rows("00000000:B7:00.0, No, Yes\n") or "")


def status(name: str, *links: str, speed: str = "26.562 GB/s") -> str:
    """What `nvidia-smi nvlink --status` prints of GPUs of this name: of each its links, `+` an active one, `-` one that
    is not; or what NVML says instead."""
    lines = []
    for number, each in enumerate(links):
        lines.append(f"GPU {number}: {name} (UUID: GPU-6968dfc2-d444-d92c-c36b-6abe53445cb9)")
        said = [f"Link {link}: {speed if sign == '+' else '<inactive>'}" for link, sign in enumerate(each)]
        lines += [f"\t {line}" for line in (said if set(each) <= {"+", "-"} else [each])]
    return "\n".join(lines) + "\n"


# as NVML puts it for a GPU without any (leptonai/gpud#1085)
NO_LINK = "NVML: Unable to retrieve NVLink information as all links are inActive"
# two cards of an HPE DL380a Gen11 with three bridges, which are well: `nvidia-smi nvlink -s` of an H100 PCIe
THREE_BRIDGES = "++++--++++--++++--"


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        # Azure/azhpc-diagnostics#73: `nvidia-smi nvlink -s` of a machine whose GPU 3 is ill
        (
            status("Tesla V100-SXM2-32GB", *["++++++"] * 3, "+++-+-", *["++++++"] * 4, speed="25.781 GB/s"),
            "GPU 3 (Tesla V100-SXM2-32GB) has 4 active NVLinks, and the machine's others 6",
        ),
        (
            status("NVIDIA H100 80GB HBM3", *["+" * 18] * 4, NO_LINK, *["+" * 18] * 3),
            "GPU 4 (NVIDIA H100 80GB HBM3) has 0 active NVLinks, and the machine's others 18",
        ),
        (status("NVIDIA H100 80GB HBM3", *["+" * 18] * 8), None),
        (status("NVIDIA H100 PCIe", THREE_BRIDGES, THREE_BRIDGES), None),
        (status("NVIDIA A100 80GB PCIe", "+" * 12, "+" * 12, NO_LINK), None),  # the third has no bridge
        (status("NVIDIA A40", "+" * 4, "+" * 4, NO_LINK), None),  # nor has this one
        (status("NVIDIA A10G", *["NVML: Unable to retrieve NVLink information: Not Supported"] * 4), None),
        (status("NVIDIA H200", "+" * 18, "+" * 17), None),  # which of two is ill nobody knows
        ("", None),
    ],
    ids=["V100", "none", "all", "bridges", "one without", "A40", "no NVLink", "two", "nothing"],
)
def test_a_gpu_with_fewer_nvlinks_than_the_machines_others_is_named(text, odd):
    assert gpu_health.by_links(text) == odd


def test_what_the_kernel_knows():
    assert gpu_health.by_kernel([XID.format(13), "EXT4-fs (nvme0n1p1): mounted"]) is None, "a program made it fail"
    assert "Xid" in (gpu_health.by_kernel([XID.format(79)]) or "")
    assert gpu_health.by_kernel(["NVRM: GPU 0000:b7:00.0: GPU has fallen off the bus."]) is not None


# --- nodes without GPUs -----------------------------------------------------------------------------------------------

JOB = {
    "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 1, "nodes": 4, "processes_per_node": 2,
    "master_addr": "10.0.0.1", "master_port": 1, "preflight_port": 3, "command": ["x.py"],
}  # fmt: skip


def on_nodes(*gflops: float, wrong: int = -1) -> list[dict[str, Any]]:
    """What nodes without GPUs have measured; `wrong`: the one whose sum over all was."""
    return [
        measured(rank, tflops=each / 1000, gb_per_s=None) | {"between": {"right": rank != wrong, "gb_per_s": 1.25}}
        for rank, each in enumerate(gflops)
    ]


def test_launchers_of_several_nodes_without_gpus_are_told_where_to_meet():
    (told,) = by_launchers(Job.model_validate(JOB)).items()
    assert told[0] == PREFLIGHT
    at = processors.Meeting(**json.loads(told[1]))
    assert (at.node_rank, at.nodes, at.host, at.port) == (1, 4, "10.0.0.1", 3)
    assert by_launchers(Job.model_validate(JOB | {"launcher": "accelerate"}))


@pytest.mark.parametrize(
    "change",
    [{"gpus": 8}, {"nodes": 1, "node_rank": 0}, {"preflight": False}, {"preflight_port": None}, {"launcher": "bash"}],
    ids=["GPUs", "one node", "off", "no port", "no torch"],
)
def test_nothing_else_is_measured_by_launchers(change):
    """GPUs by a program of their own; one node has no link; bash imports no torch that could measure."""
    assert by_launchers(Job.model_validate(JOB | change)) == {}


def test_a_processor_that_stands_out_is_named_by_its_own_node_alone():
    known = on_nodes(150, 148, 60, 152)
    slow = "the processor of node 2 does 60 GFLOPS, and the fleet's median is 149 GFLOPS"
    assert [processors.judged(known, node).machine for node in range(4)] == [None, None, slow, None]
    assert processors.judged(known, 0).said == "4 nodes, 60 GFLOPS each at least, over all nodes 1.25 GB/s"
    assert processors.judged(on_nodes(150, 148, 80, 152), 2).machine is None, "two generations of one machine type"


def test_a_sum_over_all_nodes_that_is_wrong_blames_no_machine():
    found = [processors.judged(on_nodes(150, 150, wrong=1), node) for node in range(2)]
    assert [(each.machine, each.network) for each in found] == [(None, "a sum over all nodes is wrong on rank 1")] * 2


@pytest.mark.parametrize(
    ("known", "fit", "suspect"), [((150, 150), True, None), ((40, 150), False, True), ((1, 1, -1), False, False)]
)
def test_the_agent_knows_an_unfit_machine_by_what_its_launcher_says(monkeypatch, capsys, tmp_path, known, fit, suspect):
    """And nothing of it where all is well: what a program that fails afterwards has said stays the last word."""
    found = processors.judged(on_nodes(*known[:2], wrong=0 if len(known) > 2 else -1), 0)
    monkeypatch.setattr(processors, "examine", lambda _at: found)
    assert torchrun._fit(processors.Meeting(0, 2, "h", 3, 1, 1)) is fit
    said = capsys.readouterr().err
    assert "preflight: 2 nodes, " in said
    log = Log(tmp_path / "log")
    os.write(log.fd, said.encode())
    lines = tail(log, 0)
    sign = faults.find(lines, last_words=last_words(lines), nodes=2)
    if fit:
        assert lines == ()
    else:
        assert sign is not None
        assert (sign.sign.fault, sign.sign.machine) == (Fault.INFRASTRUCTURE, suspect)


def test_a_gloo_that_cannot_be_used_says_nothing_of_a_machine(monkeypatch):
    def fails(*_given: object, **_named: object) -> None:
        raise RuntimeError("Unable to find address for: eth7")

    at = processors.Meeting(0, 2, "127.0.0.1", 3, 1, 1)
    monkeypatch.setattr(distributed, "TCPStore", lambda *_given: None)
    monkeypatch.setattr(distributed, "init_process_group", fails)
    assert processors.examine(at) == processors.Found("nothing is measured: Unable to find address for: eth7")
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert processors.examine(at) == processors.Found("nothing is measured: this torch has no gloo")


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_know_what_each_has_measured(tmp_path: Path, nodes: int):
    """Two ranks, on the processor."""
    port, here = str(ports.free(1)[0]), 2 // nodes
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    started = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}
        env = {**os.environ, **world, **place, preflight.FILE: str(tmp_path / f"{rank // here}.json")}
        started.append(ranks.start("mgpu_train.health.preflight", [], tmp_path / "said", env))
    try:
        assert [rank.wait() for rank in started] == [0, 0], started[0].said
    finally:
        for rank in started:
            rank.kill()
    first, *others = (json.loads((tmp_path / f"{node}.json").read_text())["ranks"] for node in range(nodes))
    assert others in ([], [first]), "every node has the same to judge by"
    assert [each["rank"] for each in first] == [0, 1]
    for each in first:
        assert each["tflops"] > 0
        assert (each["inside"]["right"], each["between"]["right"]) == (True, True)
        assert each["between"]["gb_per_s"] > 0
        assert (each["inside"]["gb_per_s"] is None) == (nodes == 2), "alone on its node"


# --- the agent --------------------------------------------------------------------------------------------------------

SMI = """#!/bin/sh
case "$1" in
    --query-gpu=*) printf '00000000:B7:00.0, {ecc}, Disabled\\n' ;;
    --query-remapped-rows=*) printf '00000000:B7:00.0, {pending}, No\\n' ;;
esac
"""


@pytest.fixture
def machine(node: Node, tmp_path: Path, require) -> Node:
    """A node with one GPU, as far as its driver says."""
    driver = Driver(tmp_path / "driver", require)
    driver.says(0, 1)
    (tmp_path / "bin").mkdir()
    node.env |= driver.env | {"PATH": f"{tmp_path / 'bin'}:{node.env['PATH']}"}
    node.program("import pathlib; pathlib.Path('started').touch()")
    return node


def smi(tmp_path: Path, ecc: str = "0", pending: str = "No") -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI.format(ecc=ecc, pending=pending))
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(("odd", "words"), [({"ecc": "3"}, "3 uncorrectable ECC"), ({"pending": "Yes"}, "be reset")])
def test_nothing_is_started_on_a_broken_gpu(machine: Node, tmp_path: Path, odd, words):
    smi(tmp_path, **odd)
    machine.job(checkpoint=None, gpus=1)
    machine.start()
    ended = machine.ended()
    assert (ended["phase"], ended["fault"], ended["suspect"]) == ("failed", "infrastructure", True)
    assert ended["reason"].startswith("preflight: node 0 (")
    assert words in ended["reason"]
    assert not (machine.run / "work" / "started").exists()


def test_preflight_false_asks_nothing(machine: Node, tmp_path: Path):
    smi(tmp_path, ecc="3")
    machine.job(checkpoint=None, gpus=1, preflight=False)
    machine.start()
    assert machine.ended()["phase"] == "done"
    assert "preflight" not in machine.log


def test_a_fit_machine_is_measured_and_trains(machine: Node, tmp_path: Path):
    smi(tmp_path)
    machine.env["CUDA_VISIBLE_DEVICES"] = ""
    machine.job(checkpoint=None, gpus=1, preflight_port=ports.free(1)[0])
    machine.start()
    assert machine.ended()["phase"] == "done", machine.log
    assert "preflight: 1 ranks, " in machine.log
    assert (machine.run / "work" / "started").exists()


HANGS = """
import json, os, pathlib, sys, time
if "mgpu_train.agent.launchers.torchrun" in sys.argv:
    if {part!r}:
        pathlib.Path(os.environ["MGPU_PREFLIGHT_FILE"]).write_text(json.dumps({{"part": {part!r}}}))
    time.sleep(300)
"""


@pytest.mark.parametrize(("part", "suspect"), [("matmul", True), ("inside", True), ("between", False), ("", False)])
def test_a_part_that_hangs_ends_the_attempt_and_what_is_this_machines_alone_names_it(
    machine: Node, tmp_path: Path, part, suspect
):
    """A module of the interpreter's start hangs in torchrun's place."""
    smi(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGS.format(part=part).replace("sys.argv", "sys.orig_argv"))
    machine.job(
        checkpoint=None, gpus=1, preflight_port=1, env={"PYTHONPATH": str(tmp_path / "site")},
        timeouts={"preflight_s": 1, "rendezvous_s": 1},
    )  # fmt: skip
    machine.start()
    ended = machine.ended()
    assert (ended["fault"], ended["suspect"]) == ("infrastructure", suspect), ended["reason"]
    assert "preflight_s" in ended["reason"]
    assert not (machine.run / "work" / "started").exists()


def test_what_cannot_be_measured_ends_nothing(machine: Node, tmp_path: Path):
    """Without nvidia-smi, and with a torchrun that fails."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nif 'mgpu_train.agent.launchers.torchrun' in sys.orig_argv: sys.exit('no such thing')\n"
    )
    machine.job(checkpoint=None, gpus=1, preflight_port=1, env={"PYTHONPATH": str(tmp_path / "site")})
    machine.start()
    assert machine.ended()["phase"] == "done", machine.log
    assert "says nothing of this machine" in machine.log
