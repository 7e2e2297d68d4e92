"""Backends: who runs a problem.

A backend is a module with three functions:

    unavailable()  why it cannot be used here, or None
    forward(problem, x, y, anchors)                             fills y and anchors
    reverse(problem, start, anchors, cotangent, gradients)      fills the gradients that are not None
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from ..problem import Problem

# In the order in which "auto" tries them, per device type; any other device: the reference.
PREFERENCE = {"cpu": ("cpp", "reference")}


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot be used here."""


class Backend(Protocol):
    def unavailable(self) -> str | None: ...

    def forward(self, problem: Problem, x: Tensor, y: Tensor, anchors: Tensor) -> None: ...

    def reverse(
        self,
        problem: Problem,
        start: Tensor,
        anchors: Tensor,
        cotangent: Tensor,
        gradients: Sequence[Tensor | None],
    ) -> None: ...


@cache
def load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f".{name}", __name__))


@cache
def why_not(name: str, device_type: str) -> str | None:
    """Why the backend cannot run tensors of a device, or None if it can."""
    if name in ("triton", "cuda"):
        return "this version of resode_kernels does not contain it"
    if name == "cpp" and device_type != "cpu":
        return f"it runs on the CPU, not on {device_type!r}"
    return load(name).unavailable()


def choose(name: str, device: torch.device) -> str:
    """The backend that runs tensors of ``device`` when ``name`` is asked for."""
    if name == "auto":
        candidates = PREFERENCE.get(device.type, ("reference",))
        return next(c for c in candidates if why_not(c, device.type) is None)
    reason = why_not(name, device.type)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend={name!r} is not available: {reason} "
            "(backend='auto' picks one that is; `python -m resode_kernels info` lists them)"
        )
    return name
