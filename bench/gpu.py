"""What has to be seen on a GPU, in one command: `make bench-gpu`. Under 9 minutes on one GPU; without one it says so.

All of it is one GPU's, with torch and this checkout alone; tokens and images are random, so losses mean nothing. Each
part runs in a process of its own (`bench.gpu_parts`): one that fails is told of and costs the others nothing, and once
the time is over the rest is left out by name.

- `device`: what torch and the driver find, and what a product of matrices in bf16 reaches of the data sheet's peak.
- `compile`: the first pass of a compiled block in this interpreter, with an empty cache: what it needs (a C compiler,
  Python's headers) is in the image, or it is not.
- `waits`: how often the trainer's host waits for the GPU in a step, by torch's profiler. Once: for the step before.
- `train`: GPT-2 124M in bf16, compiled, 12 x 1,024 tokens a step: the trainer beside a loop as nanoGPT has it; tokens a
  second, MFU (`mgpu_train.metrics.flops`), peak memory of tensors, and their losses against each other.
- `resnet`: ResNet-34 in bf16 on 50,000 images of CIFAR's shape, 512 a step, with crops and mirror images: seconds an
  epoch, after one.
- `stall`: how long training stands still for a save of about 1 GiB, the first one apart, beside torch.save and DCP.
- `resume`: the same state saved, uploaded to a folder, fetched with every checksum, and loaded.
- `tests`: `tests/gpu`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.report import Report
from bench.tools import ROOT

_TORCHS = re.compile(r"\[rank\d+\]:\[[IWE]")  # what torch itself logs, as a process ends, too
WHOLE_S, PART_S = 530.0, 150.0  # all of it, and one part at most
RESNET_S = 9.0  # an epoch on one GPU, as published for ResNet-34 on CIFAR-10

Figures = dict[str, Any]
Run = Callable[[str], Figures]


class Failed(Exception):
    """A part that came to nothing: the last line of why."""


def main(only: Sequence[str] = ()) -> None:
    """Runs the named parts, or all of them, and prints every target with its figure."""
    if unknown := set(only) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    import torch  # seconds, which other benches need not wait for

    if not torch.cuda.is_available():
        print(f"no GPU: PyTorch {torch.__version__} sees no CUDA device here, so there is nothing to measure")
        return
    conduct(Report(), [name for name in PARTS if not only or name in only], run)


def conduct(report: Report, names: Sequence[str], part: Callable[[str, float], Figures]) -> None:
    """Runs these parts and tells of each; `part` gives figures of one within so many seconds."""
    began = time.monotonic()
    for name in names:
        since = time.monotonic()

        def figures(which: str) -> Figures:
            left_s = WHOLE_S - (time.monotonic() - began)
            if left_s <= 0:
                raise Failed(f"not run: the {WHOLE_S:g} s of all parts are over")
            return part(which, left_s if which == "tests" else min(PART_S, left_s))

        print(f"\n{name}", flush=True)
        try:
            PARTS[name](report, figures)
        except Failed as error:
            report.holds(f"{name}: {error}", "failed", met=False)
        print(f"  ({time.monotonic() - since:.0f} s)", flush=True)
    report.summary()


def run(name: str, limit_s: float) -> Figures:
    """The figures of one part, in a process of its own. Raises Failed."""
    from bench.gpu_parts import Shape

    aside = ROOT / ".mgpu"  # a disk, where /tmp may be memory
    aside.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=aside, ignore_cleanup_errors=True) as folder:
        argv, env = ["bench.gpu_parts", name, folder, json.dumps(asdict(Shape()))], dict(os.environ)
        if name == "tests":
            argv, env = ["pytest", "-q", "-n", "8", "tests/gpu"], {**env, "MGPU_REQUIRE": "cuda"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", *argv],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"not over in {limit_s:.0f} s") from error
    if name == "tests":
        return {"passed": done.returncode == 0, "said": done.stdout}
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if not _TORCHS.match(line)]
        raise Failed((said or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def device(report: Report, figures: Run) -> None:
    found = figures("device")
    print(
        f"  {found['count']} x {found['name']}, {found['gib']:.1f} GiB, {found['capability']}, {found['cores']} cores"
    )
    print(f"  torch {found['torch']}, CUDA {found['cuda']}")
    same = found["driver"]["count"] == found["count"]
    report.holds("the driver, asked by itself, has as many GPUs as torch", str(found["driver"]["count"]), met=same)
    report.figure("product of matrices in bf16", found["tflops"], " TFLOPS")
    if found["peak_tflops"]:
        report.at_least("of the data sheet's peak", 100 * found["tflops"] / found["peak_tflops"], 60, " %")


def compiled(report: Report, figures: Run) -> None:
    found = figures("compile")
    print(f"  {found['python']}, C compiler {found['cc'] or 'absent'}, Python.h {found['headers']}")
    report.figure("first pass of a compiled block, empty cache", found["first_s"], " s")
    report.at_least("compiled over as it is", found["eager_ms"] / found["compiled_ms"], 1, "x")
    report.at_most("largest difference, of the largest value", 100 * found["differ"], 5, " %")


def waits(report: Report, figures: Run) -> None:
    from bench.gpu_parts import READ, WAITS

    found = figures("waits")
    for name in (*WAITS, READ):
        print(f"  {name:<28} {found[name]:6.2f} a step")
    report.at_most("waits of the host for the GPU, a step", sum(found[name] for name in WAITS), 1.1)


def train(report: Report, figures: Run) -> None:
    ours, hand = figures("ours"), figures("by hand")
    print(f"  {'':<10}{'tokens/s':>12}{'MFU':>8}{'GiB':>8}")
    for name, each in (("mgpu", ours), ("by hand", hand)):
        share = "" if each["mfu"] is None else f"{each['mfu']:.1%}"
        print(f"  {name:<10}{each['units_per_s']:12,.0f}{share:>8}{each['gib']:8.2f}")
    _idle(ours)
    report.at_least("tokens/s over by hand", ours["units_per_s"] / hand["units_per_s"], 1, "x")
    report.at_most("peak memory over by hand", ours["gib"] / hand["gib"], 1.02, "x")
    apart = abs(ours["losses"][-1] - hand["losses"][-1]) / hand["losses"][-1]
    report.at_most("last losses apart", 100 * apart, 1, " %")


def resnet(report: Report, figures: Run) -> None:
    found = figures("resnet")
    print(f"  {found['units_per_s']:,.0f} images/s, {found['gib']:.2f} GiB, random images of CIFAR's shape")
    print(
        f"  nothing was computed {found['host_share']:.2%} of the time, data were waited for {found['data_share']:.2%}"
    )
    report.at_most("ResNet-34, an epoch of 50,000 images of 32 x 32", found["epoch_s"], RESNET_S, " s")


def _idle(found: Figures) -> None:
    idle, waited = found["host_share"], found["data_share"]
    print(f"  between steps nothing was computed {idle:.2%} of the time, and data were waited for {waited:.2%} of it")


def stall(report: Report, figures: Run) -> None:
    from bench import checkpoint_stall

    found = figures("stall")
    print(f"  {found['gib']:.2f} GiB of state")
    of_whole, of_dcp = checkpoint_stall.report(found["saves"])
    first, *others = (seconds for seconds, _ in found["saves"][checkpoint_stall.OUTSIDE])
    report.at_most("stall of a save, of a blocking torch.save's", 100 * of_whole, 100 * checkpoint_stall.LIMIT, " %")
    report.at_most("stall of a save over DCP's async_save, its best", of_dcp, 1, "x")
    report.at_most("stall of the first save over the longest other", first / max(others), 2, "x")


def resume(report: Report, figures: Run) -> None:
    found = figures("resume")
    for name in ("save", "upload", "fetch", "load"):
        seconds = found[f"{name}_s"]
        report.figure(f"{name}, {found['gb']:.2f} GB in {seconds:.2f} s", found["gb"] / seconds, " GB/s")


def tests(report: Report, figures: Run) -> None:
    found = figures("tests")
    if not found["passed"]:
        print(found["said"])
    report.holds("tests/gpu", "passed" if found["passed"] else "failed", met=found["passed"])


PARTS: dict[str, Callable[[Report, Run], None]] = {
    "device": device,
    "compile": compiled,
    "waits": waits,
    "train": train,
    "resnet": resnet,
    "stall": stall,
    "resume": resume,
    "tests": tests,
}
