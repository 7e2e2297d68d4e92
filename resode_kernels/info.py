"""``python -m resode_kernels info``: what is built, what runs here, what "auto" picks and why."""

from __future__ import annotations

import platform

import torch

from . import __version__, backends
from .backends import cpp, cuda, native, triton

NO_GPU = "none: torch finds no GPU"
TESTED_TORCH = ("2.10", "2.13", "2.15")
"""The versions that ``tools/test_with_torch.sh`` ran the tests with."""


def lines() -> list[str]:
    device_types = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return [
        f"resode_kernels {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}",
        f"tested with torch {', '.join(TESTED_TORCH)}; takes {TESTED_TORCH[0]} or later",
        "",
        "C++ kernels",
        *_cpp(),
        "",
        "CUDA kernels",
        *_cuda(),
        "",
        "Triton kernels",
        *_triton(),
        *(line for device_type in device_types for line in _backends(device_type)),
        "",
        "Stages",
        "  ConvStage, LinearStage, MLPStage   run in the chosen backend",
        "  ResidualStage                      runs its blocks in PyTorch, on any device",
    ]


def _cpp() -> list[str]:
    reason, report = cpp.unavailable(), native.build_report().get("cpu", {})
    if reason is not None:
        return [f"  not available: {reason}"]
    threads = torch.get_num_threads() if report.get("openmp", True) else 1
    return [
        f"  built with         {report.get('compiler', 'unknown')}"
        + ("" if report.get("openmp", True) else ", without OpenMP"),
        f"  instruction sets   {', '.join(cpp._C.built())}",
        f"  this machine runs  {', '.join(cpp._C.supported())}",
        f"  in use             {_instruction_set()}, {threads} threads",
    ]


def _instruction_set() -> str:
    if cpp._C.selected() != "auto":
        return f"{cpp._C.selected()} (RESODE_ISA)"
    *narrower, widest = cpp._C.supported()
    return f"auto: {widest}" + (
        "; a narrower set for stages too narrow for its vectors (RESODE_ISA selects one set)"
        if narrower
        else ""
    )


def _cuda() -> list[str]:
    reason = cuda.unavailable()
    if reason is not None:
        return [f"  not available: {reason}"]
    if cuda.emulated():
        return ["  runs on            the CPU, emulated for tests (slow)"]
    architectures = cuda.architectures()
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return [
        f"  built with         nvcc {cuda.report.get('nvcc', 'unknown')}",
        "  architectures      "
        + ", ".join(f"sm_{name}" for name in architectures)
        + f"; PTX for GPUs newer than sm_{min(map(int, architectures))}",
        f"  GPUs               {', '.join(gpus) or NO_GPU}",
    ]


def _gpu(index: int) -> str:
    """The name of a GPU, and whether the CUDA kernels run on it."""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.hip:
        return f"{name} (AMD, not supported)"
    number = "".join(map(str, capability))
    if not cuda.serves(capability):
        return f"{name} (sm_{number}, not supported)"
    code = "" if number in cuda.architectures() else ", supported by code for an older GPU"
    return f"{name} (sm_{number}{code})"


def _triton() -> list[str]:
    reason = triton.unavailable()
    if reason is not None:
        return [f"  not available: {reason}"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if triton.interpreted():
        runs = "the CPU, in Triton's interpreter because TRITON_INTERPRET is set (slow)"
    else:
        runs = ", ".join(gpus) or NO_GPU
    return [f"  version            {triton.installed()}", f"  runs on            {runs}"]


def _backends(device_type: str) -> list[str]:
    out = ["", f"Backends for {device_type} tensors"]
    picked = backends.choose("auto", torch.device(device_type))
    for name in backends.REGISTRY:
        why_not = backends.why_not(name, torch.device(device_type))
        state = f"not available: {why_not}" if why_not else "available"
        out.append(f"  {name:<10} {state}" + ('  <- "auto" picks this' if name == picked else ""))
    return out
