"""How long it takes to know that an image's context is unchanged: 50,000 files, beside what others do with the same.

All files are in the page cache. `cold`: nothing is remembered; `unchanged`: what the run before has remembered. Ours is
what a process that runs already spends; git's are whole processes, docker-py's is its archive, hashed.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.report import Report

FILES, FOLDERS = 50_000, 500
SIZES = (500, 2_000, 4_000, 12_000)  # bytes; what a source tree is made of
RULES = ".git\n.venv\n**/__pycache__\n**/*.pyc\n*.egg-info\n!keep.egg-info\n"
RUNS = 5
COLD_S, UNCHANGED_S = 3.0, 0.5

Seconds = tuple[float, float]  # wall, CPU

_OURS = """
import sys, time
from pathlib import Path
from mgpu.image.build.context import scan
from mgpu.image.build.hashes import Hashes
from mgpu.image.build.inputs import inputs_hash
from mgpu.spec.image import ImageSpec
spec, begin, used = ImageSpec(), time.perf_counter(), time.process_time()
inputs_hash(scan(Path(sys.argv[1]), hashes=Hashes(Path(sys.argv[2]))), spec, {})
print(time.perf_counter() - begin, time.process_time() - used)
"""
_DOCKER_PY = """
import hashlib, sys, time
from docker.utils.build import tar
patterns = open(sys.argv[1] + "/.dockerignore").read().split()
begin, used = time.perf_counter(), time.process_time()
hashlib.file_digest(tar(sys.argv[1], patterns, ("Dockerfile", None)), "sha256")
print(time.perf_counter() - begin, time.process_time() - used)
"""


def main() -> None:
    """Prints what each takes, its ratio to ours, and whether the limits are kept."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as folder:
        context, kept = Path(folder, "context"), Path(folder, "kept")
        _make(context)
        git = _git(Path(folder))
        ours = {
            "cold": lambda: (kept.unlink(missing_ok=True), _inside(_OURS, context, kept))[1],
            "unchanged": lambda: _inside(_OURS, context, kept),
        }
        peers = {"git hash-object": _hash_object(context, git), "docker-py": lambda: _inside(_DOCKER_PY, context)}
        print(f"an image's context of {FILES:,} files, medians of {RUNS} and the fastest, seconds")
        print(f"  {'':<24} {'wall':>7} {'(best)':>7} {'CPU':>7}")
        cold = _side_by_side({"mgpu, cold": ours["cold"], **peers})
        subprocess.run(["git", "add", "-A"], cwd=context, env=git, check=True)
        again = {"git add -A, unchanged": lambda: _whole(["git", "add", "-A"], context, git)}
        unchanged = _side_by_side({"mgpu, unchanged": ours["unchanged"], **again})
    report = Report()
    report.at_most(f"a context of {FILES:,} files is hashed, cold", cold, COLD_S, " s")
    report.at_most("the same, unchanged", unchanged, UNCHANGED_S, " s")


def _side_by_side(named: Mapping[str, Callable[[], Seconds]]) -> float:
    """The first one's median wall time. All take turns, so that what disturbs one disturbs all."""
    times: dict[str, list[Seconds]] = {name: [] for name in named}
    for run in range(RUNS + 1):
        for name, once in named.items():
            seconds = once()
            if run:  # the first one warms caches
                times[name].append(seconds)
    first = statistics.median(next(iter(times.values())))  # a pair is ordered by its wall time
    for name, each in times.items():
        wall, cpu = statistics.median(each)[0], statistics.median(used for _, used in each)
        ratios = f"{wall / first[0]:5.1f} x ours"
        print(f"  {name:<24} {wall:7.3f} {min(each)[0]:7.3f} {cpu:7.3f}   {ratios}", flush=True)
    return first[0]


def _make(context: Path) -> None:
    rng = random.Random(1)
    for number in range(FOLDERS):
        folder = context / f"package{number % 25:02}" / f"module{number:03}"
        folder.mkdir(parents=True)
        for file in range(FILES // FOLDERS):
            (folder / f"file{file:03}.py").write_bytes(rng.randbytes(rng.choice(SIZES)))
    (context / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    (context / ".dockerignore").write_text(RULES)
    os.sync()
    time.sleep(2.5)  # younger files are not remembered


def _git(folder: Path) -> dict[str, str]:
    """An environment in which the context's repository lies beside it, and no settings of the user's count."""
    own = {"GIT_DIR": str(folder / "git"), "GIT_WORK_TREE": str(folder / "context")}
    env = os.environ | own | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q"], env=env, check=True)
    return env


def _hash_object(context: Path, env: Mapping[str, str]) -> Callable[[], Seconds]:
    names = "\n".join(sorted(str(path) for path in context.rglob("*") if path.is_file()))
    return lambda: _whole(["git", "hash-object", "--no-filters", "--stdin-paths"], context, env, names)


def _whole(argv: list[str], cwd: Path, env: Mapping[str, str], text: str = "") -> Seconds:
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, cwd=cwd, env=env, input=text, text=True, stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, used


def _inside(code: str, *arguments: Path) -> Seconds:
    """The seconds that a program says itself: without its start and its imports."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    wall, cpu = subprocess.run(argv, text=True, stdout=subprocess.PIPE, check=True).stdout.split()
    return float(wall), float(cpu)
