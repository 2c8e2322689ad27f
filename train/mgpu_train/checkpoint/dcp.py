"""The trainer's checkpoints, by torch.distributed.checkpoint: one format for every strategy and world size.

A checkpoint is the folder `step-<n>`: DCP's shards, its `.metadata`, and `meta.json` for people. Each rank writes its
shards to the disk of its own node; `.metadata` and `meta.json` are on node 0. All of it is written to `.tmp-step-<n>`
beside it, flushed, and renamed by one rank of each node when every rank is through: a folder with that name is whole.
"""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mgpu_train.checkpoint.local import publish
from mgpu_train.config import Writers
from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place


@dataclass(frozen=True)
class Progress:
    """How far training is: optimizer steps done, and samples consumed by all ranks together."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads one model and its optimizer. `meta` goes into `meta.json`, for people and for `differences`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    place: Place
    writers: Writers
    meta: dict[str, Any]

    def save(self, folder: Path, progress: Progress) -> None:
        """Write `folder/step-<n>`; returns when it stands on every node. All ranks call it together.

        Raises TrainError when a rank could not write; then no node has the folder, or some rank is gone.
        """
        place, target = self.place, folder / f"step-{progress.step}"
        aside = folder / f".tmp-{target.name}"
        keeper = place.local_rank == 0 if self.writers == "all" else place.rank == 0
        try:
            if keeper:
                shutil.rmtree(aside, ignore_errors=True)  # of an attempt that was killed here
                aside.mkdir(parents=True)
            place.barrier()
            self._write(self._state(progress, whole=self.writers == "rank0"), aside)
            if place.rank == 0:
                (aside / "meta.json").write_text(json.dumps({**asdict(progress), **self.meta}, indent=2) + "\n")
            place.barrier()
            if keeper:
                publish(aside, target)  # flushes what every rank of this node wrote
        except (OSError, CheckpointException) as error:
            raise TrainError(f"cannot save {target}: {_cause(error)}") from error
        place.barrier()

    def load(self, folder: Path) -> Progress:
        """Continue from a verified checkpoint that holds the files of all nodes. All ranks call it together.

        Raises TrainError when it cannot be read or is of another model.
        """
        reader = FileSystemReader(folder)
        try:
            state = self._state(Progress(), whole=False)
            saved = reader.read_metadata().state_dict_metadata
            # a rank that the saving run did not have keeps the random state that its seed gave it
            state["random"] = {name: value for name, value in state["random"].items() if f"random.{name}" in saved}
            load(state, storage_reader=reader, process_group=self.place.control)
        except (OSError, CheckpointException) as error:
            raise TrainError(f"cannot resume from {folder}: {_cause(error)}") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self._restore_random(state["random"])
        return Progress(**state["progress"])

    def _state(self, progress: Progress, *, whole: bool) -> dict[str, Any]:
        """All that the loop carries from step to step; with `whole`, gathered to rank 0."""
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        random = {f"cpu-{self.place.rank}": torch.get_rng_state()}
        if self.place.device.type == "cuda":
            random[f"cuda-{self.place.rank}"] = torch.cuda.get_rng_state()
        everyones = dict(ChainMap(*self.place.gather(random)))
        return {"model": model, "optimizer": optimizer, "progress": asdict(progress), "random": everyones}

    def _write(self, state: dict[str, Any], aside: Path) -> None:
        writer = FileSystemWriter(aside, sync_files=False)
        if self.writers == "all":
            save(state, storage_writer=writer, process_group=self.place.control)
        elif self.place.rank == 0:
            save(state, storage_writer=writer, no_dist=True)

    def _restore_random(self, random: dict[str, torch.Tensor]) -> None:
        rank = self.place.rank
        if f"cpu-{rank}" in random:
            torch.set_rng_state(random[f"cpu-{rank}"])
        if f"cuda-{rank}" in random:
            torch.cuda.set_rng_state(random[f"cuda-{rank}"])


def differences(folder: Path, meta: dict[str, Any]) -> list[str]:
    """What has changed since the checkpoint in `folder` was saved, e.g. `strategy: "ddp" -> "fsdp"`; one line a key."""
    try:
        saved = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError):  # DCP itself does not need it
        return []
    before, now = ({**each, **each["config"]} for each in (saved, meta))
    changed = [key for key in now if key != "config" and key in before and before[key] != now[key]]
    return [f"{key}: {json.dumps(before[key])} -> {json.dumps(now[key])}" for key in changed]


def _cause(error: BaseException) -> str:
    """The first failure of any rank, one line: DCP wraps each in its own."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}"
    return str(error)
