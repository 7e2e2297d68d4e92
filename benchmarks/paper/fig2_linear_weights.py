"""Figure 2, Proposition 2 and Theorem 1: the weights of a deep linear ResNet, trained.

The paper: Π = (I + θ_N/N) ⋯ (I + θ_1/N) is trained to be B by the gradient flow dθ_n/dt = −N ∇_n of
ℓ = ½‖Π − B‖²_Σ. Assumption 1 is √ℓ(0) < m/(4√(2Me³)), where m and M are the smallest and the
largest eigenvalue of Σ, and ‖θ_n(0)‖ ≤ 1/4. Then, if ‖θ_{n+1}(0) − θ_n(0)‖ ≤ C_0/N, at all times
‖θ_n‖ < 1/2 and ‖θ_{n+1} − θ_n‖ ≤ C/N; the proof has C = C_0 + 1/2, and ℓ(t) ≤ e^(−2mt/e) ℓ(0).
Furthermore ψ_N(s, t) = θ_⌊Ns⌋(t) converges to a limit ψ at the rate 1/N, uniformly in depth s and
time t, and Π to the flow of the ODE dx/ds = ψ(s, t) x.

Measured: all of that, for weights that start equal in all layers and for weights that start as a
smooth function of depth. Gradients are those of a linear stage, the flow is integrated by the
classical Runge-Kutta method. ψ is extrapolated from the weights of two networks deeper than the
others (Richardson: 2θ at depth 2K minus θ at depth K, whose errors of order 1/K cancel), since the
deepest network itself is as far from the limit as its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import runge_kutta
import torch
from experiment import (
    COLOURS,
    Options,
    Result,
    Verdict,
    depth_axis,
    main,
    panels,
    plt,
    progress,
    slope,
)
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

import resode_kernels as rk

DIM, SAMPLES = 4, 32
TIME = 8.0
SHOWN_TIMES = (0.5, 1.0, 2.0, 8.0)


def orthogonal(seed: int) -> Tensor:
    """A matrix of spectral norm 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64))[0]


Row = dict[str, Any]
Initial = Callable[[Tensor], Tensor]  # s [blocks] to ψ_init(s) [blocks, dim, dim]


def equal(s: Tensor) -> Tensor:
    return 0.25 * orthogonal(0) * torch.ones_like(s).view(-1, 1, 1)


def smooth(s: Tensor) -> Tensor:
    wave = torch.sin(2 * math.pi * s).view(-1, 1, 1)
    return 0.15 * orthogonal(0) + 0.1 * wave * orthogonal(1)


INITIAL = {"equal": equal, "smooth": smooth}
COLOUR = {"equal": COLOURS["euler"], "smooth": COLOURS["refined"]}


def product(weights: Tensor, scheme: str = "euler") -> Tensor:
    """Πᵀ: what becomes of the rows of the identity."""
    return rk.functional.linear_stage(torch.eye(DIM, dtype=torch.float64), weights, scheme=scheme)


def layers(depth: int) -> Tensor:
    """n/N for all n < N."""
    return torch.arange(depth, dtype=torch.float64) / depth


class Regression:
    """Data with Σ, and B at such a distance from the start that assumption 1 holds."""

    def __init__(self, initial: Initial) -> None:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, DIM, generator=generator, dtype=torch.float64)
        eigenvalues = torch.linalg.eigvalsh(x.T @ x / SAMPLES)
        self.m, self.M = float(eigenvalues[0]), float(eigenvalues[-1])
        self.allowed = self.m / (4 * math.sqrt(2 * self.M * math.e**3))
        error = x @ orthogonal(3)
        error *= 0.75 * self.allowed / error.square().sum(1).mean().sqrt()
        self.x, self.y = x, x @ product(initial(layers(4096))) + error

    def loss(self, weights: Tensor) -> Tensor:
        """½‖Π − B‖²_Σ."""
        prediction = rk.functional.linear_stage(self.x, weights, backward="stored")
        return 0.5 * (prediction - self.y).square().sum(1).mean()

    def velocity(self, weights: Tensor) -> Tensor:
        weights = weights.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(weights), weights)
        return -len(weights) * gradient

    def train(self, weights: Tensor, times: int, steps: int = 1) -> Tensor:
        """The weights at so many times in [0, TIME]; ``steps`` of Runge-Kutta between two."""
        h, result = TIME / (times - 1) / steps, [weights]
        for _ in range(times - 1):
            for _ in range(steps):
                weights = runge_kutta.step(lambda _, w: self.velocity(w), weights, h)
            result.append(weights)
        return torch.stack(result)


