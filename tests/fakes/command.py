"""`mgpu` as its users type it, forked by a server that has imported what most commands import, and so is what its
engine starts of ours. Who looks for `mgpu` in /proc starts a real one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from forks import Forks

_NEEDS_SECRET = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
launcher: python
command: [train.py]
checkpoint: none
secrets: [TOKEN]
"""

FORKS = Forks(
    *("mgpu.__main__", "mgpu.cli.launch", "mgpu.cli.reconcile", "mgpu.cli.results", "mgpu.schedule.reconcile"),
    *("mgpu.run.lifecycle.launch", "mgpu.run.lifecycle.attach", "mgpu.run.fleet.inventory", "mgpu.run.view"),
    *("mgpu.backend.lease", "mgpu.spec.load"),
    *(f"mgpu.providers.{name}.provider" for name in ("aws", "hosts", "kubernetes", "local", "slurm")),
    *("mgpu_train.checkpoint.log.commit_log", "mgpu_train.checkpoint.newest", "mgpu_train.store.disk"),
    *("boto3", "encodings.idna", "rich.console", "rich.table"),
    *("fakes.pulumi_programs", "fakes.s3_models"),
)


def mgpu(*words: str, folder: Path, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """`mgpu` with these words in this folder, to its end; there is nobody at its terminal. `env`: all of it.

    Raises:
        subprocess.TimeoutExpired: it ran for longer, in seconds, and was killed.
    """
    return FORKS.run("mgpu.__main__", words, env, cwd=folder, timeout=timeout)


def needs_secret(folder: Path, more: str = "") -> None:
    """Makes it a project whose program ends unless TOKEN is t0k; `more`: of the run file."""
    (folder / "mgpu.yaml").write_text(_NEEDS_SECRET + more)
    (folder / "train.py").write_text("import os, time; assert os.environ['TOKEN'] == 't0k'; time.sleep(3600)\n")
