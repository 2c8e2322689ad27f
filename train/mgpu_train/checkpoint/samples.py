"""`python -m mgpu_train.checkpoint.samples STEP_FOLDER OUT.png`: what a checkpoint of task diffusion draws.

A row for each class, out of the moving average of the parameters where the checkpoint has one (`train.ema`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from mgpu_train.checkpoint.formats.shards import Shards, open_shards
from mgpu_train.errors import TrainError
from mgpu_train.models.dit import DiT, follow
from mgpu_train.store.base import StoreError
from mgpu_train.tasks.diffusion_config import DiffusionOptions

log = logging.getLogger("mgpu_train")

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names, by channels
_ROWS = 10  # classes, where none are named


def load(folder: Path, guidance: float = 1.0) -> DiT:
    """The model of a checkpoint, with its average's values where it has one.

    Raises:
        TrainError: it is of another task.
        StoreError: it is none, or damaged.
    """
    shards = open_shards(folder)
    try:
        config = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["config"]
        task, options = config["task"], config["options"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainError(
            f"{folder / 'meta.json'} does not say what was trained ({error}): `mgpu checkpoints pull` brings whole ones"
        ) from error
    part = "ema" if any(name.startswith("ema.") for name in shards.tensors) else "model"
    values = {
        name.removeprefix(f"{part}."): _whole(shards, name) for name in shards.tensors if name.startswith(f"{part}.")
    }
    try:
        known = DiffusionOptions.model_validate(options)
        rows, columns, _ = values["embed.positions"].shape
        _, channels, patch, _ = values["embed.patches.weight"].shape
        classes = len(values["embed.classes.weight"]) - 1
    except (ValidationError, LookupError, ValueError) as error:
        raise TrainError(f"{folder} is of task {task}: only what task diffusion has trained draws images") from error
    if guidance != 1 and not known.class_dropout:
        raise TrainError(
            f"{folder} was trained with `class_dropout: 0`, and knows nothing of images without a class, which "
            "guidance goes away from: `--guidance 1`"
        )
    shape = channels, rows * patch, columns * patch, classes
    with torch.device("meta"):
        model = DiT(*shape, patch=patch, layers=known.layers, dim=known.dim, heads=known.heads)
    model.load_state_dict(values, assign=True)
    log.info("%s of step %s", "moving average" if part == "ema" else "parameters", folder.name.removeprefix("step-"))
    return model.eval()


def _whole(shards: Shards, name: str) -> Tensor:
    tensor = shards.tensors[name]
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    for chunk in tensor.chunks:
        data = bytearray(b"".join(shards.read(tensor, chunk)))
        at = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.shape, strict=True))
        whole[at] = torch.frombuffer(data, dtype=whole.dtype).view(chunk.shape)
    return whole


def draw(model: DiT, classes: Sequence[int] | None, each: int, *, guidance: float, steps: int, seed: int) -> np.ndarray:
    """`each` images of each class (default: of the first ten), a row a class: bytes (rows H, `each` W, C).

    Raises TrainError: there is no such class.
    """
    untold = model.embed.classes.num_embeddings - 1
    wanted = range(min(untold, _ROWS)) if classes is None else classes
    if unknown := [label for label in wanted if not 0 <= label < untold]:
        raise TrainError(f"there is no class {unknown[0]}: the model knows 0 to {untold - 1}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator().manual_seed(seed)
    shape = model.shape
    model = model.to(device)
    rows = []
    for label in wanted:
        noise = torch.randn((each, *shape), generator=random).to(device)
        told = torch.full((each,), label, device=device)
        images = follow(model, noise, told, untold=untold, guidance=guidance, steps=steps)
        rows.append(torch.cat(images.unbind(), 2))
    pixels = (torch.cat(rows, 1) + 1) * 127.5
    return pixels.round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()


def main(argv: Sequence[str] | None = None) -> int:
    """Draws as the arguments say; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        "python -m mgpu_train.checkpoint.samples", description="images that a checkpoint of task diffusion draws"
    )
    parser.add_argument("checkpoint", type=Path, help="folder step-<n>, as `mgpu checkpoints pull` brings it")
    parser.add_argument("out", type=Path, help="PNG file")
    parser.add_argument("--classes", type=int, nargs="+", help=f"by number, a row each (default: the first {_ROWS})")
    parser.add_argument("--each", type=int, default=8, help="images of each class (8)")
    parser.add_argument("--guidance", type=float, default=2.0, help="how much classes count; 1: as learned (2)")
    parser.add_argument("--steps", type=int, default=50, help="in which noise becomes an image (50)")
    parser.add_argument("--zoom", type=int, default=1, help="so many pixels wide and high each pixel is drawn (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    given = parser.parse_args(argv)
    for name in ("each", "steps", "zoom"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is less than 1")
    try:
        made = draw(
            load(given.checkpoint, given.guidance),
            given.classes,
            given.each,
            guidance=given.guidance,
            steps=given.steps,
            seed=given.seed,
        )
        _write(given.out, made.repeat(given.zoom, 0).repeat(given.zoom, 1))
    except (TrainError, StoreError) as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("cannot write %s: %s", given.out, error.strerror or error)
        return 1
    return 0


def _write(path: Path, pixels: np.ndarray) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise TrainError("PNG files are made by Pillow, which is not installed here: `pip install pillow`") from error
    if pixels.shape[2] not in _MODES:
        raise TrainError(f"a PNG file has 1, 3 or 4 channels, and these images have {pixels.shape[2]}")
    Image.frombytes(_MODES[pixels.shape[2]], pixels.shape[1::-1], pixels.tobytes()).save(path, "PNG")


if __name__ == "__main__":
    sys.exit(main())
