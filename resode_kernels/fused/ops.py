"""The two passes of a stage as ``torch.library`` ops, which is what ``torch.compile`` sees.

    forward   x[0] → x[N], the batch statistics and what is kept for the reverse pass
    reverse   ∂L/∂x[N] → ∂L/∂x[0] and the parameter gradients

Each op allocates its results and lets a backend fill them. States are in the stream's dtype,
[rows, dim], or for conv [images, channels, height, width] in any memory format. What is kept
(``problem.Kept``) are the fields that the problem has, as a list.
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

STATES = {"forward": ("x",), "reverse": ("start", "cotangent")}
"""Each op's states. What is kept follows them, then the parameters of the problem."""

library = torch.library.Library("resode_kernels", "DEF")
library.define(
    f"forward(Tensor x, {schema()}, str backend) -> (Tensor, Tensor, Tensor[])",
    tags=torch.Tag.pt2_compliant_tag,
)
library.define(
    "reverse(Tensor start, Tensor cotangent, Tensor[] kept, bool[] needs, "
    f"{schema()}, str backend) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _new_states(x: Tensor, problem: Problem) -> tuple[Tensor, Tensor, list[Tensor]]:
    shapes = problem.kept(x.shape)
    return (
        torch.empty_like(x),
        # Without layers it is empty, which new_empty is faster at.
        x.new_zeros(problem.statistics) if problem.layers else x.new_empty(problem.statistics),
        [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes.values()],
    )


def _new_gradients(start: Tensor, needs: Sequence[bool], problem: Problem) -> list[Tensor]:
    """Gradients of x and every parameter; an empty tensor where none is needed."""
    return [
        torch.empty_like(t) if t is not None and need else start.new_empty(0)
        for t, need in zip((start, *problem.parameters), needs, strict=True)
    ]


def _fake_forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    problem = Problem.from_flat(fields[:-1])
    validation.forward(x, problem, fields[-1])
    return _new_states(x, problem)


def _fake_reverse(
    start: Tensor, cotangent: Tensor, kept: list[Tensor], needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    problem = Problem.from_flat(fields[:-1])
    validation.reverse(start, cotangent, kept, needs, problem, fields[-1])
    return _new_gradients(start, needs, problem)


def _forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    problem = Problem.from_flat(fields[:-1])
    gate.check((x, *problem.parameters), STATES["forward"], problem)
    validation.forward(x, problem, fields[-1])
    backend = backends.REGISTRY[fields[-1]]
    y, statistics, kept = _new_states(x, problem)
    if x.numel():
        backend.forward(problem, ForwardIO(x, y, problem.kept_of(kept), statistics))
    return y, statistics, kept


def _reverse(
    start: Tensor, cotangent: Tensor, kept: list[Tensor], needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    problem = Problem.from_flat(fields[:-1])
    names = (*STATES["reverse"], *problem.kept_names)
    gate.check((start, cotangent, *kept, *problem.parameters), names, problem)
    validation.reverse(start, cotangent, kept, needs, problem, fields[-1])
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
        io = ReverseIO(start, problem.kept_of(kept), cotangent, wanted, flag)
        backend.reverse(problem, io)
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


def forward(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x[N], the batch statistics and what is kept."""
    result: tuple[Tensor, Tensor, list[Tensor]] = _call(
        torch.ops.resode_kernels.forward.default, x, *problem.flat(), backend
    )
    return result


def reverse(
    start: Tensor,
    cotangent: Tensor,
    kept: Sequence[Tensor],
    needs: Sequence[bool],
    problem: Problem,
    backend: str,
) -> list[Tensor | None]:
    """The gradients of x[0] and of the parameters, None where none is needed.

    ``start`` is x[N], where the reconstruction begins; with the reverse rule ``exact`` it is x[0],
    with ``recorded`` the last anchor.
    """
    gradients = _call(
        torch.ops.resode_kernels.reverse.default,
        *(start, cotangent, kept, needs),
        *problem.flat(),
        backend,
    )
    return [g if need else None for g, need in zip(gradients, needs, strict=True)]
