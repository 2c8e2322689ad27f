"""What task `diffusion` may be told."""

from __future__ import annotations

from pydantic import Field, model_validator

from mgpu_train.config import Model, Text
from mgpu_train.tasks.vision_config import IMAGES, SIZE


class DiffusionOptions(Model):
    """Task diffusion: images out of noise, by their class."""

    data: Text | None = Field(None, description=IMAGES)
    size: int | None = Field(None, ge=8, le=1024, description=SIZE)
    flip: bool = Field(False, description="half of the training images are mirrored")
    patch: int = Field(2, ge=1, le=64, description="pixels of a side of the patches, a token each; divides the images'")
    layers: int = Field(4, ge=1, le=200, description="transformer blocks")
    dim: int = Field(128, ge=8, le=65536, description="width of the residual stream")
    heads: int = Field(4, ge=1, le=1024, description="attention heads; divides dim")
    class_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of training images whose class is hidden, which guidance needs"
    )

    @model_validator(mode="after")
    def _divides(self) -> DiffusionOptions:
        if self.dim % self.heads:
            raise ValueError(f"heads ({self.heads}) does not divide dim ({self.dim})")
        if self.size is not None and self.size % self.patch:
            raise ValueError(f"patch ({self.patch}) does not divide size ({self.size})")
        return self
