"""The trainer on a GPU with NCCL: what the CPU tests prove holds there too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mgpu_train.agent.machine import ports
from mgpu_train.checkpoint.distributed.staging import Snapshot, Staging
from mgpu_train.health import gpus, preflight
from mgpu_train.models.context import Context, causal_part
from torch.nn import functional

TINY = {
    "steps": 6, "threads": 2, "precision": "fp32", "global_batch": 8, "seq_len": 32, "warmup_steps": 2, "lr": 0.01,
    "validate_every": 3, "validate_batches": 2, "model": {"layers": 2, "dim": 64, "heads": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(require) -> None:
    require("cuda", torch.cuda.is_available(), "torch sees no CUDA device")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
LLAMA = {"kv_heads": 1, "mlp": "swiglu", "qk_norm": True, "tied": True}
VISION = {"task": "vision", "options": {"width": 8, "channels_last": True}}
DIFFUSION = {"task": "diffusion", "options": {"dim": 32, "layers": 2, "heads": 2}}
HF: dict[str, Any] = {"task": "hf", "options": {"seq_len": 16}}
QLORA = {"rank": 4, "quantize_base": "nf4"}
# what is trained, how, and how far the losses of a GPU may be from a CPU's
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "tf32": ({"precision": "tf32"}, 5e-3),
    "fp16, scaled": ({"precision": "fp16"}, 0.02),
    "fp16, scaled, sharded": ({"precision": "fp16", "strategy": "fsdp", "micro_batch": 2}, 0.02),
    "compiled": ({"compile": True, "model": {**TINY["model"], **LLAMA}}, 1e-3),
    "compiled, sharded, recomputed": (
        {"compile": True, "strategy": "fsdp", "activation_checkpointing": "selective", "micro_batch": 4}, 1e-3,
    ),
    "recomputed in full": ({"activation_checkpointing": "full", "strategy": "ddp"}, 1e-3),
    "muon, averaged": ({"optimizer": "muon", "ema": 0.9}, 0.02),  # its matrix products are in bf16
    "vision": (VISION, 5e-3),
    "vision, compiled, bf16": ({**VISION, "compile": True, "precision": "bf16"}, 0.05),
    "diffusion": (DIFFUSION, 1e-3),
    "diffusion, compiled, bf16": ({**DIFFUSION, "compile": True, "precision": "bf16"}, 0.02),
    "recommender": ({"task": "recommender", "options": {"user": "0", "item": "1", "rating": "2"}}, 1e-3),
    "hf": (HF, 1e-3),
    "adamw8bit": ({"optimizer": "adamw8bit"}, 0.01),
    "adamw8bit, sharded, averaged": (
        {"optimizer": "adamw8bit", "strategy": "fsdp", "ema": 0.9, "micro_batch": 2}, 0.01,
    ),
    "fp8": ({"precision": "fp8"}, 0.05),
    "fp8, compiled, sharded, recomputed": (
        {
            "precision": "fp8", "compile": True, "strategy": "fsdp", "activation_checkpointing": "selective",
            "micro_batch": 4,
        },
        0.05,
    ),
    "fp8, tokens that are no multiple of 16": ({"precision": "fp8", "seq_len": 17, "micro_batch": 3}, 0.05),
    "hf, adapters on 4 bits": ({**HF, "options": {**HF["options"], "lora": QLORA}}, 5e-3),
    "hf, adapters on 4 bits, sharded, recomputed, bf16": (
        {
            **HF, "strategy": "fsdp", "activation_checkpointing": "full", "precision": "bf16",
            "options": {**HF["options"], "lora": QLORA},
        },
        0.05,
    ),
    "deepspeed 1": ({"strategy": "deepspeed", "zero_stage": 1, "micro_batch": 4}, 1e-3),
    "deepspeed 2, bf16": ({"strategy": "deepspeed", "zero_stage": 2, "micro_batch": 4, "precision": "bf16"}, 0.02),
    "deepspeed 3, recomputed": (
        {"strategy": "deepspeed", "zero_stage": 3, "micro_batch": 4, "activation_checkpointing": "full"}, 1e-3,
    ),
    "hf, adapters, sharded": ({**HF, "strategy": "fsdp", "options": {**HF["options"], "lora": {"rank": 4}}}, 1e-3),
}  # fmt: skip


def losses(
    home: Path,
    environment: dict[str, str],
    resume: Path | None = None,
    every_steps: int = 3,
    writers: str = "all",
    **train: object,
) -> list[float]:
    """The losses of a one-process run in a folder of its own."""
    home.mkdir()
    job = {
        "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "train": {**TINY, **train},
        "checkpoint": {"to": "file:///x", "every_steps": every_steps, "writers": writers},
        "gpus": int(environment.get("CUDA_VISIBLE_DEVICES") != ""),
    }  # fmt: skip
    (home / "job.json").write_text(json.dumps(job))
    folders = {"MGPU_JOB": home / "job.json", "MGPU_CHECKPOINT_DIR": home / "ck", "MGPU_METRICS_DIR": home / "metrics"}
    given = {**environment, **{name: str(path) for name, path in folders.items()}}
    if resume is not None:
        given["MGPU_RESUME_DIR"] = str(resume)
    subprocess.run([sys.executable, "-m", "mgpu_train.loop"], env=given, check=True, timeout=120)
    lines = map(json.loads, (home / "metrics" / "rank-0.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_the_losses_are_those_of_the_cpu_and_survive_a_resume(tmp_path, strategy):
    here = dict(os.environ)
    cpu = losses(tmp_path / "cpu", {**here, "CUDA_VISIBLE_DEVICES": ""}, strategy=strategy)
    cuda = losses(tmp_path / "cuda", here, strategy=strategy)
    assert cuda == pytest.approx(cpu, rel=1e-3)
    found = losses(tmp_path / "found", here, strategy=strategy, micro_batch="auto")
    assert found == pytest.approx(cuda, rel=1e-4)
    resumed = losses(tmp_path / "resumed", here, resume=tmp_path / "cuda" / "ck" / "step-3", strategy=strategy)
    assert resumed == pytest.approx(cuda[3:], rel=1e-4)
    bf16 = losses(tmp_path / "bf16", here, strategy=strategy, precision="bf16")
    assert bf16 == pytest.approx(cpu, rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_trained_a_gpu_finds_the_losses_of_a_cpu(tmp_path, name, require):
    asked, apart = CASES[name]
    if "8" in name.partition(",")[0] or "4 bits" in name:
        pytest.importorskip("torchao")
    if "deepspeed" in name:
        pytest.importorskip("deepspeed")
    if "fp8" in name:
        require("fp8", torch.cuda.get_device_capability() >= (8, 9), "this GPU does not compute in fp8")
    train = {**asked, **files_of(tmp_path, asked)}
    cpu = losses(tmp_path / "cpu", {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **plain(train))
    cuda = losses(tmp_path / "cuda", dict(os.environ), **train)
    assert cuda == pytest.approx(cpu, rel=apart)
    assert len(set(cuda)) > 1, "something is learned"


def plain(train: dict[str, Any]) -> dict[str, Any]:
    """The same, with nothing that saves time or memory."""
    saving = {"compile", "activation_checkpointing", "precision", "micro_batch", "zero_stage"}
    return {**{name: value for name, value in train.items() if name not in saving}, "strategy": "single"}


def files_of(home: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Where a task reads files: small ones, made here."""
    task = asked.get("task")
    if task == "recommender":
        drawn = np.random.default_rng(1)
        np.save(
            home / "ratings.npy",
            np.stack([drawn.integers(0, 50, 500), drawn.integers(0, 40, 500), np.arange(500) % 5]).T,
        )
        return {"options": {**asked["options"], "data": str(home / "ratings.npy")}}
    if task != "hf":
        return {}
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1").save_pretrained(home / "model")
    config = transformers.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=1, eos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "model")
    (home / "text").mkdir()
    for number in range(10):
        (home / "text" / f"{number}.txt").write_text(" ".join(f"w{(7 * n * n + number) % 250}" for n in range(400)))
    return {"options": {**asked["options"], "model": str(home / "model"), "data": str(home / "text")}}


