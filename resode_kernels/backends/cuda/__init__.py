"""CUDA C++ kernels (csrc/cuda) as a backend: tensors on NVIDIA GPUs, float32 streams.

    fused.py                            depth-fused MLP and linear stages
    layerwise.py                        stages layer by layer: convolutions, and what is too wide
    elementwise.py, normalization.py    the kernels of that
    gpu.py                              the GPU and the stream that kernels run on

The module can be imported where there is no GPU. The tests build another one of the same sources,
in which the processor plays a GPU (``emulated``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...problem import Problem
from .. import native

report = native.build_report().get("cuda", {})
_CUDA, _reason = native.load("_CUDA", report)


def unavailable() -> str | None:
    return _reason


def architectures() -> list[str]:
    """The compute capabilities that the kernels were compiled for: ``"80"``, ``"86"``, …"""
    return [] if _CUDA is None else str(_CUDA.architectures()).split(",")


def emulated() -> bool:
    return architectures() == ["emulated"]


def serves(capability: tuple[int, int]) -> bool:
    """Whether a GPU of that compute capability can run the kernels: from the lowest of the
    architectures on, whose PTX the driver compiles for those that are not among them."""
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
    return _unfit(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache  # every call of a stage asks
def _unfit(index: int) -> str | None:
    if torch.version.hip:
        return "it runs on NVIDIA GPUs, not on AMD's"
    capability = torch.cuda.get_device_capability(index)
    if serves(capability):
        return None
    return (
        f"it was built for compute capabilities from {min(map(int, architectures())) / 10} on, and "
        f"this GPU has {capability[0]}.{capability[1]}"
    )


def forward(problem: Problem, x: Tensor, y: Tensor, anchors: Tensor, statistics: Tensor) -> None:
    from . import fused, layerwise

    if not fused.forward(problem, x, y, anchors):
        layerwise.forward(problem, x, y, anchors, statistics)


def reverse(
    problem: Problem,
    start: Tensor,
    anchors: Tensor,
    cotangent: Tensor,
    gradients: Sequence[Tensor | None],
    nonfinite: Tensor | None,
) -> None:
    from . import fused, layerwise

    if not fused.reverse(problem, start, anchors, cotangent, gradients, nonfinite):
        layerwise.reverse(problem, start, anchors, cotangent, gradients, nonfinite)
