"""Gradients that raise an error when they are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def undifferentiable(
    gradients: Sequence[Tensor | None], graph: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients, connected to ``graph`` in autograd's graph. Differentiating them raises an
    error."""
    inputs = [t for t in graph if t is not None]
    present = [g for g in gradients if g is not None]
    guarded = iter(Undifferentiable.apply(len(present), *present, *inputs))
    return [g if g is None else next(guarded) for g in gradients]


class Undifferentiable(torch.autograd.Function):
    """Its first ``count`` tensors are returned."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is needed to raise an error."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "resode_kernels: the gradients of a stage cannot be differentiated a second time "
            "(double backward). If you need that, build the network from plain PyTorch operations."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], count: int, *tensors: Tensor) -> Any:
        return Undifferentiable.apply(count, *tensors), in_dims[1 : 1 + count]
