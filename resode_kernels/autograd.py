"""The one ``autograd.Function``: a stage's forward pass saves a state and its anchors, its backward
pass is one call of the reverse op. Every parameter enters it and every gradient is returned from
it, so hooks, accumulation, ``torch.autograd.grad`` and data-parallel wrappers work as ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .problem import Problem, stream_dtype


def run(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """x[N] in x's dtype and the statistics of the batch, differentiable where that is asked for."""
    inputs = (x, *problem.parameters)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        bare = problem._replace(parameters=())
        y, statistics = StageFunction.apply(x, bare, backend, *problem.parameters)
    else:
        problem = problem._replace(method=problem.method._replace(anchor_every=0))
        y, _, statistics = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
        y = y.to(x.dtype)
    return y, statistics


class StageFunction(torch.autograd.Function):
    """``problem`` comes without its parameters, which are inputs of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        problem: Problem,
        backend: str,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.problem, ctx.backend, ctx.dtype = problem, backend, x.dtype
        problem = problem._replace(parameters=parameters)
        y, anchors, statistics = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
        # The reverse pass starts at one end of the trajectory: exact from x[0], otherwise x[N].
        exact = problem.method.reverse_rule == "exact"
        ctx.save_for_backward(x if exact else y, anchors, *parameters)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return y.to(x.dtype), statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        start, anchors, *parameters = saved
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        with torch.no_grad():
            problem = ctx.problem._replace(parameters=tuple(parameters))
            stream = stream_dtype(ctx.dtype)
            grad_x, *grads = ops.reverse(
                start.to(stream), anchors, grad.to(stream), needs, problem, ctx.backend
            )
            if grad_x is not None:
                grad_x = grad_x.to(ctx.dtype)
        if torch.is_grad_enabled():  # create_graph=True
            grad_x, *grads = undifferentiable((grad_x, *grads), (grad, *saved))
        return grad_x, None, None, *grads


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
