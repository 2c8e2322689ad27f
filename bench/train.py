"""The bundled trainer beside a loop written by hand, Accelerate and Lightning Fabric: `make bench-train`.

All train the same model on the same text with the same torch: task lm's byte GPT of 4 layers, d = 128, 128 bytes a
sequence. Ours does all that it does in a run: metrics, checkpoints, validation, and it hears signals; the others do
nothing but train. Programs take turns in each round, beginning with another one each time, and a ratio is the median of
the rounds' ratios.

The peers are those of the lock file, with its hashes, in the environment of the checkout: another torch is no peer.

- `units/s`: from the 8th step to the last one by the wall clock, saves included, validation left out.
- `CPU us`: microseconds of CPU a unit in the same steps, of all threads of rank 0: the least disturbed by other work.
- `MiB`: the peak resident memory, of all ranks together.
- `start`: from the start of the process until its first step is over. `--only start` alone, beside `import torch`.
- `host`: the share of the time in steps in which nothing is computed: between the end of a step's update and the
  beginning of the next one's forward pass. It is the trainer's own `host_share`; others do not measure it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import ports
from mgpu_train.agent.phases import launcher_process
from mgpu_train.config import Job

from bench import measure
from bench.report import Report
from bench.tools import ROOT

ROUNDS, STEPS, WARM = 3, 40, 8
BATCH, SEQ_LEN = 16, 128
STARTS = 5  # rounds of what is over in seconds
OURS, PLAIN, TORCH = "mgpu", "by hand", "import torch"
LIMIT_S, LOOK_S = 600.0, 0.02
TRAIN: dict[str, Any] = {
    "task": "lm", "steps": STEPS, "global_batch": BATCH, "seq_len": SEQ_LEN,
    "model": {"layers": 4, "dim": 128, "heads": 4}, "validate_every": 20, "validate_batches": 2,
}  # fmt: skip


class Shape(NamedTuple):
    """How many processes, of how many threads each."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


SHAPES = (Shape(1, 1), Shape(1, 2), Shape(2, 1))
PRECISIONS = ("fp32", "bf16")
PROGRAMS: Mapping[str, Sequence[str]] = {
    OURS: ("mgpu_train.loop",),
    PLAIN: ("bench.train_plain",),
    "Accelerate": ("bench.train_peers", "accelerate"),
    "Fabric": ("bench.train_peers", "fabric"),
}


@dataclass(frozen=True)
class Run:
    """What one start of a program came to."""

    units_per_s: float
    cpu_us: float  # of rank 0, per unit that it trains on
    mib: float
    start_s: float
    host_share: float | None  # None: it does not measure it
    cpu_s: float  # of all its ranks, with start and imports


def main(only: Sequence[str] = ()) -> None:
    """Runs the named parts, or all of them, and prints every target with its figure."""
    if unknown := set(only) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report, began, busy = Report(), time.monotonic(), measure.machine_cpu_s()
    ours = sum(PARTS[name](report) for name in only or PARTS)
    report.summary()
    strangers = (measure.machine_cpu_s() - busy - ours) / (time.monotonic() - began)
    print(f"beside all that {max(0.0, strangers):.1f} of {os.cpu_count()} cores had other work")


def speed(report: Report) -> float:
    """Units per second and peak memory; returns the CPU seconds that it took."""
    cells = [(shape, precision) for precision in PRECISIONS for shape in SHAPES]
    runs: dict[tuple[Shape, str], dict[str, list[Run]]] = {cell: {name: [] for name in PROGRAMS} for cell in cells}
    names = list(PROGRAMS)
    for number in range(ROUNDS):
        for shape, precision in cells:
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                runs[shape, precision][name].append(_run(name, shape, precision))
        print(f"round {number + 1} of {ROUNDS} is over", file=sys.stderr, flush=True)
    for (shape, precision), each in runs.items():
        _table(f"{shape} (processes x threads), {precision}, {ROUNDS} rounds", each)
    print()
    for (shape, precision), each in runs.items():
        report.at_least(f"{shape}, {precision}: units/s over by hand", _ratio(each[OURS], each[PLAIN]), 1.0, "x")
    for shape in SHAPES if _has_bf16() else ():
        faster = _ratio(runs[shape, "bf16"][OURS], runs[shape, "fp32"][PLAIN])
        report.at_least(f"{shape}: units/s in bf16 over by hand in fp32", faster, 1.25, "x")
    for precision in PRECISIONS:
        two, one = runs[Shape(2, 1), precision][OURS], runs[Shape(1, 2), precision][OURS]
        report.at_least(f"{precision}: 2 x 1 over 1 x 2, units/s", _ratio(two, one), 0.9, "x")
    for (shape, precision), each in runs.items():
        more = _median(each[OURS], "mib") / _median(each[PLAIN], "mib")
        report.at_most(f"{shape}, {precision}: peak memory over by hand", more, 1.02, "x")
    return sum(run.cpu_s for each in runs.values() for of_one in each.values() for run in of_one)


