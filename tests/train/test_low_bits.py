"""Moments of 8 bits, frozen weights of 4 (QLoRA), products in fp8: as good as without, and resumed bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prose
import pytest
import ranks
import torch
from mgpu_train import entries
from mgpu_train.checkpoint.formats import export
from mgpu_train.config import TrainConfig
from mgpu_train.engines.fit import Fit
from mgpu_train.errors import TrainError
from mgpu_train.models import pretrained
from mgpu_train.optim import base as optim
from mgpu_train.optim.blocks import block_of, moments_bytes
from mgpu_train.strategies import fp8, initial, memory, precision
from mgpu_train.tasks.base import Layout
from mgpu_train.tasks.hf import HuggingFace
from mgpu_train.tasks.hf_config import HfOptions
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, sentences, tokenizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

PROGRAM = Path(__file__).with_name("low_bits.py")
LM: dict[str, Any] = {
    "task": "lm", "seq_len": 16,
    "model": {"layers": 2, "dim": 64, "heads": 2}, "steps": 8, "validate_every": 8,
}  # fmt: skip
UNEVEN = {"task": "low_bits:Uneven", "optimizer": "adamw8bit", "steps": 8, "validate_every": 8}
QLORA = {"rank": 4, "quantize_base": "nf4"}
META = {"format": "pt"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers whose weights are random, one with layers the other way round, and texts."""
    import transformers

    out = tmp_path_factory.mktemp("low")
    told = [text for text, _ in sentences(400)]
    reads = tokenizer(told)
    for seed, name in enumerate(("wide", "gpt2")):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(out / name)
        reads.save_pretrained(out / name)
    (out / "text").mkdir()
    for number in range(10):
        (out / "text" / f"{number}.txt").write_text(". ".join(told[number::10]))
    return out


def options(out: Path, lora: dict[str, Any], model: str = "wide") -> dict[str, Any]:
    return {"model": str(out / model), "data": str(out / "text"), "seq_len": 16, "lora": lora}


