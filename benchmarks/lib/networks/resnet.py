"""Residual networks on digits: stages of bottlenecks, pre-activation and post-activation, and one
of MLPs."""

from __future__ import annotations

from torch import Generator, Tensor, nn

import resode_kernels as rk

from .vit import Mean
from .whole import DigitsNetwork


def stem(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


def head(channels: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), Mean(2, 3), nn.Linear(channels, 10))


class PreActivation(DigitsNetwork):
    """x + f(x), relu and batch norm inside f."""

    relu = True

    def __init__(self, blocks: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.shape = channels, 8, 8
        self.stem, self.head = stem(channels), head(channels)
        stage = rk.ConvStage(channels, blocks, "bottleneck", hidden=hidden)
        self.stage = rk.ResidualStage(list(stage.blocks), step=1.0)  # modules, for autocast


class PostActivation(DigitsNetwork):
    """relu(x + f(x)), as in ResNet-50 and ResNet-101."""

    relu = True

    def __init__(self, blocks: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.shape = channels, 8, 8
        self.stem, self.head = stem(channels), head(channels)
        layers = [Bottleneck(channels, hidden) for _ in range(blocks)]
        self.stage = rk.ResidualStage([rk.residual_branch(b) for b in layers], step=1.0)

    def state(self, count: int, generator: Generator) -> Tensor:
        return super().state(count, generator).relu()


class Bottleneck(nn.Module):
    """As torchvision has it."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + x)


class DeepMLP(DigitsNetwork):
    """Blocks of two layers with tanh."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.shape = (width,)
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(blocks)
        ]
        self.stage = rk.ResidualStage(layers, step=1.0)
        self.head = nn.Linear(width, 10)
