"""Depth-fused MLP and linear stages (csrc/cuda/fused.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...problem import Problem
from .. import native
from .gpu import gpu_of, module


def _run(problem: Problem, state: Tensor, io: Any) -> bool:
    """False: the stage is too wide for a CTA (what CUDA calls a thread block)."""
    kernels, gpu = module(), gpu_of(state)
    parameters = native.contiguous(problem.parameters)
    stage = native.stage_of(kernels, problem, parameters, state)
    plan = kernels.plan(stage, io, gpu)
    if plan is None:
        return False
    # From torch's allocator, which hands it to nobody else before the stream is done with it.
    size = max(1, plan.workspace_bytes)
    workspace = torch.empty(size, dtype=torch.uint8, device=state.device)
    plan.run(workspace.data_ptr())
    return True


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor) -> bool:
    if problem.block == "conv":
        return False
    x, none = x.contiguous(), x.new_empty(0)
    with native.written([y]) as (result,):
        assert result is not None
        return _run(problem, x, native.forward_of(module(), x, result, anchors, none))


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
    nonfinite: Tensor | None,
) -> bool:
    if problem.block == "conv":
        return False
    start, anchors, cotangent = (t.contiguous() for t in (start, anchors, cotangent))
    with native.written(gradients) as results:
        io = native.reverse_of(module(), problem, start, anchors, cotangent, results, nonfinite)
        return _run(problem, start, io)
