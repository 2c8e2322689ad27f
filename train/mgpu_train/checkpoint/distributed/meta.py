"""`meta.json` of a checkpoint: what it was made by, for people, and for what a resume says of what has changed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mgpu_train
from mgpu_train.config import TrainConfig
from mgpu_train.parallel import Place

_DERIVED = ("config", "config_sha256", "mesh")  # what follows from other keys
_OF_STRATEGY = {"replicas": "hsdp", "zero_stage": "deepspeed"}  # what only one of them reads


def of_run(
    config: TrainConfig, place: Place, data: str, validation: str, micro_batch: int, first_seed: int
) -> dict[str, Any]:
    """What it says in all checkpoints of an attempt; `data` and `validation` are the fingerprints of what is learned
    from and validated on, `micro_batch` what was trained with, `first_seed` what the model began with."""
    said = config.model_dump()
    return {
        "seed": config.seed,
        "first_seed": first_seed,
        "world_size": place.world_size,
        "micro_batch": micro_batch,
        "strategy": config.strategy,
        "mesh": f"dp={place.dp_size}"
        + (f",cp={place.context}" if place.context > 1 else "")
        + (f",tp={place.tensor},pp={place.pipeline}" if place.parted else ""),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mgpu_train": mgpu_train.__version__,
        "data": data,
        "validation": validation,
        "config_sha256": hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest(),
        "config": said,
    }


def differences(folder: Path, meta: dict[str, Any]) -> list[str]:
    """What has changed since the checkpoint in `folder` was saved, e.g. `strategy: "ddp" -> "fsdp"`; one line a key.
    A key that only one of both versions of mgpu knows is none."""
    saved = _read(folder)
    try:
        # what was found stands beside the config, which may say that it was looked for
        before, now = ({**each, **each["config"], **each} for each in (saved, meta))
    except (KeyError, TypeError):
        return []
    idle = {key for key, strategy in _OF_STRATEGY.items() if now.get("strategy") != strategy}
    return list(_changes({key: value for key, value in now.items() if key not in (*_DERIVED, *idle)}, before))


def validated(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is of a step that was validated."""
    return any(key.startswith("validation_") for key in _read(folder))


def first_seed(folder: Path | None, config: TrainConfig, place: Place) -> int:
    """The seed of the model's first values. What is frozen is in no checkpoint, and has these: a resume from `folder`
    makes them anew, also with another `train.seed`. All ranks call it together, since a node may lack the file."""
    saved = _read(folder) if folder is not None else {}
    found = saved.get("first_seed", saved.get("seed"))
    first: int = place.gather(found if type(found) is int else config.seed)[0]
    return first


def _read(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # DCP itself does not need it
        return {}
    return saved if isinstance(saved, dict) else {}


def _changes(now: dict[str, Any], before: dict[str, Any], of: str = "") -> Iterator[str]:
    for key in (each for each in now if each in before):
        new, old = now[key], before[key]
        if isinstance(new, dict) and isinstance(old, dict) and key != "options":  # a task's are as the user gave them
            yield from _changes(new, old, f"{of}{key}.")
        elif new != old:
            yield f"{of}{key}: {json.dumps(old)} -> {json.dumps(new)}"
