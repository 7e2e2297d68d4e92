"""Detects reconstructed states that are not finite, and raises an error or warns.

The reverse pass takes the VJP of step n at a point p, its reconstruction of x[n]. If the steps
change the state too much, reconstruction errors grow from step to step until p overflows. The
gradients need not show it (tanh has the slope 0 at infinity), and neither does the next state (with
a relu, x − h φ(−∞) is finite again). Therefore every point p is checked.

A reverse pass reports the largest n whose p has an entry that is not finite, which is the first one
it reaches. Two cases are not reported, because the reconstruction is not their cause: an infinite
cotangent (loss scaling), and an x[N] that was not finite after the forward pass (standard backprop
would fail as well).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .options import Method
from .states import State, parts


class NonFiniteReconstructionError(RuntimeError):
    """A reconstructed state is not finite, and the stage has ``nonfinite="raise"``."""


class NonFiniteReconstructionWarning(RuntimeWarning):
    """A reconstructed state is not finite, and the stage has ``nonfinite="warn"``."""


def is_checked(method: Method, state: State) -> bool:
    """Whether a reverse pass checks its points. It does not while a CUDA graph is captured, because
    reading the result waits for the GPU."""
    return method.nonfinite != "ignore" and not any(
        part.is_meta or (part.is_cuda and torch.cuda.is_current_stream_capturing())
        for part in parts(state)
    )


def new_flag(device: torch.device) -> Tensor:
    """An int32 that kernels raise to the largest n whose point is not finite; −1: none so far."""
    return torch.full((1,), -1, dtype=torch.int32, device=device)


class Extremes:
    """The smallest and the largest entry of every step's point; NaN if the point has one. ``watch``
    is an argument of ``reference.adjoint``. Only ``last`` waits for a GPU."""

    def __init__(self, steps: int, state: State) -> None:
        self.of = [part.new_zeros(2, steps) for part in parts(state)]

    def watch(self, n: int, p: State, _: Any) -> None:
        for part, (low, high) in zip(parts(p), self.of, strict=True):
            if part.numel():
                torch.aminmax(part, out=(low[n], high[n]))

    def last(self) -> int:
        """The largest n whose point is not finite; −1: all are finite."""
        found = [(~extremes.isfinite().all(0)).nonzero() for extremes in self.of]
        return max((int(steps.max()) for steps in found if steps.numel()), default=-1)


def report(method: Method, n: int, end: State) -> None:
    """Raises or warns, as ``method.nonfinite`` says, that the reconstruction of x[n] is not finite.
    Does nothing if n is −1, or if x[N] = ``end`` is not finite either."""
    if n < 0 or not all(bool(part.isfinite().all()) for part in parts(end)):
        return
    order = f", order={method.order}" if method.reverse_rule in ("refined", "predicted") else ""
    remedy = "anchor_every=k, a higher order or a smaller step"
    if method.bits:
        remedy = "bits to a sequence with None for the step before, whose increment is too large"
    message = (
        f"the reconstruction of the state x[{n}] of a stage of N = {method.steps} steps is not "
        f"finite, so the gradients are wrong. The updates h f, h = {method.step:.3g}, change the "
        f"state too much for reverse={method.reverse_rule!r}{order}. Call rk.tune(stage, x), which "
        f"looks for options that work; or set {remedy}; or set backward='checkpoint', which is "
        "exact. (nonfinite='warn' turns this error into a warning, nonfinite='ignore' turns the "
        "check off.)"
    )
    if method.nonfinite == "raise":
        raise NonFiniteReconstructionError(message)
    warnings.warn(message, NonFiniteReconstructionWarning, stacklevel=2)
