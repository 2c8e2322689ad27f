"""Task hf: tiny models of transformers, made here, are trained whole and by adapters, alike by all strategies."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import transformers
from mgpu_train import entries
from mgpu_train.checkpoint.formats import export
from mgpu_train.checkpoint.formats.archives import Unsupported
from mgpu_train.errors import TrainError
from mgpu_train.models import pretrained
from mgpu_train.strategies import initial
from mgpu_train.tasks.base import Task
from mgpu_train.tasks.entry import HF
from mgpu_train.tasks.hf import HuggingFace
from mgpu_train.tasks.hf_config import HfOptions
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, sentences, tokenizer

PROGRAM = Path(__file__).with_name("finetunes.py")
MODELS = {
    **dict.fromkeys(("gpt2", "llama", "llama-2", "wide", "mixtral"), "AutoModelForCausalLM"),
    "bert": "AutoModelForMaskedLM",
    "bert-body": "AutoModel",
}
LORA = {"rank": 4, "dropout": 0.1}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with random weights, by their names, and texts."""
    out = tmp_path_factory.mktemp("hf")
    told = sentences(400)
    reads = tokenizer([text for text, _ in told])
    for seed, (name, of) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        made = getattr(transformers, of)
        made.from_config(CONFIGS[name.partition("-")[0]]()).save_pretrained(out / name)
        reads.save_pretrained(out / name)
    lines = [json.dumps({"text": text, "label": label, "question": "how?"}) for text, label in told]
    (out / "told.jsonl").write_text("\n".join(lines))
    (out / "text").mkdir()
    for number in range(10):
        (out / "text" / f"{number}.txt").write_text(". ".join(text for text, _ in told[number::10]))
    return out


def options(out: Path, model: str, **more: Any) -> dict[str, Any]:
    return {"model": str(out / model), "data": str(out / "text"), "seq_len": 16, **more}


