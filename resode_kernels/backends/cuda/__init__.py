"""CUDA C++ kernels as a backend (csrc/cuda)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def module() -> Any:
    """The compiled kernels."""
    return importlib.import_module("resode_kernels._CUDA")


def gpu_of(tensor: Tensor) -> Any:
    """Where kernels on the tensor run, with the current stream there."""
    compiled = module()
    if compiled.architectures() == "emulated":
        return compiled.Gpu(
            index=0, processors=3, shared_memory=99 << 10, cache=32 << 20, tf32=False, stream=0
        )
    properties: Any = torch.cuda.get_device_properties(tensor.device)
    return compiled.Gpu(
        index=tensor.device.index,
        processors=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        cache=properties.L2_cache_size,
        tf32=torch.backends.cuda.matmul.allow_tf32,
        stream=torch.cuda.current_stream(tensor.device).cuda_stream,
    )
