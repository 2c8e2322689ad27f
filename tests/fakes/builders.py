"""The engine's own builder and BuildKit, either one wherever the tests run; and a step that never ends by itself."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mgpu_train.agent.machine import procs

from fakes import trainer
from mgpu.image.build import buildx

BUILDERS = ("classic", "buildkit")
_CLASSIC = "#!/bin/sh\nexit 1\n"  # as if there was no program of docker's, and no plugin
# the engine of the tests has no bridge, and BuildKit wants one unless it is told otherwise
_BUILDKIT = '#!/bin/sh\ntest "$2" != build || {{ shift 2; set -- buildx build --network=host "$@"; }}\nexec {} "$@"\n'


@dataclass(frozen=True)
class Endless:
    """A step; what runs it is known by its environment."""

    _mark: str = field(default_factory=lambda: f"MGPU_TEST_STEP={uuid.uuid4().hex}")

    @property
    def line(self) -> str:
        """As a Dockerfile has it."""
        return f"RUN {self._mark} sleep 100000"

    def runs(self) -> list[procs.Process]:
        """Its processes that live."""
        return procs.carrying(self._mark)


def choose(
    builder: str, require: Callable[[str, bool, str], None], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """From now on, this test's environment leads to that builder."""
    plugins = folder / "cli-plugins"
    plugins.mkdir(parents=True)
    if builder == "buildkit":
        shutil.copy(trainer.buildx(require), plugins / "docker-buildx")
    program = folder / "docker"
    program.write_text(_BUILDKIT.format(shutil.which("docker")) if builder == "buildkit" else _CLASSIC)
    program.chmod(0o755)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    assert bool(buildx.version(os.environ)) == (builder == "buildkit")
