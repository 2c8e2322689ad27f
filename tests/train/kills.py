"""What test_trainer_kills.py looks at: two nodes of a rank each, of which one is killed at a point of a step.

`kills.py OUT STRATEGY` trains to the end. With PHASE MOMENT CALL RANK, this rank is killed before or after that call of
what the phase is, and then both go on from the newest checkpoint that both have.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_train import loop, parallel
from mgpu_train.checkpoint.distributed import dcp
from mgpu_train.checkpoint.distributed.writers import ShardWriter
from mgpu_train.checkpoint.local import finished
from mgpu_train.environment import Folders
from saves import ranks
from scenarios import Dropout, Signal, job

SMALL = {"steps": 4, "validate_every": 2, "validate_batches": 1, "model": {"layers": 1, "dim": 16, "heads": 2}}


class Mortal(Dropout):
    """A rank that may be killed, from inside, where its code stands at one point and no other."""

    def _drop(self, *given: Any) -> Any:
        out = super()._drop(*given)
        if out.requires_grad:
            out.register_hook(lambda _: self._turned())
        return out

    def _turned(self) -> None:
        """In the middle of the backward pass: the gradient has come to the embedding."""

    def die(self, phase: str, moment: str, call: int) -> None:
        """Not yet: before or after this call, counted from 1, of what the phase is."""
        owner, name = {
            "forward": (self.task, "loss"),
            "backward": (self, "_turned"),
            "exchange": (loop, "exchange"),
            "optimizer": (self.engine.optimizers, "step"),
            "validation": (self.task, "evaluate"),
            "capture": (self.checkpointer, "capture"),
            "write": (ShardWriter, "write_data"),
            "rename": (dcp, "publish"),
        }[phase]
        done, calls = getattr(owner, name), 0

        def last(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += self.model.training or phase == "validation"  # which calls `loss` and `exchange`, too
            if (moment, calls) == ("before", call):
                os.kill(os.getpid(), signal.SIGKILL)
            result = done(*given, **named)
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, last)


def train(
    home: Path, attempt: str, strategy: str, *, resume: Path | None = None, point: Sequence[str] = ()
) -> list[int]:
    """The exit codes of both ranks."""

    def body(place: parallel.Place) -> None:
        given = job(home.parent, every_steps=1, strategy=strategy, **SMALL)
        folders = Folders(home / f"node-{place.rank}", home / attempt, resume)
        made = Mortal(given, folders, place, Signal(place))
        if point and place.rank == int(point[3]):
            made.die(point[0], point[1], int(point[2]))
        made.run()

    return ranks(2, body, nodes=2)


def whole(home: Path) -> list[dict[int, list[str]]]:
    """What each node has under the name of a checkpoint: its files."""
    nodes = [finished(home / f"node-{node}") for node in (0, 1)]
    return [{step: sorted(path.name for path in folder.iterdir()) for step, folder in node} for node in nodes]


def newest(home: Path) -> Path | None:
    """The newest checkpoint that both nodes have, its parts put together as each of them would fetch them; what else
    they have stays where it is."""
    first, second = (dict(finished(home / f"node-{node}")) for node in (0, 1))
    if not first.keys() & second.keys():
        return None
    step = max(first.keys() & second.keys())
    for each in (first, second):
        shutil.copytree(each[step], home / "resume", dirs_exist_ok=True)
    return home / "resume"


def main() -> None:
    """One training."""
    out, strategy, *point = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    home = Path(out, "-".join((strategy, *point)))
    story: dict[str, Any] = {"begun": train(home, "begun", strategy, point=point), "whole": whole(home)}
    if point:
        story["resumed"] = train(home, "resumed", strategy, resume=newest(home))
    (home / "story.json").write_text(json.dumps(story))


if __name__ == "__main__":
    main()
