"""`make bench-gpu` where no GPU is: each of its parts, in small and on a CPU, and what it prints of them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from bench import checkpoint_stall, gpu
from bench.gpu_parts import PARTS, READ, WAITS, Shape
from bench.report import Report

SMALL = {"layers": 2, "dim": 32, "heads": 2}
TINY = Shape(
    model=SMALL, seq_len=16, batch=4, steps=8, warm=4, precision="fp32", compiler=None, network="resnet18", width=4,
    images=64, image_batch=16, epochs=2, saved=SMALL, rounds=1,
)  # fmt: skip
GPU = {"name": "NVIDIA H100 80GB HBM3", "gib": 79.1, "count": 1, "capability": "sm_90", "peak_tflops": 989.4}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all parts, which run side by side."""
    out = tmp_path_factory.mktemp("bench")
    started = {}
    for number, name in enumerate(PARTS):
        (out / str(number)).mkdir()
        given = [name, out / str(number), json.dumps(asdict(TINY))]
        started[name] = ranks.start("bench.gpu_parts", given, out / f"said-{number}", os.environ)
    try:
        assert {name: part.wait() for name, part in started.items()} == dict.fromkeys(PARTS, 0), [
            part.said for part in started.values()
        ]
    finally:
        for part in started.values():
            part.kill()
    return {name: json.loads(part.said.strip().splitlines()[-1]) for name, part in started.items()}


def test_the_loop_beside_ours_trains_the_same(figures):
    ours, hand = figures["ours"], figures["by hand"]
    assert ours["losses"] == pytest.approx([hand["losses"][step - 1] for step in (4, 8)], rel=1e-5)
    assert min(each["units_per_s"] for each in (ours, hand)) > 0
    assert ours["gib"] / hand["gib"] == pytest.approx(1, rel=0.3)


def test_all_that_a_gpu_has_to_show_is_measured_on_a_cpu_as_well(figures):
    assert figures["device"]["tflops"] > 0
    assert figures["compile"]["differ"] < 1e-5
    assert figures["compile"]["headers"] in (True, False)
    assert [figures["waits"][name] for name in WAITS] == [0] * len(WAITS), "there is nothing to wait for"
    assert figures["waits"][READ] > 1, "but numbers are read, and seen"
    assert figures["resnet"]["epoch_s"] == pytest.approx(64 / figures["resnet"]["units_per_s"])
    assert set(figures["stall"]["saves"]) >= {checkpoint_stall.WHOLE, checkpoint_stall.OUTSIDE, "mgpu"}
    assert all(len(taken) == 2 for taken in figures["stall"]["saves"].values()), "the first one, and a round"
    assert figures["resume"]["gb"] * 1e9 > 3 * 4 * 2 * 32 * 32
    assert min(figures["resume"][f"{name}_s"] for name in ("save", "upload", "fetch", "load")) > 0


def test_each_part_is_told_with_what_it_must_reach(figures, capsys):
    known = {**figures, "device": {**figures["device"], **GPU}, "tests": {"passed": True, "said": ""}}
    gpu.conduct(Report(), list(gpu.PARTS), lambda name, _: known[name])
    said = capsys.readouterr().out
    assert said.partition("what it must reach")[2].count("\n  ") >= 18
    assert "1 x NVIDIA H100 80GB HBM3, 79.1 GiB, sm_90" in said
    assert "tokens/s over by hand" in said


def test_a_part_that_fails_costs_no_other_one_and_what_has_no_time_is_named(figures, capsys, monkeypatch):
    asked = []

    def part(name: str, limit_s: float) -> dict[str, Any]:
        asked.append((name, limit_s <= gpu.PART_S))
        if name == "compile":
            monkeypatch.setattr(gpu, "WHOLE_S", -1.0)
            raise gpu.Failed("gcc: not found")
        return {**figures[name], **GPU}

    gpu.conduct(Report(), ["device", "compile", "waits", "tests"], part)
    assert asked == [("device", True), ("compile", True)]
    summary = capsys.readouterr().out.partition("what it must reach")[2]
    assert "compile: gcc: not found" in summary
    assert summary.count("not run: the -1 s of all parts are over") == 2
    assert summary.count("NOT MET") >= 3


def test_without_a_gpu_it_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU: PyTorch ")
    with pytest.raises(SystemExit, match="no part mfu; there are device, compile"):
        gpu.main(["mfu"])


def test_a_part_runs_in_a_process_whose_last_words_are_told(monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", Path(__file__).parents[2])
    with pytest.raises(gpu.Failed, match="KeyError: 'absent'"):
        gpu.run("absent", 240)
