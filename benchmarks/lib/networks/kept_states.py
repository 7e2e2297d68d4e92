"""The simplest way to save activation memory, in plain PyTorch: keep the state before every block
in a low precision, and run the block again from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from resode_kernels.recording import Increment, Recorder, decode, encode

from .plain_adjoint import Block, parameters_of

Kept = tuple[Tensor, ...]


class Bfloat16:
    """Keeps a state in bfloat16."""

    def pack(self, x: Tensor) -> Kept:
        return (x.to(torch.bfloat16),)

    def unpack(self, kept: Kept, like: Tensor) -> Tensor:
        return kept[0].to(like.dtype)


class Quantised:
    """Keeps a state in some bits an element, by the quantiser of the rule ``recorded``. Rounding is
    then relative to the largest element of a group of the state, not of the increment."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def pack(self, x: Tensor) -> Kept:
        return tuple(encode(self.rows(x), self.bits))

    def unpack(self, kept: Kept, like: Tensor) -> Tensor:
        row = self.rows(like).shape[1]
        return decode(Increment(*kept), self.bits, row, like.dtype).reshape(like.shape)

    @staticmethod
    def rows(x: Tensor) -> Tensor:
        """Contiguous, however x lies in memory."""
        x = x.contiguous()
        return Recorder().rows(x, like=x)


Keep = Bfloat16 | Quantised


def kept_states(
    block: Block, layers: Sequence[Any], h: float, x: Tensor, keep: Keep | None = None
) -> Tensor:
    """x[n+1] = x[n] + h block(layers[n], x[n]) for all layers, with every x[n] kept in bfloat16 or
    as ``keep`` says."""
    for layer in layers:
        x = KeptState.apply(block, layer, h, keep or Bfloat16(), x, *parameters_of(layer))
    return x


class KeptState(torch.autograd.Function):
    """One step."""

    @staticmethod
    def forward(
        ctx: Any, block: Block, layer: Any, h: float, keep: Keep, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.block, ctx.layer, ctx.h, ctx.keep = block, layer, h, keep
        ctx.save_for_backward(*keep.pack(x))
        return torch.add(x, block(layer, x), alpha=h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x = ctx.keep.unpack(ctx.saved_tensors, like=g).requires_grad_()
        with torch.enable_grad():
            f = ctx.block(ctx.layer, x)
        dx, *grads = torch.autograd.grad(f, [x, *parameters_of(ctx.layer)], ctx.h * g)
        return None, None, None, None, g + dx, *grads
