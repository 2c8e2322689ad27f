"""Task lm: its sizes, what it learns, and the same losses on tokens however it is spread."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from mgpu_train.config import PRESETS, LmOptions, ModelConfig, TrainConfig
from mgpu_train.data.token_index import Index, Shard
from mgpu_train.metrics import flops
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.models.gpt import GPT
from mgpu_train.report import Report
from mgpu_train.strategies import initial
from mgpu_train.strategies.precision import Policy
from mgpu_train.tasks import lm
from pydantic import ValidationError

SMALL = {"task": "lm", "seq_len": 16, "lr": 0.01}  # of the trainings here: see `train` in conftest.py
SHAPE = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "mlp": "swiglu", "mlp_dim": 48, "vocabulary": 300}
MODELS: dict[str, dict[str, Any]] = {"tied": {**SHAPE, "tied": True}, "untied": {**SHAPE, "qk_norm": True, "heads": 2}}


# --- what it learns ---------------------------------------------------------------------------------------------------


def test_it_beats_whoever_counts_pairs_of_bytes(train):
    """On files of Python's standard library that it has not seen."""
    model = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "mlp": "swiglu", "qk_norm": True}
    given = {"steps": 150, "global_batch": 8, "seq_len": 128, "warmup_steps": 10, "validate_every": 150}
    told = train("library", text=None, model=model, validate_batches=8, **given)
    (first, last), (bits,) = told.of("validation", "loss"), told.of("validation", "bits_per_byte")[1:]
    assert last < told.of("start", "bigram_entropy")[0] - 0.05 < first
    assert bits == pytest.approx(last / np.log(2))


# --- on tokens --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tokens that nearly repeat, as nanoGPT's files."""
    folder, chance = tmp_path_factory.mktemp("tokens"), np.random.default_rng(1)
    for name, count in (("train", 5000), ("val", 1000)):
        flat = np.arange(count) * 7 % 300
        flat[chance.random(count) < 0.1] = 299
        flat.astype("<u2").tofile(folder / f"{name}.bin")
    return str(folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_on_two_ranks_are_those_of_one(train, tokens, model, strategy):
    given = {"tokens": tokens, "model": MODELS[model]}
    alone, both = train(model, **given), train(f"{model}-{strategy}", 2, strategy=strategy, **given)
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        assert both.of(kind, key) == pytest.approx(alone.of(kind, key), rel=1e-5)
    assert "validation_bits_per_byte" not in alone.metrics, "nobody knows of which text they are"
    assert alone.of("step", "loss")[-1] < alone.of("step", "loss")[0]


def test_compiled_it_has_the_losses_of_what_is_not(train, tokens):
    """Its blocks, and its loss."""
    given = {"tokens": tokens, "model": MODELS["tied"], "steps": 2, "validate_every": 2}
    plain, compiled = train("tied-plain", **given), train("tied-compiled", compile=True, **given)
    for kind, key in (("step", "loss"), ("step", "grad_norm"), ("validation", "loss")):
        assert compiled.of(kind, key) == pytest.approx(plain.of(kind, key), rel=1e-5)


def test_what_is_compiled_with_the_blocks_is_the_loss_of_logits(tokens, monkeypatch):
    """Written out in float32 they are most of what a step of a large vocabulary moves."""
    seen: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    given = TrainConfig.model_validate({"tokens": tokens, "seq_len": 16, "model": MODELS["tied"], "compile": True})
    task = lm.LM(LmOptions.model_validate(given.task_options))
    place = SimpleNamespace(device=torch.device("cpu"), context=1)
    alone: Any = SimpleNamespace(shards=False, place=place, policy=Policy(), apply=lambda model, layout: model)
    model, _ = initial.spread(alone, task, given)
    task.loss(model, task.data("train").batch([0, 1], [0, 0]))
    assert seen[-1] == 2, "after the blocks logits and targets, in one piece"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resumed_it_has_the_same_bits(train, tokens, same_bits, strategy):
    given = {"tokens": tokens, "model": MODELS["tied"], "strategy": strategy}
    whole = train(f"tied-{strategy}", 2, **given)
    resumed = train(f"tied-{strategy}-resumed", 2, resume=f"tied-{strategy}", **given)
    assert resumed.of("step", "loss") == whole.of("step", "loss")[3:]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)))


