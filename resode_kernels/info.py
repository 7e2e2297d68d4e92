"""``python -m resode_kernels info``: what was built, what runs here, what "auto" picks and why."""

from __future__ import annotations

import platform

import torch

from . import __version__, backends
from .backends import cpp
from .options import BACKENDS


def lines() -> list[str]:
    report = cpp.build_report()
    out = [
        f"resode_kernels {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}",
        "",
        "C++ kernels",
    ]
    reason = cpp.unavailable()
    if reason is None:
        threads = torch.get_num_threads() if report.get("openmp", True) else 1
        out += [
            f"  built with         {report.get('compiler', 'unknown')}"
            + ("" if report.get("openmp", True) else ", without OpenMP"),
            f"  instruction sets   {', '.join(cpp._C.built())}",
            f"  this machine runs  {', '.join(cpp._C.supported())}",
            f"  in use             {cpp._C.selected()} (RESODE_ISA changes it), {threads} threads",
        ]
    else:
        out += [f"  not available: {reason}"]
    device_types = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device_type in device_types:
        out += ["", f"Backends for {device_type} tensors"]
        picked = backends.choose("auto", torch.device(device_type))
        for name in BACKENDS[1:]:
            why_not = backends.why_not(name, device_type)
            state = f"not available: {why_not}" if why_not else "available"
            out.append(
                f"  {name:<10} {state}" + ('  <- "auto" picks this' if name == picked else "")
            )
    return [
        *out,
        "",
        "Stages",
        "  ConvStage, LinearStage, MLPStage   run in the backend that is picked",
        "  ResidualStage                      runs its blocks in PyTorch, on any device",
    ]
