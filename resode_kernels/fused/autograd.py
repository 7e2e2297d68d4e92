"""The ``autograd.Function`` of a fused stage. Its forward pass saves one state and the anchors; its
backward pass is one call of the reverse op. Every parameter is an input of the Function and every
gradient is returned from it, so hooks, gradient accumulation, ``torch.autograd.grad`` and
data-parallel wrappers work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from ..states import stream_dtype
from ..undifferentiable import undifferentiable
from . import ops


def run(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """x[N] in x's dtype, differentiable if needed, and the batch statistics."""
    inputs = (x, *problem.parameters)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        without_parameters = problem._replace(parameters=())
        y, statistics = StageFunction.apply(x, without_parameters, backend, *problem.parameters)
    else:
        problem = problem._replace(method=problem.method._replace(anchor_every=0))
        y, _, statistics = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
        y = y.to(x.dtype)
    return y, statistics


class StageFunction(torch.autograd.Function):
    """The parameters are separate inputs; ``problem.parameters`` is empty."""

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
        # The reverse rule "exact" recomputes states from x[0]; the others reconstruct from x[N].
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
