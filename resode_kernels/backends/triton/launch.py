"""Launching kernels."""

from __future__ import annotations

from typing import Any

import torch

from .device import Device


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a kernel on the device of its first argument; the interpreter also runs on the CPU.
    Multiply-adds are fused, whatever Triton's default is."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, enable_fp_fusion=True, **options)


def all_registers(device: Device, threads: int) -> dict[str, Any]:
    """Options of a launch that needs many registers: ptxas may use all registers that a program of
    ``threads`` threads can have. Without this limit it sometimes spills registers to fit more
    programs on a multiprocessor."""
    limit = {"maxnreg": min(255, 65536 // threads)} if device.target.startswith("cuda") else {}
    return {"num_warps": threads // device.warp, **limit}
