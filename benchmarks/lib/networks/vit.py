"""A vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import resode_kernels as rk

from .transformer import TransformerBlock
from .whole import DigitsNetwork


class DigitsViT(DigitsNetwork):
    """Pre-norm transformer layers over patches of 2 × 2 pixels, 16 of an image."""

    def __init__(self, layers: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.shape = 16, width
        self.stem = Patches(width)
        blocks = [TransformerBlock(width, 4 * width, heads) for _ in range(layers)]
        self.stage = rk.ResidualStage(blocks, step=1.0)
        self.head = nn.Sequential(nn.LayerNorm(width), Mean(1), nn.Linear(width, 10))


class Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.places


class Mean(nn.Module):
    """Over some dimensions."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)
