"""The states of a stage, which its kernels do not show: those of the forward pass, and those that a
reverse rule reconstructs. Both are computed by the reference."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

import resode_kernels as rk
from resode_kernels import reference
from resode_kernels.backends.engine import REFERENCE
from resode_kernels.problem import Problem


def _scheme(stage: rk.MLPStage) -> reference.Scheme:
    parameters = (stage.w1, stage.b1, stage.w2, stage.b2)
    method = stage.options.method(stage.depth)
    return REFERENCE.scheme(Problem("mlp", stage.activation, parameters, method), stage.w1.dtype)


@torch.no_grad()
def trajectory(stage: rk.MLPStage, x: Tensor) -> Tensor:
    """x[0], …, x[N]: [N + 1, rows, dim]."""
    last, anchors = reference.forward(_scheme(stage), x, anchor_every=1)
    return torch.stack([x, *anchors.values(), last])


@torch.no_grad()
def reconstruction(stage: rk.MLPStage, last: Tensor) -> Tensor:
    """x̃[0], …, x̃[N] by the rule that the stage is set to, from x[N]."""
    method, states = stage.options.method(stage.depth), [last]

    def watch(n: int, p: Any, x: Any) -> None:
        states.append(x)

    steps = reference.adjoint(
        method.reverse_rule, method.order, _scheme(stage), last, {}, watch=watch
    )
    deque(steps, maxlen=0)  # walks back; nobody asks for the VJPs
    return torch.stack(states[::-1])
