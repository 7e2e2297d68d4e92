"""The algorithm of the paper, written in plain PyTorch as anyone would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Block = Callable[[Any, Tensor], Tensor]


def parameters_of(layer: Any) -> list[Tensor]:
    return list(layer.parameters()) if isinstance(layer, nn.Module) else list(layer)


def plain_adjoint(block: Block, layers: Sequence[Any], h: float, x: Tensor) -> Tensor:
    """x[n+1] = x[n] + h block(layers[n], x[n]) for all layers; the backward pass reconstructs."""
    parameters = [p for layer in layers for p in parameters_of(layer)]
    return PlainAdjoint.apply(block, layers, h, x, *parameters)


class PlainAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: Block, layers: Sequence[Any], h: float, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        for layer in layers:
            x = x + h * block(layer, x)
        ctx.block, ctx.layers, ctx.h = block, layers, h
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        gradients: list[Tensor] = []
        for layer in reversed(ctx.layers):
            x = (x - ctx.h * ctx.block(layer, x)).requires_grad_()
            with torch.enable_grad():
                f = ctx.block(layer, x)
            dx, *dp = torch.autograd.grad(f, [x, *parameters_of(layer)], ctx.h * g)
            x, g = x.detach(), g + dx
            gradients = dp + gradients
        return None, None, None, g, *gradients