def stories(out: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """By the number of ranks, those that are trained one after the other."""
    lm = {**LM, "text": prose.written(out / "prose")}
    eight = {**lm, "optimizer": "adamw8bit"}
    qlora = {"options": options(out, QLORA)}
    ratings = {"data": str(out / "ratings.npy"), "user": "0", "item": "1", "rating": "2"}
    learns = {"steps": 60, "validate_every": 60, "validate_batches": 8, "lr": 0.03}
    one: dict[str, Any] = {
        "adamw": lm, "eight": eight, "fp8": {**lm, "precision": "fp8", "activation_checkpointing": "selective"},
        "bf16": {**lm, "precision": "bf16"},
        "eight-on": {**eight, "resume": "eight/checkpoints/step-3"},
        "adamw-from-eight": {**lm, "resume": "eight/checkpoints/step-3"},
        "eight-from-adamw": {**eight, "resume": "adamw/checkpoints/step-3"},
        "qlora": qlora, "qlora-bf16": {**qlora, "precision": "bf16"},
        "qlora-gpt2": {"options": options(out, QLORA, "gpt2")},
        "lora-gpt2": {"options": options(out, {"rank": 4}, "gpt2")},
        "learns": {"options": options(out, {**QLORA, "rank": 8}), **learns},
        "no-layers": {"task": "recommender", "precision": "fp8", "options": ratings},
    }  # fmt: skip
    sharded = {"strategy": "fsdp", "micro_batch": 3}
    two: dict[str, Any] = {
        "eight-ddp": {**eight, "strategy": "ddp"},
        "eight-fsdp": {**eight, **sharded},
        "eight-fsdp-on": {**eight, **sharded, "resume": "eight-fsdp/checkpoints/step-3"},
        "uneven": {**UNEVEN, **sharded},
        "uneven-on": {**UNEVEN, **sharded, "resume": "uneven/checkpoints/step-3"},
        "eight-fsdp-from-one": {**eight, **sharded, "resume": "eight/checkpoints/step-3"},
        "fp8-fsdp": {**lm, **sharded, "precision": "fp8"},
        "bf16-fsdp": {**lm, **sharded, "precision": "bf16"},
        "qlora-ddp": {**qlora, "strategy": "ddp"},
        "qlora-fsdp": {**qlora, **sharded, "activation_checkpointing": "full"},
        "qlora-fsdp-on": {
            **qlora, **sharded, "activation_checkpointing": "full", "resume": "qlora-fsdp/checkpoints/step-3",
        },
    }  # fmt: skip
    three = {"eight-3-from-fsdp": {**eight, "strategy": "fsdp", "resume": "eight-fsdp/checkpoints/step-3"}}
    return {1: {name: {"strategy": "single", **story} for name, story in one.items()}, 2: two, 3: three}


@pytest.fixture(scope="module")
def trained(out: Path) -> Callable[[str], SimpleNamespace]:
    """`trained(name)`: what the lines of metrics of a story say, and what went wrong."""
    import numpy as np

    np.save(out / "ratings.npy", np.array([[n % 7, n % 5, n % 3] for n in range(200)]))
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = ranks.start(PROGRAM, [out, json.dumps(stories(out))], out / "said", env).wait()
    assert done == 0, (out / "said").read_text()

    def of(name: str) -> SimpleNamespace:
        home = out / name
        error = (home / "error").read_text() if (home / "error").exists() else ""
        files = sorted((home / "metrics").glob("rank-0.jsonl"))
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return SimpleNamespace(home=home, lines=lines, error=error)

    return of


def losses(trained: Callable[[str], SimpleNamespace], name: str, kind: str = "step") -> list[float]:
    story = trained(name)
    assert not story.error, story.error
    return [line["loss"] for line in story.lines if line["kind"] == kind]


# --- moments of 8 bits ------------------------------------------------------------------------------------------------


def test_a_moment_of_8_bits_trains_as_one_of_32(trained):
    assert losses(trained, "eight") == pytest.approx(losses(trained, "adamw"), rel=0.01)
    assert losses(trained, "eight") != losses(trained, "adamw")


@pytest.mark.parametrize("name", ["eight-ddp", "eight-fsdp"])
def test_ranks_round_the_blocks_that_one_process_rounds(trained, name):
    for kind in ("step", "validation"):
        assert losses(trained, name, kind) == pytest.approx(losses(trained, "eight", kind), rel=1e-5)


@pytest.mark.parametrize("name", ["eight", "eight-fsdp", "uneven"])
def test_training_goes_on_bit_by_bit(trained, same_bits, name):
    assert losses(trained, f"{name}-on") == losses(trained, name)[3:]
    same_bits(*(trained(each).home / "checkpoints" / "step-8" for each in (name, f"{name}-on")))


@pytest.mark.parametrize(("name", "before"), [("eight-fsdp-from-one", "eight"), ("eight-3-from-fsdp", "eight-fsdp")])
def test_any_number_of_ranks_goes_on_with_the_same_codes(trained, name, before):
    assert losses(trained, name) == pytest.approx(losses(trained, before)[3:], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "lacks"), [("adamw-from-eight", "exp_avg` is absent"), ("eight-from-adamw", "exp_avg_codes` is absent")]
)
def test_moments_of_another_kind_are_refused(trained, name, lacks):
    assert "it is of another optimizer: `state." in trained(name).error
    assert lacks in trained(name).error


def test_matrices_whose_rows_are_blocks_have_8_bits_and_the_rest_32():
    model = nn.ModuleDict({
        "large": nn.Linear(256, 32), "narrow": nn.Linear(96, 64), "kernels": nn.Conv2d(64, 64, 3),
        "small": nn.Linear(64, 8),
    })  # fmt: skip
    made = optim.make(model, Layout(), TrainConfig(optimizer="adamw8bit"))
    names = {id(each): name for name, each in model.named_parameters()}
    (plain, eight) = ({names[id(p)] for group in one.param_groups for p in group["params"]} for one in made.each)
    assert eight == {"large.weight", "kernels.weight"}
    assert plain == set(names.values()) - eight
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    made.step(0.1, torch.tensor(1.0), torch.tensor(0.0))
    held = sum(each.nbytes for one in made.each for state in one.state.values() for each in state.values() if each.ndim)
    assert made.state_bytes == made.held_bytes == held
    assert block_of((32, 384)) == 128
    assert moments_bytes((4096, 4096)) / 4096**2 == 2 * (1 + 4 / 256), "of a number, in place of 8"


