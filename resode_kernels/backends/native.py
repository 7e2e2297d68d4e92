"""What the compiled modules ``resode_kernels_cpu`` and ``resode_kernels_cuda`` share: how they are
loaded, and the translation of a problem into the structs of csrc/stage.h."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from .contract import ForwardIO, ReverseIO

INTERFACE = 1
"""The version of the interface between Python and the compiled modules: ``kInterface`` of
csrc/stage.h, to be raised when a signature changes."""


@functools.cache
def build_report() -> dict[str, dict[str, Any]]:
    """What ``tools/build_kernels.py`` reported of the builds of ``"cpu"`` and ``"cuda"``. The
    report lies beside the compiled modules, which may be another folder than the package's."""
    for folder in sys.path:
        file = Path(folder, "resode_kernels_build.json")
        if file.is_file():
            report: dict[str, dict[str, Any]] = json.loads(file.read_text())
            return report
    return {}


def load(name: str) -> tuple[Any, str | None]:
    """The compiled module ``"cpu"`` or ``"cuda"``, or why it cannot be used."""
    module_name = f"resode_kernels_{name}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        report = build_report().get(name, {})
        suffix = report.get("suffix", EXTENSION_SUFFIXES[0])
        if suffix not in EXTENSION_SUFFIXES:
            return None, (
                f"the kernels were built for another Python (they end in {suffix}, this one loads "
                f"{EXTENSION_SUFFIXES[0]}); install the package again"
            )
        return None, str(report.get("error", error))
    built = getattr(module, "INTERFACE", None)
    if built != INTERFACE:
        return None, (
            f"{module.__file__} is of another version of the package (its interface is {built}, "
            f"expected {INTERFACE}); install the package again"
        )
    return module, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _strides(problem: Problem, tensors: Sequence[Tensor | None]) -> list[int]:
    """Bytes from a block's tensor to the next block's, if parameters are stacked."""
    if problem.block == "conv":
        return []
    return [0 if t is None else t.stride(0) * t.element_size() for t in tensors]


def contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors, copied if necessary. The copies must live until the kernels are done."""
    return [None if t is None else t.contiguous() for t in tensors]


def stage_of(
    module: Any,
    problem: Problem,
    parameters: Sequence[Tensor | None],
    state: Tensor,
    threads: int = 1,
) -> Any:
    """The struct Stage. ``parameters`` are contiguous; ``state`` is [rows, dim] or
    channels-last."""
    weight = parameters[0]
    assert weight is not None
    dim = state.shape[-1]
    height, width = state.shape[1:3] if problem.block == "conv" else (1, 1)
    return module.Stage(
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
        anchor_every=problem.method.anchor_every,
        threads=threads,
    )


def forward_of(module: Any, io: ForwardIO) -> Any:
    """The struct Forward. All tensors are contiguous."""
    return module.Forward(**{name: tensor.data_ptr() for name, tensor in io._asdict().items()})


def reverse_of(module: Any, problem: Problem, io: ReverseIO) -> Any:
    """The struct Reverse. All tensors are contiguous."""
    grad_x, *gradients = _addresses(io.gradients)
    return module.Reverse(
        reverse_rule=problem.method.reverse_rule,
        order=problem.method.order,
        start=io.start.data_ptr(),
        anchors=io.anchors.data_ptr(),
        cotangent=io.cotangent.data_ptr(),
        grad_x=grad_x,
        gradients=gradients,
        strides=_strides(problem, io.gradients[1:]),
        blocks=1 if problem.tied else problem.blocks,
        nonfinite=0 if io.nonfinite is None else io.nonfinite.data_ptr(),
    )


@contextmanager
def written(results: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
    """Yields memory for kernels to write to: the results themselves if they are contiguous,
    otherwise buffers that are copied to the results at the end."""
    buffers = [r if r is None or r.is_contiguous() else r.new_empty(r.shape) for r in results]
    yield buffers
    for result, buffer in zip(results, buffers, strict=True):
        if result is not None and buffer is not None and buffer is not result:
            result.copy_(buffer)
