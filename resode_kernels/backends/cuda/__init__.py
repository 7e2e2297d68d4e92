"""CUDA C++ kernels (csrc/cuda) as a backend: tensors on NVIDIA GPUs, float32 streams.

    fused.py                            depth-fused MLP and linear stages
    layerwise.py                        stages layer by layer: convolutions and wide stages
    elementwise.py, normalization.py    the kernels of layerwise.py
    gpu.py                              the GPU and the stream that kernels run on

The module can be imported without a GPU. The tests build another module from the same sources, in
which the CPU emulates a GPU (``emulated``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...problem import Problem
from .. import native
from ..contract import ForwardIO, ReverseIO

name = "cuda"
automatic_on = ("cuda",)

report = native.build_report().get("cuda", {})
_CUDA, _reason = native.load("cuda")


def unavailable() -> str | None:
    return _reason


def architectures() -> list[str]:
    """The compute capabilities that the kernels were compiled for: ``"80"``, ``"86"``, …"""
    return [] if _CUDA is None else str(_CUDA.architectures()).split(",")


def emulated() -> bool:
    return architectures() == ["emulated"]


def serves(capability: tuple[int, int]) -> bool:
    """Whether a GPU of that compute capability can run the kernels. It can from the lowest
    architecture on: the driver compiles that PTX for GPUs whose architecture is not in the list."""
    numbers = [int(name) for name in architectures() if name.isdigit()]
    return bool(numbers) and divmod(min(numbers), 10) <= capability


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "it takes float32, float16 and bfloat16, not float64"
    if emulated():
        return (
            None if device.type == "cpu" else f"it is emulated on the CPU, not on {device.type!r}"
        )
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs, not on {device.type!r}"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return _refuses_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache  # called by every call of a stage
def _refuses_gpu(index: int) -> str | None:
    if torch.version.hip:
        return "it runs on NVIDIA GPUs, not on AMD's"
    capability = torch.cuda.get_device_capability(index)
    if serves(capability):
        return None
    return (
        f"it was built for compute capabilities from {min(map(int, architectures())) / 10} on, and "
        f"this GPU has {capability[0]}.{capability[1]}"
    )


def combine(x: Any, *terms: tuple[float, Any]) -> Any:
    from .elementwise import combine

    return combine(x, *terms)


def forward(problem: Problem, io: ForwardIO) -> None:
    from . import fused, layerwise

    if not fused.forward(problem, io):
        layerwise.LAYERWISE.forward(problem, io)


def reverse(problem: Problem, io: ReverseIO) -> None:
    from . import fused, layerwise

    if not fused.reverse(problem, io):
        layerwise.LAYERWISE.reverse(problem, io)
