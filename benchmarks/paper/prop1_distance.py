"""Proposition 1: the distance between a ResNet and the ODE that interpolates it.

The paper: if φ(·, n/N) = f(·, θ_n), φ is L-Lipschitz in x and C_N = sup ‖∂_s φ + ∂_x φ[φ]‖, then

    ‖x_n − x(n/N)‖ ≤ (e^L − 1)/(2NL) C_N        (C_N/(2N) if L = 0).

The bound is tight: for φ(x, s) = a s + b it is reached at n = N. Without smoothness in depth it
promises nothing: at every N, f = n is 1/2 away from its ODE, and f = θ² with θ_n = (−1)^n is 2/3.

Measured: the largest distance over n and over a batch, and the bound. All networks are MLP stages
with weights that are constant in depth, smooth in depth or, in the three examples, zero but for an
output bias. The ODE is integrated by the classical Runge-Kutta method with two steps per layer,
exact for the examples; with four steps per layer it comes out the same. L is sup ‖W2(s)‖‖W1(s)‖,
since |tanh'| ≤ 1; C_N is taken along the solution, which is all that the proof needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import runge_kutta
import torch
from experiment import COLOURS, Options, Result, Verdict, depth_axis, main, panels, progress, slope
from states import trajectory
from torch import Tensor

import resode_kernels as rk

DIM, HIDDEN, BATCH = 4, 8, 16

Weights = tuple[Tensor, ...]  # W1, b1, W2, b2 at depths s, stacked as in an MLPStage
Curve = Callable[[Tensor, int], Weights]  # of s and N; θ_n at s = n/N


def mlp(wave: Callable[[Tensor], Tensor]) -> Curve:
    """Weights A + wave(s) B with random A and B."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(HIDDEN, DIM): DIM**-0.5, (HIDDEN,): 0.2, (DIM, HIDDEN): HIDDEN**-0.5, (DIM,): 0.2}
    draws = [
        0.6 * spread * torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for shape, spread in shapes.items()
    ]
    return lambda s, depth: tuple(a + wave(s).view(-1, *[1] * a.dim()) * b for a, b in draws)


def bias(value: Callable[[Tensor, int], Tensor]) -> Curve:
    """f(x) = value(s, N), along the first coordinate."""

    def weights(s: Tensor, depth: int) -> Weights:
        zero, along = s.new_zeros(len(s), HIDDEN, DIM), torch.eye(1, DIM, dtype=s.dtype)
        return zero, zero[..., 0], zero.mT, value(s, depth).unsqueeze(1) * along

    return weights


def alternating(s: Tensor, depth: int) -> Tensor:
    """θ(s)², with θ linear between θ_n = (−1)^n and θ_{n+1}."""
    return (2 * (depth * s - torch.floor(depth * s)) - 1) ** 2


@dataclass(frozen=True)
class Case:
    label: str
    weights: Curve
    colour: str
    order: int
    """The distance falls as 1/N^order."""
    exact: float | None = None
    """The distance at n = N is this times 1/N^order."""


TIED = Case("constant weights", mlp(torch.zeros_like), COLOURS["euler"], 1)
SMOOTH = Case(
    "smooth weights", mlp(lambda s: 0.5 * torch.sin(2 * math.pi * s)), COLOURS["refined"], 1
)
TIGHT = Case("a s + b", bias(lambda s, depth: 1.5 * s - 1), COLOURS["exact"], 1, 1.5 / 2)
GROWING = Case("f = n", bias(lambda s, depth: depth * s), COLOURS["heun"], 0, 1 / 2)
ALTERNATING = Case("θₙ = (−1)ⁿ, f = θ²", bias(alternating), COLOURS["predicted"], 0, 2 / 3)
CASES = (TIED, SMOOTH, TIGHT, GROWING, ALTERNATING)


def stage(case: Case, depth: int) -> rk.MLPStage:
    result = rk.MLPStage(DIM, HIDDEN, depth, dtype=torch.float64)
    weights = case.weights(torch.arange(depth, dtype=torch.float64) / depth, depth)
    for p, value in zip(result.parameters(), weights, strict=True):
        p.data.copy_(value)
    return result


