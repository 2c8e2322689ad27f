"""Containers of a node that is no machine: its engine is this machine's, so what runs there has to be ended by hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_LOCK = Path(".mgpu", "container.lock")  # of mgpu_train.agent.host.container: who never had a container has none
_HOME = "dev.mgpu.home"
_DOCKER_S = 30.0


def remove(home: Path) -> None:
    """Ends and removes the containers that have this home; nothing where Docker does not answer in time."""
    docker = shutil.which("docker")
    if docker is None or not (home / _LOCK).exists():
        return
    found = _call(docker, "ps", "--all", "--quiet", f"--filter=label={_HOME}={home}").split()
    if found:
        _call(docker, "rm", "--force", "--volumes", *found)


def _call(docker: str, *arguments: str) -> str:
    try:
        command = [docker, *arguments]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DOCKER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