def stories(out: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """By the number of ranks, those that are trained one after the other."""
    lora, llama = options(out, "gpt2", lora=LORA), options(out, "llama")
    told = options(out, "bert-body", kind="classifier", data=str(out / "told.jsonl"), lora={"rank": 4})
    bert = options(out, "bert", kind="masked")
    asked = options(out, "llama", data=str(out / "told.jsonl"), prompt_key="question")
    mixtral = options(out, "mixtral")
    sparse = {**mixtral, "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
    long = {"steps": 60, "validate_every": 60, "validate_batches": 8}
    of_all = {"lora": options(out, "llama", lora={"rank": 4}), "llama": llama, "bert": bert, "asked": asked}
    one: dict[str, Any] = {name: {"strategy": "single", "options": each} for name, each in of_all.items()}
    two: dict[str, Any] = {
        f"{name}-{strategy}": {"strategy": strategy, "options": each, "micro_batch": micro}
        for name, each in of_all.items()
        for strategy, micro in (("ddp", None), ("fsdp", 3))
    }
    for name in ("lora", "llama", "bert"):
        two[f"{name}-context"] = {"strategy": "fsdp", "options": of_all[name], "context_parallel": 2}
    two["lora-fsdp-saved"] = {"strategy": "fsdp", "options": of_all["lora"], "activation_checkpointing": "full"}
    two["mixtral-fsdp"] = {"strategy": "fsdp", "options": mixtral}
    two["mixtral-lora-fsdp"] = {"strategy": "fsdp", "options": sparse}
    for strategy in ("ddp", "fsdp"):
        two[f"dropout-{strategy}"] = {"strategy": strategy, "options": lora, "ema": 0.9}
        resume = f"dropout-{strategy}/checkpoints/step-3"
        two[f"dropout-{strategy}-on"] = {**two[f"dropout-{strategy}"], "resume": resume}
    one |= {
        "mixtral": {"strategy": "single", "options": mixtral},
        "mixtral-lora": {"strategy": "single", "options": sparse},
        "learns-gpt2": {"strategy": "single", "options": options(out, "gpt2"), **long},
        "learns-lora": {"strategy": "single", "options": options(out, "wide", lora={"rank": 8}), **long, "lr": 0.03},
        "learns-bert": {
            "strategy": "single", "options": {**bert, "data": str(out / "told.jsonl"), "pack": False}, **long,
            "steps": 120, "validate_every": 120, "global_batch": 16, "lr": 0.006, "warmup_steps": 10,
        },
        "classifier": {
            "strategy": "single", "options": told, "steps": 40, "validate_every": 40, "validate_batches": 8,
        },
        "another": {
            "strategy": "single", "options": options(out, "llama-2", lora={"rank": 4}),
            "resume": "lora/checkpoints/step-3",
        },
    }  # fmt: skip
    return {1: one, 2: two}


@pytest.fixture(scope="module")
def trained(out: Path) -> Callable[[str], SimpleNamespace]:
    """`trained(name)`: what the lines of metrics of a story say, and what went wrong."""
    for count, given in stories(out).items():
        said = out / f"{count}.said"
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = ranks.start(PROGRAM, [out, count, json.dumps(given)], said, env).wait()
        assert done == 0, said.read_text()

    def of(name: str) -> SimpleNamespace:
        home = out / name
        error = (home / "error").read_text() if (home / "error").exists() else ""
        assert not error or name == "another", error
        files = sorted((home / "metrics").glob("rank-*.jsonl"))
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
        return SimpleNamespace(home=home, lines=lines[0] if lines else [], error=error)

    return of


def numbers(lines: list[dict[str, Any]], kind: str, *keys: str) -> list[float]:
    return [line[key] for line in lines if line["kind"] == kind for key in keys]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learns-gpt2", "learns-lora", "learns-bert"])
def test_tiny_models_learn(trained, name):
    """A model that knows nothing has log(320), and one that knows how frequent each token is 3.2."""
    first, last = numbers(trained(name).lines, "validation", "loss")
    assert first > math.log(320) - 0.1
    assert last < {"learns-gpt2": 2.0, "learns-lora": 2.6, "learns-bert": 2.2}[name]


def test_a_classifier_tells_sentences_apart_that_it_has_never_seen(trained):
    """By adapters, and a head that is new."""
    lines = trained("classifier").lines
    assert numbers(lines, "validation", "accuracy")[-1] > 0.9
    assert {"accuracy", "samples_per_s", "classes", "documents"} <= {key for line in lines for key in line}
    assert {key for line in lines for key in line if "accuracy" in key or "_per_s" in key} <= set(HF.metrics)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, strategy) for name in ("lora", "llama", "bert", "asked") for strategy in ("ddp", "fsdp")),
        *((name, "context") for name in ("lora", "llama", "bert")),
    ],
)
def test_ranks_train_what_one_process_trains(trained, name, strategy):
    alone, both = trained(name).lines, trained(f"{name}-{strategy}").lines
    for kind, keys in (("step", ("loss", "grad_norm")), ("validation", ("loss", "accuracy"))):
        assert numbers(both, kind, *keys) == pytest.approx(numbers(alone, kind, *keys), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "same"),
    [("lora-fsdp-saved", "lora"), ("mixtral-fsdp", "mixtral"), ("mixtral-lora-fsdp", "mixtral-lora")],
)
def test_layers_can_be_recomputed_and_experts_that_are_stored_apart_are_read(trained, name, same):
    found, wanted = (numbers(trained(each).lines, "step", "loss") for each in (name, same))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_go_on_bit_by_bit(trained, same_bits, strategy):
    whole, resumed = trained(f"dropout-{strategy}"), trained(f"dropout-{strategy}-on")
    assert numbers(resumed.lines, "step", "loss") == numbers(whole.lines, "step", "loss")[3:]
    same_bits(*(each.home / "checkpoints" / "step-5" for each in (whole, resumed)))


def test_adapters_of_another_model_are_refused(trained):
    assert "the checkpoint's adapters are of another model" in trained("another").error


