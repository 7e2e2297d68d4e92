"""What the compiled modules ``resode_kernels_cpu`` and ``resode_kernels_cuda`` share: how they are
loaded, and the translation of a problem into the structs of csrc/stage.h."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem import Kept, Problem
from .contract import ForwardIO, ReverseIO

INTERFACE = 3
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


NAMES = {getattr(torch, name): name for name in ("float32", "float64", "float16", "bfloat16")}


def memory(tensor: Tensor | None) -> tuple[int, int]:
    """A tensor's memory as kernels take it: its address and its bytes."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is not contiguous or if its numbers do not lie at multiples of
    their size. The copy must live until the kernels are done."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor


def contiguous_kept(kept: Kept) -> Kept:
    return Kept._make(None if t is None else contiguous(t) for t in kept)


def all_contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else contiguous(t) for t in tensors]


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
    method = problem.method
    return module.Stage(  # by position: by name it takes twice as long
        problem.block,
        problem.activation,
        method.scheme,
        method.steps,
        method.step,
        problem.tied,
        state.numel() // dim,
        dim,
        weight.shape[1],
        height,
        width,
        problem.convolutions,
        problem.epsilon,
        NAMES[state.dtype],
        NAMES[weight.dtype],
        [memory(p) for p in parameters],
        method.anchor_every,
        method.bits,
        threads,
    )


def forward_of(module: Any, io: ForwardIO) -> Any:
    """The struct Forward. All tensors are contiguous."""
    return module.Forward(memory(io.x), memory(io.y), *map(memory, io.kept), memory(io.statistics))


def reverse_of(module: Any, problem: Problem, io: ReverseIO) -> Any:
    """The struct Reverse. All tensors are contiguous."""
    grad_x, *gradients = map(memory, io.gradients)
    return module.Reverse(
        problem.method.reverse_rule,
        problem.method.order,
        memory(io.start),
        *map(memory, io.kept),
        memory(io.cotangent),
        grad_x,
        gradients,
        memory(io.nonfinite),
    )


def writable(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Memory for kernels to write to: the results that are contiguous, buffers for the others."""
    return [r if r is None or r.is_contiguous() else r.new_empty(r.shape) for r in results]


def copy_buffers(buffers: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
    """Copies what kernels have written to the buffers of ``writable`` to the results."""
    for buffer, result in zip(buffers, results, strict=True):
        if result is not None and buffer is not None and buffer is not result:
            result.copy_(buffer)
