"""What task `vision` may be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from mgpu_train.config import Model, Text

_OURS = "resnet18|resnet34|resnet50"
IMAGES = (
    "folder on the node: class folders of images (or `train` and `val` with these), TFRecord files, the files of "
    "CIFAR-10 or CIFAR-100 (binary, or for Python), MNIST's IDX files, or images.npy and labels.npy (or `train-` and "
    "`val-` before these) (default: the 8x8 digits that scikit-learn brings)"
)
SIZE = "pixels of a side; class folders and TFRecord files need it (default: as the files are)"
Network = Annotated[str, StringConstraints(pattern=rf"^({_OURS}|timm:[a-z0-9_.]+)$", max_length=128)]


class VisionOptions(Model):
    """Task vision: images that have one class each."""

    data: Text | None = Field(None, description=IMAGES)
    model: Network = Field(
        "resnet18", description="resnet18, resnet34 or resnet50, by torchvision's names; timm:NAME: one of timm's"
    )
    weights: Text | None = Field(
        None,
        description="file on the node with first values, by the model's own names (.pth, .pt, .safetensors); a layer "
        "of another shape, as that of other classes, stays random (default: all random)",
    )
    width: int = Field(64, ge=4, le=1024, description="channels of the first stage")
    norm: Literal["batch", "group"] = Field(
        "batch", description="batch: over all ranks on GPUs, over a rank's micro-batch on CPUs; group: image by image"
    )
    stem: Literal["small", "large"] | None = Field(
        None, description="small: 3x3, for images below 64 pixels; large: 7x7 and pooling (default: by `size`)"
    )
    size: int | None = Field(None, ge=8, le=1024, description=SIZE)
    crop_padding: int = Field(0, ge=0, le=64, description="pixels by which training images are shifted at most")
    flip: bool = Field(False, description="half of the training images are mirrored")
    mixup: float = Field(0.0, ge=0, le=10, description="alpha of mixup (Zhang et al. 2018); 0: none")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target that all classes have")
    balance: bool = Field(False, description="images count by how rare their class is, in the loss of training alone")
    channels_last: bool = Field(False, description="lays images out as GPUs with matrix units read them fastest")

    @property
    def timm(self) -> str | None:
        """The name of one of timm's models."""
        return self.model.removeprefix("timm:") if self.model.startswith("timm:") else None

    @model_validator(mode="after")
    def _ours_alone(self) -> VisionOptions:
        given = self.model_fields_set & {"width", "norm", "stem"}
        if self.timm and given:
            raise ValueError(f"{min(given)} is of resnet18, resnet34 and resnet50: {self.model} is as timm has made it")
        return self

    @model_validator(mode="after")
    def _padding_fits(self) -> VisionOptions:
        if self.size is not None and self.crop_padding > self.size // 2:
            raise ValueError(f"crop_padding ({self.crop_padding}) is more than half of size ({self.size})")
        return self
