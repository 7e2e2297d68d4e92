"""Triton kernels as a backend: tensors on NVIDIA and AMD GPUs, float32 streams.

    stage.py, schemes.py, blocks.py, activations.py   the depth-fused kernels of MLP and linear
                                                      stages
    fused.py, sums.py, launch.py      launches of these kernels, and sums of the gradients
    plan.py, tiles.py, spec.py        programs, tiles, and the constants a kernel is compiled for
    device.py, tuning.py              the GPU, and the tiles that were fastest there
    layerwise.py                      stages layer by layer: convolutions and wide stages
    elementwise.py, normalization.py, rows.py   the kernels of layerwise.py, and their tiles

With ``TRITON_INTERPRET=1`` Triton's interpreter runs the same kernels on the CPU, slowly. Triton is
imported when a kernel is to run.
"""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ...problem import Problem
from ..contract import ForwardIO, ReverseIO

name = "triton"
automatic_on = ("cuda",)
OLDEST = (3, 8)


def _find() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    for name in ("triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "of unknown version"


_found = _find()  # looked up once, because every call of a stage needs it


def installed() -> str | None:
    """Triton's version, or None if it is not installed."""
    return _found


def unavailable() -> str | None:
    found = installed()
    if found is None:
        return "Triton is not installed; `pip install triton` (on Linux)"
    number = re.match(r"(\d+)\.(\d+)", found)
    if number and (int(number[1]), int(number[2])) < OLDEST:
        return f"Triton {found} is too old; the kernels need {OLDEST[0]}.{OLDEST[1]} or later"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels. The variable counts when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    kind = device.type
    if dtype == torch.float64:
        return "it takes float32, float16 and bfloat16, not float64"
    if interpreted():
        return None if kind in ("cpu", "cuda") else f"Triton's interpreter does not run on {kind!r}"
    if kind == "cpu":
        return (
            "it runs on GPUs, not on the CPU; to try it there, set TRITON_INTERPRET=1 before "
            "Python starts"
        )
    return None if kind == "cuda" else f"it runs on GPUs, not on {kind!r}"


def combine(x: Any, *terms: tuple[float, Any]) -> Any:
    from .elementwise import combine

    return combine(x, *terms)


def forward(problem: Problem, io: ForwardIO) -> None:
    from . import fused, layerwise

    plan = fused.layout(problem, io.x, reverse=False)
    if plan is None:
        layerwise.LAYERWISE.forward(problem, io)
    else:
        fused.forward(problem, plan, io)


def reverse(problem: Problem, io: ReverseIO) -> None:
    from . import fused, layerwise

    plan = fused.layout(problem, io.start, reverse=True)
    if plan is None:
        layerwise.LAYERWISE.reverse(problem, io)
    else:
        fused.reverse(problem, plan, io)
