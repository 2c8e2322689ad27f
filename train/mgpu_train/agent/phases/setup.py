"""The run file's `setup:`: lines of a shell, run on each node before the program, once for a machine."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.phases.launcher_process import with_python
from mgpu_train.agent.status.log import last_words, tail
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.status.words import count


def run(attempt: Attempt, environment: Mapping[str, str], python: str) -> None:
    """Runs the lines as one script in the work folder; `python` is what `python` and `pip` are of in it.

    Raises:
        AttemptFailed: a line fails, or no shell can be started.
    """
    lines = attempt.job.setup
    done = _marker(attempt, lines)
    if not lines or done.exists():
        return
    script = "\n".join(lines)
    attempt.say(f"setup: {count(len(script.splitlines()), 'line')}")  # one text may have several
    begin = attempt.log.size
    shell = shutil.which("bash") or "sh"
    try:
        code = subprocess.run(
            [shell, "-e", "-c", script],
            cwd=attempt.work,
            env=with_python(environment, python),
            stdin=subprocess.DEVNULL,
            stdout=attempt.log.fd,
            stderr=attempt.log.fd,
            check=False,
        ).returncode
    except OSError as error:
        raise AttemptFailed(Fault.USER, f"setup cannot be run: {error}") from error
    if code:
        words = last_words(tail(attempt.log, begin))
        raise AttemptFailed(Fault.USER, f"setup: exit code {code}" + (f": {words}" if words else ""))
    done.touch()


def _marker(attempt: Attempt, lines: tuple[str, ...]) -> Path:
    """Says that it was done on this machine. A new container has none: what was installed is gone with the old."""
    name = "\0".join((attempt.job.run_id, str(attempt.layout.home), *lines))
    return Path(tempfile.gettempdir(), f"mgpu-setup-{hashlib.sha256(name.encode()).hexdigest()[:32]}")
