"""`agent.json`: which process the newest agent of a run is. Standard library only: `agent stop` has to be quick."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import procs

LIBRARY = "library"  # the key that names the folder of LIB with the agent's own code, for operators of other versions


@dataclass(frozen=True)
class Identity:
    """The newest agent of a run; it may have ended."""

    attempt: int
    process: procs.Process


def read(layout: RunLayout) -> Identity | None:
    """None where there is none that can be read."""
    try:
        said = json.loads(Path(layout.agent).read_bytes())
        process = procs.Process(**said["process"])
        if not all(type(number) is int for number in (said["attempt"], process.pid, process.start_ticks)):
            return None
        return Identity(said["attempt"], process)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(layout: RunLayout, attempt: int) -> None:
    """This process is the agent of the attempt. Raises OSError."""
    path = Path(layout.agent)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    said = {**asdict(Identity(attempt, procs.me())), LIBRARY: Path(__file__).parents[3].name}
    aside.write_text(json.dumps(said) + "\n", encoding="utf-8")
    aside.replace(path)


def stop(layout: RunLayout, *, now: bool) -> bool:
    """Asks the living agent to stop, `now` without grace; False: there is none to ask."""
    agent = read(layout)
    return agent is not None and agent.process.send(signal.SIGUSR1 if now else signal.SIGTERM)