@pytest.mark.parametrize("asked", [{"optimizer": "adamw8bit"}, {"precision": "fp8"}], ids=str)
def test_what_is_computed_in_8_bits_goes_on_where_it_was(tmp_path, asked, require):
    pytest.importorskip("torchao")
    require("fp8", torch.cuda.get_device_capability() >= (8, 9), "this GPU does not compute in fp8")
    here = dict(os.environ)
    whole = losses(tmp_path / "whole", here, strategy="fsdp", **asked)
    resumed = losses(tmp_path / "on", here, resume=tmp_path / "whole" / "ck" / "step-3", strategy="fsdp", **asked)
    assert resumed == pytest.approx(whole[3:], rel=1e-4)


def test_a_gpu_is_counted_and_measured(tmp_path):
    assert gpus.ask_driver().count == torch.cuda.device_count()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **place, "MASTER_PORT": str(ports.free(1)[0]), preflight.FILE: str(tmp_path / "said")}
    subprocess.run([sys.executable, "-m", "mgpu_train.health.preflight"], env=env, check=True, timeout=120)
    ((measured,),) = json.loads((tmp_path / "said").read_text()).values()
    assert measured["tflops"] > 1, "a GPU's, not a processor's"


@pytest.mark.parametrize(
    ("kind", "shared", "far"), [(torch.bfloat16, 4, 2e-2), (torch.float16, 1, 5e-3), (torch.float32, 1, 1e-3)]
)
def test_parts_of_causal_attention_are_those_of_the_whole(kind, shared, far):
    """Of ranks that share sequences: with the mask that flash attention knows, and with the one of float32."""
    torch.manual_seed(0)
    shapes = [(2, 2 * shared, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64)]
    q, k, v = given = [torch.randn(*shape, device="cuda", dtype=kind, requires_grad=True) for shape in shapes]
    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum(), given)
    parts = [Context(rank, 4, None) for rank in range(4)]
    found = [causal_part(each.part(q, 2), k, v, each, enable_gqa=shared > 1) for each in parts]
    for each, part in zip(parts, found, strict=True):
        torch.testing.assert_close(part, each.part(whole, 2), rtol=far, atol=far)
    total = torch.stack([(part * each.part(weights, 2)).sum() for each, part in zip(parts, found, strict=True)]).sum()
    for gradient, expected in zip(torch.autograd.grad(total, given), wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=far, atol=4 * far)