def test_bits_per_byte_count_the_bytes_that_tokens_stand_for(tmp_path):
    """All 64 tokens are equally likely at first: 6 bits each, and one is 2.5 bytes of the validation text."""
    shards = []
    for split, text_bytes in (("train", 40), ("validation", 100)):
        np.arange(40).astype("<u2").tofile(tmp_path / f"{split}.bin")
        given = {"file": f"{split}.bin", "split": split, "tokens": 40, "documents": 1, "crc64nvme": "0"}
        shards.append(Shard.model_validate({**given, "text_bytes": text_bytes}))
    index = Index(token_bytes=2, vocabulary=40, end=None, tokenizer="0", settings="0", shards=tuple(shards))
    (tmp_path / "index.json").write_text(index.model_dump_json())
    shape = ModelConfig(layers=1, dim=8, heads=1, vocabulary=40)
    task = lm.LM(LmOptions(tokens=str(tmp_path), seq_len=8, model=shape))
    model = task.model()
    task.initialise(model)
    batch = task.data("validation").batch([0, 3], [0, 0])
    loss = task.evaluate(model, batch).detached
    assert loss.values["bits_per_byte"] / loss.weight == pytest.approx(6 / 2.5)
    assert task.loss(model, batch).values == {}
    assert task.facts() == {"bytes_per_token": 2.5}


# --- what is known without torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2-124m", 0.124), ("llama-1b", 1.236), ("llama-8b", 8.030), ("llama-70b", 70.554)]
)
def test_presets_have_the_sizes_of_their_names(name, billions):
    """As their makers publish them; GPT-2's has positions that are learned, and biases."""
    shape = ModelConfig(preset=name)
    with torch.device("meta"):
        model = GPT(shape, 16)
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert ModelConfig.model_validate(shape.model_dump(exclude_unset=True)) == shape
    assert get_args(get_args(ModelConfig.model_fields["preset"].annotation)[0]) == tuple(PRESETS)


def test_what_is_said_beside_a_preset_holds():
    shape = ModelConfig.model_validate({"preset": "llama-8b", "layers": 2, "kv_heads": None})
    assert (shape.layers, shape.kv_heads, shape.dim) == (2, None, 4096)


def test_flops_of_a_token_are_those_of_palm():
    """Written out for GPT-2: 6 of each weight, its head's too, and attention over 1,024 positions."""
    blocks, head = 12 * (4 * 768**2 + 2 * 768 * 3072), 50304 * 768
    assert ModelConfig(preset="gpt2-124m").flops(1024) == 6 * (blocks + head) + 12 * 12 * 768 * 1024
    untied = ModelConfig(preset="gpt2-124m", tied=False)
    assert untied.flops(1024) == ModelConfig(preset="gpt2-124m").flops(1024), "an embedding is looked up"


@pytest.mark.parametrize(("vocabulary", "rows"), [(None, 256), (50257, 50304), (64, 64), (65, 128)])
def test_a_vocabulary_is_padded(vocabulary, rows):
    model = GPT(ModelConfig(layers=1, dim=8, heads=1, vocabulary=vocabulary), 8)
    assert model(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, rows)


def test_base_of_the_angles_is_a_choice():
    first, other = (GPT(ModelConfig(rotary_base=base), 8).get_buffer("rotation") for base in (1e4, 5e5))
    assert torch.equal(first[:, :, 0], other[:, :, 0])
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "x", "text": "y"}, "both name what is learned from"),
        ({"tokens": "x"}, "`model.vocabulary` is needed with `tokens`"),
        ({"model": {"vocabulary": 100}}, "less than the 256 bytes that text has"),
        ({"model": {"preset": "gpt3"}}, "Input should be 'gpt2-124m'"),
        ({"model": {"preset": "gpt2-124m", "heads": 5}}, "does not divide dim"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        LmOptions.model_validate(options)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("cpu", None),
    ],
)
def test_peaks_of_gpus_are_known_by_their_names(device, tflops):
    assert flops.peak(device) == (tflops and pytest.approx(tflops * 1e12))
    share = flops.mfu(1e9, 1e5, 8, device)
    assert share == (tflops and pytest.approx(1e14 / (8e12 * tflops)))
    assert flops.mfu(None, 1e5, 8, device) is None


@pytest.mark.parametrize(("precision", "told"), [("bf16", {"mfu": 0.4}), ("tf32", {})])
def test_a_line_has_the_share_of_all_gpus_peak(monkeypatch, precision, told):
    """Of what is computed in 16 bits, on 8 of them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda")
    policy = Policy("bf16", torch.bfloat16) if precision == "bf16" else Policy("tf32", tf32=True)
    place = SimpleNamespace(device=device, world_size=8)
    task = SimpleNamespace(flops=lambda: 2e9)
    report = Report(MetricLines(None, 0), TrainConfig(), task, place, policy, None)  # type: ignore[arg-type]
    assert report.mfu(0.4 * 8 * 989.4e12 / 2e9) == told
