"""Trials as an agent starts them: fresh processes, one that fails ends itself alone, and node 0 has the last word."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.machine import ports, procs
from mgpu_train.config import Job, TrialResults
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.trials import part
from mgpu_train.trials.__main__ import WARM_UP, Conductor, _of_all
from mgpu_train.trials.lr_range import curve, suggested
from mgpu_train.trials.part import Part, Ranks
from waiting import until

PARITY = Path(__file__).resolve().parents[1] / "outside" / "parity"
TASKS = """
import os, torch
from mgpu_parity.task import Parity

class Greedy(Parity):
    def loss(self, model, batch):
        if len(batch["bits"]) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().loss(model, batch)

class Hermit(Parity):
    def model(self):
        if os.environ["WORLD_SIZE"] == "2":
            raise ValueError("two are too many")
        return super().model()
"""


def job(trials: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
        "master_addr": "127.0.0.1", "master_port": ports.free(1)[0], "launcher": "python", "trials": trials, **more,
    }  # fmt: skip


def conduct(folder: Path, told: dict[str, Any]) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "own.py").write_text(TASKS)
    (folder / "job.json").write_text(json.dumps(told))
    given = {"MGPU_JOB": str(folder / "job.json"), "MGPU_METRICS_DIR": str(folder / "metrics"), "OMP_NUM_THREADS": "1"}
    given["PYTHONPATH"] = os.pathsep.join([str(PARITY), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "mgpu_train.trials"], cwd=folder, env={**os.environ, **given}, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def rows(folder: Path) -> list[tuple[Any, ...]]:
    found = TrialResults.model_validate_json((folder / "trials.json").read_bytes())
    return [(row.name, row.world_size, row.outcome, row.units_per_s is not None) for row in found.rows]


def test_what_lacks_memory_or_is_refused_is_a_row_and_the_others_are_tried(tmp_path: Path):
    tries = [
        {"name": "four", "train": {"micro_batch": 4}},
        {"name": "no", "train": {"micro_batch": 1}, "refused": "nobody wants it"},
        {"name": "alone", "train": {"strategy": "single"}},
        {"name": "two", "train": {"micro_batch": 2}},
    ]
    train = {"task": "own:Greedy", "global_batch": 8, "steps": 1_000_000}
    ended = conduct(tmp_path / "node", job({"purpose": "tune", "steps": 2, "tries": tries}, train=train))
    _, said = ended.communicate(timeout=600)
    assert ended.returncode == 0, said
    assert rows(tmp_path / "node") == [
        ("four", 2, "out of memory", False),
        ("no", 2, "refused", False),
        ("alone", 2, "refused", False),
        ("two", 2, "ok", True),
    ]
    best = TrialResults.model_validate_json((tmp_path / "node" / "trials.json").read_bytes()).rows[-1]
    assert (best.unit, best.train) == ("numbers", {"micro_batch": 2})
    assert 0 < (best.memory_gib or 0) < 100
    lines = [json.loads(line) for line in (tmp_path / "node" / "metrics" / "rank-0.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["steps"]) for line in lines if line["kind"] == "step"]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert lines[-1]["reason"] == "done"


def test_a_smoke_run_ends_where_it_first_breaks_and_says_so_on_node_0(tmp_path: Path):
    tries = [{"name": "one process", "nodes": 1}, {"name": "2 nodes, 2 processes"}, {"name": "never"}]
    train = {"task": "own:Hermit", "global_batch": 4}
    two = {"nodes": 2, "processes_per_node": 1, "addresses": ["127.0.0.1", "127.0.0.2"]}
    told = job({"purpose": "smoke", "steps": 1, "tries": tries}, train=train, **two)
    nodes = [conduct(tmp_path / f"{rank}", {**told, "node_rank": rank}) for rank in (0, 1)]
    said = [each.communicate(timeout=600)[1] for each in nodes]
    assert [each.returncode for each in nodes] == [1, 0], said
    assert rows(tmp_path / "0") == [("one process", 1, "ok", True), ("2 nodes, 2 processes", 2, "failed", False)]
    last = said[0].strip().splitlines()[-1]
    assert last.startswith("[trials]: TrainError: it breaks with 2 nodes, 2 processes: ")
    assert "two are too many" in last
    assert not (tmp_path / "1" / "trials.json").exists()


@pytest.mark.parametrize(("purpose", "made"), [("smoke", 5), ("lr-range", 5), ("tune", 5 + WARM_UP)])
def test_steps_that_are_not_measured_are_made_where_speeds_are_compared_alone(purpose, made):
    told = Job.model_validate(job({"purpose": purpose, "steps": 5, "tries": [{"name": "x"}]}, train={"steps": 100}))
    assert told.trials is not None
    train = Conductor(told, told.trials, MetricLines(None, 0))._of(told.trials.tries[0]).train
    assert train is not None
    assert (train.steps, train.validate_every) == (made, made)


def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, count: int = 2) -> Ranks:
    """Ranks whose trainer is a line of a shell."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(part.sys, "executable", str(python))
    folder = tmp_path / "trial"
    folder.mkdir()
    monkeypatch.setenv("TOKEN", "hunter22")
    trials = {"purpose": "tune", "tries": [{"name": "x"}], "steps": 2}
    return Ranks(Job.model_validate(job(trials, train={}, processes_per_node=count, secrets=["TOKEN"])), 1, folder)


