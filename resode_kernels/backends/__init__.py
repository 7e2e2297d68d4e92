"""Backends: who runs a problem.

A backend is a module with four functions:

    unavailable()                                           why it cannot be used here, or None
    refuses(device_type, dtype)                             why it does not take such an x, or None
    forward(problem, x, y, anchors, statistics)             fills y, anchors and statistics
    reverse(problem, start, anchors, cotangent, gradients)  fills the gradients that are not None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..problem import Problem
from . import cpp, reference, triton


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot be used here."""


class Backend(Protocol):
    def unavailable(self) -> str | None: ...

    def refuses(self, device_type: str, dtype: torch.dtype) -> str | None: ...

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
    ) -> None: ...


IMPLEMENTED: dict[str, Backend] = {"cpp": cpp, "triton": triton, "reference": reference}

# The order in which "auto" tries them, per device type; on any other device the reference runs.
# (AMD's GPUs are "cuda" devices of torch, too.)
PREFERENCE = {"cpu": ("cpp",), "cuda": ("triton",)}


def why_not(name: str, device_type: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the backend cannot run a tensor of that kind, or None if it can."""
    if name not in IMPLEMENTED:
        return "this version of resode_kernels does not contain it"
    backend = IMPLEMENTED[name]
    return backend.unavailable() or backend.refuses(device_type, dtype)


def choose(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """The backend that runs an x on ``device`` when ``name`` is asked for."""
    if name == "auto":
        for candidate in PREFERENCE.get(device.type, ()):
            if why_not(candidate, device.type, dtype) is None:
                return candidate
        return "reference"
    reason = why_not(name, device.type, dtype)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend={name!r} is not available: {reason} "
            "(backend='auto' picks one that is; `python -m resode_kernels info` lists them)"
        )
    return name