def f(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """For states [..., rows, dim]."""
    return torch.tanh(x @ w1.mT + b1.unsqueeze(-2)) @ w2.mT + b2.unsqueeze(-2)


def solve(case: Case, depth: int, x: Tensor, steps: int) -> Tensor:
    """x(k/steps), k = 0, …, steps, by the classical Runge-Kutta method."""
    h, states = 1 / steps, [x]
    halves = torch.arange(2 * steps + 1, dtype=x.dtype) / (2 * steps)
    weights = list(zip(*case.weights(halves, depth), strict=True))
    for k in range(0, 2 * steps, 2):
        x = runge_kutta.step(lambda i, y, k=k: f(y, *weights[k + i]), x, h)
        states.append(x)
    return torch.stack(states)


def bound(case: Case, depth: int, solution: Tensor) -> float:
    """Of Prop. 1."""

    def phi(x: Tensor, s: Tensor) -> Tensor:
        return f(x, *case.weights(s, depth))

    s = torch.linspace(0, 1, len(solution), dtype=torch.float64)
    # ∂_s φ + ∂_x φ[φ]: the derivative of φ along (φ, 1)
    direction = phi(solution, s), torch.ones_like(s)
    c = norm(torch.func.jvp(phi, (solution, s), direction)[1])
    w1, _, w2, _ = case.weights(s, depth)
    lipschitz = float((torch.linalg.matrix_norm(w1, 2) * torch.linalg.matrix_norm(w2, 2)).max())
    return (math.expm1(lipschitz) / lipschitz if lipschitz else 1) * c / (2 * depth)


def norm(states: Tensor) -> float:
    """The largest of the states'."""
    return float(states.norm(dim=-1).max())


def measure(case: Case, depth: int) -> dict[str, str | int | float]:
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states = trajectory(stage(case, depth), x)
    solution, finer = solve(case, depth, x, 2 * depth), solve(case, depth, x, 4 * depth)
    return {
        "case": case.label,
        "depth": depth,
        "distance": norm(states - solution[::2]),
        "at_the_end": norm(states[-1] - solution[-1]),
        "bound": bound(case, depth, solution),
        "uncertainty": norm(solution - finer[::2]),
    }


def run(options: Options) -> Result:
    depths = [8, 32, 128] if options.quick else [8, 16, 32, 64, 128, 256, 512]
    todo = [(case, depth) for case in CASES for depth in depths]
    rows = options.rows
    for case, depth in progress(todo, "network", len(todo)):
        rows.append(measure(case, depth))
    # columns[label][name] are the numbers for all depths
    columns = {
        case.label: {
            name: [float(row[name]) for row in rows if row["case"] == case.label]
            for name in ("distance", "at_the_end", "bound", "uncertainty")
        }
        for case in CASES
    }

    title = "Proposition 1: distance between a ResNet and its ODE"
    figure, axes = panels(2, title)
    for one, tight in zip(axes, (TIGHT, GROWING), strict=True):
        for case in (case for case in CASES if case.order == tight.order):
            numbers = columns[case.label]
            one.plot(depths, numbers["distance"], "o-", color=case.colour, label=case.label)
            one.plot(depths, numbers["bound"], "--", color=case.colour)
        one.plot([], [], "--", color="grey", label=f"bound ({tight.label} is on it)")
        one.set_yscale("log")
        depth_axis(one, depths)
        one.legend(frameon=False)
    axes[0].set_ylabel("max ‖xₙ − x(n/N)‖")
    axes[0].set_title("smooth in depth: falls as 1/N", fontsize=11)
    axes[1].set_title("not smooth in depth: does not fall", fontsize=11)
    axes[1].set_ylim(0.1, 10)

    verdicts = [judge(case, depths, **columns[case.label]) for case in CASES]
    accuracy = max(
        u / d
        for numbers in columns.values()
        for u, d in zip(numbers["uncertainty"], numbers["distance"], strict=True)
    )
    notes = [
        f"MLPs with {DIM} inputs and {HIDDEN} hidden units, {BATCH} initial states, float64. "
        f"Halving the integrator's step changes x(s) by at most {accuracy:.0e} of the distance."
    ]
    return Result(title, rows, figure, verdicts, notes)


def judge(
    case: Case,
    depths: Sequence[int],
    distance: Sequence[float],
    at_the_end: Sequence[float],
    bound: Sequence[float],
    uncertainty: Sequence[float],
) -> Verdict:
    fitted = slope(depths, distance)
    ratios = [d / b for d, b in zip(distance, bound, strict=True)]
    holds = abs(fitted + case.order) < 0.15 and max(ratios) < 1 + 1e-9
    numbers = f"slope {fitted:.3f}, distance/bound {min(ratios):.3f} to {max(ratios):.3f}"
    if case.exact is None:
        claim = "the distance is below the bound and falls as 1/N"
    else:
        power = ["", "/N"][case.order]
        constants = [end * n**case.order for n, end in zip(depths, at_the_end, strict=True)]
        holds = holds and all(abs(c - case.exact) < 1e-9 for c in constants)
        claim = f"the distance at n = N is {case.exact:.4g}{power}"
        numbers = f"{min(constants):.10f} to {max(constants):.10f}{power}; {numbers}"
    return Verdict(f"{case.label}: {claim}", holds, numbers)


if __name__ == "__main__":
    main(run, __doc__)
