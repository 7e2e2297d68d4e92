"""The ``autograd.Function`` of a fused stage. Its forward pass saves one state and the anchors; its
backward pass is one call of the reverse op. Every parameter is an input of the Function and every
gradient is returned from it, so hooks, gradient accumulation, ``torch.autograd.grad`` and
data-parallel wrappers work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..backends.engine import REFERENCE
from ..problem import Problem
from ..states import stream_dtype
from ..uncompiled import uncompiled
from ..undifferentiable import undifferentiable
from . import batching, gate, ops

Outputs = tuple[Any, ...]
"""x[N] in x's dtype, the batch statistics, x[N] in the stream's dtype if that is another one, and
what is kept."""


def run(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """x[N] in x's dtype, differentiable if needed, and the batch statistics."""
    inputs = (x, *problem.parameters)
    if transforms.carry_tangents(inputs) or transforms.jit_is_tracing():
        return REFERENCE.differentiable(problem, x)
    try:
        if transforms.are_active():
            return _transformed(x, problem, backend)
        if torch.is_grad_enabled() and _require_gradients(inputs):
            y, statistics = _apply(StageFunction, x, problem, backend)
            return y, statistics
        problem = problem._replace(method=problem.method.without_keeping())
        y, statistics, _ = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
        return y.to(x.dtype), statistics
    except gate.NOT_IMPLEMENTED as error:
        gate.blame_inputs(inputs, problem, error)
        raise


@uncompiled  # traced inside a compiled torch.func.grad, a Function would have the gradient zero
def _transformed(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    if transforms.are_functionalizing():
        return REFERENCE.differentiable(problem, x)
    y, statistics, *_ = _apply(TransformedStageFunction, x, problem, backend)
    return y, statistics


def _require_gradients(inputs: Sequence[Tensor | None]) -> bool:
    return any(t is not None and t.requires_grad for t in inputs)


def _apply(
    function: type[torch.autograd.Function], x: Tensor, problem: Problem, backend: str
) -> Any:
    if problem.block == "conv":
        needs = [t is not None and t.requires_grad for t in problem.parameters]
        gate.refuse_gradients_of_constants(problem, needs)
    without_parameters = problem._replace(parameters=())
    return function.apply(x, without_parameters, backend, *problem.parameters)


class StageFunction(torch.autograd.Function):
    """The parameters are separate inputs; ``problem.parameters`` is empty."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, problem: Problem, backend: str, *parameters: Tensor | None
    ) -> Any:
        outputs = _forward(x, problem, backend, *parameters)
        _save(ctx, x, problem, backend, parameters, *outputs)
        y, statistics, *_ = outputs
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        transforms.refuse_tangents((grad, *saved))
        start, kept, parameters = _unpacked(ctx, saved)
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        with torch.no_grad():
            problem = ctx.problem._replace(parameters=tuple(parameters))
            stream = stream_dtype(ctx.dtype)
            grad_x, *grads = ops.reverse(
                start.to(stream), grad.to(stream), kept, needs, problem, ctx.backend
            )
            if grad_x is not None:
                grad_x = grad_x.to(ctx.dtype)
        if torch.is_grad_enabled():  # create_graph=True
            grad_x, *grads = undifferentiable((grad_x, *grads), (grad, *saved))
        return grad_x, None, None, *grads


class TransformedStageFunction(torch.autograd.Function):
    """``StageFunction`` for the transforms of ``torch.func``. They need a forward pass without
    ``ctx``, which every call would pay for with 10 µs."""

    @staticmethod
    def forward(x: Tensor, problem: Problem, backend: str, *parameters: Tensor | None) -> Any:
        return _forward(x, problem, backend, *parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        x, problem, backend, *parameters = inputs
        _save(ctx, x, problem, backend, parameters, *output)
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))

    backward = staticmethod(uncompiled(StageFunction.backward))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> Any:
        return batching.forward(TransformedStageFunction.apply, info, in_dims, x, *arguments)


def _forward(x: Tensor, problem: Problem, backend: str, *parameters: Tensor | None) -> Outputs:
    problem = problem._replace(parameters=parameters)
    end, statistics, kept = ops.forward(x.to(stream_dtype(x.dtype)), problem, backend)
    y = end.to(x.dtype)
    return y, statistics, None if end is y else end, *kept


def _save(
    ctx: Any,
    x: Tensor,
    problem: Problem,
    backend: str,
    parameters: Sequence[Tensor | None],
    y: Tensor,
    _statistics: Tensor,
    end: Tensor | None,
    *kept: Tensor,
) -> None:
    ctx.problem, ctx.backend, ctx.dtype, ctx.kept = problem, backend, x.dtype, len(kept)
    # The reverse rule "exact" recomputes states from x[0], "recorded" starts at the last anchor,
    # the others reconstruct from x[N].
    rule = problem.method.reverse_rule
    if rule == "recorded":
        ctx.save_for_backward(*kept, *parameters)
    else:
        start = x if rule == "exact" else y if end is None else end
        ctx.save_for_backward(start, *kept, *parameters)
    ctx.set_materialize_grads(False)


def _unpacked(
    ctx: Any, saved: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Where the reverse pass starts, what was kept, and the parameters."""
    first = 0 if ctx.problem.is_recorded else 1
    kept, parameters = saved[first : first + ctx.kept], saved[first + ctx.kept :]
    return saved[0] if first else kept[0][-1], kept, parameters


def _differentiable_forward(x: Tensor, *fields: Any) -> Any:
    """The op ``forward`` where it is called by itself, as by exported programs."""
    if torch.is_grad_enabled():
        problem, backend = Problem.from_flat(fields[:-1]), fields[-1]
        if _require_gradients((x, *problem.parameters)):
            _refuse_transforms_of_ops()
            y, statistics, _, *kept = _apply(TransformedStageFunction, x, problem, backend)
            return y, statistics, kept
    return ops.below_autograd(torch.ops.resode_kernels.forward.default, x, *fields)


def _undifferentiable_reverse(*arguments: Any) -> Any:
    """The op ``reverse``, whose gradients cannot be differentiated."""
    gradients = ops.below_autograd(torch.ops.resode_kernels.reverse.default, *arguments)
    if torch.is_grad_enabled():
        start, cotangent, kept, _, *fields = arguments
        inputs = (start, cotangent, *kept, *Problem.from_flat(fields[:-1]).parameters)
        if _require_gradients(inputs):
            _refuse_transforms_of_ops()
            return undifferentiable(gradients, inputs)
    return gradients


def _refuse_transforms_of_ops() -> None:
    if transforms.are_active():
        raise RuntimeError(
            "resode_kernels: torch.func cannot differentiate the ops of a stage, for example in an "
            "exported program; use the stage itself"
        )


ops.library.impl("forward", _differentiable_forward, "Autograd")
ops.library.impl("reverse", _undifferentiable_reverse, "Autograd")