SPEEDS = """cd $MGPU_METRICS_DIR/.. && mkdir -p metrics; for speed in 1 1 1 1 50 70; do
echo '{"kind": "step", "memory_gib": '$RANK.5', "mfu": 0.4, "images_per_s": '$speed'}' >> metrics/rank-$RANK.jsonl
done; exit"""


@pytest.mark.parametrize(
    ("program", "outcome", "said"),
    [
        (SPEEDS, "ok", ""),
        ("echo 'RuntimeError: [enforce fail] DefaultCPUAllocator: can'\"'\"'t allocate memory: you tried'; exit 1",
         "out of memory", "can't allocate memory"),
        ("echo 'TrainError: `train.strategy`: not so'; exit 1", "refused", "not so"),
        ("kill -9 $$", "failed", "was ended by SIGKILL"),
        ("echo 'ValueError: the token is '$TOKEN; exit 1", "failed", "the token is ***"),
        ("[ $RANK = 1 ] && { sleep 0.2; echo 'ValueError: the cause'; exit 1; }; echo 'gloo: connection lost'; exit 1",
         "failed", "ValueError: the cause"),
    ],
)  # fmt: skip
def test_how_ranks_have_ended(tmp_path: Path, monkeypatch, program: str, outcome: str, said: str):
    found = begin(tmp_path, monkeypatch, program).run(60, lambda: False, lambda: None)
    assert found.outcome == outcome
    assert said in found.said
    if outcome == "ok":
        assert (found.unit, found.units_per_s, found.memory_gib, found.mfu) == ("images", 60, 1.5, 0.4)


def test_what_is_not_through_in_time_is_killed_with_all_that_it_has_started(tmp_path: Path, monkeypatch):
    pid = tmp_path / "pid"
    ranks = begin(tmp_path, monkeypatch, f"sleep 1000 & echo $! > {pid}; wait", count=1)
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), 60)
    child = procs.of(int(pid.read_text()))
    assert child is not None
    found = ranks.run(0, lambda: False, lambda: None)
    assert found.outcome == "too slow"
    until(lambda: not child.alive, 60)


def test_ranks_end_soon_after_those_of_another_node_have_failed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(part, "_GRACE_S", 0.1)
    began = time.monotonic()
    found = begin(tmp_path, monkeypatch, "sleep 1000", count=1).run(600, lambda: True, lambda: None)
    assert (found.outcome, found.consequence) == ("failed", True)
    assert time.monotonic() - began < 300


def test_a_range_of_rates_goes_on_where_it_diverges_and_tells_what_it_suggests(tmp_path: Path):
    tried = {"name": "lr: 1e-05 to 1e+20", "train": {"lr_from": 1e-5, "lr": 1e20}}
    train = {"task": "mgpu_parity.task:Parity", "global_batch": 64, "steps": 1_000_000, "options": {"bits": 4}}
    told = job({"purpose": "lr-range", "steps": 60, "tries": [tried]}, train=train, processes_per_node=1)
    ended = conduct(tmp_path / "node", told)
    _, said = ended.communicate(timeout=600)
    assert ended.returncode == 0, said
    [row] = TrialResults.model_validate_json((tmp_path / "node" / "trials.json").read_bytes()).rows
    assert row.outcome == "ok"
    rates = [each.lr for each in row.rates]
    assert rates[0] == pytest.approx(1e-5)
    assert [after / before for before, after in pairwise(rates[:9])] == pytest.approx([10 ** (25 / 59)] * 8)
    assert row.rates[-1].loss > 10 * row.rates[0].loss, "it has diverged"
    assert f"at lr {row.lr:g}" in said
    assert 1e-4 < (row.lr or 0) < 10


def loss_at(lr: float, falls: float) -> float:
    """Flat, then falling, by most at a rate of 0.01, then rising."""
    return 5 - falls / (1 + (0.01 / lr) ** 2) + lr**2


@pytest.mark.parametrize(("falls", "noise", "found"), [(3.0, 0.0, 0.01), (3.0, 0.05, 0.01), (0.01, 0.5, None)])
def test_the_rate_that_is_suggested_is_where_the_loss_falls_fastest(falls: float, noise: float, found: float | None):
    drawn = random.Random(1)
    steps = [
        (lr, loss_at(lr, falls) + noise * drawn.gauss(0, 1)) for lr in (10 ** (-6 + 7 * at / 99) for at in range(100))
    ]
    rates = curve(steps)
    assert [each.loss for each in rates] == [loss for _, loss in steps]
    lr = suggested(rates)
    assert (lr is None) == (found is None)
    assert lr is None or found is None or found / 2 < lr < found * 2
    assert suggested(rates[:2]) is None
    assert suggested(()) is None


def test_of_all_nodes_the_one_that_is_the_cause_is_believed():
    lost = Part(outcome="failed", said="gloo: connection lost", consequence=True, memory_gib=3)
    cause = Part(outcome="out of memory", said="CUDA out of memory", memory_gib=2)
    found = _of_all([lost, cause])
    assert (found.outcome, found.said, found.memory_gib) == ("out of memory", "CUDA out of memory", 3)
    assert _of_all([Part(units_per_s=4), Part(units_per_s=None)]).units_per_s == 4
