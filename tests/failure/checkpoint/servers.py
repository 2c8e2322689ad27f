"""Servers that fork savers (saver.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]


class Savers:
    """A server of saver.py: it forks a saver in milliseconds. For one thread at a time."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "failure.checkpoint.saver"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    def _ask(self, **request: Any) -> dict[str, Any]:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps(request).encode() + b"\n")
        asked.flush()
        return json.loads(answers.readline())

    def begin(self, do: str, **request: Any) -> int:
        """The pid of a saver; it stays that of no other process until it was waited for."""
        return self._ask(do=do, **request)["pid"]

    def wait(self, pid: int) -> int:
        """Its exit code, or -signal."""
        return self._ask(wait=pid)["code"]

    def run(self, do: str, **request: Any) -> int:
        """Begins one and waits for it."""
        return self.wait(self.begin(do, **request))

    @property
    def said(self) -> str:
        """What failed savers have said."""
        return self.errors.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
