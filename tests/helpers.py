"""What several test files need: stages to test, their gradients, and higher precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import resode_kernels as rk
from resode_kernels import reference

RULES: list[dict[str, Any]] = [
    {"reverse": "paper"},
    {"reverse": "refined"},
    {"reverse": "refined", "order": 3},
    {"reverse": "predicted", "order": 1},
    {"reverse": "predicted", "order": 2},
    {"reverse": "predicted", "order": 3},
    {"reverse": "paper", "anchor_every": 2},
    {"reverse": "predicted", "order": 2, "anchor_every": 3},
    {"backward": "stored"},
    {"backward": "checkpoint", "anchor_every": 3},
]
# Reconstructs states to within round-off of float64, so that adjoint gradients can be compared with
# exact ones wherever truncation is not what is tested.
PRECISE: dict[str, Any] = {"reverse": "refined", "order": 9, "step": 0.05}
BLOCKS = ["relu", "tanh", "gelu", "silu", "linear"]


def name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def make_stage(
    block: str, dim: int, hidden: int, depth: int, bias: bool = True, **options: Any
) -> rk.Stage:
    """An MLP stage with the activation ``block``, or a linear one."""
    if block == "linear":
        return rk.LinearStage(dim, depth, **options)
    return rk.MLPStage(dim, hidden, depth, block, bias, **options)


def gradients(stage: rk.Stage, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = stage(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *stage.parameters()], g)]


def plain(stage: rk.Stage, x: Tensor) -> Tensor:
    """The network as anyone would write it, for autograd: standard backprop."""
    h = 1 / stage.depth if stage.how.step is None else stage.how.step

    def f(n: int, x: Tensor) -> Tensor:
        n = 0 if stage.tied else n
        if isinstance(stage, rk.LinearStage):
            return x @ stage.weight[n].T
        z = x @ stage.w1[n].T
        z = z if stage.b1 is None else z + stage.b1[n]
        u = getattr(torch.nn.functional, stage.activation)(z)
        v = u @ stage.w2[n].T
        return v if stage.b2 is None else v + stage.b2[n]

    for n in range(stage.depth):
        a = f(n, x)
        if stage.how.scheme == "heun":
            a = (a + f(n + 1, x + h * a)) / 2
        x = x + h * a
    return x


def relative_error(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> float:
    """‖a − b‖/‖b‖, in at least b's precision."""
    a, b = (np.asarray(t.to(torch.float64) if isinstance(t, Tensor) else t) for t in (a, b))
    return float(np.linalg.norm((a - b).ravel()) / max(np.linalg.norm(b.ravel()), 1e-300))


# ------------------------------------------------------------------- more precise than float64


def _erf(z: np.ndarray) -> np.ndarray:
    """erf(z) = 2/√π e^(−z²) Σ_n 2^n z^(2n+1)/(2n+1)!!, a series without cancellation."""
    z = np.clip(z, -8, 8)
    term = total = z
    for n in range(1, 300):
        term = term * 2 * z * z / (2 * n + 1)
        total = total + term
    return total * np.exp(-z * z) / np.sqrt(np.arctan(np.longdouble(1)))


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def _cdf(z: np.ndarray) -> np.ndarray:
    return (1 + _erf(z / np.sqrt(np.longdouble(2)))) / 2


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / np.sqrt(8 * np.arctan(np.longdouble(1)))


LONG_ACTIVATIONS = {
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(np.longdouble)),
    "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "gelu": (lambda z: z * _cdf(z), lambda z: _cdf(z) + z * _density(z)),
    "silu": (lambda z: z * _sigmoid(z), lambda z: _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
}


class LongMLP(reference.Block):
    """``reference.MLP`` in numpy's long double."""

    def __init__(self, activation: str, w1: Any, b1: Any, w2: Any, b2: Any) -> None:
        self.sigma, self.slope = LONG_ACTIVATIONS[activation]
        self.w1, self.w2 = w1, w2
        self.b1, self.b2 = (0 if b is None else b for b in (b1, b2))

    def f(self, x: np.ndarray, k: int) -> np.ndarray:
        return self.sigma(x @ self.w1.T + self.b1) @ self.w2.T + self.b2

    def linearize(self, x: np.ndarray, k: int, wrt_x: bool = True) -> Any:
        z = x @ self.w1.T + self.b1
        u = self.sigma(z)

        def pullback(g: np.ndarray) -> Any:
            dz = (g @ self.w2) * self.slope(z)
            return dz @ self.w1, (dz.T @ x, dz.sum(0), g.T @ u, g.sum(0))

        return u @ self.w2.T + self.b2, pullback


class LongLinear(reference.Block):
    def __init__(self, weight: np.ndarray) -> None:
        self.weight = weight

    def f(self, x: np.ndarray, k: int) -> np.ndarray:
        return x @ self.weight.T

    def linearize(self, x: np.ndarray, k: int, wrt_x: bool = True) -> Any:
        return x @ self.weight.T, lambda g: (g @ self.weight, (g.T @ x,))


def long_gradients(stage: rk.Stage, x: Tensor, g: Tensor) -> list[np.ndarray]:
    """What ``gradients`` returns, by the reference in long double (64 bits of mantissa)."""
    names = ["weight"] if isinstance(stage, rk.LinearStage) else ["w1", "b1", "w2", "b2"]
    parameters = [getattr(stage, n) for n in names]

    def long(t: Tensor | None) -> Any:
        return None if t is None else t.detach().to(torch.float64).numpy().astype(np.longdouble)

    stacked = [long(p) for p in parameters]
    block_class = LongLinear if len(names) == 1 else lambda *t: LongMLP(stage.activation, *t)
    distinct = [
        block_class(*(None if p is None else p[n] for p in stacked))
        for n in range(stage.num_blocks)
    ]
    blocks = distinct * stage.how.blocks(stage.depth) if stage.tied else distinct
    method = stage.how.method(stage.depth)
    scheme = reference.SCHEMES[method.scheme](blocks, method.step)
    y, kept = reference.forward(scheme, long(x), method.keep_every)
    if method.rule == "exact":
        pullbacks = reference.exact(scheme, long(x), kept)
    else:
        pullbacks = reference.adjoint(method.rule, method.order, scheme, y, kept)
    sums = reference.Sums()
    grad_x = reference.reverse(pullbacks, long(g), sums.add)
    stacked_gradients = [
        np.stack([sums[block][i] for block in distinct])
        for i, p in enumerate(parameters)
        if p is not None
    ]
    return [y, grad_x, *stacked_gradients]
