"""Launching kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels run on the current device: inside, that is the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


# Options of every launch: multiply-adds are fused, whatever Triton's default becomes.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


def options(target: str, warps: int) -> dict[str, Any]:
    """Of a launch that needs many registers. ptxas may have all there are for so many warps: left
    to itself it sometimes spills in order to fit more programs on a multiprocessor."""
    limit = {"maxnreg": min(255, 2048 // warps)} if target.startswith("cuda") else {}
    return {**OPTIONS, "num_warps": warps, **limit}