def limit(coarse: Tensor, twice: Tensor) -> Tensor:
    """ψ at s = k/K, k = 0, …, K, [times, K + 1, dim, dim], from the weights at depths K and 2K."""
    psi = 2 * twice[:, ::2] - coarse
    return torch.cat([psi, 2 * psi[:, -1:] - psi[:, -2:-1]], 1)


def distance(weights: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """‖ψ_N − ψ‖ at all times, in L2 and at its largest; ψ is linear between its points."""
    cells = weights.repeat_interleave((psi.shape[1] - 1) // weights.shape[1], dim=1)
    left, right = cells - psi[:, :-1], cells - psi[:, 1:]
    squares = (left**2 + left * right + right**2).sum((2, 3)) / 3
    largest = torch.stack([left, right]).norm(dim=(3, 4)).amax((0, 2))
    return squares.mean(1).sqrt(), largest


def spectral(matrices: Tensor) -> Tensor:
    """The largest norm in every network: [times, blocks, dim, dim] to [times]."""
    return torch.linalg.matrix_norm(matrices, 2).amax(1)


def measure(start: str, depths: list[int], fine: int, times: int) -> tuple[list[Row], float]:
    """The rows, and by how much halving the step of the integrator changes the weights."""
    initial, problem = INITIAL[start], Regression(INITIAL[start])
    trained = {
        depth: problem.train(initial(layers(depth)), times)
        for depth in progress([*depths, fine, 2 * fine], "training", len(depths) + 2)
    }
    psi = limit(trained.pop(fine), trained.pop(2 * fine))
    flow = torch.stack([product(weights, "heun") for weights in psi])
    rows = []
    for depth, weights in trained.items():
        l2, largest = distance(weights, psi)
        columns = {
            "time": TIME * torch.arange(times) / (times - 1),
            "l2_distance": l2,
            "largest_distance": largest,
            "output_distance": (torch.stack(list(map(product, weights))) - flow).norm(dim=(1, 2)),
            "change_in_depth": depth * spectral(weights.diff(dim=1)),
            "norm": spectral(weights),
            "loss": torch.stack(list(map(problem.loss, weights))),
        }
        rows += [
            {"start": start, "depth": depth, **dict(zip(columns, values, strict=True))}
            for values in zip(*(column.tolist() for column in columns.values()), strict=True)
        ]
    halved = problem.train(initial(layers(depths[0])), times, steps=2)
    return rows, float((halved - trained[depths[0]]).abs().max())


def judge(start: str, rows: list[Row], depths: list[int]) -> list[Verdict]:
    problem = Regression(INITIAL[start])

    def largest(name: str, depth: int) -> float:
        """Over training time."""
        return max(row[name] for row in rows if row["depth"] == depth)

    def falls(claim: str, name: str) -> Verdict:
        errors = [largest(name, depth) for depth in depths]
        deep = [i for i, depth in enumerate(depths) if depth >= 16]
        fitted = slope([depths[i] for i in deep], [errors[i] for i in deep])
        numbers = f"slope {fitted:.3f}, {errors[0]:.1e} at N = {depths[0]}, {errors[-1]:.1e} at "
        return Verdict(claim, abs(fitted + 1) < 0.15, f"{numbers}{depths[-1]}")

    begin = [row for row in rows if row["time"] == 0]
    # ‖Π − B‖_Σ itself keeps to the assumption, so ℓ does with the factor ½ and without it.
    distances = [math.sqrt(2 * row["loss"]) / problem.allowed for row in begin]
    norm = max(row["norm"] for row in begin)
    change = {depth: largest("change_in_depth", depth) for depth in depths}
    allowed = max(row["change_in_depth"] for row in begin) + 0.5
    first = {row["depth"]: row["loss"] for row in begin}
    decays = [
        row["loss"] / first[row["depth"]] * math.exp(2 / math.e * problem.m * row["time"])
        for row in rows
    ]
    end = max(row["loss"] / first[row["depth"]] for row in rows if row["time"] == TIME)
    verdicts = [
        Verdict(
            "assumption 1 is met",
            max(distances) < 1 and norm <= 0.25 + 1e-12,
            f"√ℓ(0) at most {max(distances):.2f} of what is allowed, ‖θ(0)‖ at most {norm:.2f}",
        ),
        falls("‖ψ_N − ψ‖₂ falls as 1/N, uniformly in time", "l2_distance"),
        falls("‖ψ_N − ψ‖ falls as 1/N, uniformly in depth and time", "largest_distance"),
        falls(
            "Π converges to the flow of the limit's ODE as 1/N, uniformly in time",
            "output_distance",
        ),
        Verdict(
            "N‖θ_{n+1} − θ_n‖ ≤ C_0 + 1/2 and ‖θ‖ < 1/2 at all times and depths",
            max(change.values()) <= allowed and max(row["norm"] for row in rows) < 0.5,
            f"N‖θ_{{n+1}} − θ_n‖ at most {change[depths[0]]:.4f} at N = {depths[0]}, "
            f"{change[depths[-1]]:.4f} at {depths[-1]}, bound {allowed:.2f}; ‖θ‖ at most "
            f"{max(row['norm'] for row in rows):.2f}",
        ),
        Verdict(
            "the loss converges, at the rate of the proof or faster",
            max(decays) <= 1 + 1e-12 and end < 1e-3,
            f"ℓ({TIME:g})/ℓ(0) at most {end:.0e}",
        ),
    ]
    return [Verdict(f"{start} weights: {v.claim}", v.holds, v.numbers) for v in verdicts]


def draw(title: str, rows: list[Row], depths: list[int]) -> Figure:
    figure, (image, rates, changes) = panels(3, title, width=5)
    times = sorted({row["time"] for row in rows})

    def column(name: str, **where: object) -> list[float]:
        return [row[name] for row in rows if where.items() <= row.items()]

    # At t = 0 equal weights have no error, which a logarithm cannot show.
    pixels = [column("l2_distance", start="equal", depth=depth)[1:] for depth in depths]
    mesh = image.pcolormesh(times[1:], depths, pixels, norm=LogNorm(), cmap="magma")
    image.grid(visible=False)
    image.set_yscale("log", base=2)
    powers = [depth for depth in depths if depth.bit_count() == 1]
    image.set_yticks(powers, [f"{depth}" for depth in powers])
    image.set(xlabel="training time t", ylabel="depth N")
    image.set_title("‖ψ_N(·, t) − ψ(·, t)‖₂, equal at the start", fontsize=11)
    figure.colorbar(mesh, ax=image)

    for time in SHOWN_TIMES:
        colour = plt.get_cmap("Blues")(0.4 + 0.6 * time / TIME)
        errors = column("l2_distance", start="equal", time=time)
        rates.plot(depths, errors, "o-", ms=3, color=colour, label=f"equal, t = {time:g}")
    errors = column("l2_distance", start="smooth", time=TIME)
    rates.plot(depths, errors, "o-", ms=3, color=COLOUR["smooth"], label=f"smooth, t = {TIME:g}")
    rates.plot(depths, [0.2 / depth for depth in depths], "--", color="grey", label="slope −1")
    rates.set_yscale("log")
    rates.set_title("‖ψ_N(·, t) − ψ(·, t)‖₂ falls as 1/N", fontsize=11)
    depth_axis(rates, powers)
    rates.legend(frameon=False, fontsize=9, loc="lower left")

    shown = powers[::2]
    for start, colour in COLOUR.items():
        for style, depth in zip((":", "-.", "--", "-"), shown, strict=False):
            values = column("change_in_depth", start=start, depth=depth)
            changes.plot(times[1:], values[1:], style, color=colour, label=f"{start}, N = {depth}")
        first = max(column("change_in_depth", start=start, time=0.0))
        changes.axhline(first + 0.5, color=colour, lw=0.8, label=f"{start}, bound")
    changes.set_yscale("log")
    changes.set_xlabel("training time t")
    changes.set_title("max N‖θₙ₊₁ − θₙ‖, and the bound of the proof", fontsize=11)
    changes.legend(frameon=False, fontsize=8, ncols=2, loc="center right")
    return figure


def run(options: Options) -> Result:
    depths = [4, 8, 16, 32, 64]
    if not options.quick:
        depths = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    fine, times = 3 * depths[-1], 33 if options.quick else 65
    title = "Figure 2: the weights of a deep linear ResNet in training converge to a limit"
    measured = {}
    rows = options.rows
    for start in INITIAL:
        measured[start] = measure(start, depths, fine, times)
        rows += measured[start][0]
    halving = max(change for _, change in measured.values())
    notes = [
        f"{DIM} × {DIM} weights, {SAMPLES} samples, float64. ψ from depths {fine} and {2 * fine}. "
        f"Halving the step of the gradient flow's integration changes weights by at most "
        f"{halving:.0e}. The loss has the factor ½ that the paper's gradient and proofs have."
    ]
    verdicts = [v for start, (some, _) in measured.items() for v in judge(start, some, depths)]
    return Result(title, rows, draw(title, rows, depths), verdicts, notes)


if __name__ == "__main__":
    main(run, __doc__)
