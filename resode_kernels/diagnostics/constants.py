"""Estimates of the constants in the paper's bounds, at the states of a stage.

The state of a stage is the whole batch, because batch normalization connects the rows, and norms
are Euclidean. Maxima are taken over the points that were evaluated, so all of these are estimates
from below.

    C_f   max ‖f_n(x)‖                                                  (assumption 2)
    L_f   max ‖∂_x f_n(x)‖                                              (assumption 2)
    Δ     max ‖θ[n+1] − θ[n]‖
    L_θ   max ‖f_{n+1}(x) − f_n(x)‖ / ‖θ[n+1] − θ[n]‖                   (Prop. 5)
    L'_θ  max ‖∂_x f_{n+1}(x) − ∂_x f_n(x)‖ / ‖θ[n+1] − θ[n]‖           (Prop. 5)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .. import reference
from ..stages import Stage
from ..states import parts, state_like
from .budget import Budget, now
from .trajectory import Trajectory, minus, norm

ITERATIONS = 12
LAYERS = 8
"""The number of blocks that power iteration is applied to, at most."""
EVALUATIONS = 5 * ITERATIONS
"""The time of a power iteration, in evaluations of a block: about two for a difference and three
for a vector-Jacobian product."""


class Difference(reference.Block):
    """f_{n+1} − f_n."""

    def __init__(self, after: reference.Block, before: reference.Block) -> None:
        self.pair = (after, before)

    def f(self, x: Any, k: int) -> Any:
        return minus(*(block.f(x, k) for block in self.pair))

    def linearize(
        self, x: Any, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, reference.Pullback]:
        (y, back), (z, back_z) = (block.linearize(x, k, wrt_x) for block in self.pair)
        return minus(y, z), lambda g: (minus(back(g)[0], back_z(g)[0]), ())


def spectral_norm(block: reference.Block, x: Any, k: int, iterations: int = ITERATIONS) -> float:
    """‖∂_x f(x)‖ by power iteration on JᵀJ, with J v as a central difference: f only has to support
    gradients, not forward-mode differentiation."""
    generator = torch.Generator().manual_seed(0)
    _, pullback = block.linearize(x, k)
    v = state_like(x, [torch.randn(t.shape, generator=generator).to(t) for t in parts(x)])
    step = 1e-3 * max(norm(x), 1e-6)
    result = 0.0
    for _ in range(iterations):
        size = norm(v)
        if not math.isfinite(size) or size == 0:
            break
        v = reference.combine(None, (step / size, v))
        ahead, behind = (block.f(reference.combine(x, (sign, v)), k) for sign in (1, -1))
        jv = reference.combine(None, (0.5 / step, minus(ahead, behind)))
        result = norm(jv)
        v = pullback(jv)[0]
        if v is None:
            break
    return result


def step_of_weights(stage: Stage) -> list[tuple[float, float]]:
    """‖θ[n+1] − θ[n]‖ and ‖θ[n]‖ for every pair of neighbouring blocks; empty if blocks differ in
    the shapes of their parameters."""
    blocks = stage.by_block(dict(stage.named_parameters(remove_duplicate=False)))
    shapes = {tuple(t.shape for t in block) for block in blocks}
    if len(shapes) > 1 or not blocks[0]:
        return []
    return [
        (norm(minus(tuple(two), tuple(one))), norm(tuple(one))) for one, two in pairwise(blocks)
    ]


@dataclass(frozen=True)
class Constants:
    c_f: float
    l_f: float
    smoothness: float | None
    """Δ = max ‖θ[n+1] − θ[n]‖; zero if tied, None if the blocks cannot be compared."""
    relative_smoothness: float | None
    """max ‖θ[n+1] − θ[n]‖ / ‖θ[n]‖."""
    l_theta: float | None
    l_theta_x: float | None
    """L'_θ. Like L_θ it is None unless the scheme is Heun, whose bound needs both."""
    blocks: int
    """The number of blocks at which they were estimated."""
    blocks_wanted: int
    """The number of blocks at which they are estimated if there is time."""


def layers_of(steps: int) -> list[int]:
    """The blocks for power iteration, evenly in depth: the last, the first, the middle, …"""
    evenly = list(dict.fromkeys(round(i * (steps - 1) / (LAYERS - 1)) for i in range(LAYERS)))
    order = (7, 0, 4, 2, 6, 1, 3, 5) if len(evenly) == LAYERS else range(len(evenly) - 1, -1, -1)
    return [evenly[i] for i in order]


def estimate(trajectory: Trajectory, stage: Stage, budget: Budget, evaluation: float) -> Constants:
    """Estimates the constants, at one block at least and at others while there is time.
    ``evaluation`` is the time of an evaluation of a block in seconds. To be called inside
    ``probe.untouched()``."""
    scheme = trajectory.scheme
    layers = layers_of(scheme.steps)
    euler = stage.options.scheme == "euler"
    pairs = step_of_weights(stage) if not stage.tied else [(0.0, 1.0)]
    l_f, l_theta, l_theta_x = 0.0, 0.0, 0.0
    cost, done = EVALUATIONS * evaluation, 0
    for n in layers:
        if done and not budget.allows(cost):
            break
        budget.show("estimating the constants of the theory")
        begin, done = now(), done + 1
        x, k = trajectory[n], n if euler else 2 * n
        l_f = max(l_f, spectral_norm(scheme.f[n], x, k))
        if not euler and not stage.tied and pairs and pairs[n][0] > 0:
            change = Difference(scheme.f[n + 1], scheme.f[n])
            l_theta = max(l_theta, norm(change.f(x, k)) / pairs[n][0])
            l_theta_x = max(l_theta_x, spectral_norm(change, x, k) / pairs[n][0])
        cost = now() - begin
    return Constants(
        c_f=trajectory.largest_slope,
        l_f=l_f,
        smoothness=max((d for d, _ in pairs), default=None),
        relative_smoothness=max((d / s for d, s in pairs if s > 0), default=None),
        l_theta=None if euler else l_theta,
        l_theta_x=None if euler else l_theta_x,
        blocks=done,
        blocks_wanted=len(layers),
    )


def bound(constants: Constants, stage: Stage, n: int = 0) -> float | None:
    """The bound on ‖x̃[n] − x[n]‖ with the rule ``paper`` and no anchors, to leading order in h,
    from the discrete Gronwall inequality over N − n steps:

        Prop. 3 (Euler)   (e^{L_f (N − n) h} − 1) C_f h
        Prop. 5 (Heun)    (e^{L' (N − n) h} − 1) / L' · ¼ L_θ L'_θ Δ² h

    With h = 1/N and n = 0 these are the paper's bounds. L' = L_f + h L_f² / 2 bounds the Lipschitz
    constant of Heun's step back.
    """
    method = stage.options.method(stage.depth)
    h, length, l_f = abs(method.step), method.steps - n, constants.l_f
    if method.scheme == "euler":
        return _growth(l_f, length * h) * l_f * constants.c_f * h
    if constants.smoothness is None or constants.l_theta is None or constants.l_theta_x is None:
        return None
    c_f = constants.l_theta * constants.l_theta_x * constants.smoothness**2 / 4
    return _growth(l_f + h * l_f**2 / 2, length * h) * c_f * h


def _growth(rate: float, time: float) -> float:
    """(e^{rate · time} − 1) / rate."""
    if rate == 0:
        return time
    return math.expm1(rate * time) / rate if rate * time < 700 else math.inf
