"""Backends run problems. ``contract.py`` says what a backend is.

cpp.py           C++ kernels for CPUs                        csrc/cpu
cuda/, triton/   kernels for GPUs                            csrc/cuda, triton/*.py
engine.py        the reference's passes in PyTorch: the backend "reference"
native.py        what the compiled modules of cpp and cuda share
layerwise.py     stages layer by layer on a GPU, by the engine and the kernels of cuda or triton,
                 with rows.py, combining.py and precision.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..recording import Recorder
from . import cpp, cuda, triton
from .contract import Backend, BackendUnavailableError
from .engine import REFERENCE

__all__ = [
    "REGISTRY",
    "Backend",
    "BackendUnavailableError",
    "MissingKernelsWarning",
    "choose",
    "choose_combine",
    "choose_recorder",
    "why_not",
]

_ALL: tuple[Backend, ...] = (cpp, cuda, triton, REFERENCE)
REGISTRY: dict[str, Backend] = {backend.name: backend for backend in _ALL}
"""Backends by name, in the order in which "auto" tries them. (In torch AMD's GPUs are "cuda".)"""


def why_not(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the backend cannot run an x of this device and dtype, or None if it can."""
    backend = REGISTRY[name]
    return backend.unavailable() or backend.refuses(device, dtype)


def choose(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The backend that runs an x on ``device`` with the option ``backend=name``."""
    if name == "auto":
        for candidate, backend in REGISTRY.items():
            if device.type in backend.automatic_on and why_not(candidate, device, dtype) is None:
                return candidate
        if not torch.compiler.is_compiling():  # a warning would break the graph
            _warn_of_missing_kernels(device.type)
        return REFERENCE.name
    reason = why_not(name, device, dtype)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend={name!r} is not available: {reason} "
            "(backend='auto' picks an available one; `python -m resode_kernels info` lists them)"
        )
    return name


class MissingKernelsWarning(UserWarning):
    """``backend="auto"`` runs the slower reference, because compiled kernels are missing."""


@functools.cache  # one warning per process
def _warn_of_missing_kernels(device_type: str) -> None:
    missing = [
        f"the backend {name!r} is not available: {reason}"
        for name, backend in REGISTRY.items()
        if device_type in backend.automatic_on and (reason := backend.unavailable()) is not None
    ]
    if missing:
        warnings.warn(
            f"stages on {device_type!r} run in the backend 'reference', which is slower and takes "
            f"more memory, because {'; '.join(missing)}. Install resode_kernels again with a C++ "
            "compiler (for GPUs: with nvcc, or Triton), or set backend='reference' to do without "
            "this warning. `python -m resode_kernels info` shows what was built.",
            MissingKernelsWarning,
            stacklevel=2,
        )


def choose_combine(name: str, state: Sequence[Tensor]) -> reference.Combine:
    """The function that updates the states of a stage of modules, with ``backend=name``."""
    if name != "auto" and REGISTRY[name].combine is None:
        takes = [known for known, backend in REGISTRY.items() if backend.combine is not None]
        raise BackendUnavailableError(
            f"backend={name!r} is not available: blocks that are modules run in PyTorch, and this "
            "backend cannot update their states (use backend='auto' or "
            f"{' or '.join(map(repr, takes))})"
        )
    chosen = {choose(name, t.device, t.dtype) for t in state}
    combine = REGISTRY[chosen.pop()].combine if len(chosen) == 1 else None
    return combine or reference.combine


def choose_recorder(name: str, state: Sequence[Tensor]) -> Recorder:
    """What records the increments of a stage of modules, with ``backend=name``."""
    usable = cpp.unavailable() is None and all(t.device.type == "cpu" for t in state)
    return cpp.recorder if name == "auto" and usable else Recorder()
