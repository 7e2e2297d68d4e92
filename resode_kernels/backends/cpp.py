"""The C++ kernels (csrc/cpu) as a backend: CPU tensors, float32 and float64 streams."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from ..recording import Increment, Recorder, code_bytes, groups
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


LARGE_PAGE = 2 << 20


def _use_large_pages(memory: Tensor | None) -> None:
    """For memory that the kernels are about to fill: see csrc/cpu/core/pages.h."""
    if memory is not None and memory.nbytes >= LARGE_PAGE:
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


class CppRecorder(Recorder):
    """Records states in one pass over memory. Other tensors than dense ones on the CPU are left to
    PyTorch."""

    def encode(self, after: Tensor, estimate: Tensor, bits: int) -> tuple[Tensor, Increment]:
        rows, x = self.rows(estimate, like=estimate), self.rows(after, like=estimate)
        if not self.takes(rows, x):
            return super().encode(after, estimate, bits)
        count, row = rows.shape
        increment = Increment(
            rows.new_empty((count, code_bytes(row, bits)), dtype=torch.uint8),
            rows.new_empty((count, groups(row)), dtype=torch.bfloat16),
        )
        moved = torch.empty_like(rows)
        self.run(bits, x, rows, moved, increment)
        return self.state(moved, like=estimate), increment

    def decode(self, estimate: Tensor, increment: Increment, bits: int) -> Tensor:
        rows = self.rows(estimate, like=estimate)
        increment = Increment(*(t.contiguous() for t in increment))
        if not self.takes(rows, rows):
            return super().decode(estimate, increment, bits)
        moved = torch.empty_like(rows)
        self.run(bits, None, rows, moved, increment)
        return self.state(moved, like=estimate)

    def takes(self, estimate: Tensor, after: Tensor) -> bool:
        """Whether the kernels take these rows."""
        return estimate.numel() > 0 and all(
            t.device.type == "cpu" and t.dtype == estimate.dtype and t.is_contiguous()
            for t in (estimate, after)
        )

    def run(
        self, bits: int, x: Tensor | None, estimate: Tensor, moved: Tensor, increment: Increment
    ) -> None:
        count, row = estimate.shape
        work = estimate.numel() // ELEMENTS_PER_THREAD
        _C.increment(
            native.NAMES[estimate.dtype], count, row, bits,
            *map(native.memory, (x, estimate, moved, *increment)),
            max(1, min(torch.get_num_threads(), work)),
        )  # fmt: skip


ELEMENTS_PER_THREAD = 1 << 14
"""Elements for which another thread takes less time than it costs."""
recorder: Recorder = CppRecorder()
