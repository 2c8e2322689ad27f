"""DeepSpeed's ZeRO trains as replicas do, and leaves checkpoints that have nothing of it."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from mgpu_train.config import TrainConfig
from mgpu_train.errors import TrainError
from mgpu_train.strategies import entry
from mgpu_train.strategies.deepspeed import DeepSpeed
from mgpu_train.strategies.entry import Sizes
from mgpu_train.strategies.precision import POLICIES
from mgpu_train.tasks.base import Layout
from pydantic import ValidationError

PROGRAM = Path(__file__).with_name("zero_stages.py")
DDP: dict[str, Any] = {"task": "zero_stages:Oddities", "strategy": "ddp"}
ZERO: dict[int, dict[str, Any]] = {
    1: {**DDP, "strategy": "deepspeed", "zero_stage": 1, "micro_batch": 2},
    2: {**DDP, "strategy": "deepspeed", "zero_stage": 2, "micro_batch": 2, "activation_checkpointing": "selective"},
    3: {**DDP, "strategy": "deepspeed", "zero_stage": 3, "activation_checkpointing": "full"},
}
LM: dict[str, Any] = {
    "task": "lm", "seq_len": 16, "precision": "bf16", "lr": 6e-3,
    "model": {"layers": 2, "dim": 32, "heads": 2, "tied": True},
}  # fmt: skip
STAGES = {stage: pytest.param(stage, marks=pytest.mark.together(f"stage {stage}")) for stage in ZERO}
BAD = {"loss": "zero_stages:BadLoss", "gradient": "zero_stages:BadGradient", "weight": "zero_stages:NoWeight"}
Stories = dict[int, dict[str, dict[str, Any]]]


def others() -> Stories:
    """By the number of ranks, those that are trained one after the other, without DeepSpeed."""
    two = {"fsdp": {**DDP, "strategy": "fsdp"}, "ddp": DDP, "ddp-lm": {**LM, "strategy": "ddp"}}
    two["ddp-ema"] = {**DDP, "ema": 0.9}
    return {2: two | {f"ddp-{what}": {**DDP, "task": task} for what, task in BAD.items()}}


def by_stage(stage: int) -> Stories:
    """With it."""
    zero, name = ZERO[stage], f"zero-{stage}"
    two = {
        name: zero,
        f"{name}-on": {**zero, "resume": name},
        f"{name}-lm": {**LM, "strategy": "deepspeed", "zero_stage": stage},
        f"{name}-from-fsdp": {**zero, "resume": "fsdp"},
        f"fsdp-from-{name}": {**DDP, "strategy": "fsdp", "resume": name},
        f"{name}-scalars": {**zero, "task": "zero_stages:Scalars"},
        f"{name}-base": {**zero, "task": "zero_stages:Based"},
        f"{name}-other-base": {**zero, "task": "zero_stages:OtherBase", "resume": f"{name}-base"},
    }
    if stage < 3:
        two[f"{name}-ema"] = {**zero, "ema": 0.9}
        two[f"{name}-ema-on"] = {**zero, "ema": 0.9, "resume": f"{name}-ema"}
    two |= {f"{name}-{what}": {**zero, "task": task, "micro_batch": None} for what, task in BAD.items()}
    return {2: two, 3: {f"{name}-by-3": {**zero, "resume": name}}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """`trained(name)`: what the lines of metrics of a story say, and what was refused. Those of a stage are trained
    together, when one of them is asked for first."""
    pytest.importorskip("deepspeed", reason="mgpu-train's extra `deepspeed` is not installed")
    out = tmp_path_factory.mktemp("zero")

    @functools.cache
    def train(stage: int) -> None:
        if stage:
            train(0)
        said, stories = out / f"{stage}.said", by_stage(stage) if stage else others()
        assert ranks.start(PROGRAM, [out, json.dumps(stories)], said, os.environ).wait() == 0, said.read_text()

    def of(name: str) -> SimpleNamespace:
        train(next((stage for stage in ZERO if f"zero-{stage}" in name), 0))
        home = out / name
        error = (home / "error").read_text() if (home / "error").exists() else ""
        lines = [json.loads(line) for line in (home / "metrics" / "rank-0.jsonl").read_text().splitlines()]
        return SimpleNamespace(home=home, lines=lines, error=error)

    return of


def told(trained: Callable[[str], SimpleNamespace], name: str, *keys: str, kind: str = "step") -> list[float]:
    story = trained(name)
    assert not story.error, story.error
    return [line[key] for line in story.lines if line["kind"] == kind for key in keys]


@pytest.mark.parametrize("stage", STAGES.values())
def test_each_stage_trains_as_replicas_do_and_tells_the_same(trained, stage):
    for kind, keys in (("step", ("loss", "error", "grad_norm", "lr")), ("validation", ("loss", "error"))):
        expected = told(trained, "ddp", *keys, kind=kind)
        assert told(trained, f"zero-{stage}", *keys, kind=kind) == pytest.approx(expected, rel=1e-5)
    assert max(told(trained, "ddp", "grad_norm")) > 1, "clipped"


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_language_model_in_16_bits_with_tied_weights_trains_as_by_replicas(trained, stage):
    for kind in ("step", "validation"):
        expected = told(trained, "ddp-lm", "loss", kind=kind)
        assert told(trained, f"zero-{stage}-lm", "loss", kind=kind) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stage", STAGES.values())
def test_training_goes_on_bit_by_bit(trained, same_bits, stage):
    assert told(trained, f"zero-{stage}-on", "loss") == told(trained, f"zero-{stage}", "loss")[3:]
    same_bits(*(trained(f"zero-{stage}{each}").home / "checkpoints" / "step-5" for each in ("", "-on")))


@pytest.mark.parametrize("stage", STAGES.values())
@pytest.mark.parametrize("how", ["zero-{}-by-3", "zero-{}-from-fsdp", "fsdp-from-zero-{}"])
def test_another_number_of_ranks_or_strategy_goes_on_from_its_checkpoint_and_it_from_theirs(trained, stage, how):
    expected = told(trained, "ddp", "loss", "grad_norm")[2 * 3 :]
    assert told(trained, how.format(stage), "loss", "grad_norm") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES.values())
@pytest.mark.parametrize("what", BAD)
def test_a_step_that_is_not_finite_changes_nothing(trained, stage, what):
    expected, steps = told(trained, f"ddp-{what}", "loss"), told(trained, f"ddp-{what}", "step")
    assert steps == [1, 3, 4, 5], "that step is not told as one that has changed something"
    assert told(trained, f"zero-{stage}-{what}", "step") == steps
    assert told(trained, f"zero-{stage}-{what}", "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [STAGES[1], STAGES[2]])
def test_the_average_of_parameters_is_that_of_replicas_and_goes_on(trained, same_bits, stage):
    expected = told(trained, "ddp-ema", "ema_loss", kind="validation")
    assert told(trained, f"zero-{stage}-ema", "ema_loss", kind="validation") == pytest.approx(expected, rel=1e-5)
    same_bits(*(trained(f"zero-{stage}-ema{each}").home / "checkpoints" / "step-5" for each in ("", "-on")))


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_parameter_without_a_dimension_is_refused_by_its_name(trained, stage):
    assert "`gain`" in trained(f"zero-{stage}-scalars").error


@pytest.mark.parametrize("stage", STAGES.values())
def test_a_checkpoint_that_the_model_itself_refuses_is_not_gone_on_from(trained, stage):
    """As adapters refuse one that was learned for other weights."""
    assert not trained(f"zero-{stage}-base").error
    assert trained(f"zero-{stage}-other-base").error == "it is of another base"


@pytest.mark.parametrize("stage", STAGES.values())
def test_no_group_of_deepspeeds_own_waits_longer_for_a_rank_than_any_other(trained, stage):
    assert json.loads((trained(f"zero-{stage}").home / "limits").read_text()) == []


def test_stage_3_has_buffers_on_the_device_and_parameters_on_the_host_until_they_are_shared_out():
    strategy: Any = SimpleNamespace(zero_stage=3, place=SimpleNamespace(device=torch.device("meta")))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    DeepSpeed.apply(strategy, model, Layout())
    assert {each.device.type for each in model.buffers()} == {"meta"}
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    strategy.zero_stage = 2
    assert {each.device.type for each in DeepSpeed.apply(strategy, model, Layout()).parameters()} == {"meta"}


# --- refused ----------------------------------------------------------------------------------------------------------


def test_all_that_does_not_go_with_it_is_told_before_anything_is_rented():
    given: dict[str, Any] = {"precision": "fp16", "optimizer": "muon", "micro_batch": "auto", "compile": True}
    given |= {"activation_checkpointing": "selective"}
    with pytest.raises(ValidationError) as raised:
        TrainConfig.model_validate({"strategy": "deepspeed", "zero_stage": 3, "ema": 0.9, **given})
    said = str(raised.value)
    keys = ("precision: fp16", "optimizer: muon", "micro_batch: auto", "`compile`", "`ema`", "selective` with `zero_st")
    assert all(key in said for key in keys)
    TrainConfig.model_validate({"strategy": "deepspeed", "ema": 0.9, "activation_checkpointing": "selective"})
    TrainConfig.model_validate({"strategy": "fsdp", "zero_stage": 3, **given})


@pytest.mark.parametrize("sizes", [Sizes(4, tensor=2), Sizes(4, pipeline=2), Sizes(4, context=2)])
def test_ranks_that_share_a_layer_or_a_model_are_refused(sizes):
    assert "leave tensor_parallel, pipeline_parallel and context_parallel at 1" in (entry.DEEPSPEED.refuse(sizes) or "")
    assert entry.DEEPSPEED.refuse(Sizes(4)) is None


def test_a_node_without_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    place: Any = SimpleNamespace(device=torch.device("cpu"), local_rank=0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(TrainError, match=r"`train.strategy`: deepspeed needs .*'mgpu-train\[deepspeed\]'"):
        DeepSpeed(place, POLICIES["fp32"])


def test_the_fp16_that_auto_comes_to_on_older_gpus_is_refused():
    place: Any = SimpleNamespace(device=torch.device("cpu"), local_rank=0)
    with pytest.raises(TrainError, match="compute capability"):
        DeepSpeed(place, POLICIES["fp16"])
