"""The parts of `make bench-gpu`, a process each: `python -m bench.gpu_parts PART FOLDER SHAPE` prints figures as JSON.

What each measures stands in `bench.gpu`. All of them run on a CPU, too, in small: so they are tested where no GPU is.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mgpu_train import parallel
from mgpu_train.checkpoint.distributed.dcp import Progress
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Job, LmOptions, ModelConfig, TrainConfig
from mgpu_train.environment import Folders
from mgpu_train.health import gpus, hardware, preflight
from mgpu_train.loop import Trainer
from mgpu_train.metrics import flops
from mgpu_train.models.gpt import Block
from mgpu_train.optim.schedule import learning_rate
from mgpu_train.signals import StopRequest
from mgpu_train.step import Pending
from mgpu_train.store import open_store
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench import checkpoint_stall
from bench.train_plain import loss_of, make

# what makes the host wait for a GPU, by the profiler's names
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
READ = "aten::_local_scalar_dense"  # a number that is read from a tensor, on a CPU, too
HEARD = 10  # steps after which a loop by hand looks at its loss, as nanoGPT does
Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What is trained, and for how long: steps after `warm` count. `compiler`: torch.compile's; None: nothing is."""

    model: dict[str, Any] = field(default_factory=lambda: {"preset": "gpt2-124m"})
    seq_len: int = 1024
    batch: int = 12  # sequences: as nanoGPT has it, and 24 GiB are enough
    steps: int = 60
    warm: int = 20
    precision: str = "bf16"
    compiler: str | None = "inductor"
    network: str = "resnet34"
    width: int = 64
    images: int = 50_000  # of 3 x 32 x 32 bytes: CIFAR-10's
    image_batch: int = 512
    epochs: int = 3
    saved: dict[str, Any] = field(default_factory=lambda: checkpoint_stall.MODEL.model_dump(exclude_none=True))
    rounds: int = 3


def device(shape: Shape, folder: Path) -> Figures:
    """What is there, by torch and by the driver, and what it computes."""
    _ = shape, folder
    place, seen = _device(), gpus.ask_driver()
    found: Figures = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": asdict(seen)}
    found |= {"tflops": preflight.matmul(place), "cores": hardware.cores()}
    if place.type == "cuda":
        facts = torch.cuda.get_device_properties(place)
        found |= {"name": facts.name, "gib": facts.total_memory / 2**30, "count": torch.cuda.device_count()}
        found |= {"capability": f"sm_{facts.major}{facts.minor}", "peak_tflops": (flops.peak(facts.name) or 0) / 1e12}
    return found


