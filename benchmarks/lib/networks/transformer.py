"""A stage of transformer blocks."""

from __future__ import annotations

import math
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.options import Options

from .modules import ModuleNetwork
from .names import PER_BLOCK, STANDARD


class TransformerNetwork(ModuleNetwork):
    """Pre-norm transformer blocks; the batch is split into sequences of 64 tokens."""

    title = "Stage of transformer blocks"
    products: ClassVar = {
        **{STANDARD: 3, PER_BLOCK: 4},
        **{"paper": 5, "refined": 5, "predicted": 4, "recorded": 4},
    }
    hidden_factor = 4

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        count = 1 if c.tied else Options(scheme=c.scheme).blocks(c.depth)
        blocks = [TransformerBlock(c.dim, c.hidden) for _ in range(count)]
        return rk.ResidualStage(blocks, depth=c.depth, scheme=c.scheme)

    def product_flops(self) -> float:
        """FLOPs of all matrix products of a block in one direction."""
        c, (_, tokens, _) = self.config, self.shape()
        return 2 * c.batch * c.dim * (4 * c.dim + 2 * c.hidden + 2 * tokens)

    def shape(self) -> tuple[int, ...]:
        tokens = math.gcd(self.config.batch, 64)
        return self.config.batch // tokens, tokens, self.config.dim


class TransformerBlock(nn.Module):
    """f(x) = a + MLP(norm(x + a)), a = attention(norm(x)): what such a block adds to x.

    heads   None: one for 64 channels
    causal  a token sees only those before it
    """

    def __init__(
        self, dim: int, hidden: int, heads: int | None = None, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads or max(1, dim // 64), causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=self.causal)
        a = self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        return a + self.mlp(self.norm2(x + a))
