"""The paper's networks, as ordinary modules built from stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .options import StageOptions, choice, flag, given, integer, positive_int
from .stages.conv import WINDOWS, ConvBlock, ConvStage

EXPANSION = {"basic": 1, "bottleneck": 4}
"""The number of channels between blocks divided by the number inside a block."""


class SimpleResNet(nn.Module):
    """The network of the paper's section 5.2: a 5 × 5 convolution, batch norm and relu, one stage
    of ``depth`` basic blocks, the mean over all pixels, a linear layer.

    stride, padding  of the first convolution; 3 and 0 reduce 32 × 32 pixels to 10 × 10
    zero_init        f = 0 at first: the last batch norm's weight of every block starts at zero
    tied             one block for all steps
    options          the options of the stage, see ``rk.StageOptions``

    ``model(x)`` takes [images, in_channels, height, width] and returns [images, classes].
    """

    def __init__(
        self,
        depth: int,
        *,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 16,
        stride: int = 3,
        padding: int = 0,
        tied: bool = False,
        zero_init: bool = True,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__()
        channels = positive_int("channels", channels)
        padding = integer("padding", padding, 0)
        self.stem = _stem(in_channels, channels, 5, positive_int("stride", stride), padding)
        self.stage = ConvStage(channels, depth, zero_init=zero_init, tied=tied, **options)
        self.linear = nn.Linear(channels, positive_int("classes", classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.stage(self.stem(x)).mean((2, 3)))
        return logits


class ResNet(nn.Module):
    """He et al.'s network with pre-activation blocks and the step 1/N in each of its layers
    (appendix C of the paper).

    layers        the number of blocks of each layer, at least 2. The blocks of the first layer have
                  ``width`` channels inside. Every further layer doubles the number of channels and
                  halves the size of the images
    block         ``"bottleneck"`` or ``"basic"``
    small_images  a 3 × 3 convolution as stem, for CIFAR and smaller; otherwise 7 × 7 with stride 2
                  and a pooling
    tied          the blocks of a stage share their weights
    options       the options of every stage, see ``rk.StageOptions``; ``step=1.0`` is the classical
                  x + f(x). To change one stage: ``model.layer3.stage.configure(backward="stored")``

    ``model(x)`` takes [images, in_channels, height, width] and returns [images, classes].
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        block: str = "bottleneck",
        classes: int = 1000,
        width: int = 64,
        in_channels: int = 3,
        small_images: bool = False,
        tied: bool = False,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__()
        choice("block", block, tuple(WINDOWS))
        flag("small_images", small_images)
        width = positive_int("width", width)
        if not isinstance(layers, list | tuple) or not layers:
            raise TypeError(f"layers must be a list of numbers of blocks, not {given(layers)}")
        if small_images:
            self.stem = _stem(in_channels, width, 3, 1, 1)
        else:
            self.stem = _stem(in_channels, width, 7, 2, 3)
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        channels = width
        self.names = [f"layer{i}" for i in range(1, len(layers) + 1)]
        for i, (name, blocks) in enumerate(zip(self.names, layers, strict=True)):
            hidden, stride = width << i, 1 if i == 0 else 2
            self.add_module(name, Layer(channels, hidden, blocks, block, stride, tied, options))
            channels = hidden * EXPANSION[block]
        self.linear = nn.Linear(channels, positive_int("classes", classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def layers(self) -> list[Layer]:
        return [self._modules[name] for name in self.names]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class Layer(nn.Module):
    """``blocks`` residual blocks. The first changes the shape of x and is not a residual step: it
    computes s(x) + f(x) with a projection s. The others are a stage of N = ``blocks`` − 1 steps,
    with h = 1/N unless ``options`` set another step, as in the authors' code."""

    def __init__(
        self,
        channels: int,
        hidden: int,
        blocks: int,
        block: str,
        stride: int,
        tied: bool,
        options: StageOptions,
    ) -> None:
        super().__init__()
        blocks = positive_int("blocks of a layer", blocks)
        if blocks == 1:
            raise ValueError(
                "blocks of a layer must be at least 2 (the first is not a step), not 1"
            )
        outputs = hidden * EXPANSION[block]
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )
        self.first = ConvBlock(channels, hidden, WINDOWS[block], outputs=outputs, stride=stride)
        self.stage = ConvStage(outputs, blocks - 1, block, hidden=hidden, tied=tied, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.stage(self.shortcut(x) + self.first(x))
        return result


def resnet34(**options: Any) -> ResNet:
    """ResNet-34: 3, 4, 6 and 3 basic blocks; see ``resnet101``. It has 4,224 parameters more than
    torchvision's 21,797,672, because the first layer has a projection as well."""
    return ResNet((3, 4, 6, 3), **{"block": "basic", **options})


def resnet50(**options: Any) -> ResNet:
    """ResNet-50: 3, 4, 6 and 3 bottlenecks; see ``resnet101``."""
    return ResNet((3, 4, 6, 3), **options)


def resnet101(**options: Any) -> ResNet:
    """ResNet-101: 3, 4, 23 and 3 bottlenecks; options as for ``ResNet``.

    It has as many parameters as torchvision's, 44,549,160: pre-activation only moves a relu from
    behind a batch norm to before the next convolution.

    A stage has one step less than its layer has blocks. Stages of so few steps cannot be
    reconstructed well: ``backward="checkpoint"`` is exact, and for ResNet-101 and ResNet-152
    ``rk.tune`` may find a setting of the long stage ``layer3.stage`` that takes less memory.
    (ResNet-18 is missing, because its stages would have a single step.)
    """
    return ResNet((3, 4, 23, 3), **options)


def resnet152(**options: Any) -> ResNet:
    """ResNet-152: 3, 8, 36 and 3 bottlenecks; see ``resnet101``."""
    return ResNet((3, 8, 36, 3), **options)


def _stem(inputs: int, channels: int, size: int, stride: int, padding: int) -> nn.Sequential:
    inputs = positive_int("in_channels", inputs)
    return nn.Sequential(
        nn.Conv2d(inputs, channels, size, stride, padding, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )
