"""Task `vision`: a residual network on images that have one class each.

In shapes, B is images, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.data.base import Batch, Data
from mgpu_train.data.images import Images, open_splits
from mgpu_train.data.seeds import mix
from mgpu_train.models.foreign import blocks, copy_file, copy_values, made_by_timm
from mgpu_train.models.resnet import ResNet
from mgpu_train.tasks.base import Layout, Loss, Split, Task
from mgpu_train.tasks.vision_config import VisionOptions

_MEASURED = 1000  # images of which mean and deviation are taken
_SMALL = 64  # pixels below which an image has the small stem


class Vision(Task):
    """Which class an image is of."""

    Options = VisionOptions
    unit = "images"
    options: VisionOptions

    def data(self, split: Split) -> Data:
        """Training images, shifted, mirrored and mixed as the options say, or validation images as they are."""
        images = self._splits[split == "validation"]
        return Pictures(images, *self._scale, None if split == "validation" else self.options, self._counts)

    def model(self) -> nn.Module:
        """A residual network."""
        channels, height, width = self._splits[0].read(0).shape
        if self.options.timm is not None:
            size = (height, width)
            return self._laid_out(made_by_timm(self.options.timm, channels, self._splits[0].classes, size))
        small = height < _SMALL if self.options.stem is None else self.options.stem == "small"
        group = self.options.norm == "group"
        classes = self._splits[0].classes
        model = ResNet(self.options.model, channels, classes, width=self.options.width, small=small, group=group)
        return self._laid_out(model)

    def initialise(self, model: nn.Module) -> None:
        """By fan-out, or as timm does; and what the file of weights says."""
        if isinstance(model, ResNet):
            model.initialise()
        else:  # on the host: what timm computes of shapes has no value on the meta device
            copy_values(self.model(), model)
        if self.options.weights is not None:
            copy_file(self.options.weights, model)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy, in nat; of two images that are mixed the mean by their shares."""
        guess = self._guess(model, batch)
        smooth = self.options.label_smoothing
        total = F.cross_entropy(guess, batch["label"], reduction="none", label_smoothing=smooth)
        if "share" in batch:
            total = batch["share"] * total
        if "other" in batch:
            other = F.cross_entropy(guess, batch["other"], reduction="none", label_smoothing=smooth)
            total = total + batch["rest"] * other
        return Loss(total.sum(), len(guess), self._right(guess, batch["label"]))

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """Without smoothing."""
        guess = self._guess(model, batch)
        total = F.cross_entropy(guess, batch["label"], reduction="sum")
        return Loss(total, len(guess), self._right(guess, batch["label"]))

    def layout(self, model: nn.Module) -> Layout:
        """The network's blocks."""
        return Layout(blocks(model))

    def facts(self) -> Mapping[str, float]:
        """How many classes there are."""
        return {"classes": self._splits[0].classes}

    def _guess(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images = batch["image"]
        return model(images.to(memory_format=torch.channels_last) if self.options.channels_last else images).float()

    def _laid_out(self, model: nn.Module) -> nn.Module:
        return model.to(memory_format=torch.channels_last) if self.options.channels_last else model

    def _right(self, guess: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        best = guess.topk(min(5, guess.shape[1]), 1).indices == label[:, None]
        right = {"accuracy": best[:, 0].sum()}
        return right if guess.shape[1] <= 5 else {**right, "top5_accuracy": best.sum()}

    @cached_property
    def _splits(self) -> tuple[Images, Images]:
        return open_splits(self.options.data, self.options.size)

    @cached_property
    def _counts(self) -> np.ndarray | None:
        """How much an image of each class counts: 1 in the mean of all images, and the same for all of a class."""
        if not self.options.balance:
            return None
        images = self._splits[0]
        numbers = np.bincount([images.label(number) for number in range(len(images))], minlength=images.classes)
        return len(images) / (np.count_nonzero(numbers) * np.maximum(numbers, 1))

    @cached_property
    def _scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of each channel, of images at equal distances; where all pixels are the same, 1."""
        images = self._splits[0]
        some = range(0, len(images), max(1, len(images) // _MEASURED))
        pixels = np.stack([images.read(number) for number in some]).astype(np.float32)
        mean, deviation, most, least = (
            how(pixels, axis=(0, 2, 3)).reshape(-1, 1, 1) for how in (np.mean, np.std, np.max, np.min)
        )
        return mean, np.where(most == least, np.float32(1), deviation)


@dataclass(frozen=True)
class Pictures:
    """Images as tensors; with `options`, changed as each one's seed says."""

    images: Images
    mean: np.ndarray
    deviation: np.ndarray
    options: VisionOptions | None
    counts: np.ndarray | None = None  # by class; None: 1 each

    @property
    def fingerprint(self) -> str:
        """The images'."""
        return self.images.fingerprint

    def __len__(self) -> int:
        """How many there are."""
        return len(self.images)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`image` float32 (B, C, H, W), `label` int64 (B,); with mixup the `other` label, and `share` and `rest`, by
        which the losses of both count, and in which classes are balanced.

        A partner is drawn out of all images, so that it does not depend on who else is in the batch.
        """
        images = [self._read(number, seed) for number, seed in zip(samples, seeds, strict=True)]
        labels = np.array([self.images.label(number) for number in samples])
        made, shares = {"label": labels}, np.ones(len(labels))
        if self.options is not None and self.options.mixup:
            alpha, picked = self.options.mixup, [mix(seed, 1) % len(self.images) for seed in seeds]
            shares = np.array([np.random.Generator(np.random.Philox(seed)).beta(alpha, alpha) for seed in seeds])
            partners = (self._read(number, mix(seed, 2)) for number, seed in zip(picked, seeds, strict=True))
            both = zip(images, partners, shares, strict=True)
            images = [share * image + (1 - share) * partner for image, partner, share in both]
            others = np.array([self.images.label(number) for number in picked])
            made |= {"other": others, "rest": (1 - shares) * self._count(others)}
        if self.options is not None and (self.options.mixup or self.options.balance):
            made["share"] = shares * self._count(labels)
        made["image"] = np.stack(images)
        return {
            name: torch.from_numpy(each.astype(np.int64 if name in ("label", "other") else np.float32))
            for name, each in made.items()
        }

    def _count(self, labels: np.ndarray) -> np.ndarray | float:
        return 1.0 if self.counts is None else self.counts[labels]

    def _read(self, number: int, seed: int) -> np.ndarray:
        image = (self.images.read(number) - self.mean) / self.deviation
        if self.options is None:
            return image
        if self.options.flip and seed & 1:
            image = image[:, :, ::-1]
        if padding := self.options.crop_padding:
            down, right = (seed >> shift & 0xFFFF for shift in (8, 24))
            _, height, width = image.shape
            around = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
            down, right = down % (2 * padding + 1), right % (2 * padding + 1)
            image = around[:, down : down + height, right : right + width]
        return image
