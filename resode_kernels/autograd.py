"""The one ``autograd.Function``: a stage's forward pass saves a state and its anchors, its backward
pass is one call of the reverse op. Every parameter enters it and every gradient is returned from
it, so hooks, accumulation, ``torch.autograd.grad`` and data-parallel wrappers work as ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .options import Method
from .problem import Problem, stream_dtype


class StageFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        block: str,
        activation: str,
        method: Method,
        backend: str,
        *parameters: Tensor | None,
    ) -> Tensor:
        problem = Problem(block, activation, parameters, method)
        y, anchors = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
        # The reverse pass starts at one end of the trajectory: exact from x[0], otherwise x[N].
        result = y.to(x.dtype)
        ctx.save_for_backward(x if method.rule == "exact" else y, anchors, *parameters)
        ctx.block, ctx.activation, ctx.method, ctx.backend = block, activation, method, backend
        ctx.dtype = x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        start, anchors, *parameters = saved
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[5:])
        with torch.no_grad():
            problem = Problem(ctx.block, ctx.activation, tuple(parameters), ctx.method)
            stream = stream_dtype(ctx.dtype)
            grad_x, *grads = ops.reverse(
                start.to(stream), anchors, grad.to(stream), needs, problem, ctx.backend
            )
            if grad_x is not None:
                grad_x = grad_x.to(ctx.dtype)
        if torch.is_grad_enabled():  # create_graph=True
            grad_x, *grads = undifferentiable((grad_x, *grads), (grad, *saved))
        return grad_x, None, None, None, None, *grads


def undifferentiable(
    gradients: Sequence[Tensor | None], graph: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients that depend on ``graph``, as autograd sees it, and refuse to be differentiated."""
    known = [t for t in graph if t is not None and t.requires_grad]
    present = [g for g in gradients if g is not None]
    passed = iter(Undifferentiable.apply(len(present), *present, *known))
    return [g if g is None else next(passed) for g in gradients]


class Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "resode_kernels: a stage's gradients cannot be differentiated a second time (double "
            "backward). Build the network from plain PyTorch operations where you need that."
        )
