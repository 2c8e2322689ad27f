"""What task `vision` may be told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mgpu_train.config import Model, Text


class VisionOptions(Model):
    """Task vision: images that have one class each."""

    data: Text | None = Field(
        None,
        description="folder on the node: class folders of images (or `train` and `val` with these), the binary files "
        "of CIFAR-10 or CIFAR-100, or MNIST's IDX files (default: the 8x8 digits that scikit-learn brings)",
    )
    model: Literal["resnet18", "resnet34", "resnet50"] = Field("resnet18", description="by torchvision's names")
    width: int = Field(64, ge=4, le=1024, description="channels of the first stage")
    norm: Literal["batch", "group"] = Field(
        "batch", description="batch: over all ranks on GPUs, over a rank's micro-batch on CPUs; group: image by image"
    )
    stem: Literal["small", "large"] | None = Field(
        None, description="small: 3x3, for images below 64 pixels; large: 7x7 and pooling (default: by `size`)"
    )
    size: int | None = Field(
        None, ge=8, le=1024, description="pixels of a side; class folders need it (default: as the files are)"
    )
    crop_padding: int = Field(0, ge=0, le=64, description="pixels by which training images are shifted at most")
    flip: bool = Field(False, description="half of the training images are mirrored")
    mixup: float = Field(0.0, ge=0, le=10, description="alpha of mixup (Zhang et al. 2018); 0: none")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target that all classes have")
    channels_last: bool = Field(False, description="lays images out as GPUs with matrix units read them fastest")

    @model_validator(mode="after")
    def _padding_fits(self) -> VisionOptions:
        if self.size is not None and self.crop_padding > self.size // 2:
            raise ValueError(f"crop_padding ({self.crop_padding}) is more than half of size ({self.size})")
        return self
