"""The reference as a backend: plain PyTorch, for every device. Its passes also run other blocks
that are made for the reference's engine (``Kit``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..nonfinite import Extremes
from ..problem import PER_LAYER, Problem


class Kit(NamedTuple):
    """What the engine is to run: blocks, made as the reference's are, and the updates of states."""

    mlp: Callable[..., reference.Block]
    linear: Callable[..., reference.Block]
    conv: Callable[..., reference.Block]
    combine: reference.Combine
    widens: bool
    """Whether the blocks get their parameters in the dtype of the states, or as they are."""

    def scheme(
        self, problem: Problem, dtype: torch.dtype, statistics: Tensor | None = None
    ) -> reference.Scheme:
        """``dtype``: of the states."""

        def given(p: Tensor | None) -> Any:
            return p.to(dtype) if p is not None and self.widens else p

        def block(n: int) -> reference.Block:
            if problem.block == "conv":
                layers = [[given(p) for p in layer] for layer in problem.layers_of(n)]
                return self.conv(problem.activation, problem.epsilon, layers, statistics)
            theta = [given(None if p is None else p[n]) for p in problem.parameters]
            if problem.block == "linear":
                return self.linear(*theta)
            return self.mlp(problem.activation, *theta)

        count = 1 if problem.tied else problem.blocks
        blocks = [block(n) for n in range(count)] * (problem.blocks // count)
        method = problem.method
        return reference.SCHEMES[method.scheme](blocks, method.step, self.combine)


PLAIN = Kit(reference.MLP, reference.Linear, reference.Conv, reference.combine, widens=True)


def unavailable() -> None:
    return None


def refuses(device: torch.device, dtype: torch.dtype) -> None:
    return None


def forward(
    problem: Problem,
    x: Tensor,
    y: Tensor,
    anchors: Tensor,
    statistics: Tensor,
    kit: Kit = PLAIN,
) -> None:
    with torch.autocast(x.device.type, enabled=False):
        scheme = kit.scheme(problem, x.dtype, statistics)
        result, states = reference.forward(scheme, x, problem.method.anchor_every)
    y.copy_(result)
    for anchor, state in zip(anchors, states.values(), strict=True):
        anchor.copy_(state)


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
    nonfinite: Tensor | None,
    kit: Kit = PLAIN,
) -> None:
    method = problem.method
    scheme = kit.scheme(problem, start.dtype)
    anchor_at = {(i + 1) * method.anchor_every: anchor for i, anchor in enumerate(anchors)}
    extremes = None if nonfinite is None else Extremes(method.steps, start)
    watch = None if extremes is None else extremes.watch
    if method.reverse_rule == "exact":
        pullbacks = reference.exact(scheme, start, anchor_at)
    else:
        pullbacks = reference.adjoint(
            method.reverse_rule, method.order, scheme, start, anchor_at, watch=watch
        )
    sums = reference.Sums()
    with torch.autocast(start.device.type, enabled=False):
        grad_x = reference.reverse(pullbacks, cotangent, sums.add)
    if nonfinite is not None and extremes is not None:
        nonfinite.fill_(extremes.last())
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
