"""The C++ kernels (csrc/cpu) as a backend: CPU tensors, float32 and float64 streams."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from . import native
from .contract import ForwardIO, ReverseIO

name = "cpp"
automatic_on = ("cpu",)
combine = None

# Loaded after torch, so that the module shares torch's OpenMP runtime and thread pool.
_C, _reason = native.load("cpu")
if _C is not None and not _C.supported():
    _reason = (
        f"the kernels were built for {', '.join(_C.built())}, which this processor does not run; "
        "install the package again, with baseline in RESODE_ISAS or without that variable"
    )
    _C = None
if _C is not None and os.environ.get("RESODE_ISA"):
    _C.select(os.environ["RESODE_ISA"])


def unavailable() -> str | None:
    return _reason


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else f"it runs on the CPU, not on {device.type!r}"


def forward(problem: Problem, io: ForwardIO) -> None:
    x = native.contiguous(_channels_last(problem, io.x))
    results = [_channels_last(problem, io.y)]
    buffers = native.writable(results)
    (y,) = buffers
    assert y is not None
    _run(problem, x, native.forward_of(_C, ForwardIO(x, y, *io[2:])))
    native.copy_buffers(buffers, results)


def reverse(problem: Problem, io: ReverseIO) -> None:
    start, cotangent = (
        native.contiguous(_channels_last(problem, t)) for t in (io.start, io.cotangent)
    )
    kept = native.contiguous_kept(io.kept)
    to_x, *to_parameters = io.gradients
    if to_x is not None:
        to_x = _channels_last(problem, to_x)
    results = [to_x, *to_parameters]
    buffers = native.writable(results)
    for buffer in buffers:
        _use_large_pages(buffer)
    native_io = ReverseIO(start, kept, cotangent, buffers, io.nonfinite)
    _run(problem, start, native.reverse_of(_C, problem, native_io))
    native.copy_buffers(buffers, results)


def _channels_last(problem: Problem, state: Tensor) -> Tensor:
    """The state as kernels take it; images are [images, height, width, channels]."""
    return state.permute(0, 2, 3, 1) if problem.block == "conv" else state


def _use_large_pages(memory: Tensor | None) -> None:
    """For memory that the kernels are about to fill: see csrc/cpu/core/pages.h."""
    if memory is not None:
        _C.use_large_pages(memory.data_ptr(), memory.nbytes)


def _run(problem: Problem, state: Tensor, io: Any) -> None:
    parameters = native.all_contiguous(problem.parameters)
    stage = native.stage_of(_C, problem, parameters, state, torch.get_num_threads())
    plan = _C.plan(stage, io)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
    _use_large_pages(workspace)
    # Only the main thread handles signals, among them Ctrl-C.
    handles_signals = threading.get_ident() == threading.main_thread().ident
    plan.run(native.memory(workspace), handles_signals)
