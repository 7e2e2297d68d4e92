"""The two passes of a stage as ``torch.library`` ops, which is what ``torch.compile`` sees.

    forward   x[0] → x[N], the anchors and the batch statistics
    reverse   ∂L/∂x[N] → ∂L/∂x[0] and the parameter gradients

Each op allocates its results and lets a backend fill them. States are in the stream's dtype,
[rows, dim], or for conv [images, channels, height, width] in any memory format. Anchors are
[count, …] in a layout of the backend's choice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, nonfinite
from ..backends.contract import ForwardIO, ReverseIO
from ..problem import Problem, schema
from . import batching, gate, validation

STATES = {"forward": ("x",), "reverse": ("start", "anchors", "cotangent")}
"""The tensors among each op's arguments, before those of the problem."""

library = torch.library.Library("resode_kernels", "DEF")
library.define(
    f"forward(Tensor x, {schema()}, str backend) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
library.define(
    "reverse(Tensor start, Tensor anchors, Tensor cotangent, bool[] needs, "
    f"{schema()}, str backend) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _new_states(x: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x),
        x.new_empty((problem.anchor_count, *x.shape)),
        # Without layers it is empty, which new_empty is faster at.
        x.new_zeros(problem.statistics) if problem.layers else x.new_empty(problem.statistics),
    )


def _new_gradients(start: Tensor, needs: Sequence[bool], problem: Problem) -> list[Tensor]:
    """Gradients of x and every parameter; an empty tensor where none is needed."""
    return [
        torch.empty_like(t) if t is not None and need else start.new_empty(0)
        for t, need in zip((start, *problem.parameters), needs, strict=True)
    ]


def _fake_forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem.from_flat(fields[:-1])
    validation.forward(x, problem, fields[-1])
    return _new_states(x, problem)


def _fake_reverse(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    problem = Problem.from_flat(fields[:-1])
    validation.reverse(start, anchors, cotangent, needs, problem, fields[-1])
    return _new_gradients(start, needs, problem)


def _forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem.from_flat(fields[:-1])
    gate.check((x, *problem.parameters), STATES["forward"], problem)
    validation.forward(x, problem, fields[-1])
    backend = backends.REGISTRY[fields[-1]]
    io = ForwardIO(x, *_new_states(x, problem))
    if x.numel():
        backend.forward(problem, io)
    return io.y, io.anchors, io.statistics


def _reverse(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    problem = Problem.from_flat(fields[:-1])
    gate.check((start, anchors, cotangent, *problem.parameters), STATES["reverse"], problem)
    validation.reverse(start, anchors, cotangent, needs, problem, fields[-1])
    if problem.block == "conv":
        gate.refuse_gradients_of_constants(problem, needs[1:])
    backend = backends.REGISTRY[fields[-1]]
    gradients = _new_gradients(start, needs, problem)
    if start.numel():
        wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        flag = (
            nonfinite.new_flag(start.device)
            if nonfinite.is_checked(problem.method, start)
            else None
        )
        backend.reverse(problem, ReverseIO(start, anchors, cotangent, wanted, flag))
        if flag is not None:
            nonfinite.report(problem.method, int(flag), start)
    else:  # without rows every gradient is zero
        for gradient in gradients:
            gradient.zero_()
    return gradients


for _name, _implementation, _fake, _batched in (
    ("forward", _forward, _fake_forward, batching.one_by_one),
    ("reverse", _reverse, _fake_reverse, batching.reverse),
):
    _op = getattr(torch.ops.resode_kernels, _name).default
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    gate.register(library, _name, _op, STATES[_name])
    torch.library.register_fake(f"resode_kernels::{_name}", _fake, lib=library)
    torch.library.register_vmap(
        f"resode_kernels::{_name}", functools.partial(_batched, _op), lib=library
    )


def below_autograd(op: Any, *arguments: Any) -> Any:
    """Calls an op without what ``fused.autograd`` registers for it."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _call(op: Any, *arguments: Any) -> Any:
    return op(*arguments) if torch.compiler.is_compiling() else below_autograd(op, *arguments)


def forward(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """x[N], the anchors and the batch statistics."""
    result: tuple[Tensor, Tensor, Tensor] = _call(
        torch.ops.resode_kernels.forward.default, x, *problem.flat(), backend
    )
    return result


def reverse(
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    needs: Sequence[bool],
    problem: Problem,
    backend: str,
) -> list[Tensor | None]:
    """The gradients of x[0] and of the parameters, None where none is needed.

    ``start`` is x[N], where the reconstruction begins; with the reverse rule ``exact`` it is x[0].
    """
    gradients = _call(
        torch.ops.resode_kernels.reverse.default,
        *(start, anchors, cotangent, needs),
        *problem.flat(),
        backend,
    )
    return [g if need else None for g, need in zip(gradients, needs, strict=True)]
