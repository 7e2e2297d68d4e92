"""The GPU that runs kernels, as csrc/cuda/launch.h describes it, and torch's current stream."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import cuda
from ..precision import tf32_allowed

# The emulated GPU. It has few multiprocessors, so that each of them gets several tiles.
EMULATED = {"index": 0, "processors": 3, "shared_memory": 99 << 10, "cache": 32 << 20}


def module() -> Any:
    """The compiled kernels. Called only if they are available."""
    return cuda._CUDA


def gpu_of(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu":
        facts, stream = EMULATED, 0
    else:
        facts = _facts(tensor.device)
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return module().Gpu(**facts, tf32=tf32_allowed(), stream=stream)


@functools.cache
def _facts(device: torch.device) -> dict[str, int]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "index": device.index,
        "processors": properties.multi_processor_count,
        "shared_memory": properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        "cache": properties.L2_cache_size,
    }
