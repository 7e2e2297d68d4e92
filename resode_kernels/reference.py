"""The mathematics of the package in plain PyTorch: the specification of every kernel.

A stage makes N steps  x[n+1] = x[n] + h φ_n(x[n]).  The way back starts at x[N] with the cotangent
g = ∂L/∂x[N]; at each step a rule chooses a point p, takes the step's vector-Jacobian product (VJP)
there, and moves the state back. Nothing below knows what a block computes: a block is any object
with ``f(x)`` and ``vjp(x, g)``, and states are anything with ``+``, ``-`` and ``*``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# ---------------------------------------------------------------------------------------- blocks


class Block(Protocol):
    def f(self, x: Any) -> Any:
        """The residual function at x."""

    def vjp(self, x: Any, g: Any) -> tuple[Any, tuple[Any, ...]]:
        """∂_x f(x)ᵀ g, and ∂_θ f(x)ᵀ g for each parameter θ."""


class MLP:
    """f(x) = W2 σ(W1 x + b1) + b2, with the rows of a matrix as x."""

    def __init__(
        self, activation: str, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None
    ) -> None:
        self.sigma, self.slope = ACTIVATIONS[activation]
        self.w1, self.b1, self.w2, self.b2 = w1, b1, w2, b2

    def f(self, x: Tensor) -> Tensor:
        return F.linear(self.sigma(F.linear(x, self.w1, self.b1)), self.w2, self.b2)

    def vjp(self, x: Tensor, g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        z = F.linear(x, self.w1, self.b1)
        dz = (g @ self.w2) * self.slope(z)
        return dz @ self.w1, (dz.T @ x, dz.sum(0), g.T @ self.sigma(z), g.sum(0))


class Linear:
    """f(x) = θ x."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def f(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def vjp(self, x: Tensor, g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return g @ self.weight, (g.T @ x,)


class Function:
    """Any function f(x, *parameters), differentiated by autograd."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        self.function, self.parameters = function, parameters

    def f(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.function(x, *self.parameters)

    def vjp(self, x: Tensor, g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradients = torch.autograd.grad(
                self.function(x, *self.parameters), (x, *self.parameters), g
            )
        return gradients[0], gradients[1:]


def normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s + z * s * (1 - s)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu, lambda z: (z > 0).to(z.dtype)),
    "tanh": (torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
    "gelu": (F.gelu, lambda z: normal_cdf(z) + z * normal_density(z)),
    "silu": (F.silu, silu_slope),
}

# --------------------------------------------------------------------------------------- schemes


class Euler:
    """φ_n(x) = f_n(x): N blocks make N steps."""

    def __init__(self, blocks: Sequence[Block], h: float) -> None:
        self.f, self.h, self.steps = blocks, h, len(blocks)

    def slope(self, n: int, x: Any) -> Any:
        return self.f[n].f(x)

    def reverse_slope(self, n: int, x: Any) -> Any:
        return self.f[n].f(x)

    def vjp(self, n: int, p: Any, g: Any) -> tuple[Any, list[tuple[Block, tuple[Any, ...]]]]:
        """The cotangent of x[n], and contributions to blocks' parameter gradients."""
        gx, grads = self.f[n].vjp(p, self.h * g)
        return g + gx, [(self.f[n], grads)]


class Heun:
    """φ_n(x) = (a + b)/2, a = f_n(x), y = x + h a, b = f_{n+1}(y): N + 1 blocks make N steps."""

    def __init__(self, blocks: Sequence[Block], h: float) -> None:
        self.f, self.h, self.steps = blocks, h, len(blocks) - 1

    def slope(self, n: int, x: Any) -> Any:
        a = self.f[n].f(x)
        b = self.f[n + 1].f(x + self.h * a)
        return (a + b) * 0.5

    def reverse_slope(self, n: int, x: Any) -> Any:
        b = self.f[n + 1].f(x)
        a = self.f[n].f(x - self.h * b)
        return (a + b) * 0.5

    def vjp(self, n: int, p: Any, g: Any) -> tuple[Any, list[tuple[Block, tuple[Any, ...]]]]:
        y = p + self.h * self.f[n].f(p)
        gy, grads_b = self.f[n + 1].vjp(y, (self.h / 2) * g)
        gx, grads_a = self.f[n].vjp(p, (self.h / 2) * g + self.h * gy)
        return g + gy + gx, [(self.f[n + 1], grads_b), (self.f[n], grads_a)]


Scheme = Euler | Heun
SCHEMES: dict[str, type[Euler] | type[Heun]] = {"euler": Euler, "heun": Heun}

# ---------------------------------------------------------------------------------- forward pass


def forward(scheme: Scheme, x: Any, keep_every: int = 0) -> tuple[Any, dict[int, Any]]:
    """x[N], and the kept states x[k], x[2k], … before it."""
    kept = {}
    for n in range(scheme.steps):
        if keep_every and n and n % keep_every == 0:
            kept[n] = x
        x = x + scheme.h * scheme.slope(n, x)
    return x, kept


# ---------------------------------------------------------------------------------- reverse pass

EXTRAPOLATION = {1: (1,), 2: (2, -1), 3: (3, -3, 1)}


def point(rule: str, order: int, scheme: Scheme, n: int, x: Any, history: Sequence[Any]) -> Any:
    """p of step n, given the state x = x̃[n+1] and the newest evaluations of φ, newest first."""
    h = scheme.h
    if rule == "predicted" and history:
        newest = zip(EXTRAPOLATION[len(history)], history, strict=True)
        p = x - h * sum(c * slope for c, slope in newest)
        corrections = order - len(history)
    else:
        p = x - h * scheme.reverse_slope(n, x)
        corrections = {"paper": 0, "refined": order - 1, "predicted": order}[rule]
    for _ in range(corrections):
        p = x - h * scheme.slope(n, p)
    return p


def adjoint_points(
    rule: str, order: int, scheme: Scheme, x: Any, kept: dict[int, Any]
) -> Iterator[tuple[int, Any]]:
    """n and p for n = N − 1 … 0, with the states reconstructed from x = x[N]."""
    history: deque[Any] = deque(maxlen=order)
    for n in reversed(range(scheme.steps)):
        x = kept.get(n + 1, x)
        p = point(rule, order, scheme, n, x, history)
        yield n, p
        if rule == "paper":
            x = p
        else:
            slope = scheme.slope(n, p)
            x = x - scheme.h * slope
            if rule == "predicted":
                history.appendleft(slope)


def exact_points(scheme: Scheme, x: Any, kept: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """n and x[n] for n = N − 1 … 0, recomputed from x = x[0] and the kept states."""
    end = scheme.steps
    for begin, start in sorted({**kept, 0: x}.items(), reverse=True):
        states = [start]
        for n in range(begin, end - 1):
            states.append(states[-1] + scheme.h * scheme.slope(n, states[-1]))
        for n in reversed(range(begin, end)):
            yield n, states.pop()
        end = begin


def reverse(
    scheme: Scheme, g: Any, points: Iterator[tuple[int, Any]]
) -> tuple[Any, dict[Block, tuple[Any, ...]]]:
    """∂L/∂x[0] and the blocks' parameter gradients, each step's VJP taken at its point."""
    sums: dict[Block, tuple[Any, ...]] = {}
    for n, p in points:
        g, contributions = scheme.vjp(n, p, g)
        for block, grads in contributions:
            before = sums.get(block)
            sums[block] = (
                tuple(a + b for a, b in zip(before, grads, strict=True)) if before else grads
            )
    return g, sums