def test_a_skipped_step_changes_no_bit_and_gradients_are_scaled():
    """Whatever the gradients were; what comes after is as if there had been none."""

    def run(*, skips: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 64), nn.Conv2d(64, 64, 3)).to(memory_format=torch.channels_last)
        made = optim.make(model, Layout(), TrainConfig(optimizer="adamw8bit", weight_decay=0.1))
        draw = torch.Generator().manual_seed(1)
        for step in range(3):
            for each in model.parameters():
                each.grad = torch.randn(each.shape, generator=draw) * (4.0 if skips else 1.0)
            made.step(0.01, torch.tensor(0.25 if skips else 1.0), torch.tensor(0.0))
            before = [each.clone() for each in model.parameters()]
            for each in model.parameters() if skips and step < 2 else ():
                each.grad = torch.full_like(each, torch.nan)
            if skips and step < 2:
                made.step(0.01, torch.tensor(0.5), torch.tensor(1.0))
                assert all(map(torch.equal, before, model.parameters()))
        kept = (each for one in made.each for state in one.state.values() for each in state.values())
        return [*model.parameters(), *kept]

    assert all(map(torch.equal, run(skips=True), run(skips=False)))


# --- frozen weights of 4 bits -----------------------------------------------------------------------------------------


def test_adapters_on_4_bits_learn_what_the_frozen_model_does_not_know(trained):
    first, last = losses(trained, "learns", "validation")
    assert last < first / 2
    near = losses(trained, "lora-gpt2", "validation")
    assert losses(trained, "qlora-gpt2", "validation") == pytest.approx(near, rel=0.01)
    assert losses(trained, "qlora-bf16") == pytest.approx(losses(trained, "qlora"), rel=0.01)


@pytest.mark.parametrize("name", ["qlora-ddp", "qlora-fsdp"])
def test_ranks_have_the_4_bits_of_one_process(trained, name):
    for kind in ("step", "validation"):
        assert losses(trained, name, kind) == pytest.approx(losses(trained, "qlora", kind), rel=1e-5)


def test_adapters_on_4_bits_go_on_bit_by_bit(trained, same_bits):
    assert losses(trained, "qlora-fsdp-on") == losses(trained, "qlora-fsdp")[3:]
    same_bits(*(trained(each).home / "checkpoints" / "step-5" for each in ("qlora-fsdp", "qlora-fsdp-on")))


def test_a_checkpoint_holds_adapters_alone_and_they_are_exported_with_the_models_name(trained, out, tmp_path):
    export.export(trained("qlora").home / "checkpoints" / "step-5", tmp_path / "adapters", form="peft")
    stored = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert stored
    assert all(".lora_" in name for name in stored)
    told = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(out / "wide")
    assert (told["r"], "q_proj" in " ".join(told["target_modules"])) == (4, True)


@pytest.mark.parametrize("model", ["wide", "gpt2"])
def test_linear_layers_take_a_quarter_of_16_bits_and_their_weights_are_near(out, model):
    task = HuggingFace(HfOptions.model_validate(options(out, {**QLORA, "targets": ["down_proj", "c_proj"]}, model)))
    made = initial.whole(task, 1)
    from mgpu_train.models import nf4

    found = nf4.layers(made)
    assert len(found) == (14 if model == "wide" else 8), "those without an adapter, too"
    stored = load_file(out / model / "model.safetensors")
    held = sum(each.nbytes for layer in found.values() for each in layer.buffers())
    assert held < 0.3 * 2 * sum(layer.like.numel() for layer in found.values())
    assert all(name in pretrained.frozen(made) for name in found)
    for name, layer in found.items():
        weight = stored[pretrained.plain(name)]
        rounded = layer.weight.get_original_weight()
        error = (rounded.t() if layer.transposed else rounded) - weight
        assert error.norm() < 0.12 * weight.norm(), name


def test_a_layer_of_4_bits_whose_weight_is_missing_is_told_of(out, tmp_path):
    shutil.copytree(out / "wide", tmp_path / "wide")
    lacks = "model.layers.1.mlp.up_proj.weight"
    stored = load_file(out / "wide" / "model.safetensors")
    save_file(
        {name: each for name, each in stored.items() if name != lacks}, tmp_path / "wide" / "model.safetensors", META
    )
    task = HuggingFace(HfOptions.model_validate({**options(out, QLORA), "model": str(tmp_path / "wide")}))
    with pytest.raises(TrainError, match=r"have no `model\.layers\.1\.mlp\.up_proj\.base_layer\.weight` of shape"):
        initial.whole(task, 1)


