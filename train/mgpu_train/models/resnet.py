"""Residual networks (He et al. 2016), by torchvision's names of parameters, so that its weights fit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # of one rank, and of all

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
Norm = Callable[[int], nn.Module]


class Basic(nn.Module):
    """Two convolutions of 3x3."""

    expansion = 1

    def __init__(self, given: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(given, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, given, H, W) -> (B, width, H / stride, W / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))

    @property
    def last(self) -> nn.Module:
        """The norm before the sum."""
        return self.bn2


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, and 1x1 to four times the width."""

    expansion = 4

    def __init__(self, given: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = norm(4 * width)
        self.downsample = _shortcut(given, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, given, H, W) -> (B, 4 * width, H / stride, W / stride)."""
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))

    @property
    def last(self) -> nn.Module:
        """The norm before the sum."""
        return self.bn3


class ResNet(nn.Module):
    """Four stages of blocks; `initialise` gives it its values."""

    def __init__(self, name: str, channels: int, classes: int, *, width: int, small: bool, group: bool) -> None:
        """`small`: for images below 64 pixels; `group`: norms of groups of 8 channels, image by image."""
        super().__init__()
        kind = Bottleneck if name == "resnet50" else Basic
        norm: Norm = (lambda count: nn.GroupNorm(max(1, count // 8), count)) if group else nn.BatchNorm2d
        self.conv1 = nn.Conv2d(channels, width, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
        self.bn1 = norm(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        given = width
        for stage, depth in enumerate(DEPTHS[name]):
            blocks = []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(kind(given, width << stage, stride, norm))
                given = (width << stage) * kind.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(given, classes)

    def initialise(self) -> None:
        """He initialisation; every block begins as the identity (Goyal et al. 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BatchNorm | nn.GroupNorm | nn.Linear):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Basic | Bottleneck):
                nn.init.zeros_(module.last.weight)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) -> logits (B, classes) float32."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)).float()


def _shortcut(given: int, width: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and given == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), norm(width))
