"""Backends: who runs a problem.

A backend is a module with three functions:

    unavailable()                                           why it cannot be used here, or None
    forward(problem, x, y, anchors, statistics)             fills y, anchors and statistics
    reverse(problem, start, anchors, cotangent, gradients)  fills the gradients that are not None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..problem import Problem
from . import cpp, reference


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot be used here."""


class Backend(Protocol):
    def unavailable(self) -> str | None: ...

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


IMPLEMENTED: dict[str, Backend] = {"cpp": cpp, "reference": reference}

# The order in which "auto" tries them, per device type; on any other device the reference runs.
PREFERENCE = {"cpu": ("cpp", "reference")}


def why_not(name: str, device_type: str) -> str | None:
    """Why the backend cannot run tensors of a device, or None if it can."""
    if name not in IMPLEMENTED:
        return "this version of resode_kernels does not contain it"
    if name == "cpp" and device_type != "cpu":
        return f"it runs on the CPU, not on {device_type!r}"
    return IMPLEMENTED[name].unavailable()


def choose(name: str, device: torch.device) -> str:
    """The backend that runs tensors of ``device`` when ``name`` is asked for."""
    if name == "auto":
        for candidate in PREFERENCE.get(device.type, ()):
            if why_not(candidate, device.type) is None:
                return candidate
        return "reference"
    reason = why_not(name, device.type)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend={name!r} is not available: {reason} "
            "(backend='auto' picks one that is; `python -m resode_kernels info` lists them)"
        )
    return name