def start(report: Report) -> float:
    """From the start of a process to the end of its first step, beside `import torch`; returns CPU seconds."""
    seconds, used = ({name: list[float]() for name in (TORCH, OURS, PLAIN)} for _ in range(2))
    cpu_s = 0.0
    for number in range(STARTS + 1):
        for name in seconds:
            with tempfile.TemporaryDirectory() as folder:
                (rank,) = _start(name, Shape(1, 2), "fp32", Path(folder), steps=1)
                over = rank.ended if name == TORCH else _times(name, Path(folder))[0][1]
            cpu_s += rank.cpu_s
            if number:  # the first one warms the page cache
                seconds[name].append(over - rank.began)
                used[name].append(rank.cpu_s if name == TORCH else rank.cpu_at(over))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"\nstart to the end of the first step, 1 x 2, fp32, median of {STARTS}: seconds, and those of CPU")
    for name, median in medians.items():
        print(f"  {name:<16} {median:6.2f} {statistics.median(used[name]):6.2f}")
    report.at_most(f"start to the first step, beyond `{TORCH}`", medians[OURS] - medians[TORCH], 1.5, " s")
    return cpu_s


def torchrun(report: Report) -> float:
    """Two nodes of one process on this machine, as agents start them, to the first step; returns CPU seconds."""
    seconds, cpu_s = [], 0.0
    for number in range(STARTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            port, nodes = ports.free(1)[0], list[tuple[list[str], dict[str, str], Path]]()
            for rank in range(2):
                layout = RunLayout("bench", PurePosixPath(folder, f"node-{rank}"))
                job = _job(_train(Shape(2, 1), "fp32", 1), nodes=2, node_rank=rank, master_port=port)
                for each in (layout.work, layout.checkpoints, layout.metrics):
                    Path(each).mkdir(parents=True)
                Path(layout.attempt_job(1)).write_text(job.model_dump_json())
                environment = launcher_process.environment(job, {}, layout, os.environ)
                nodes.append((launcher_process.argv(job, layout, sys.executable), environment, Path(layout.work)))
            launchers = _wait([(argv, env, cwd, Path(cwd, "said")) for argv, env, cwd in nodes])
            cpu_s += sum(rank.cpu_s for rank in launchers)
            metrics = Path(RunLayout("bench", PurePosixPath(folder, "node-0")).metrics)
            seconds += [_trainers(metrics)[0][1] - launchers[0].began] if number else []
    median = statistics.median(seconds)
    print(f"\ntorchrun on two nodes of one process to the end of the first step, median of {STARTS}: {median:.2f} s")
    report.at_most("two nodes by torchrun, to the first step", median, 5, " s")
    return cpu_s


PARTS = {"speed": speed, "start": start, "torchrun": torchrun}


@dataclass(frozen=True)
class Rank:
    """A process that has ended; UNIX seconds."""

    began: float
    ended: float
    mib: float
    cpu_s: float
    seen: Sequence[tuple[float, float]]  # when, and how much CPU it had used by then, in seconds

    def cpu_at(self, moment: float) -> float:
        """CPU seconds that it had used at a moment, between two looks in proportion."""
        after = bisect(self.seen, (moment, math.inf))
        (before_s, before), (after_s, used) = self.seen[max(0, after - 1)], self.seen[min(after, len(self.seen) - 1)]
        share = (moment - before_s) / (after_s - before_s) if after_s > before_s else 0.0
        return before + share * (used - before)


def _run(name: str, shape: Shape, precision: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(name, shape, precision, Path(folder))
        times = _times(name, Path(folder))
        shares = [line["host_share"] for line in _lines(Path(folder)) if "host_share" in line and line["step"] > WARM]
        spans = _validations(Path(folder))
    (first, began), (last, ended) = times[WARM - 1], times[-1]
    left_out = [(since, until) for since, until in spans if began <= since and until <= ended]
    units, cpu_at = (last - first) * BATCH * SEQ_LEN, ranks[0].cpu_at
    cpu_s = cpu_at(ended) - cpu_at(began) - sum(cpu_at(until) - cpu_at(since) for since, until in left_out)
    run = Run(
        units_per_s=units / (ended - began - sum(until - since for since, until in left_out)),
        cpu_us=1e6 * cpu_s / (units / shape.processes),
        mib=sum(rank.mib for rank in ranks),
        start_s=times[0][1] - ranks[0].began,
        host_share=statistics.mean(shares) if shares else None,
        cpu_s=sum(rank.cpu_s for rank in ranks),
    )
    print(
        f"{shape}, {precision}, {name}: {run.units_per_s:.0f} units/s, {run.cpu_us:.0f} us of CPU each",
        file=sys.stderr,
        flush=True,
    )
    return run


def _start(name: str, shape: Shape, precision: str, folder: Path, steps: int | None = None) -> list[Rank]:
    """Runs a program on all ranks to its end; what it says is in the folder."""
    train = _train(shape, precision, steps or STEPS)
    told = [] if name == OURS else [json.dumps(train)]
    argv = ["-c", TORCH] if name == TORCH else ["-m", *PROGRAMS[name], *told]
    (folder / "job.json").write_text(_job(train).model_dump_json())
    (folder / "checkpoints").mkdir()
    folders = {"MGPU_JOB": "job.json", "MGPU_CHECKPOINT_DIR": "checkpoints", "MGPU_METRICS_DIR": "metrics"}
    known = {**os.environ, **{each: str(folder / path) for each, path in folders.items()}}
    known |= {"OMP_NUM_THREADS": str(shape.threads), "PYTHONPATH": str(ROOT)}
    port, starts = str(ports.free(1)[0]), []
    for rank in range(shape.processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": shape.processes, "LOCAL_WORLD_SIZE": shape.processes}
        world = {each: str(value) for each, value in place.items()} if shape.processes > 1 else {}
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world else {}
        starts.append(([sys.executable, *argv], {**known, **world, **meet}, folder, folder / f"said-{rank}"))
    return _wait(starts)


def _train(shape: Shape, precision: str, steps: int) -> dict[str, Any]:
    strategy = "single" if shape.processes == 1 else "ddp"
    return {**TRAIN, "steps": steps, "strategy": strategy, "precision": precision, "threads": shape.threads}


def _job(train: dict[str, Any], **changes: Any) -> Job:
    base = {
        "run_id": "bench", "attempt": 1, "writer": "bench", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "train": train,
        "checkpoint": {"to": "file:///nowhere", "every_steps": 10, "writers": "all"},
    }  # fmt: skip
    return Job.model_validate({**base, **changes})


def _wait(starts: Sequence[tuple[list[str], dict[str, str], Path, Path]]) -> list[Rank]:
    """Starts programs (command, environment, folder, where its output goes) together, and waits for all of them."""
    began, processes = time.time(), []
    for argv, env, cwd, said in starts:
        with said.open("wb") as out, said.with_suffix(".err").open("wb") as err:
            processes.append(subprocess.Popen(argv, env=env, cwd=cwd, stdout=out, stderr=err))
    ranks, deadline = list[Rank](), time.monotonic() + LIMIT_S
    seen: dict[int, list[tuple[float, float]]] = {process.pid: [(began, 0.0)] for process in processes}
    left = list(zip(processes, starts, strict=True))
    try:
        for process, (argv, _, _, said) in left:
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(argv)} has not ended in {LIMIT_S:g} s")
                time.sleep(LOOK_S)
                for pid, looks in seen.items():
                    looks.append((time.time(), measure.cpu_s(pid)))
            process.returncode = os.waitstatus_to_exitcode(ended[1])
            if process.returncode:
                why = said.with_suffix(".err").read_text()
                raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}:\n{why}")
            used = ended[2].ru_utime + ended[2].ru_stime
            looks = [look for look in seen.pop(process.pid) if look[1]]  # a zombie has none
            ranks.append(Rank(began, time.time(), ended[2].ru_maxrss / 1024, used, looks))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    return ranks


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics" / "rank-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _times(name: str, folder: Path) -> list[tuple[int, float]]:
    """Each step, and when it was over."""
    if name == OURS:
        return _trainers(folder / "metrics")
    return list(enumerate(json.loads((folder / "said-0").read_text().splitlines()[-1])["times"], 1))


def _trainers(metrics: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["t"]) for line in _lines(metrics.parent) if line["kind"] == "step"]


