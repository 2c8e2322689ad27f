"""What `--smoke` and `--tune` make of a run file, and what `--write` makes of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu.errors import InputError
from mgpu.spec import trials
from mgpu.spec.load import load, loads, text_of, whole
from mgpu.spec.text.change import Change

TEXT = """\
name: tiny
provider: local
nodes: 2
processes_per_node: 2
market: spot
max_price_usd_per_hour: 1
max_hours: 1
expect: {loss: {max: 1}}
recovery: {attempts: 3, wait_minutes: 2}
train: {strategy: fsdp, global_batch: 32}   # ours
"""
WHOLE = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}


def file(tmp_path: Path, more: str = "", text: str = TEXT) -> Path:
    path = tmp_path / "mgpu.yaml"
    path.write_text(text + more)
    return path


def test_smoke_is_one_process_one_node_and_all_each_rank_with_as_much_to_do(tmp_path: Path):
    spec = trials.smoke(load(file(tmp_path)))
    assert spec.trials is not None
    known = [(t.name, t.nodes, t.processes_per_node, t.train, t.may_lack_memory) for t in spec.trials.tries]
    assert known == [
        ("one process", 1, 1, {"global_batch": 8}, True),
        ("one node, 2 processes", 1, 2, {"global_batch": 16}, True),
        ("2 nodes, 4 processes", None, None, {}, False),
    ]
    assert (spec.name, spec.checkpoint, spec.expect, spec.recovery.attempts) == ("tiny-smoke", "none", {}, 1)
    assert loads(text_of(spec, tmp_path / "mgpu.yaml"), "kept") == spec


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("train.strategy=hsdp", {"strategy": "fsdp", **WHOLE}),
        ("train.tensor_parallel=2", {"strategy": "fsdp", **WHOLE}),
        ("train={strategy: ddp, context_parallel: 2}", {"strategy": "ddp", **WHOLE}),
        ("train.strategy=ddp", {}),
    ],
)
def test_one_process_is_asked_for_nothing_that_it_cannot_do(tmp_path: Path, change: str, first: dict[str, Any]):
    spec = trials.smoke(load(file(tmp_path), [Change.of("--set", change)]))
    assert spec.trials is not None
    tried = spec.trials.tries[0]
    assert {key: value for key, value in tried.train.items() if key != "global_batch"} == first
    assert tried.may_lack_memory == (change != "train.strategy=ddp")


def test_what_is_the_same_is_tried_once(tmp_path: Path):
    changes = [Change.of("--set", each) for each in ("nodes=1", "processes_per_node=1")]
    spec = trials.smoke(load(file(tmp_path), changes))
    assert spec.trials is not None
    assert [trial.name for trial in spec.trials.tries] == ["one process"]


def test_tune_tries_every_combination_of_the_matrix_and_knows_what_cannot_be(tmp_path: Path):
    more = "matrix: {train.strategy: [ddp, single], train.micro_batch: [8, 0]}\n"
    spec = trials.tune(whole(file(tmp_path, more)))
    assert spec.trials is not None
    assert [(trial.name, bool(trial.refused)) for trial in spec.trials.tries] == [
        ("strategy: ddp, micro_batch: 8", False),
        ("strategy: ddp, micro_batch: 0", True),
        ("strategy: single, micro_batch: 8", True),
        ("strategy: single, micro_batch: 0", True),
    ]
    assert "single is for one process" in spec.trials.tries[2].refused
    assert (spec.matrix, spec.outputs) == ({}, ("trials.json",))
    assert loads(text_of(spec, tmp_path / "mgpu.yaml"), "kept") == spec


def test_without_a_matrix_tune_tries_eight_on_a_cpu_and_compiles_beside_gpus_alone(tmp_path: Path):
    spec = trials.tune(whole(file(tmp_path)))
    assert spec.trials is not None
    assert len(spec.trials.tries) == 8
    assert not any(trial.refused for trial in spec.trials.tries)
    assert {trial.train["micro_batch"] for trial in spec.trials.tries} == {8, 4}
    gpus = trials.tune(spec.model_copy(update={"trials": None, "gpus_per_node": 2, "processes_per_node": None}))
    assert gpus.trials is not None
    assert {trial.train["compile"] for trial in gpus.trials.tries} == {False, True}


@pytest.mark.parametrize(
    ("given", "low", "high"), [((), 1e-6, 1.0), (("train.lr_from=1e-4", "train.lr=0.1"), 1e-4, 0.1)]
)
def test_a_range_of_rates_is_one_training_with_all_of_them(tmp_path: Path, given: tuple[str, ...], low, high):
    spec = trials.lr_range(load(file(tmp_path), [Change.of("--set", each) for each in given]))
    assert spec.trials is not None
    assert [trial.train for trial in spec.trials.tries] == [{"lr_from": low, "lr": high}]
    assert (spec.name, spec.trials.purpose, spec.trials.steps) == ("tiny-lr-range", "lr-range", 100)
    assert loads(text_of(spec, tmp_path / "mgpu.yaml"), "kept") == spec


@pytest.mark.parametrize("key", ["train.lr", "train.global_batch", "nodes", "micro_batch"])
def test_tune_refuses_what_is_not_about_speed(tmp_path: Path, key: str):
    with pytest.raises(InputError, match="cannot be tuned"):
        trials.tune(whole(file(tmp_path, f"matrix: {{{key}: [1, 2]}}\n")))


def test_more_combinations_than_one_run_tries_are_refused(tmp_path: Path):
    values = ", ".join(map(str, range(1, 18)))
    wide = whole(file(tmp_path, f"matrix: {{train.threads: [{values}], train.loader_threads: [{values}]}}\n"))
    with pytest.raises(InputError, match="289 trials"):
        trials.tune(wide)


def test_a_command_cannot_be_tried(tmp_path: Path):
    (tmp_path / "a.py").write_text("")
    text = TEXT.replace("train: {strategy: fsdp, global_batch: 32}   # ours", "command: [a.py]")
    for make in (trials.smoke, trials.tune, trials.lr_range):
        with pytest.raises(InputError, match="is for `train`"):
            make(load(file(tmp_path, text=text)))


BLOCK = "train:\n  global_batch: 32\n  strategy: fsdp   # ours\n"
FLOW = "train: {strategy: fsdp, global_batch: 32}   # ours\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FLOW, "train: {micro_batch: 4, compile: true, strategy: ddp, global_batch: 32}   # ours\n"),
        (BLOCK, "train:\n  micro_batch: 4\n  compile: true\n  global_batch: 32\n  strategy: ddp   # ours\n"),
    ],
)
def test_the_fastest_is_written_where_it_belongs_and_all_else_stays(tmp_path: Path, before: str, after: str):
    path = file(tmp_path, text=TEXT.replace(FLOW, before))
    trials.write(path, {"micro_batch": 4, "compile": True, "strategy": "ddp"})
    assert path.read_text() == TEXT.replace(FLOW, after)


def test_line_ends_stay_as_they_are(tmp_path: Path):
    path = tmp_path / "mgpu.yaml"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    trials.write(path, {"strategy": "ddp"})
    assert path.read_bytes().decode() == TEXT.replace("fsdp", "ddp").replace("\n", "\r\n")
    path.write_bytes(TEXT.replace(FLOW, BLOCK).replace("\n", "\r\n").encode())
    trials.write(path, {"micro_batch": 4})
    assert b"train:\r\n  micro_batch: 4\r\n  global_batch: 32\r\n" in path.read_bytes()


@pytest.mark.parametrize(
    "block", ["train: &it {seed: 3}\n", "train: {}\n", "train:\n  strategy: >-\n    fsdp\n  seed: 3\n"]
)
def test_a_file_that_cannot_be_changed_is_left_and_what_to_write_is_said(tmp_path: Path, block: str):
    path = file(tmp_path, text=TEXT.replace(FLOW, block))
    before = path.read_text()
    with pytest.raises(InputError) as error:
        trials.write(path, {"strategy": "ddp"})
    assert "`train: {strategy: ddp}`" in error.value.next_step
    assert path.read_text() == before


def test_trials_in_a_run_file_are_checked_like_all_else():
    for tried, wrong in (("{name: x, nodes: 3}", "2 nodes"), ("{name: x, train: {micro_batch: 0}}", "greater than")):
        with pytest.raises(InputError, match=wrong):
            loads(f"{TEXT}checkpoint: none\ntrials: {{purpose: smoke, tries: [{tried}]}}\n", "x")
    with pytest.raises(InputError, match="keep none"):
        loads(f"{TEXT}trials: {{purpose: smoke, tries: [{{name: x}}]}}\n", "x")