def test_no_rank_holds_a_whole_model_but_to_put_experts_together(trained, out):
    trained("llama")
    said = [line for line in (out / "2.said").read_text().splitlines() if "holds the whole model" in line]
    assert len(said) == 4  # of two ranks, for both trainings of the mixture
    assert all("mlp" in line and "is not stored as such" in line for line in said), said


def test_adapters_are_exported_as_peft_loads_them_and_checkpoints_hold_nothing_else(trained, out, tmp_path):
    """What the trainer says of validation is what the loaded model says of the same samples."""
    home = trained("classifier").home / "checkpoints"
    checkpoint = max(home.glob("step-*"), key=lambda path: int(path.name[5:]))
    report = export.export(checkpoint, tmp_path / "adapters", form="peft")
    assert report.files == ("adapter_config.json", "adapter_model.safetensors")
    held = {name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors") if ".lora_" not in name}
    assert held == {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
    options = HfOptions.model_validate(stories(out)[1]["classifier"]["options"])
    task = HuggingFace(options)
    import peft  # a second, which every worker would pay that reads this file

    base = transformers.AutoModelForSequenceClassification.from_pretrained(out / "bert-body", num_labels=2)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    data = task.data("validation")
    samples = [*range(len(data))]
    assert len(samples) < 64, "fewer than a validation takes: each once"
    with torch.no_grad():
        loss = task.loss(model, data.batch(samples, samples))
    (told,) = numbers(trained("classifier").lines, "validation", "loss")[1:]
    assert (loss.total / loss.weight).item() == pytest.approx(told, rel=1e-4)
    with pytest.raises(Unsupported, match="has no adapters"):
        export.export(trained("llama").home / "checkpoints" / "step-5", tmp_path / "none", form="peft")


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "causal"), ("llama", "causal"), ("mixtral", "causal"), ("bert", "masked"), ("bert-body", "classifier")],
)
def test_weights_are_those_that_transformers_loads(out, name, kind):
    """Bodies are stored without the head's prefix, tied weights once, and experts apart."""
    data = str(out / ("told.jsonl" if kind == "classifier" else "text"))
    task = HuggingFace(HfOptions(model=str(out / name), data=data, kind=kind, seq_len=16))
    made = initial.whole(task, 1).eval()
    theirs = type(made).from_pretrained(out / name, num_labels=2)
    stored = theirs.state_dict()
    new = {key for key in stored if key.startswith("classifier.")}
    for key, value in made.state_dict().items():
        assert torch.equal(value, stored[key]) or key in new, key
    assert len(task.layout(made).blocks) == 2


def test_what_is_not_stored_begins_as_transformers_begins_it(out):
    scratch = HfOptions(model=str(out / "gpt2"), data=str(out / "text"), seq_len=16, from_scratch=True)
    made = initial.whole(HuggingFace(scratch), 1)
    named = dict(made.named_parameters())
    assert named["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert named["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)  # 1/sqrt(2 layers)
    assert named["transformer.ln_f.weight"].eq(1).all()


def test_a_checksum_tells_models_apart_that_have_the_same_shapes(out, tmp_path):
    tensors = load_file(out / "llama" / "model.safetensors")
    found = {pretrained.checksum(out / name) for name in ("llama", "llama-2")}
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        if name == "other":
            tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        found.add(pretrained.checksum(tmp_path / name))
    assert len(found) == 3


def test_a_model_on_the_hub_is_downloaded_by_its_revision(out, monkeypatch):
    asked: list[Any] = []

    def download(name: str, **more: Any) -> str:
        asked.append((name, more["revision"]))
        if name == "nobody/none":
            raise OSError("404 Client Error\nRepository Not Found")
        return str(out / "gpt2")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    given = {"data": str(out / "text"), "seq_len": 16, "revision": "v1"}
    assert len(HuggingFace(HfOptions(model="openai-community/gpt2", **given)).data("train"))
    with pytest.raises(TrainError, match=r"`train\.options\.model`: nobody/none .*\(OSError: 404 Client Error\)"):
        HuggingFace(HfOptions(model="nobody/none", **given)).data("train")
    assert asked == [("openai-community/gpt2", "v1"), ("nobody/none", "v1")]


