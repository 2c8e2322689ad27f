"""What the benches share: a command's median wall time, and a peer's environment of its own."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mgpu import paths

ROOT = Path(__file__).resolve().parent.parent
MGPU = Path(sys.executable).with_name("mgpu")
# a run file without torch and without checkpoints; `nodes` and more is for whoever writes it
PLAIN_RUN = """
name: bench
provider: local
processes_per_node: 1
market: spot
max_price_usd_per_hour: 2
max_hours: 0.5
launcher: python
command: [train.py]
checkpoint: none
"""
UV = ("sh", str(ROOT / "scripts" / "uv.sh"))
PEERS = {"skypilot": ("skypilot==0.14.1", "sky"), "dstack": ("dstack==0.22.5", "dstack")}


def median_s(argv: list[str], *, runs: int = 9, cwd: Path | None = None, env: dict[str, str] | None = None) -> float:
    """Median wall time in seconds, after one run that warms caches and compiles bytecode."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        subprocess.run(argv, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def peer(name: str, peers: Mapping[str, tuple[str, str]] = PEERS) -> Path | None:
    """The peer's command in an environment of its own, installed on first use; None where that fails."""
    requirement, command = peers[name]
    home = paths.cache_dir() / "bench" / requirement.replace("==", "-")
    program, seal = home / "bin" / command, home / ".complete"
    if seal.exists() and seal.read_text() == requirement:
        return program
    print(f"installing {requirement} into {home} (once) ...", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)  # a bench was killed in the middle
    # in its place from the start: programs that can be moved begin with a shell, which the peer's time would contain
    python = str(home / "bin" / "python")
    try:
        subprocess.run([*UV, "venv", "-q", str(home)], check=True, capture_output=True, text=True)
        install = [*UV, "pip", "install", "-q", "--python", python, requirement]
        subprocess.run(install, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        print(f"{name} is left out:\n{error.stderr.strip()}", file=sys.stderr)
        shutil.rmtree(home, ignore_errors=True)
        return None
    subprocess.run([python, "-m", "compileall", "-q", str(home / "lib")], check=False, capture_output=True)
    seal.write_text(requirement)
    return program


def store_tool(name: str) -> Path:
    """s5cmd or versitygw, as scripts/setup-go-tools.sh builds them, once. Raises SystemExit where that fails."""
    command = ["sh", str(ROOT / "scripts" / "setup-go-tools.sh"), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} is not there")
    return Path(done.stdout.strip())


def environment() -> dict[str, str]:
    """This process's environment, quiet and offline as far as peers know how."""
    return os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
