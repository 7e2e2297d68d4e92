"""Backends: who runs a problem.

A backend is a module with four functions:

    unavailable()           why it cannot be used here, or None
    refuses(device, dtype)  why it does not take such an x, or None
    forward(problem, x, y, anchors, statistics)
                            fills y, anchors and statistics
    reverse(problem, start, anchors, cotangent, gradients, nonfinite)
                            fills the gradients that are not None, and raises nonfinite, an int32,
                            to the largest n whose point p is not finite; None: nobody looks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..problem import Problem
from . import cpp, cuda, reference, triton


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot be used here."""


class Backend(Protocol):
    def unavailable(self) -> str | None: ...

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None: ...

    def forward(
        self, problem: Problem, x: Tensor, y: Tensor, anchors: Tensor, statistics: Tensor
    ) -> None: ...

    def reverse(
        self,
        problem: Problem,
        start: Tensor,
        anchors: Tensor,
        cotangent: Tensor,
        gradients: Sequence[Tensor | None],
        nonfinite: Tensor | None,
    ) -> None: ...


IMPLEMENTED: dict[str, Backend] = {
    "cpp": cpp,
    "triton": triton,
    "cuda": cuda,
    "reference": reference,
}

# The order in which "auto" tries them, per device type; on any other device the reference runs.
# (AMD's GPUs are "cuda" devices of torch, too.)
PREFERENCE = {"cpu": ("cpp",), "cuda": ("cuda", "triton")}


def why_not(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the backend cannot run such a tensor, or None if it can."""
    backend = IMPLEMENTED[name]
    return backend.unavailable() or backend.refuses(device, dtype)


def choose(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The backend that runs an x on ``device`` when ``name`` is asked for."""
    if name == "auto":
        for candidate in PREFERENCE.get(device.type, ()):
            if why_not(candidate, device, dtype) is None:
                return candidate
        return "reference"
    reason = why_not(name, device, dtype)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend={name!r} is not available: {reason} "
            "(backend='auto' picks one that is; `python -m resode_kernels info` lists them)"
        )
    return name
