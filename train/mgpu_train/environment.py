"""What the environment tells a rank of the trainer.

Started once per process: by the agent, by torchrun, or as `python -m mgpu_train.loop` for one process. It reads

    MGPU_JOB               path of job.json (`mgpu_train.config.Job`); `train`, `checkpoint` and `timeouts` matter here
    MGPU_CHECKPOINT_DIR    where `step-<n>` folders go, when job.json has `checkpoint`
    MGPU_METRICS_DIR       where `rank-<rank>.jsonl` goes; without it there is none
    MGPU_RESUME_DIR        a verified checkpoint to go on from; without it training begins at step 0
    MGPU_SAVE_REQUEST      a file; when it appears a checkpoint is made ahead of time, once
    MGPU_STACKS_DIR        where `rank-<rank>.txt` gets the stacks of all threads at SIGUSR2; without it there are none

and torchrun's own variables. It needs nothing else of mgpu:

    echo '{"run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
           "master_addr": "127.0.0.1", "master_port": 29500, "train": {"strategy": "fsdp", "steps": 100}}' > job.json
    MGPU_JOB=job.json torchrun --standalone --nproc-per-node 2 -m mgpu_train.loop
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mgpu_train.config import Job, TrainConfig
from mgpu_train.errors import TrainError

USAGE = (
    "usage: MGPU_JOB=job.json [MGPU_CHECKPOINT_DIR=folder] [MGPU_METRICS_DIR=folder] [MGPU_RESUME_DIR=folder] "
    "torchrun --nproc-per-node N -m mgpu_train.loop"
)


@dataclass(frozen=True)
class Folders:
    """Where the trainer reads and writes; None where it does not."""

    checkpoints: Path | None = None
    metrics: Path | None = None
    resume: Path | None = None
    save_request: Path | None = None  # a file that appears when a checkpoint ahead of time is wanted

    @classmethod
    def of_environment(cls) -> Folders:
        """As the variables MGPU_* say."""
        names = ("MGPU_CHECKPOINT_DIR", "MGPU_METRICS_DIR", "MGPU_RESUME_DIR", "MGPU_SAVE_REQUEST")
        return cls(*(Path(os.environ[name]).absolute() if os.environ.get(name) else None for name in names))


def trainable(job: Job, folders: Folders) -> TrainConfig:
    """The `train` section; raises TrainError for a request that cannot be carried out here."""
    config = job.train
    if config is None:
        raise TrainError("job.json has no `train` section: the bundled trainer has nothing to do")
    if job.checkpoint is not None and folders.checkpoints is None:
        raise TrainError("job.json asks for checkpoints, but MGPU_CHECKPOINT_DIR does not say where to put them")
    return config


def read_job() -> Job:
    """The job that MGPU_JOB names; raises TrainError when there is none, or a wrong one."""
    path = os.environ.get("MGPU_JOB")
    if not path:
        raise TrainError(f"MGPU_JOB is not set: it names the job.json to train by. {USAGE}")
    try:
        return Job.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise TrainError(f"cannot read MGPU_JOB={path}: {error.strerror}") from error
    except ValidationError as error:
        mistakes = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'job'}: {e['msg']}" for e in error.errors())
        raise TrainError(f"{path} is no job.json of mgpu: {mistakes}") from error
