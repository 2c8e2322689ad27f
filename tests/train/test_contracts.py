"""The trainer with a task and a strategy that are not its own, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks

SCENARIOS = Path(__file__).with_name("contracts.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("contracts")
    started = ranks.meet(SCENARIOS, 2, out, said=out / "said")
    try:
        assert [rank.wait() for rank in started] == [0, 0], started[0].said
    finally:
        for rank in started:
            rank.kill()
    return out


def failures(out: Path, name: str) -> list[str | None]:
    return [json.loads((out / f"failures-{rank}.json").read_text())[name] for rank in (0, 1)]


def lines(out: Path, name: str, kind: str) -> list[dict[str, Any]]:
    assert failures(out, name) == [None, None]
    text = (out / name / "metrics" / "rank-0.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


@pytest.mark.parametrize("name", ["cut", "uneven", "fsdp", "byhand", "doubled"])
def test_any_split_of_a_batch_has_the_same_mean_though_samples_weigh_differently(out, name):
    for kind, keys in (("step", ("loss", "accuracy", "grad_norm")), ("validation", ("loss", "accuracy"))):
        for key in keys:
            expected = [line[key] for line in lines(out, "whole", kind)]
            assert [line[key] for line in lines(out, name, kind)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["adding-together", "adding-byhand"])
def test_sequences_of_any_task_are_shared_under_any_strategy_and_each_token_counts_once(out, name):
    for kind in ("step", "validation"):
        expected = [line["loss"] for line in lines(out, "adding", kind)]
        assert [line["loss"] for line in lines(out, name, kind)] == pytest.approx(expected, rel=1e-5)
        assert [line["accuracy"] for line in lines(out, name, kind)] == [1.0] * len(expected)
    for key in ("grad_norm", "samples"):
        expected = [line[key] for line in lines(out, "adding", "step")]
        assert [line[key] for line in lines(out, name, "step")] == pytest.approx(expected, rel=1e-5)
    assert json.loads((out / name / "checkpoints" / "step-4" / "meta.json").read_text())["mesh"] == "dp=1,cp=2"


def test_what_a_task_freezes_stays_as_it_began_whatever_the_seed_of_a_resume(out):
    """It is in no checkpoint, but the seed that made it is."""
    names = ("fixed", "fixed-on", "fixed-on-again")
    told = [line["fixed"] for name in names for line in lines(out, name, "step")]
    assert told == [pytest.approx(told[0])] * 8
    metas = [
        json.loads((out / f"{name}/checkpoints/step-{step}/meta.json").read_text())
        for name, step in zip(names, (4, 6, 8), strict=True)
    ]
    assert [(each["seed"], each["first_seed"]) for each in metas] == [(1, 1), (2, 1), (3, 1)]


def test_values_of_a_task_are_told_by_their_names_and_speed_in_its_unit(out):
    *_, last = lines(out, "whole", "step")
    assert 0 <= last["accuracy"] <= 1
    assert last["numbers_per_s"] > 0
    assert "tokens_per_s" not in last
    meta = json.loads((out / "whole" / "checkpoints" / "step-4" / "meta.json").read_text())
    assert meta["validation_accuracy"] == lines(out, "whole", "validation")[-1]["accuracy"]
    assert (meta["data"], meta["config"]["options"]) == ("2 x 5 bits", {"bits": 5, "width": 8})


def test_a_validation_takes_no_more_memory_than_training(out):
    assert [line["loss"] for line in lines(out, "frugal", "validation")] == pytest.approx(
        [line["loss"] for line in lines(out, "whole", "validation")], rel=1e-5
    )


def test_a_micro_batch_is_as_large_as_every_rank_has_memory_for_and_training_is_as_if_it_had_been_told(out):
    for found, told, size in (("greedy", "normed", 2), ("hungry", "hungry-told", 16)):
        assert [line["micro_batch"] for name in (found, told) for line in lines(out, name, "start")] == [size, size]
        for kind, keys in (("step", ("loss", "accuracy", "grad_norm", "lr")), ("validation", ("loss", "accuracy"))):
            rows = [[[line[key] for key in keys] for line in lines(out, name, kind)] for name in (found, told)]
            assert rows[0] == rows[1], "the search has changed nothing"
    meta = json.loads((out / "hungry" / "checkpoints" / "step-4" / "meta.json").read_text())
    assert (meta["micro_batch"], meta["config"]["micro_batch"]) == (16, "auto")


def test_a_resume_with_less_memory_finds_another_micro_batch_and_has_the_same_losses(out):
    [start] = lines(out, "hungry-on", "start")
    assert (start["micro_batch"], start["resumed_step"]) == (8, 2)
    expected = [line["loss"] for line in lines(out, "hungry", "step")][2:]
    assert [line["loss"] for line in lines(out, "hungry-on", "step")] == pytest.approx(expected, rel=1e-5)


def test_shards_find_their_micro_batch_too(out):
    assert [line["micro_batch"] for line in lines(out, "hungry-fsdp", "start")] == [16]
    for key in ("loss", "grad_norm"):
        expected = [line[key] for line in lines(out, "hungry-told", "step")]
        assert [line[key] for line in lines(out, "hungry-fsdp", "step")] == pytest.approx(expected, rel=1e-5)


def test_the_trainer_says_which_phase_begins(out):
    assert [line["phase"] for line in lines(out, "whole", "phase")] == [
        "building", "validation", "first_step", "training", "validation", "training", "saving", "saving", "finishing",
    ]  # fmt: skip


def test_weights_that_are_one_stay_one(out):
    assert failures(out, "tied") == [None, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "bad-options",
            "`train.options` of task mgpu_parity.task:Parity: bits: Input should be less than or equal to 12",
        ),
        ("bad-options", "widht: Extra inputs are not permitted"),
        ("forgetful", "`initialise` of Forgetful gives `2.weight` no value"),
        ("positions", "`initialise` of Positions gives `positions` no value"),
        ("empty", "task tasks_of_tests:Empty has no samples: 0 and 0"),
        ("other", "tasks_of_tests:Other is no class that is derived from mgpu_train.tasks.base.Task"),
        ("no-class", "tasks_of_tests:Absent cannot be imported (AttributeError"),
        ("no-module", "nowhere.task:Parity cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("no-module", "`code:` of the run file sends a folder and installs requirements"),
        ("no-name", "`train.task`: `partiy` is not one of diffusion, hf, lm, recommender, vision"),
        ("no-strategy", "`train.strategy`: `dpd` is not one of ddp, deepspeed, fsdp, hsdp, single"),
        ("starved", "`train.micro_batch: auto`: not even 1 at a time: with it rank"),
        ("unknown", "`train.micro_batch: auto`: this system does not say how much memory"),
        ("no-sequences", "`train.context_parallel`: Parity does not say how ranks share its sequences"),
        (
            "no-parts",
            "`train.context_parallel`: `seq_len`: 2 ranks share sequences of a multiple of 4 tokens, and 18 is none",
        ),
        ("no-fp8", "`train.precision`: fp8 needs a GPU of compute capability 8.9 or more"),
        ("lm-options", "`train.options` of task lm: seq_len: Input should be greater than or equal to 8"),
    ],
)
def test_what_only_a_node_can_know_is_said_in_one_line_by_every_rank(out, name, message):
    for failure in failures(out, name):
        assert failure is not None
        assert message in failure
        assert "\n" not in failure
