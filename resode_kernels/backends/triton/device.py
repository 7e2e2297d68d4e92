"""The properties of a device on which the plan of a launch depends."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from . import interpreted

# Bytes of the last cache before DRAM, where torch does not report it: AMD's Infinity Cache.
LAST_LEVEL_CACHE = {"gfx942": 256 << 20}


class Device(NamedTuple):
    target: str
    """``"cuda:80"``, ``"hip:gfx942"``, …, or ``"interpreter"``."""
    warp: int
    """Threads that run in lockstep."""
    processors: int
    """Streaming multiprocessors, or compute units."""
    shared: int
    """Bytes of shared memory that a program may have."""
    cache: int
    """Bytes of the last cache before DRAM."""


INTERPRETER = Device("interpreter", warp=32, processors=3, shared=1 << 20, cache=32 << 20)


def device_of(tensor: Tensor) -> Device:
    if interpreted():
        return INTERPRETER
    with torch.cuda.device_of(tensor):
        return _describe(tensor.device, driver.active.get_current_target())


@functools.cache
def _describe(device: torch.device, target: GPUTarget) -> Device:
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    cache = LAST_LEVEL_CACHE.get(str(target.arch).split(":")[0])
    if cache is None and device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return Device(
        f"{target.backend}:{target.arch}",
        target.warp_size,
        properties["multiprocessor_count"],
        properties["max_shared_mem"],
        cache or 32 << 20,
    )
