"""What test_hf.py looks at: trainings of tiny models of transformers, one after the other, by ranks that are forked.

`finetunes.py OUT RANKS STORIES`: STORIES is JSON, for each name {resume, step, settings...}. It writes into
OUT/NAME/, and what failed into OUT/NAME/error. transformers is imported once, before ranks are forked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import mgpu_train.tasks.hf  # noqa: F401
import peft.tuners.lora  # noqa: F401
from mgpu_train import parallel
from mgpu_train.config import Job
from mgpu_train.environment import Folders
from mgpu_train.errors import TrainError
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest
from saves import ranks


def train(out: Path, name: str, place: parallel.Place, resume: str = "", **settings: Any) -> None:
    """One of them; RESUME is another one's `name/checkpoints/step-N`."""
    given = {
        "task": "hf", "steps": 5, "global_batch": 8, "lr": 0.01, "warmup_steps": 0, "validate_every": 5,
        "validate_batches": 2, "threads": 1, **settings,
    }  # fmt: skip
    job = Job.model_validate({
        "run_id": "test", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 8,
        "master_addr": "127.0.0.1", "master_port": 1, "train": given,
        "checkpoint": {"to": "file:///x", "every_steps": 3, "writers": "all"},
    })  # fmt: skip
    home = out / name
    try:
        folders = Folders(home / "checkpoints", home / "metrics", out / resume if resume else None)
        Trainer(job, folders, place, StopRequest()).run()
    except TrainError as error:
        home.mkdir(exist_ok=True)
        (home / "error").write_text(str(error))
    except Exception:
        traceback.print_exc()
        raise


def main() -> None:
    """All of this number of ranks."""
    out, count, stories = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])

    def each(place: parallel.Place) -> None:
        for name, story in stories.items():
            train(out, name, place, **story)

    assert ranks(count, each) == [0] * count


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
