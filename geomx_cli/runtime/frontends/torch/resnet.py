"""ResNet-18 in the form of gluon's model zoo, version 1, with the same names. He et al., CVPR 2016."""

from typing import Any

import torch
from torch import nn

__all__ = ["resnet18"]

WIDTHS = (64, 128, 256, 512)


class _Block(nn.Module):  # type: ignore[misc, unused-ignore]  # torch is not installed where mypy runs
    """Two 3 x 3 convolutions, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        else:
            self.downsample = None

    def forward(self, images: Any) -> Any:
        shortcut = images if self.downsample is None else self.downsample(images)
        return torch.relu(shortcut + self.body(images))


class _ResNet(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[Any] = [
            nn.Conv2d(channels, WIDTHS[0], 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        for index, width in enumerate(WIDTHS):
            before = WIDTHS[max(0, index - 1)]
            layers += [nn.Sequential(_Block(before, width, 1 + (index > 0)), _Block(width, width, 1))]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.output = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: Any) -> Any:
        return self.output(self.features(images).flatten(1))


def resnet18(channels: int, classes: int) -> Any:
    """A module for images of any size, float32 of shape (b, channels, height, width); its first layers are those for
    ImageNet. Returns logits of shape (b, classes).
    """
    return _ResNet(channels, classes)
