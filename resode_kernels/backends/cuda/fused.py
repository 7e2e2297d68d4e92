"""Depth-fused MLP and linear stages (csrc/cuda/fused.cu)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem import Problem
from .. import native
from ..contract import ForwardIO, ReverseIO
from ..layerwise import can_be_depth_fused
from .gpu import gpu_of, module


def _run(problem: Problem, state: Tensor, io: Any) -> bool:
    """False: the stage is too wide for a CTA (what CUDA calls a thread block)."""
    kernels, gpu = module(), gpu_of(state)
    parameters = native.all_contiguous(problem.parameters)
    stage = native.stage_of(kernels, problem, parameters, state)
    plan = kernels.plan(stage, io, gpu)
    if plan is None:
        return False
    # From torch's allocator, which reuses it only when the stream is done with it.
    size = max(1, plan.workspace_bytes)
    workspace = torch.empty(size, dtype=torch.uint8, device=state.device)
    plan.run(native.memory(workspace))
    return True


def forward(problem: Problem, io: ForwardIO) -> bool:
    """Runs the forward pass. False: nothing was done, because the kernels do not take the stage."""
    if not can_be_depth_fused(problem):
        return False
    x, none = native.contiguous(io.x), io.x.new_empty(0)
    buffers = native.writable([io.y])
    (y,) = buffers
    assert y is not None
    done = _run(problem, x, native.forward_of(module(), ForwardIO(x, y, io.kept, none)))
    native.copy_buffers(buffers, [io.y])
    return done


def reverse(problem: Problem, io: ReverseIO) -> bool:
    if not can_be_depth_fused(problem):
        return False
    start, cotangent = map(native.contiguous, (io.start, io.cotangent))
    kept = native.contiguous_kept(io.kept)
    buffers = native.writable(io.gradients)
    native_io = ReverseIO(start, kept, cotangent, buffers, io.nonfinite)
    done = _run(problem, start, native.reverse_of(module(), problem, native_io))
    native.copy_buffers(buffers, io.gradients)
    return done
