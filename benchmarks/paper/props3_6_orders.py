"""Propositions 3 to 6: errors of reconstructed states and of gradients against depth.

The paper, of its rule: with Euler's steps ‖x_n − x̃_n‖ ≤ (e^L − 1) C/N + O(1/N²), where C and L
bound f and ∂_x f. The gradient of a layer, which is O(1/N) itself, is off by O(1/N²), so that the
relative error is O(1/N), whether weights are smooth in depth or not (Props. 3, 4). With Heun's
steps and weights that are smooth in depth, both are off by O(1/N²) (Props. 5, 6).

What to expect more precisely, and of the other rules, with h = 1/N. A rule that misses x[n] by
h^(p+1) in one step from the right x[n+1] misses it by h^p after all N steps: it is of order p.

    Euler, paper   order 1: x̃[n+1] − h f_n(x̃[n+1]) misses by h².
    Heun, paper    order 3: the errors of a step, c h³ + O(h⁴), and of the step back, −c h³ + O(h⁴),
                   cancel but for h⁴, as with every scheme of even order.
    refined k      order k + 1, with Heun k + 3: paper's error gets the factor h k times, from k − 1
                   corrections and from the step itself.
    predicted k    order k + 1: φ is extrapolated with an error h^k, so p misses by h^(k+1) and the
                   next state by h^(k+2), with either scheme.

Gradients, taken at p, are as good. Without smoothness in depth Heun's errors do not cancel and
nothing can be extrapolated: refined k keeps k + 1, paper and predicted have order 1. Then errors
that add up have random signs, which may gain half an order.

Measured: max_n ‖x_n − x̃_n‖ over a batch, and the relative error of all parameter gradients against
exact ones, for a tanh MLP in float64 with weights that are tied, smooth (linear in depth) or
independent.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from experiment import COLOURS, Options, Result, Verdict, depth_axis, main, panels, progress, slope
from matplotlib.figure import Figure
from states import reconstruction, trajectory
from torch import Tensor

import resode_kernels as rk

DIM, BATCH = 32, 64
SPREADS = {"w1": DIM**-0.5, "b1": 0.1, "w2": DIM**-0.5, "b2": 0.1}
SCHEMES = ("euler", "heun")
WEIGHTS = ("tied", "smooth", "independent")
ERRORS = ("state_error", "gradient_error")
ROUND_OFF = 1e-13
FITTED = 3
"""Orders are fitted to so many points, the deepest: they are asymptotic."""

Row = dict[str, Any]


class Rule(NamedTuple):
    scheme: str
    name: str
    k: int

    def order(self, weights: str) -> int:
        """As expected."""
        if weights == "independent":
            return self.k + 1 if self.name == "refined" else 1
        gain = 2 if self.scheme == "heun" and self.name != "predicted" else 0
        return gain + (1 if self.name == "paper" else self.k + 1)

    def __str__(self) -> str:
        return self.name if self.name == "paper" else f"{self.name} {self.k}"


RULES = [
    Rule(scheme, name, k)
    for scheme in SCHEMES
    for name, orders in {"paper": [1], "refined": [1, 2, 3], "predicted": [1, 2, 3]}.items()
    for k in orders
]


# ------------------------------------------------------------------------------------- measuring


def network(weights: str, scheme: str, depth: int, seed: int) -> rk.MLPStage:
    stage = rk.MLPStage(DIM, DIM, depth, tied=weights == "tied", scheme=scheme, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, spread in SPREADS.items():
        p = getattr(stage, name).data
        draws = 2 if weights == "smooth" else len(p)
        theta = torch.randn(draws, *p.shape[1:], generator=generator, dtype=p.dtype)
        if weights == "smooth":
            s = torch.linspace(0, 1, len(p), dtype=p.dtype).view(-1, *[1] * (p.dim() - 1))
            theta = (1 - s) * theta[0] + s * theta[1]
        p.copy_(spread * theta)
    return stage


@torch.no_grad()
def bound(stage: rk.MLPStage, states: Tensor) -> float:
    """(e^L − 1) C/N. C and L are the largest at the states of some layers, so rather too small than
    too large."""
    c, lipschitz = 0.0, 0.0
    for n in range(0, stage.depth, max(1, stage.depth // 8)):
        w1, b1, w2, b2 = (p[0 if stage.tied else n] for p in stage.parameters())
        u = torch.tanh(states[n] @ w1.T + b1)
        jacobians = w2 * (1 - u**2).unsqueeze(1) @ w1
        c = max(c, float((u @ w2.T + b2).norm(dim=1).max()))
        lipschitz = max(lipschitz, float(torch.linalg.matrix_norm(jacobians, 2).max()))
    return math.expm1(lipschitz) * c / stage.depth


def gradients(stage: rk.MLPStage, x: Tensor, g: Tensor) -> Tensor:
    parts = torch.autograd.grad(stage(x), list(stage.parameters()), g)
    return torch.cat([part.flatten() for part in parts])


def measure(weights: str, scheme: str, depth: int, seed: int) -> Iterator[Row]:
    """A row for every rule."""
    stage = network(weights, scheme, depth, seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    x, g = torch.randn(2, BATCH, DIM, generator=generator, dtype=torch.float64)
    states, exact = trajectory(stage, x), gradients(stage.configure(backward="stored"), x, g)
    for rule in (rule for rule in RULES if rule.scheme == scheme):
        stage.configure(backward="adjoint", reverse=rule.name, order=rule.k)
        published = rule == RULES[0]
        yield {
            "weights": weights,
            "scheme": scheme,
            "rule": str(rule),
            "depth": depth,
            "state_error": float((reconstruction(stage, states[-1]) - states).norm(dim=-1).max()),
            "prop3_bound": bound(stage, states) if published else math.nan,
            "gradient_error": float((gradients(stage, x, g) - exact).norm() / exact.norm()),
        }


def medians(draws: list[list[Row]]) -> list[Row]:
    """Row by row, of what was measured."""
    names = (*ERRORS, "prop3_bound")
    return [
        same[0] | {name: statistics.median(row[name] for row in same) for name in names}
        for same in zip(*draws, strict=True)
    ]


# --------------------------------------------------------------------------------------- judging


def curve(rows: list[Row], rule: Rule, weights: str, error: str) -> dict[int, float]:
    """The error by depth, as far as it is not round-off."""
    key = {"weights": weights, "scheme": rule.scheme, "rule": str(rule)}.items()
    chosen = [row for row in rows if key <= row.items()]
    return {row["depth"]: row[error] for row in chosen if row[error] > ROUND_OFF}


def fitted(rows: list[Row], rule: Rule, weights: str, error: str) -> float:
    """The order as measured."""
    points = curve(rows, rule, weights, error)
    return -slope(list(points)[-FITTED:], list(points.values())[-FITTED:])


def judge(rows: list[Row]) -> list[Verdict]:
    bounded = [row for row in rows if not math.isnan(row["prop3_bound"])]
    ratios = [row["state_error"] / row["prop3_bound"] for row in bounded]
    verdicts = [
        Verdict(
            "Prop. 3: ‖xₙ − x̃ₙ‖ ≤ (e^L − 1) C/N with Euler's steps and any weights",
            max(ratios) <= 1,
            f"error/bound {min(ratios):.4f} to {max(ratios):.4f}",
        )
    ]
    promises = {
        ("euler", "paper"): " (Props. 3, 4)",
        ("heun", "paper"): ", where Props. 5 and 6 promise 2",
    }
    for rule in RULES:
        fits = [
            fitted(rows, rule, weights, error) for weights in ("tied", "smooth") for error in ERRORS
        ]
        expected = rule.order("smooth")
        verdicts.append(
            Verdict(
                f"{rule.scheme}, {rule}: order {expected} with tied and smooth weights"
                + promises.get((rule.scheme, rule.name), ""),
                all(abs(fit - expected) < 0.15 for fit in fits),
                f"states {fits[0]:.2f}, {fits[2]:.2f}, gradients {fits[1]:.2f}, {fits[3]:.2f}",
            )
        )
    for name, claim in (
        ("paper", "order 1 at least (Props. 3, 4; with Heun's steps 5, 6)"),
        ("refined", "order k + 1 at least"),
        ("predicted", "order 1 at least, no more for gradients"),
    ):
        rules = [rule for rule in RULES if rule.name == name]
        gains = {
            error: [
                fitted(rows, rule, "independent", error) - rule.order("independent")
                for rule in rules
            ]
            for error in ERRORS
        }
        states, of_gradients = gains.values()
        holds = min(states + of_gradients) > -0.15
        verdicts.append(
            Verdict(
                f"{name} with independent weights: {claim}",
                holds and (name == "paper" or max(of_gradients) < 0.15),
                f"better than that by {min(states):.2f} to {max(states):.2f} for states, "
                f"{min(of_gradients):.2f} to {max(of_gradients):.2f} for gradients",
            )
        )
    return verdicts


def table(rows: list[Row]) -> str:
    lines = [
        "| scheme | rule | expected | tied | smooth | independent |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        fits = [
            " / ".join(f"{fitted(rows, rule, weights, error):.2f}" for error in ERRORS)
            for weights in WEIGHTS
        ]
        expected = f"{rule.order('smooth')}, independent {rule.order('independent')}"
        lines.append(f"| {rule.scheme} | {rule} | {expected} | {' | '.join(fits)} |")
    return "Orders, of states / of gradients:\n\n" + "\n".join(lines)


def draw(rows: list[Row], title: str, depths: list[int]) -> Figure:
    columns = [
        ("smooth", "state_error", "states, max ‖xₙ − x̃ₙ‖"),
        ("smooth", "gradient_error", "gradients, relative error"),
        ("independent", "gradient_error", "gradients, relative error"),
    ]
    figure, axes = panels(len(columns), title, width=4.6, rows=len(SCHEMES))
    expected = {"ls": "--", "lw": 0.8, "color": "grey"}
    for one, (scheme, column) in zip(axes, itertools.product(SCHEMES, columns), strict=True):
        weights, error, what = column
        for rule in (rule for rule in RULES if rule.scheme == scheme):
            points = curve(rows, rule, weights, error)
            x, y = list(points), list(points.values())
            marks = {"marker": "os^"[rule.k - 1], "ms": 4, "lw": 1, "color": COLOURS[rule.name]}
            one.plot(x, y, label=str(rule), **marks)
            # the promise starts from the deepest network, where it is asymptotic
            one.plot(x, [y[-1] * (x[-1] / n) ** rule.order(weights) for n in x], **expected)
        one.plot([], [], label="slope that theory promises", **expected)
        one.set_yscale("log")
        depth_axis(one, depths)
        one.set_title(f"{scheme}, {weights} weights:\n{what}", fontsize=10)
    bounds = curve(rows, RULES[0], "smooth", "prop3_bound")
    dots = {"ls": ":", "color": COLOURS["paper"], "label": "paper, bound of Prop. 3"}
    axes[0].plot(list(bounds), list(bounds.values()), **dots)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def run(options: Options) -> Result:
    depths = [8, 16, 48, 96, 192] if options.quick else [8, 16, 32, 64, 128, 256, 512]
    seeds = options.seeds or (1 if options.quick else 3)
    networks = list(itertools.product(WEIGHTS, SCHEMES, depths))
    rows = options.rows
    for case in progress(networks, "network", len(networks)):
        rows += medians([list(measure(*case, seed)) for seed in range(seeds)])
    title = "Propositions 3 to 6: errors of reconstructed states and of gradients"
    notes = [
        f"dim = hidden = {DIM}, batch {BATCH}, weights N(0, 1/{DIM}), biases N(0, 0.01), median "
        f"of {seeds} draws. Orders are those of the {FITTED} deepest points above {ROUND_OFF}."
    ]
    return Result(title, rows, draw(rows, title, depths), judge(rows), notes, table(rows))


if __name__ == "__main__":
    main(run, __doc__)
