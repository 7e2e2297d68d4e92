"""Figure 3c: the relative error between the gradients of the adjoint method and the true ones, of
every parameter of a trained simple ResNet, against its depth.

    python benchmarks/paper/fig3c_gradient_error.py

The paper: the deeper the network, the better the approximation; and a HeunNet approximates the true
gradient better than a ResNet. Both with the rule `paper`; `refined` is shown beside it.

Networks trained at each depth do not all do as much work with their blocks, and less work means a
smaller error. So one of them is also transferred to every depth, as in the authors' code: every
block is the trained one nearest in depth.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from architectures import simple
from data import load
from experiment import COLOURS, Options, Result, Verdict, main, panels, slope
from jobs import side_by_side
from matplotlib.figure import Figure
from torch import Tensor
from trainer import SIMPLE, Recipe, train

import resode_kernels as rk
from resode_kernels.models import SimpleResNet

DEPTHS = (4, 8, 16, 32, 64)
QUICK_DEPTHS = (4, 8, 16)
CHANNELS = 16
BATCH = 250
RULES = ("paper", "refined")
BASE = 16
"""The depth of the network that is transferred."""
KINDS = {
    "paper": "trained at each depth, the paper's rule",
    "refined": "trained at each depth, rule refined",
    "transferred": "trained at N = {base}, transferred, the paper's rule",
}
NETWORKS = {"euler": "ResNet (Euler)", "heun": "HeunNet"}


@dataclass(frozen=True)
class Job:
    """A training at ``depth``, and measurements at ``others`` with the blocks transferred."""

    depth: int
    others: tuple[int, ...]
    scheme: str
    recipe: Recipe
    data: Path | None
    device: str


def measure_one(job: Job) -> list[dict[str, Any]]:
    """Rows for every parameter of the stage, after a training by backprop."""
    torch.manual_seed(0)
    data = load(job.data)
    model = simple(data, job.depth, channels=CHANNELS, scheme=job.scheme, backward="stored")
    history = train(model, data, job.recipe, device=job.device)
    batch = tuple(tensor.to(job.device) for tensor in next(data.train.batches(BATCH)))
    measured = [(job.depth, kind, row) for kind in RULES for row in errors_of(model, batch, kind)]
    for depth in job.others:
        rows = errors_of(transferred(model, depth), batch, "paper")
        measured += [(depth, "transferred", row) for row in rows]
    return [
        {
            "depth": depth,
            "scheme": job.scheme,
            "kind": kind,
            **row,
            "trained_at": job.depth,
            "test_error": history.error,
        }
        for depth, kind, row in measured
    ]


def transferred(model: SimpleResNet, depth: int) -> SimpleResNet:
    """The same network with its blocks repeated or left out as the other depth needs."""
    other = copy.deepcopy(model)
    other.stage = rk.deepen(model.stage, depth)
    return other


def errors_of(model: SimpleResNet, batch: tuple[Tensor, ...], rule: str) -> list[dict[str, Any]]:
    """A row per parameter of the stage."""
    exact = gradients(model, *batch, backward="stored")
    approximate = gradients(model, *batch, backward="adjoint", reverse=rule)
    with torch.no_grad():
        state = model.stem(batch[0])
        change = float((model.stage(state) - state).norm() / state.norm())
    return [
        {
            "parameter": name,
            "relative_error": float((approximate[name] - true).norm() / true.norm()),
            "change_of_state": change,
        }
        for name, true in exact.items()
    ]


def gradients(model: SimpleResNet, x: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    """Of the stage's parameters, by name; normalizations are by the batch, as in training."""
    model.stage.configure(**options)
    model.train()
    loss = F.cross_entropy(model(x), labels)
    named = dict(model.stage.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


Errors = dict[tuple[str, str], dict[int, list[float]]]
"""Of all parameters, by scheme and kind, by depth."""


def verdicts(errors: Errors, depths: Sequence[int]) -> list[Verdict]:
    medians = {
        key: [median(of_depth[depth]) for depth in depths] for key, of_depth in errors.items()
    }

    def deeper_is_better(scheme: str, kind: str, condition: str) -> Verdict:
        values = medians[scheme, kind]
        numbers = [f"{v:.1e} at {depth}" for depth, v in zip(depths, values, strict=True)]
        return Verdict(
            f"the deeper, the better the gradients of a {NETWORKS[scheme]}, {condition}",
            all(after < before for before, after in pairwise(values)),
            f"medians {', '.join(numbers)}; slope {slope(depths, values):.2f}",
        )

    def heun_is_better(kind: str, condition: str) -> Verdict:
        ratios = [h / e for h, e in zip(medians["heun", kind], medians["euler", kind], strict=True)]
        numbers = [f"{ratio:.2f} at {depth}" for depth, ratio in zip(depths, ratios, strict=True)]
        return Verdict(
            f"a HeunNet approximates the true gradient better than a ResNet, {condition}",
            max(ratios) < 1,
            f"medians relative to the ResNet's: {', '.join(numbers)}",
        )

    conditions = {"paper": "trained at each depth", "transferred": "with the same blocks"}
    return [
        verdict
        for kind, condition in conditions.items()
        for verdict in (
            *(deeper_is_better(scheme, kind, condition) for scheme in NETWORKS),
            heun_is_better(kind, condition),
        )
    ]


def run(options: Options) -> Result:
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    data = load(options.data)
    recipe = SIMPLE[data.name]
    jobs = [
        Job(depth, depths if depth == BASE else (), scheme, recipe, options.data, options.device)
        for depth in reversed(depths)
        for scheme in ("heun", "euler")
    ]
    rows = options.rows
    for _, of_job in side_by_side(measure_one, jobs, options.device):
        rows += of_job
    errors: Errors = {(scheme, kind): {} for scheme in NETWORKS for kind in KINDS}
    changes: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for row in rows:
        of_depth = errors[row["scheme"], row["kind"]]
        of_depth.setdefault(row["depth"], []).append(row["relative_error"])
        if row["scheme"] == "euler":
            changes[row["kind"]][row["depth"]] = row["change_of_state"]

    def work(kind: str) -> str:
        return ", ".join(f"{changes[kind][depth]:.2f} at {depth}" for depth in depths)

    return Result(
        "Figure 3c: error of the adjoint method's gradients against depth",
        rows,
        draw(errors, depths, data.name),
        verdicts(errors, depths),
        [
            f"{data.name}, {CHANNELS} channels, trained by backprop for {recipe.epochs} epochs; "
            f"gradients of {min(BATCH, len(data.train))} training images, in float32. The blocks' "
            "convolutions start independent of one another: weights are not smooth in depth.",
            "How much the stage of a ResNet changes its state, relative to the state's norm: "
            f"{work('paper')} if trained at each depth; {work('transferred')} if transferred. "
            "Where deeper stages do less, that is a part of why their errors are smaller.",
        ],
    )


def draw(errors: Errors, depths: Sequence[int], name: str) -> Figure:
    figure, axes = panels(3, f"Each point is one parameter of a simple ResNet on {name}")
    generator = torch.Generator().manual_seed(0)
    for one, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for scheme, label in NETWORKS.items():
            for place, depth in enumerate(depths):
                values = errors[scheme, kind][depth]
                side = -0.2 if scheme == "euler" else 0.2
                jitter = 0.24 * (torch.rand(len(values), generator=generator) - 0.5)
                one.scatter(
                    place + side + jitter,
                    values,
                    s=3,
                    alpha=0.5,
                    color=COLOURS[scheme],
                    linewidth=0,
                )
                one.plot(
                    [place + side - 0.17, place + side + 0.17],
                    [median(values)] * 2,
                    color=COLOURS[scheme],
                    linewidth=2.5,
                    label=f"{label}: median" if place == 0 else None,
                )
        one.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        one.set_xlabel("depth N")
        one.set_yscale("log")
        one.set_title(title.format(base=BASE), fontsize=10)
        one.set_ylim(1e-7, 1)  # what is below is rounding
    axes[0].set_ylabel("relative error of the gradient")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    main(run, __doc__)
