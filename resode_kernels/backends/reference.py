"""The reference as a backend: plain PyTorch, for every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..problem import PER_LAYER, Problem


def unavailable() -> None:
    return None


def refuses(device_type: str, dtype: torch.dtype) -> None:
    return None


def _scheme(
    problem: Problem, dtype: torch.dtype, statistics: Tensor | None = None
) -> reference.Scheme:
    def block(n: int) -> reference.Block:
        if problem.block == "conv":
            layers = [
                [None if p is None else p.to(dtype) for p in layer]
                for layer in problem.layers_of(n)
            ]
            return reference.Conv(problem.activation, problem.epsilon, layers, statistics)
        theta: list[Any] = [None if p is None else p[n].to(dtype) for p in problem.parameters]
        if problem.block == "linear":
            return reference.Linear(*theta)
        return reference.MLP(problem.activation, *theta)

    blocks = (
        [block(0)] * problem.blocks if problem.tied else [block(n) for n in range(problem.blocks)]
    )
    return reference.SCHEMES[problem.method.scheme](blocks, problem.method.step)


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor, statistics: Tensor) -> None:
    with torch.autocast(x.device.type, enabled=False):
        scheme = _scheme(problem, x.dtype, statistics)
        result, kept = reference.forward(scheme, x, problem.method.keep_every)
    y.copy_(result)
    for anchor, state in zip(anchors, kept.values(), strict=True):
        anchor.copy_(state)


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
) -> None:
    method = problem.method
    scheme = _scheme(problem, start.dtype)
    kept = {(i + 1) * method.keep_every: anchor for i, anchor in enumerate(anchors)}
    if method.rule == "exact":
        pullbacks = reference.exact(scheme, start, kept)
    else:
        pullbacks = reference.adjoint(method.rule, method.order, scheme, start, kept)
    sums = reference.Sums()
    with torch.autocast(start.device.type, enabled=False):
        grad_x = reference.reverse(pullbacks, cotangent, sums.add)
    if gradients[0] is not None:
        gradients[0].copy_(grad_x)
    for i, gradient in enumerate(gradients[1:]):
        if gradient is None:
            continue
        if problem.block == "conv":
            n, k = divmod(i, PER_LAYER * problem.layers)
            gradient.copy_(sums[scheme.f[n]][k])
        else:
            for n in range(gradient.shape[0]):
                gradient[n].copy_(sums[scheme.f[n]][i])