# --- data -------------------------------------------------------------------------------------------------------------


def data_of(out: Path, split: Any = "train", **more: Any) -> Any:
    return HuggingFace(HfOptions.model_validate(options(out, **more))).data(split)


def test_windows_hold_each_token_once_and_predict_the_next(out):
    data = data_of(out, model="gpt2")
    flat = data.samples.tokens.flat
    batch = data.batch([0, 1], [0, 0])
    assert batch["tokens"].flatten().tolist() == flat[:32].tolist()
    assert batch["labels"].flatten().tolist() == flat[1:33].tolist()
    assert (flat == 5).sum() == len(data.samples.tokens)  # each document has an end


def test_padding_and_prompts_are_not_learned(out, tmp_path):
    lines = [{"text": "old " * length, "question": "was this?"} for length in (1, 3, 5, 40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = data_of(out, model="gpt2", data=str(tmp_path), validation=str(tmp_path), prompt_key="question")
    batch = data.batch([0, 1, 3], [0] * 3)
    prompt = int(data.samples.tokens.prompts[0])
    learned = (batch["labels"] != -100).sum(1)
    assert learned.tolist() == [len(data.samples.tokens.read(n)) - prompt for n in (0, 1, 3)]
    assert batch["tokens"].shape[1] == 16
    assert not (batch["labels"][:, : prompt - 1] != -100).any()


def test_what_is_hidden_follows_from_a_samples_seed_and_in_validation_from_the_sample(out):
    training, validation = (data_of(out, split, model="bert", kind="masked") for split in ("train", "validation"))
    one, again, other = (training.batch([3, 4], seeds) for seeds in ([1, 2], [1, 2], [3, 4]))
    swapped = training.batch([4, 3], [2, 1])
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], swapped[name].flip(0)) for name in one)
    assert not torch.equal(one["labels"], other["labels"])
    assert torch.equal(validation.batch([5], [1])["tokens"], validation.batch([5], [9])["tokens"])


def test_of_what_is_predicted_most_is_hidden_and_nothing_special_is(out):
    data = data_of(out, model="bert", kind="masked", mask_share=0.4)
    every = data.batch(range(len(data)), range(len(data)))
    plain = torch.from_numpy(data.samples.tokens.flat[: len(data) * 16].astype("int64")).view(-1, 16)
    chosen = every["labels"] != -100
    assert torch.equal(every["labels"][chosen], plain[chosen])
    assert torch.equal(every["tokens"][~chosen], plain[~chosen])
    assert not data.special[plain[chosen]].any()
    assert chosen.any(1).all()
    assert chosen.sum().item() / (~data.special[plain]).sum() == pytest.approx(0.4, abs=0.03)
    hidden, same = (every["tokens"][chosen] == each for each in (4, plain[chosen]))
    assert hidden.float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert same.float().mean().item() == pytest.approx(0.1, abs=0.03)


