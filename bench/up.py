"""What an unchanged image adds to `pulumi up`: stacks that stand, with an image of 2,000 files and without, in turns.

Needs Docker's engine, to build the image once, and Debian's docker-registry, as the tests do.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.report import Report
from bench.sync import write_sources
from bench.tools import MGPU, PLAIN_RUN, ROOT

RUNS, LIMIT_S = 7, 1.0
PULUMI = ("sh", "-c", '. .mgpu/env && exec pulumi "$@" --yes --skip-preview --non-interactive', "sh")
RUN_FILE = f"{PLAIN_RUN}nodes: 1\n"


def main() -> None:
    """Prints both medians and their difference."""
    sys.path.insert(0, str(ROOT / "tests"))  # for `fakes`
    from fakes import engine as engines

    if why := engines.missing("dockerd", "docker", "containerd", "runc", "docker-registry"):
        print(f"pulumi up with an image is left out: {why}")
        return
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as home, engines.running_registry() as registry:
        env = os.environ | {f"XDG_{kind}_HOME": str(Path(home, kind.lower())) for kind in ("STATE", "CONFIG", "DATA")}
        plain, imaged = Path(home, "plain"), Path(home, "imaged")
        write_sources(imaged / "docker")
        (imaged / "docker" / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
        for folder in (plain, imaged):
            folder.mkdir(exist_ok=True)
            _run([str(MGPU), "init"], folder, env)
            (folder / "mgpu.yaml").write_text(RUN_FILE)
        with (imaged / "mgpu.yaml").open("a") as run_file:
            run_file.write(f"image: {{context: docker, repository: '{registry.address}/bench'}}\n")
        with engines.running_engine() as engine:
            _run([str(MGPU), "image", "push"], imaged, env | engine.env)
        try:
            without, added = _compare(plain, imaged, env)
        finally:
            for folder in (plain, imaged):
                _run([*PULUMI, "destroy"], folder, env)
    print(f"pulumi up of a stack that stands, wall seconds: {without:.2f}; with an unchanged image {added:.2f} more")
    Report().at_most("an unchanged image adds to pulumi up", added, LIMIT_S, " s")


def _compare(plain: Path, imaged: Path, env: Mapping[str, str]) -> tuple[float, float]:
    """The median without an image, and the median of what each pair differs by."""
    pairs = []
    for _ in range(RUNS + 1):  # the first one makes the fleets
        pairs.append([_run([*PULUMI, "up"], folder, env) for folder in (plain, imaged)])
    return statistics.median(each for each, _ in pairs[1:]), statistics.median(more - each for each, more in pairs[1:])


def _run(argv: list[str], folder: Path, env: Mapping[str, str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return time.perf_counter() - begin
