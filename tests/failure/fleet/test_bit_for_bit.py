"""I9 through the product: killed between two checkpoints, resumed on another machine, and equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.store import open_store

from mgpu.providers.local import control

STEPS, EVERY = 120, 20  # enough that it is not through before its end on a busy machine
RUN_FILE = """
name: {name}
provider: local
nodes: 2
market: spot
max_price_usd_per_hour: 1
max_hours: 0.2
train:
  task: lm
  strategy: STRATEGY
  steps: 120
  global_batch: 16
  seq_len: 64
  warmup_steps: 5
  validate_every: 25
  validate_batches: 2
  threads: 1
  text: TEXT
  model: {{layers: 2, dim: 64, heads: 2}}
checkpoint: {{to: "file://{folder}/store", every_steps: 20, writers: all}}
recovery: {{attempts: 3, wait_minutes: 1}}
"""
TOLD = {"step": ("loss", "grad_norm", "lr", "samples", "steps"), "validation": ("loss",)}


def metrics(line) -> dict[int, dict[tuple[str, int], tuple[Any, ...]]]:
    """By attempt: what the first rank's metrics say of each step, less what depends on the clock."""
    found: dict[int, dict[tuple[str, int], tuple[Any, ...]]] = {}
    for text in (line.session.folder.root / "metrics" / "rank-0.jsonl").read_text().splitlines():
        record = json.loads(text)
        if record["kind"] == "start":
            found[record["attempt"]] = now = {}
        for key in [TOLD[record["kind"]]] if record["kind"] in TOLD else []:
            now[record["kind"], record["step"]] = tuple(record[name] for name in key)
    return found


def contents(line, folder: Path) -> dict[str, Any]:
    """All that the final checkpoint holds, by name."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    store = open_store(line.request.checkpoint.to)
    log = CommitLog(store, line.run_id)
    manifest = log.manifest(log.checkpoints()[0])
    assert manifest.step == STEPS
    fetch(store, line.run_id, manifest, folder)
    whole = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, whole)
    return dict(flat(torch.load(whole, weights_only=False)))


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in flat(inner, f"{name}.{key}")]
    return [(name, value)]


@pytest.mark.parametrize(("strategy", "node"), [("ddp", 1), ("fsdp", 0)])
def test_interrupted_between_two_checkpoints_equals_uninterrupted(new_line, tmp_path, strategy, node):
    import torch

    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}").write_text("the quick brown fox jumps over the lazy dog " * 40)
    run_file = RUN_FILE.replace("STRATEGY", strategy).replace("TEXT", json.dumps(str(text)))
    whole, cut = new_line(text=run_file), new_line(text=run_file)
    for line in (cut, whole):  # both at once: what a machine's load does to a run is nothing
        line.start()
    cut.wait(lambda: cut.committed() and cut.session.record.step > EVERY + 2, 90)
    control.kill(cut.fleet.instance(node))
    assert cut.end(120).succeeded
    assert whole.end(120).succeeded

    (wanted,), (before, after) = metrics(whole).values(), metrics(cut).values()
    first, last = (max(step for kind, step in told if kind == "step") for told in (before, after))
    interruption = cut.record.interruptions[0]
    resumed = interruption.resumed_step
    assert resumed in range(EVERY, STEPS, EVERY)
    assert EVERY + 2 < interruption.step < STEPS == last
    assert [step for kind, step in after if kind == "step"] == list(range(resumed + 1, STEPS + 1))
    assert wanted.items() >= before.items()
    assert wanted.items() >= after.items()
    # what its first node had written last, and nobody had copied yet, went with it
    assert {step for _, step in wanted.keys() - before.keys() - after.keys()} <= set(range(first + 1, resumed + 1))

    ones, others = contents(whole, tmp_path / "whole"), contents(cut, tmp_path / "cut")
    assert ones.keys() == others.keys()
    tensors = {key for key, value in ones.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 30
    assert all(torch.equal(ones[key], others[key]) for key in tensors)
    assert all(ones[key] == others[key] for key in ones.keys() - tensors)
    cut.judge()