def test_labels_are_numbered_alike_in_both_splits(out, tmp_path):
    for name, labels in (("a", (2, 0)), ("b", (0, 1))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": "x", "label": each}) for each in labels))
    given = {"kind": "classifier", "data": str(tmp_path / "a.jsonl"), "validation": str(tmp_path / "b.jsonl")}
    task = HuggingFace(HfOptions.model_validate(options(out, "bert-body", **given)))
    training, validation = task.data("train"), task.data("validation")
    assert [each.batch([0, 1], [0, 0])["labels"].tolist() for each in (training, validation)] == [[2, 0], [0, 1]]
    assert task.facts() == {"documents": 2, "classes": 3}
    assert training.fingerprint != validation.fingerprint


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_key": "question", "kind": "masked"}, "prompt_key is for kind causal"),
        ({"label_key": "label"}, "label_key is for kind classifier"),
        ({"mask_share": 0.2}, "mask_share is for kind masked"),
        ({"kind": "classifier", "pack": True}, "pack goes with no label and no prompt"),
        ({"lora": {}, "from_scratch": True}, "lora adapts weights"),
        ({"model": "./gpt2", "revision": "v1"}, r"revision is of a model on the hub, and \./gpt2 is a folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_rented(wrong, message):
    with pytest.raises(ValidationError, match=message):
        HfOptions.model_validate({"model": "gpt2", "data": "texts", **wrong})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "/nowhere/gpt2"}, "there is no folder /nowhere/gpt2 on this node"),
        ({"model": "text"}, "has no configuration of a model"),
        ({"model": "weightless"}, r"has no \*\.safetensors.*`from_scratch: true`"),
        ({"model": "broken"}, "is no file of safetensors"),
        ({"model": "bert-body", "kind": "masked"}, "have no `cls.predictions"),
        ({"model": "gpt2", "tokenizer": "/nowhere"}, r"`train\.options\.tokenizer`: there is no folder"),
        ({"model": "gpt2", "seq_len": 65}, "the model's positions are 64"),
        (
            {"model": "gpt2", "lora": {"targets": ["q_proj"]}},
            "no layer of the model ends in one of q_proj; there are c_",
        ),
        ({"model": "bert", "kind": "classifier", "data": "told.jsonl", "lora": {}}, "has no `bert.pooler"),
        ({"model": "gpt2", "data": "nowhere"}, "names a folder or file of texts"),
        ({"model": "gpt2", "data": "empty"}, "holds no texts"),
        ({"model": "gpt2", "data": "text/0.txt"}, "is the only document"),
        ({"model": "gpt2", "seq_len": 60, "data": "short.jsonl"}, "there is too little text for"),
        ({"model": "gpt2", "text_key": "body", "data": "told.jsonl"}, "told.jsonl:1 has a text nowhere under 'body'"),
        ({"model": "gpt2", "data": "no.jsonl"}, "no.jsonl:2 is no JSON"),
        ({"model": "gpt2", "data": "bytes"}, "is no text in UTF-8, at byte 0"),
        ({"model": "bert", "kind": "classifier"}, "has no 'label': JSON lines stand in files that end in .jsonl"),
        ({"model": "bert", "kind": "classifier", "data": "short.jsonl"}, "all texts have the same label, 'x'"),
        ({"model": "llama", "kind": "masked"}, "transformers has no model of kind masked"),
        *(
            ({"model": "mixtral", "lora": lora}, rf"experts.*gate_up_proj.*: name other layers, \[{others}\], or")
            for lora, others in (
                ({}, "k_proj, o_proj, q_proj, v_proj"),
                ({"dropout": 0.1}, "k_proj, o_proj, q_proj, v_proj"),
                ({"targets": ["w1", "w3", "q_proj"]}, "q_proj"),
                ({"targets": ["w1", "w3"]}, "k_proj, lm_head, o_proj, q_proj, v_proj"),
            )
        ),
        ({"model": "mixtral", "lora": {"targets": ["q_proj", "w1"]}}, "no layer of the model ends in one of w1; there"),
    ],
)
def test_what_is_wrong_with_models_and_data_is_said_in_one_line(out, more, message):
    for name in ("weightless", "broken"):
        (out / name).mkdir(exist_ok=True)
        for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (out / name / each).write_bytes((out / "gpt2" / each).read_bytes())
    (out / "broken" / "model.safetensors").write_bytes(b"none")
    (out / "empty").mkdir(exist_ok=True)
    (out / "bytes").write_bytes(b"\xff\xfe")
    (out / "no.jsonl").write_text('{"text": "a"}\n{')
    (out / "short.jsonl").write_text('{"text": "a", "label": "x"}\n' * 2)
    given = options(out, **more)
    given["data"] = str(out / more.get("data", "text"))
    task = HuggingFace(HfOptions.model_validate(given))
    with pytest.raises(TrainError, match=message) as caught:
        task.data("train"), initial.whole(task, 1)
    assert "\n" not in str(caught.value)


def test_packages_that_are_missing_are_named_with_what_brings_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "mgpu_train.tasks.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TrainError, match=r"pip install 'mgpu-train\[hf\]'"):
        entries.load(HF.task, Task, "train.task")
