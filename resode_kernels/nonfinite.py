"""Reconstructions that are not finite, the classic failure of invertible networks: never silent.

The way back takes the VJP of step n at a point p that it has reconstructed for x[n]. Where the
steps change the state too much, the errors of the reconstruction grow from step to step until p
overflows. The gradients need not show it: at infinity tanh has the slope 0. So it is the points
that are looked at, all of them: a state may be finite again after a point that was not, as
x − h φ(−∞) is with a relu.

Every pass notes the largest n whose point has an entry that is not finite, which is the first that
it came to. An infinite cotangent (loss scaling) is nobody's fault here, and neither is an x[N] that
was not finite in the first place: standard backprop would be no better.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .options import Method
from .replay import State, parts


class NonFiniteReconstructionError(RuntimeError):
    """A state was reconstructed as something that is not finite: ``nonfinite="raise"``."""


class NonFiniteReconstructionWarning(RuntimeWarning):
    """The same: ``nonfinite="warn"``."""


def looked_for(method: Method, state: State) -> bool:
    """Whether the points of a pass are to be looked at. Not while a CUDA graph is captured: to read
    what was found is to wait for the GPU."""
    return method.nonfinite != "ignore" and not any(
        part.is_meta or (part.is_cuda and torch.cuda.is_current_stream_capturing())
        for part in parts(state)
    )


def nothing_found(device: torch.device) -> Tensor:
    """Where kernels note what they find: an int32, raised to every n whose point is not finite."""
    return torch.full((1,), -1, dtype=torch.int32, device=device)


class Extremes:
    """The smallest and the largest number in the point of every step, both NaN if there is one, as
    ``reference.adjoint`` tells it to ``watch``. Only ``last`` waits for a GPU."""

    def __init__(self, steps: int, state: State) -> None:
        self.of = [part.new_zeros(2, steps) for part in parts(state)]

    def watch(self, n: int, p: State, _: Any) -> None:
        for part, (low, high) in zip(parts(p), self.of, strict=True):
            if part.numel():
                torch.aminmax(part, out=(low[n], high[n]))

    def last(self) -> int:
        """The largest n whose point is not finite; −1: all are."""
        found = [(~extremes.isfinite().all(0)).nonzero() for extremes in self.of]
        return max((int(steps.max()) for steps in found if steps.numel()), default=-1)


def report(method: Method, n: int, end: State) -> None:
    """Raises or warns, as the method says, unless n is −1: x[n] was reconstructed as something that
    is not finite, on the way back from x[N] = ``end``."""
    if n < 0 or not all(bool(part.isfinite().all()) for part in parts(end)):
        return
    rule = f"reverse={method.reverse_rule!r}" + (
        f", order={method.order}" if method.reverse_rule != "paper" else ""
    )
    message = (
        f"the state x[{n}] of a stage of N = {method.steps} steps was reconstructed as something "
        f"that is not finite, and the gradients are worth nothing: its steps h f, h = "
        f"{method.step:.3g}, change the state too much to be inverted by {rule}. What helps: "
        "rk.tune(stage, x), which looks for options that work; anchor_every=k, a higher order, a "
        "smaller step; or backward='checkpoint', which is exact. (nonfinite='warn' or 'ignore' "
        "makes this a warning or nothing.)"
    )
    if method.nonfinite == "raise":
        raise NonFiniteReconstructionError(message)
    warnings.warn(message, NonFiniteReconstructionWarning, stacklevel=2)
