"""The C++ kernels (csrc/cpu) as a backend: CPU tensors, float32 and float64 streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from . import native

# After torch, whose OpenMP runtime and thread pool the module then shares.
_C, _reason = native.load("_C", native.build_report())
if _C is not None and os.environ.get("RESODE_ISA"):
    _C.select(os.environ["RESODE_ISA"])


def unavailable() -> str | None:
    return _reason


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else f"it runs on the CPU, not on {device.type!r}"


def _pixel_rows(problem: Problem, state: Tensor) -> Tensor:
    """A view of the state with channels last, which is how the kernels take images."""
    return state.permute(0, 2, 3, 1) if problem.block == "conv" else state


def _use_large_pages(memory: Tensor | None) -> None:
    """For memory that the kernels are about to fill: see csrc/cpu/core/pages.h."""
    if memory is not None:
        _C.use_large_pages(memory.data_ptr(), memory.nbytes)


def _run(problem: Problem, state: Tensor, io: Any) -> None:
    parameters = native.contiguous(problem.parameters)
    stage = native.stage_of(_C, problem, parameters, state, torch.get_num_threads())
    plan = _C.plan(stage, io)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    _use_large_pages(workspace)
    plan.run(workspace.data_ptr())


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor, statistics: Tensor) -> None:
    x = _pixel_rows(problem, x).contiguous()
    with native.written([_pixel_rows(problem, y)]) as (result,):
        assert result is not None
        _run(problem, x, native.forward_of(_C, x, result, anchors, statistics))


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
    nonfinite: Tensor | None,
) -> None:
    start, cotangent = (_pixel_rows(problem, t).contiguous() for t in (start, cotangent))
    anchors = anchors.contiguous()
    grad_x = None if gradients[0] is None else _pixel_rows(problem, gradients[0])
    with native.written([grad_x, *gradients[1:]]) as results:
        for result in results:
            _use_large_pages(result)
        io = native.reverse_of(_C, problem, start, anchors, cotangent, results, nonfinite)
        _run(problem, start, io)
