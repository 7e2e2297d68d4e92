"""Detects reconstructions that are not finite and reports them: never silently.

The reverse pass takes the VJP of step n at a point p, its reconstruction of x[n]. If the steps
change the state too much, reconstruction errors grow from step to step until p overflows. The
gradients need not show it (at infinity tanh has the slope 0), and neither need the state that
follows (with a relu, x − h φ(−∞) is finite again). So every point p is checked.

Every reverse pass reports the largest n whose p has an entry that is not finite: the first one that
it came to. Two cases are not errors of the reconstruction: a cotangent that is infinite (loss
scaling), and an x[N] that was not finite after the forward pass (standard backprop would do no
better).
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
    """Whether a reverse pass checks its points. Not while a CUDA graph is captured: reading the
    result would wait for the GPU."""
    return method.nonfinite != "ignore" and not any(
        part.is_meta or (part.is_cuda and torch.cuda.is_current_stream_capturing())
        for part in parts(state)
    )


def new_flag(device: torch.device) -> Tensor:
    """Where kernels report: an int32, raised to every n whose point is not finite; −1: none yet."""
    return torch.full((1,), -1, dtype=torch.int32, device=device)


class Extremes:
    """The smallest and the largest number in the point of every step; NaN if it has one. ``watch``
    is for ``reference.adjoint``. Only ``last`` waits for a GPU."""

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
    """Raises or warns, as the method says: the reconstruction of x[n] is not finite, in a reverse
    pass that began at x[N] = ``end``. Does nothing if n is −1 or ``end`` itself is not finite."""
    if n < 0 or not all(bool(part.isfinite().all()) for part in parts(end)):
        return
    order = f", order={method.order}" if method.reverse_rule != "paper" else ""
    message = (
        f"the reconstruction of the state x[{n}], in a stage of N = {method.steps} steps, is not "
        "finite, and the gradients are useless. The steps h f with h = "
        f"{method.step:.3g} change the state too much for reverse={method.reverse_rule!r}{order}. "
        "Use rk.tune(stage, x), which looks for options that work; or anchor_every=k, a higher "
        "order or a smaller step; or backward='checkpoint', which is exact. (nonfinite='warn' or "
        "'ignore' turns this error into a warning or off.)"
    )
    if method.nonfinite == "raise":
        raise NonFiniteReconstructionError(message)
    warnings.warn(message, NonFiniteReconstructionWarning, stacklevel=2)
