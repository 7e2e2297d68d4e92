"""The paper's networks in the size that suits the data: as published for CIFAR-10 and ImageNet,
smaller for digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data import Data

from resode_kernels.models import ResNet, SimpleResNet


def simple(data: Data, depth: int, **options: Any) -> SimpleResNet:
    """The network of section 5.2. Digits are brought down to 4 × 4 pixels instead of 10 × 10, and
    have four channels: 16 would leave no room between good and bad gradients."""
    if data.name == "digits":
        options = {"in_channels": 1, "channels": 4, "stride": 2, "padding": 2, **options}
    return SimpleResNet(depth, classes=data.classes, **options)


def deep(data: Data, layers: Sequence[int], **options: Any) -> ResNet:
    """He et al.'s network with bottlenecks; for digits with a sixteenth of its channels."""
    if data.name == "digits":
        options = {"in_channels": 1, "width": 4, **options}
    return ResNet(layers, classes=data.classes, small_images=data.name != "ImageNet", **options)
