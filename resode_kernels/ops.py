"""The two operators of a stage as ``torch.library`` ops, which is what ``torch.compile`` sees.

    forward   x[0] → x[N] and the kept states
    reverse   ∂L/∂x[N] → ∂L/∂x[0] and the parameter gradients

Each makes its results and lets a backend fill them. States are [rows, dim] in the stream's dtype,
kept states (anchors) [count, rows, dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends
from .options import Method
from .problem import Problem

# A Problem, field by field, and the name of the backend that runs it.
_PROBLEM = (
    "str block, str activation, Tensor?[] parameters, str scheme, int steps, float step, "
    "str rule, int order, int keep_every, str backend"
)

library = torch.library.Library("resode_kernels", "DEF")
library.define(
    f"forward(Tensor x, {_PROBLEM}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
library.define(
    "reverse(Tensor start, Tensor anchors, Tensor cotangent, bool[] needs, "
    f"{_PROBLEM}) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _problem(fields: Sequence[Any]) -> Problem:
    block, activation, parameters, *method, _backend = fields
    return Problem(block, activation, tuple(parameters), Method(*method))


def _new_states(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((_problem(fields).kept_states, *x.shape))


def _new_gradients(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    """For x and every parameter; empty where a gradient is not needed."""
    inputs = (start, *_problem(fields).parameters)
    return [
        t.new_empty(t.shape) if t is not None and need else start.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    ]


def _forward(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    y, anchors = _new_states(x, *fields)
    if x.numel():
        backends.IMPLEMENTED[fields[-1]].forward(_problem(fields), x, y, anchors)
    return y, anchors


def _reverse(
    start: Tensor, anchors: Tensor, cotangent: Tensor, needs: Sequence[bool], *fields: Any
) -> list[Tensor]:
    gradients = _new_gradients(start, anchors, cotangent, needs, *fields)
    wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    if start.numel():
        backends.IMPLEMENTED[fields[-1]].reverse(
            _problem(fields), start, anchors, cotangent, wanted
        )
    else:  # no rows: nothing to sum
        for gradient in gradients:
            gradient.zero_()
    return gradients


for _name, _implementation, _fake in (
    ("forward", _forward, _new_states),
    ("reverse", _reverse, _new_gradients),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"resode_kernels::{_name}", _fake, lib=library)


def forward(x: Tensor, problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """x[N] and the kept states."""
    result: tuple[Tensor, Tensor] = torch.ops.resode_kernels.forward.default(
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
