"""The two operators of a stage as ``torch.library`` ops, which is what ``torch.compile`` sees.

    forward   x[0] → x[N], the anchors and the statistics of the batch
    reverse   ∂L/∂x[N] → ∂L/∂x[0] and the parameter gradients

Each makes its results and lets a backend fill them. States are in the stream's dtype, [rows, dim]
or for conv [images, channels, height, width] in any memory format; anchors are
[count, …], laid out as the backend likes. Only conv has statistics (``Problem.statistics``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends, nonfinite
from .options import Method
from .problem import Problem

# A Problem, field by field, and the name of the backend that runs it.
_PROBLEM = (
    "str block, str activation, Tensor?[] parameters, str scheme, int steps, float step, "
    "str reverse_rule, int order, int anchor_every, str nonfinite, int layers, float epsilon, "
    "str backend"
)

library = torch.library.Library("resode_kernels", "DEF")
library.define(
    f"forward(Tensor x, {_PROBLEM}) -> (Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
library.define(
    "reverse(Tensor start, Tensor anchors, Tensor cotangent, bool[] needs, "
    f"{_PROBLEM}) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _problem(fields: Sequence[Any]) -> Problem:
    block, activation, parameters, *method, layers, epsilon, _backend = fields
    return Problem(block, activation, tuple(parameters), Method(*method), layers, epsilon)


def _new_states(x: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x),
        x.new_empty((problem.anchor_count, *x.shape)),
        x.new_zeros(problem.statistics),
    )


def _new_gradients(start: Tensor, needs: Sequence[bool], problem: Problem) -> list[Tensor]:
    """For x and every parameter; empty where a gradient is not needed."""
    return [
        torch.empty_like(t) if t is not None and need else start.new_empty(0)
        for t, need in zip((start, *problem.parameters), needs, strict=True)
    ]


def _fake_forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _new_states(x, _problem(fields))


def _fake_reverse(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    return _new_gradients(start, needs, _problem(fields))


def _forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, backend = _problem(fields), backends.IMPLEMENTED[fields[-1]]
    y, anchors, statistics = _new_states(x, problem)
    if x.numel():
        backend.forward(problem, x, y, anchors, statistics)
    return y, anchors, statistics


def _reverse(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    problem, backend = _problem(fields), backends.IMPLEMENTED[fields[-1]]
    gradients = _new_gradients(start, needs, problem)
    if start.numel():
        wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        looked_for = nonfinite.looked_for(problem.method, start)
        found = nonfinite.nothing_found(start.device) if looked_for else None
        backend.reverse(problem, start, anchors, cotangent, wanted, found)
        if found is not None:
            nonfinite.report(problem.method, int(found), start)
    else:  # no rows: nothing to sum
        for gradient in gradients:
            gradient.zero_()
    return gradients


for _name, _implementation, _fake in (
    ("forward", _forward, _fake_forward),
    ("reverse", _reverse, _fake_reverse),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"resode_kernels::{_name}", _fake, lib=library)


def forward(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """x[N], the anchors and the statistics of the batch."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.resode_kernels.forward.default(
        x, *problem.fields(), backend
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
    """The gradients of x[0] and of the parameters that are needed.

    ``start`` is x[N], from where the states are reconstructed; for the rule ``exact`` it is x[0].
    """
    gradients = torch.ops.resode_kernels.reverse.default(
        start, anchors, cotangent, needs, *problem.fields(), backend
    )
    return [g if need else None for g, need in zip(gradients, needs, strict=True)]
