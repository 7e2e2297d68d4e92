"""The classical Runge-Kutta method, of fourth order: the yardstick for Euler's and Heun's steps."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def step(slope: Callable[[int, Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    """x a step h later; slope(i, x) is the derivative after i half steps."""
    a = slope(0, x)
    b = slope(1, x + h / 2 * a)
    c = slope(1, x + h / 2 * b)
    d = slope(2, x + h * c)
    return x + h / 6 * (a + 2 * b + 2 * c + d)