def compiled(shape: Shape, folder: Path) -> Figures:
    """A block compiled by this interpreter with an empty cache, forward and backward, beside itself as it is."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(folder / name)
    place, config = _device(), ModelConfig.model_validate(shape.model)
    torch.manual_seed(1)
    block = Block(config).to(place)
    x = torch.randn(shape.batch, shape.seq_len, config.dim, device=place)
    angles = torch.randn(shape.seq_len, config.head_dim // 2, device=place)
    rotation = torch.stack((angles.cos(), angles.sin()))

    def passed(run: Callable[..., torch.Tensor]) -> tuple[float, torch.Tensor]:
        began = _now(place)
        with torch.autocast(place.type, torch.bfloat16, enabled=shape.precision == "bf16"):
            y = run(x, rotation)
        y.float().sum().backward()
        block.zero_grad()
        return _now(place) - began, y.detach().float()

    made = torch.compile(block, backend=shape.compiler or "eager")
    first_s, y = passed(made)
    _, wanted = passed(block)
    eager_s, compiled_s = (statistics.median(passed(run)[0] for _ in range(9)) for run in (block, made))
    return {
        "python": sys.executable,
        "cc": shutil.which(os.environ.get("CC", "gcc")) or "",
        "headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "first_s": first_s,
        "eager_ms": 1000 * eager_s,
        "compiled_ms": 1000 * compiled_s,
        "differ": float((y - wanted).abs().max() / wanted.abs().max()),
    }


def waits(shape: Shape, folder: Path) -> Figures:
    """How often the host waits for the device, a step of the trainer."""
    config = _language(shape, folder, compile=False)
    counts = _trained(config, folder, Watched)[0].counts
    counted = shape.steps - shape.warm
    return {name: counts.get(name, 0) / counted for name in (*WAITS, READ)}


def ours(shape: Shape, folder: Path) -> Figures:
    """The bundled trainer, as a run file starts it, without checkpoints."""
    config = _language(shape, folder, compile=shape.compiler is not None)
    found = _speed(_trained(config, folder)[1], shape.warm, "tokens_per_s")
    return {**found, "mfu": _mfu(config, found["units_per_s"])}


def by_hand(shape: Shape, folder: Path) -> Figures:
    """A loop as nanoGPT has it: the whole model compiled, autocast, fused AdamW, the next batch pinned and under way,
    and a look at the loss each ten steps."""
    place = _device()
    config = TrainConfig.model_validate(_language(shape, folder, compile=False))
    plain, optimizer, text = make(config, 0, 1, place)
    model: nn.Module = torch.compile(plain, backend=shape.compiler) if shape.compiler else plain  # type: ignore[assignment]
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    losses, marks = list[torch.Tensor](), [(0, _now(place))]
    tokens = _beside(text.of(1), place)
    for step in range(1, config.steps + 1):
        with torch.autocast(place.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = loss_of(model, tokens)
        tokens = _beside(text.of(step + 1), place)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % min(HEARD, shape.warm) == 0:
            loss.item()
            marks.append((step, _now(place)))
    counted = [mark for mark in marks if mark[0] >= shape.warm]
    speeds = [shape.batch * shape.seq_len * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(counted)]
    speed = statistics.median(speeds)
    gpu = place.type == "cuda"
    peak = torch.cuda.max_memory_allocated(place) if gpu else hardware.resident_bytes(most=True)
    values = [float(each) for each in losses]
    return {"units_per_s": speed, "gib": peak / 2**30, "losses": values, "mfu": _mfu(config.model_dump(), speed)}


def resnet(shape: Shape, folder: Path) -> Figures:
    """ResNet on synthetic images of CIFAR's shape, from files, with crops and mirror images."""
    drawn = np.random.default_rng(1)
    for split, count in (("train", shape.images), ("val", shape.image_batch)):
        np.save(folder / f"{split}-images.npy", drawn.integers(0, 256, (count, 3, 32, 32), np.uint8))
        np.save(folder / f"{split}-labels.npy", np.arange(count) % 10)
    per_epoch = max(1, shape.images // shape.image_batch)
    options = {"data": str(folder), "model": shape.network, "width": shape.width, "crop_padding": 4, "flip": True}
    config = {
        "task": "vision", "strategy": "single", "steps": shape.epochs * per_epoch, "global_batch": shape.image_batch,
        "lr": 1e-3, "precision": shape.precision, "log_every": max(1, per_epoch // 10), "validate_every": 10**6,
        "validate_batches": 1, "options": {**options, "channels_last": True},
    }  # fmt: skip
    found = _speed(_trained(config, folder)[1], per_epoch, "images_per_s")  # the first epoch warms up
    return {**found, "epoch_s": shape.images / found["units_per_s"]}


def stall(shape: Shape, folder: Path) -> Figures:
    """Saves of `bench.checkpoint_stall`, each with its stall and when it stood on disk, in seconds."""
    training = checkpoint_stall.Training(folder, ModelConfig.model_validate(shape.saved))
    taken = checkpoint_stall.measure(training, shape.rounds)
    parallel.leave()
    return {"gib": training.gib, "saves": taken}


def resume(shape: Shape, folder: Path) -> Figures:
    """A checkpoint on its way out and back: saved, uploaded and committed, fetched and verified, on the device again.
    The store is a folder of the same disk."""
    training = checkpoint_stall.Training(folder, ModelConfig.model_validate(shape.saved))
    checkpointer = checkpoint_stall.checkpointer_of(training, outside=False)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = training.now()
        made = work()
        seconds[name] = training.now() - began
        return made

    (folder / "store").mkdir()
    store, run = open_store(f"file://{folder / 'store'}"), "bench"
    name, log = checkpoint_id(1, 1), CommitLog(store, run)
    log.begin_attempt(1, "bench")
    timed("save_s", lambda: checkpointer.save(folder / "saved", Progress(1, 1)))

    def upload() -> Any:
        saved = {"folder": folder / "saved" / "step-1", "attempt": 1, "node": 0, "step": 1}
        upload_part(store, run, name, **saved, world_size=1, meta={})
        return commit_when_complete(store, run, name, writers=range(1), nodes=1, writer="bench")

    entry = timed("upload_s", upload)
    manifest = log.manifest(entry)
    timed("fetch_s", lambda: fetch(store, run, manifest, folder / "fetched", durable=False))
    timed("load_s", lambda: checkpointer.load(folder / "fetched"))
    checkpointer.close()
    parallel.leave()
    return {"gb": manifest.bytes / 1e9, **seconds}


class Watched(Trainer):
    """A trainer whose steps, once it is warm, are seen by torch's profiler."""

    warm = 0
    counts: dict[str, int]

    def _step(self) -> Pending:
        step, last = self.progress.step, self.config.steps
        if step == self.warm:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.place.device.type == "cuda" else [])]
            self._seen = profile(activities=kinds)
            self._seen.start()
        pending = super()._step()
        if step + 1 == last:
            self._seen.stop()
            self.counts = {each.key: each.count for each in self._seen.key_averages()}
        return pending


