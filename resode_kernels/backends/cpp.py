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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _run(problem: Problem, state: Tensor, io: Any) -> None:
    # The contiguous copies, if any were needed, must live until the kernels are done.
    parameters = [None if p is None else p.contiguous() for p in problem.parameters]
    weight = parameters[0]
    assert weight is not None
    rows, dim = state.shape
    stage = _C.Stage(
        block=problem.block,
        activation=problem.activation,
        scheme=problem.method.scheme,
        steps=problem.method.steps,
        step=problem.method.step,
        tied=problem.tied,
        rows=rows,
        dim=dim,
        hidden=weight.shape[1],
        stream=_name(state.dtype),
        storage=_name(weight.dtype),
        parameters=[_address(p) for p in parameters],
        keep_every=problem.method.keep_every,
        threads=torch.get_num_threads(),
    )
    workspace = torch.empty(_C.workspace_bytes(stage, io), dtype=torch.uint8)
    _C.run(stage, io, workspace.data_ptr())


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor) -> None:
    x = x.contiguous()
    _run(problem, x, _C.Forward(x=_address(x), y=_address(y), anchors=_address(anchors)))


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
) -> None:
    start, anchors, cotangent = (t.contiguous() for t in (start, anchors, cotangent))
    io = _C.Reverse(
        rule=problem.method.rule,
        order=problem.method.order,
        start=_address(start),
        anchors=_address(anchors),
        cotangent=_address(cotangent),
        grad_x=_address(gradients[0]),
        gradients=[_address(g) for g in gradients[1:]],
    )
    _run(problem, start, io)
