"""Task `diffusion`: images out of noise, by a transformer, along straight lines (rectified flow).

An image and noise are mixed, (1 - t) of the one and t of the other, and the model learns the direction between them,
noise - image (Liu, Gong & Liu 2023; Lipman et al. 2023). There is no schedule of noise to choose, the target has the
same size at every t, and few steps make an image. With the blocks of DiT it was better than guessing DDPM's noise at
every size that was tried (SiT: Ma et al. 2024). t is uniform, as there.

In shapes, B is images, C channels, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from mgpu_train.data.base import Batch, Data
from mgpu_train.data.images import Images, open_splits
from mgpu_train.data.seeds import mix
from mgpu_train.errors import TrainError
from mgpu_train.models.dit import LEVELS, DiT
from mgpu_train.tasks.base import Layout, Loss, Split, Task
from mgpu_train.tasks.diffusion_config import DiffusionOptions

_MEASURED = 256  # images of which the deviation of each pixel is taken


class Diffusion(Task):
    """What an image was before there was noise in it."""

    Options = DiffusionOptions
    unit = "images"
    options: DiffusionOptions

    def data(self, split: Split) -> Data:
        """Images with noise of their own: in training that of each one's place, in validation always the same."""
        if split == "validation":
            return Noised(self._splits[1])
        return Noised(self._splits[0], self.options)

    def model(self) -> DiT:
        """A transformer for images of this size."""
        given = self.options.model_dump(include={"patch", "layers", "dim", "heads"})
        return DiT(*self._shape, self._splits[0].classes, **given)

    def initialise(self, model: nn.Module) -> None:
        """So that it guesses 0."""
        assert isinstance(model, DiT)  # noqa: S101
        model.initialise()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The mean square of the error in the direction, over an image's numbers."""
        image, noise, level = batch["image"], batch["noise"], batch["level"]
        noisy = torch.lerp(image, noise, level[:, None, None, None] / LEVELS)
        errors = model(noisy, level, batch["label"]) - (noise - image)
        return Loss(errors.square().flatten(1).mean(1).sum(), len(image))

    def layout(self, model: nn.Module) -> Layout:
        """The transformer's blocks."""
        blocks = tuple(f"blocks.{number}" for number in range(self.options.layers))
        return Layout(blocks, first=("embed",), last=("head",))

    def flops(self) -> float:
        """Of an image, as those of task lm are counted; what follows from the condition is computed once for all of
        its patches."""
        (channels, height, width), dim, layers = self._shape, self.options.dim, self.options.layers
        patches, pixels = height * width / self.options.patch**2, channels * self.options.patch**2
        once = (6 * layers + 3) * dim**2 + 256 * dim
        each = 12 * layers * dim**2 + 2 * pixels * dim
        return 6.0 * (once + patches * each) + 12.0 * layers * dim * patches**2

    def facts(self) -> Mapping[str, float]:
        """The mark to fall below: the loss of who guesses each pixel by itself, as well as a straight line can.

        For a pixel of variance v that line errs by v / ((1 - t)^2 v + t^2); the mean of this over t is pi / 2 sqrt(v).
        """
        images = self._splits[0]
        some = range(0, len(images), max(1, len(images) // _MEASURED))
        mean = square = np.zeros(self._shape)
        for number in some:
            image = _scaled(images.read(number)).astype(np.float64)
            mean, square = mean + image / len(some), square + image**2 / len(some)
        return {"pixel_loss": round(math.pi / 2 * float(np.sqrt((square - mean**2).clip(0)).mean()), 4)}

    @cached_property
    def _splits(self) -> tuple[Images, Images]:
        return open_splits(self.options.data, self.options.size)

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        """Channels, height and width of all images."""
        shape, *others = dict.fromkeys(each.read(0).shape for each in self._splits if len(each))
        data, patch = self.options.data or "the digits", self.options.patch
        if others:
            raise TrainError(
                f"{data}: images of training and of validation have the shapes {shape} and {others[0]}, and a model "
                "that makes images has one: cut them to one size (`train.options.size` does, of image files)"
            )
        channels, height, width = shape
        if height % patch or width % patch:
            raise TrainError(
                f"`train.options.patch` ({patch}) does not divide images of {height} x {width} pixels ({data}): take "
                "one that divides both sides"
            )
        return channels, height, width


@dataclass(frozen=True)
class Noised:
    """Images, and noise to be mixed with; with `options` for training."""

    images: Images
    options: DiffusionOptions | None = None

    @property
    def fingerprint(self) -> str:
        """The images'."""
        return self.images.fingerprint

    def __len__(self) -> int:
        """How many there are."""
        return len(self.images)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`image` from -1 to 1 and `noise`, float32 (B, C, H, W); `level` of noise and `label`, int64 (B,). What is
        drawn for an image in validation follows from its number alone: losses of all runs on it can be compared."""
        drawn = seeds if self.options else [mix(number) for number in samples]
        rows = [self._row(number, seed) for number, seed in zip(samples, drawn, strict=True)]
        images, noises, levels, labels = zip(*rows, strict=True)
        return {
            "image": torch.from_numpy(np.stack(images)),
            "noise": torch.from_numpy(np.stack(noises)),
            "level": torch.tensor(levels),
            "label": torch.tensor(labels),
        }

    def _row(self, number: int, seed: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        draw = np.random.Generator(np.random.Philox(seed))
        image, label = _scaled(self.images.read(number)), self.images.label(number)
        level = int(draw.integers(LEVELS + 1))
        noise = draw.standard_normal(image.shape, np.float32)
        if self.options:
            label = self.images.classes if draw.random() < self.options.class_dropout else label
            image = image[:, :, ::-1] if self.options.flip and draw.random() < 0.5 else image
        return image, noise, level, label


def _scaled(pixels: np.ndarray) -> np.ndarray:
    return pixels.astype(np.float32) / 127.5 - 1