def _validations(folder: Path) -> list[tuple[float, float]]:
    """From when until when the trainer validated."""
    phases = [(line["t"], line["phase"]) for line in _lines(folder) if line["kind"] == "phase"]
    return [(since, until) for (since, phase), (until, _) in pairwise(phases) if phase == "validation"]


def _ratio(some: Iterable[Run], others: Iterable[Run], what: str = "units_per_s") -> float:
    """Of units per second, or of something else, round by round."""
    return statistics.median(getattr(a, what) / getattr(b, what) for a, b in zip(some, others, strict=True))


def _median(runs: Iterable[Run], what: str) -> float:
    return statistics.median(getattr(run, what) for run in runs)


def _table(title: str, runs: Mapping[str, Sequence[Run]]) -> None:
    print(f"\n{title}")
    print(
        f"  {'':<14}"
        + "".join(
            f"{column:>12}"
            for column in ("units/s", "by hand", "CPU us", "by hand", "MiB", "by hand", "start s", "host")
        )
    )
    plain = runs[PLAIN]
    for name, each in runs.items():
        mib = _median(each, "mib")
        shares = [run.host_share for run in each if run.host_share is not None]
        print(
            f"  {name:<14}{_median(each, 'units_per_s'):12.0f}{_ratio(each, plain):11.2f}x"
            f"{_median(each, 'cpu_us'):12.1f}{_ratio(each, plain, 'cpu_us'):11.2f}x"
            f"{mib:12.0f}{mib / _median(plain, 'mib'):11.2f}x{_median(each, 'start_s'):12.2f}"
            f"{f'{statistics.median(shares):.1%}' if shares else 'not measured':>14}",
            flush=True,
        )


def _has_bf16() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags
