"""The C++ kernels (csrc/cpu) as a backend: CPU tensors, float32 and float64 streams."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem


def build_report() -> dict[str, Any]:
    """What setup.py wrote down about the build of the extension module."""
    file = resources.files("resode_kernels") / "build_report.json"
    return json.loads(file.read_text()) if file.is_file() else {}


_C: Any = None
_reason: str | None = None
try:
    # After torch, whose OpenMP runtime and thread pool the module then shares.
    _C = importlib.import_module("resode_kernels._C")
except ImportError as error:
    _reason = str(build_report().get("error", error))
    if resources.files("resode_kernels").joinpath("../setup.py").is_file():
        _reason += (
            "; this is resode_kernels' source tree: start Python elsewhere to get the installed "
            "package, or `pip install -e .` to build the module here"
        )
else:
    if os.environ.get("RESODE_ISA"):
        _C.select(os.environ["RESODE_ISA"])


def unavailable() -> str | None:
    return _reason


def refuses(device_type: str, dtype: torch.dtype) -> str | None:
    return None if device_type == "cpu" else f"it runs on the CPU, not on {device_type!r}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _strides(problem: Problem, tensors: Sequence[Tensor | None]) -> list[int]:
    """Bytes from a block's tensor to the next block's, where they are stacked."""
    if problem.block == "conv":
        return []
    return [0 if t is None else t.stride(0) * t.element_size() for t in tensors]


def _pixel_rows(problem: Problem, state: Tensor) -> Tensor:
    """A view of the state with channels last, which is how the kernels take images."""
    return state.permute(0, 2, 3, 1) if problem.block == "conv" else state


def _run(problem: Problem, state: Tensor, io: Any) -> None:
    # The contiguous copies, if any were needed, must live until the kernels are done.
    parameters = [None if p is None else p.contiguous() for p in problem.parameters]
    weight = parameters[0]
    assert weight is not None
    dim = state.shape[-1]
    height, width = state.shape[1:3] if problem.block == "conv" else (1, 1)
    stage = _C.Stage(
        block=problem.block,
        activation=problem.activation,
        scheme=problem.method.scheme,
        steps=problem.method.steps,
        step=problem.method.step,
        tied=problem.tied,
        rows=state.numel() // dim,
        dim=dim,
        hidden=weight.shape[1],
        height=height,
        width=width,
        convolutions=problem.convolutions,
        epsilon=problem.epsilon,
        stream=_name(state.dtype),
        storage=_name(weight.dtype),
        parameters=_addresses(parameters),
        strides=_strides(problem, parameters),
        keep_every=problem.method.keep_every,
        threads=torch.get_num_threads(),
    )
    workspace = torch.empty(_C.workspace_bytes(stage, io), dtype=torch.uint8)
    _C.run(stage, io, workspace.data_ptr())


def _buffer(result: Tensor) -> Tensor:
    """Where the kernels write: the result itself if they can, else a contiguous stand-in."""
    return result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype)


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor, statistics: Tensor) -> None:
    x, result = _pixel_rows(problem, x).contiguous(), _pixel_rows(problem, y)
    buffer = _buffer(result)
    io = _C.Forward(
        x=x.data_ptr(),
        y=buffer.data_ptr(),
        anchors=anchors.data_ptr(),
        statistics=statistics.data_ptr(),
    )
    _run(problem, x, io)
    if buffer is not result:
        result.copy_(buffer)


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
) -> None:
    start, cotangent = (_pixel_rows(problem, t).contiguous() for t in (start, cotangent))
    anchors = anchors.contiguous()
    results = list(gradients)
    if results[0] is not None:
        results[0] = _pixel_rows(problem, results[0])
    buffers = [None if r is None else _buffer(r) for r in results]
    grad_x, *wanted = _addresses(buffers)
    io = _C.Reverse(
        rule=problem.method.rule,
        order=problem.method.order,
        start=start.data_ptr(),
        anchors=anchors.data_ptr(),
        cotangent=cotangent.data_ptr(),
        grad_x=grad_x,
        gradients=wanted,
        strides=_strides(problem, buffers[1:]),
        blocks=1 if problem.tied else problem.blocks,
    )
    _run(problem, start, io)
    for result, buffer in zip(results, buffers, strict=True):
        if result is not None and buffer is not None and buffer is not result:
            result.copy_(buffer)
