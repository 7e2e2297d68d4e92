"""A language model over bytes."""

from __future__ import annotations

import torch
from samples import standard_library, windows
from torch import Generator, Tensor, nn

import resode_kernels as rk

from .transformer import TransformerBlock
from .whole import Batch, WholeNetwork


class ByteGPT(WholeNetwork):
    """Pre-norm transformer layers over the bytes of Python's standard library."""

    training_batch = 16

    def __init__(self, layers: int, width: int, context: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.context, self.shape = context, (context, width)
        self.stem = Embedding(256, context, width)
        blocks = [TransformerBlock(width, 4 * width, heads, causal=True) for _ in range(layers)]
        self.stage = rk.ResidualStage(blocks, step=1.0)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def batch(self, count: int, generator: Generator) -> Batch:
        return windows(standard_library().train, count, self.context, generator)


class Embedding(nn.Module):
    """Of tokens and their places, with GPT-2's initial weights."""

    def __init__(self, tokens: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.places = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens[x] + self.places
