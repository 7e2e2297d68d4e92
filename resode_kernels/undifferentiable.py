"""Tensors that raise an error when they are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TWICE = (
    "resode_kernels: the gradients of a stage cannot be differentiated a second time (double "
    "backward). If you need that, build the network from plain PyTorch operations."
)


def undifferentiable(
    tensors: Sequence[Tensor | None], graph: Sequence[Tensor | None], message: str = TWICE
) -> list[Tensor | None]:
    """The tensors, connected to ``graph`` in autograd's graph. Differentiating them raises an
    error."""
    inputs = [t for t in graph if t is not None]
    present = [t for t in tensors if t is not None]
    guarded = iter(Undifferentiable.apply(message, len(present), *present, *inputs))
    return [t if t is None else next(guarded) for t in tensors]


class Undifferentiable(torch.autograd.Function):
    """Its first ``count`` tensors are returned."""

    @staticmethod
    def forward(message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.message)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], message: str, count: int, *tensors: Tensor
    ) -> Any:
        return Undifferentiable.apply(message, count, *tensors), in_dims[2 : 2 + count]