def _trained(config: Figures, folder: Path, kind: type[Trainer] = Trainer) -> tuple[Any, list[Figures]]:
    """A trainer of this kind that has trained, and the lines of its metrics."""
    job = Job.model_validate({
        "run_id": "bench", "attempt": 1, "writer": "bench", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "train": config,
    })  # fmt: skip
    place = parallel.join(600, 600)
    trainer = kind(job, Folders(metrics=folder / "metrics"), place, StopRequest())
    trainer.run()
    parallel.leave()
    return trainer, [json.loads(line) for line in (folder / "metrics" / "rank-0.jsonl").read_text().splitlines()]


def _language(shape: Shape, folder: Path, **more: Any) -> Figures:
    """`train` of a GPT on random tokens, in nanoGPT's files."""
    vocabulary = ModelConfig.model_validate(shape.model).vocabulary or 256
    count, drawn = (shape.steps + 2) * shape.batch * (shape.seq_len + 1), np.random.default_rng(1)
    for name in ("train", "val"):
        drawn.integers(0, vocabulary, count, np.uint16).tofile(folder / f"{name}.bin")
    return {
        "task": "lm", "tokens": str(folder), "model": {"vocabulary": vocabulary, **shape.model},
        "seq_len": shape.seq_len, "strategy": "single", "steps": shape.steps, "global_batch": shape.batch,
        "precision": shape.precision, "lr": 6e-4, "warmup_steps": shape.warm, "log_every": min(HEARD, shape.warm),
        "validate_every": 10**6, "validate_batches": 1, **more,
    }  # fmt: skip


def _speed(lines: list[Figures], warm: int, unit: str) -> Figures:
    steps = [line for line in lines if line["kind"] == "step"]
    counted = [line for line in steps if line["step"] > warm]
    shares = {name: statistics.mean(line[name] for line in counted) for name in ("host_share", "data_share")}
    speed, memory = statistics.median(line[unit] for line in counted), max(line["memory_gib"] for line in steps)
    return {"units_per_s": speed, "gib": memory, "losses": [line["loss"] for line in steps], **shares}


def _mfu(config: Figures, units_per_s: float) -> float | None:
    """Of the GPU's peak, where it is known."""
    if not torch.cuda.is_available():
        return None
    options = LmOptions.model_validate(TrainConfig.model_validate(config).task_options)
    return flops.mfu(options.model.flops(options.seq_len), units_per_s, 1, torch.cuda.get_device_name())


def _beside(tokens: torch.Tensor, place: torch.device) -> torch.Tensor:
    return tokens.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else tokens


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _now(place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


PARTS: dict[str, Callable[[Shape, Path], Figures]] = {
    "device": device,
    "compile": compiled,
    "waits": waits,
    "ours": ours,
    "by hand": by_hand,
    "resnet": resnet,
    "stall": stall,
    "resume": resume,
}


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    name, folder, shape = sys.argv[1], Path(sys.argv[2]), Shape(**json.loads(sys.argv[3]))
    Watched.warm = shape.warm
    print(json.dumps(PARTS[name](shape, folder)), flush=True)
    os._exit(0)  # as the trainer ends, and for its reason


if __name__ == "__main__":
    main()