def test_the_search_for_a_micro_batch_copies_no_weights():
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **kwargs or {})
            if func in (torch.ops.aten.clone.default, torch.ops.aten.cat.default):
                copied.add(made.dtype)
            return made

    copied: set[torch.dtype] = set()
    model = nn.BatchNorm1d(4)
    model.register_buffer("codes", torch.zeros(8, dtype=torch.uint8))
    memory = SimpleNamespace(restart=lambda: None)
    search: Any = SimpleNamespace(_model=model, _compiled=False, _memory=memory)
    with Counts(), Fit._unchanged(search):
        model(torch.randn(8, 4))
    assert copied == {torch.float32, torch.int64}
    assert model.running_mean is not None
    assert not model.running_mean.any(), "statistics are as before"


# --- products in 8 bits -----------------------------------------------------------------------------------------------


def test_products_in_fp8_train_as_those_in_32_bits(trained):
    for name in ("fp8", "fp8-fsdp"):
        assert losses(trained, name) == pytest.approx(losses(trained, "adamw"), rel=0.01)
        assert losses(trained, name)[1:] != losses(trained, name.replace("fp8", "bf16"))[1:], "they are rounded further"


def test_layers_of_blocks_are_converted_but_for_adapters_and_odd_sizes():
    block = nn.ModuleDict({"up": nn.Linear(32, 48), "odd": nn.Linear(48, 24), "lora_A": nn.Linear(32, 16)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(32, 64)})
    names = [name for name, _ in model.named_parameters()]
    fp8.convert(model, Layout(("blocks.0",)))
    assert [name for name, each in model.named_modules() if type(each).__name__ == "Float8Linear"] == ["blocks.0.up"]
    assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(TrainError, match=r"whose sides are multiples of 16, and ModuleDict has none.*bf16"):
        fp8.convert(nn.ModuleDict({"head": nn.Linear(32, 64)}), Layout())


def test_selective_checkpointing_keeps_what_fp8_products_gave():
    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func is torch.ops.aten.mm.default)
            return func(*args, **kwargs or {})

    products: list[bool] = []
    model, layout = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))]), Layout(("0",))
    fp8.convert(model, layout)
    memory.save(model, layout, "selective")
    with Counts():
        model[0](torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert sum(products) == 2 * 3, "one forward and two backward of each layer, and none again"


def test_a_model_without_such_layers_is_refused_by_the_node(trained):
    assert "`train.precision`: fp8 computes the linear layers of a model's blocks" in trained("no-layers").error


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 3), True)])
def test_a_gpu_that_has_no_fp8_is_refused_before_training(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    cuda = torch.device("cuda", 0)
    if fits:
        found = precision.policy("fp8", cuda)
        assert (found.low, found.fp8, found.scaled) == (torch.bfloat16, True, False)
        return
    version = ".".join(map(str, capability))
    with pytest.raises(TrainError, match=rf"capability 8\.9 or more.*and NVIDIA A100 has {version}\. .*bf16"):
        precision.policy("fp8", cuda)


def test_a_cpu_has_no_fp8():
    with pytest.raises(TrainError, match=r"fp8 needs a GPU .* and this rank has none"):
        precision.policy("fp8", torch.device("cpu"))


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "adamw8bit", "tensor_parallel": 2}, "`optimizer: adamw8bit`: not with `tensor_parallel`"),
        (
            {"optimizer": "adamw8bit", "precision": "fp8", "tensor_parallel": 2},
            "`optimizer: adamw8bit` and `precision: fp8`: not with",
        ),
        ({"precision": "fp8", "task": "hf", "options": {"lora": QLORA}}, r"`options\.lora\.quantize_base` keeps in 4"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_rented(wrong, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(wrong)


def test_another_quantisation_is_refused_with_the_one_there_is():
    with pytest.raises(ValidationError, match="'nf4'"):
        HfOptions.model_validate({"model": "gpt2", "data": "x", "lora": {"quantize_base": "int4"}})


def test_a_node_without_torchao_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(TrainError, match=r"precision`: fp8 needs more packages, `pip install 'mgpu-train\[torchao\]'`"):
        entries.of_extra("torchao.float8", "torchao", "`train.precision`: fp8")