def test_a_copy_beside_the_gpus_other_work_is_of_the_moment_it_was_asked_for():
    cuda = torch.device("cuda", 0)
    staging = Staging(cuda, shared=True)
    tensors = [torch.full((1 << 20,), float(number), device=cuda) for number in range(8)]
    for tensor in tensors:
        tensor.mul_(2).add_(1)  # still under way when the snapshot is taken
    snapshot = Snapshot({"w": tensors}, {tensor.untyped_storage().data_ptr() for tensor in tensors}, staging)
    filler = threading.Thread(target=snapshot.fill)
    filler.start()
    assert snapshot.filled.wait(60)
    filler.join()
    for tensor in tensors:
        tensor.zero_()
    for number, tensor in enumerate(tensors):
        copy = snapshot.copy_of(tensor)
        assert copy is not None
        assert copy.is_pinned()
        assert torch.equal(copy, torch.full((1 << 20,), 2.0 * number + 1))
    del copy, snapshot
    staging.close()


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_saves_in_the_background_change_no_loss_and_resume_where_they_were_made(tmp_path, strategy):
    here = dict(os.environ)
    longer = {"strategy": strategy, "steps": 40, "validate_every": 40}
    saving = losses(tmp_path / "saving", here, **longer)
    apart = losses(tmp_path / "apart", here, every_steps=1000, **longer)
    assert saving == pytest.approx(apart, rel=1e-4)
    first = tmp_path / "saving" / "ck" / "step-3"  # later ones may have been skipped, so fast are these steps
    resumed = losses(tmp_path / "resumed", here, resume=first, **longer)
    assert resumed == pytest.approx(apart[3:], rel=1e-4)


def test_what_is_gathered_to_one_rank_is_saved_and_resumed(tmp_path):
    """Nothing is copied later then: all of it is in the host's memory already."""
    here = dict(os.environ)
    saving = losses(tmp_path / "saving", here, strategy="fsdp", writers="rank0")
    resume = tmp_path / "saving" / "ck" / "step-3"
    resumed = losses(tmp_path / "resumed", here, resume=resume, strategy="fsdp", writers="rank0")
    assert resumed == pytest.approx(saving[3:], rel=1e-4)
