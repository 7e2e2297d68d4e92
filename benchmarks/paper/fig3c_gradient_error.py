"""Figure 3c: the relative error between the gradients of the adjoint method and the true ones, of
every parameter of a trained simple ResNet, against its depth.

    python benchmarks/paper/fig3c_gradient_error.py

The paper: the deeper the network, the better the approximation; and a HeunNet approximates the true
gradient better than a ResNet. Both with the rule `paper`; `refined` is shown beside it.
"""

from __future__ import annotations

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
from trainer import SIMPLE, Recipe, train

from resode_kernels.models import SimpleResNet

DEPTHS = (4, 8, 16, 32, 64)
QUICK_DEPTHS = (4, 8, 16)
CHANNELS = 16
BATCH = 250
RULES = ("paper", "refined")
NETWORKS = {"euler": "ResNet (Euler)", "heun": "HeunNet"}


@dataclass(frozen=True)
class Job:
    depth: int
    scheme: str
    recipe: Recipe
    data: Path | None
    device: str


def measure_one(job: Job) -> list[dict[str, Any]]:
    """A row for every parameter of the stage, after a training by backprop."""
    torch.manual_seed(0)
    data = load(job.data)
    model = simple(data, job.depth, channels=CHANNELS, scheme=job.scheme, backward="stored")
    history = train(model, data, job.recipe, device=job.device)
    x, labels = (tensor.to(job.device) for tensor in next(data.train.batches(BATCH)))
    exact = gradients(model, x, labels, backward="stored")
    with torch.no_grad():
        state = model.stem(x)
        change = float((model.stage(state) - state).norm() / state.norm())
    rows = []
    for rule in RULES:
        approximate = gradients(model, x, labels, backward="adjoint", reverse=rule)
        rows += [
            {
                "depth": job.depth,
                "scheme": job.scheme,
                "rule": rule,
                "parameter": name,
                "relative_error": float((approximate[name] - true).norm() / true.norm()),
                "test_error": history.error,
                "change_of_state": change,
            }
            for name, true in exact.items()
        ]
    return rows


def gradients(
    model: SimpleResNet, x: torch.Tensor, labels: torch.Tensor, **how: Any
) -> dict[str, torch.Tensor]:
    """Of the stage's parameters, by name; normalizations are by the batch, as in training."""
    model.stage.configure(**how)
    model.train()
    loss = F.cross_entropy(model(x), labels)
    named = dict(model.stage.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


Errors = dict[tuple[str, str], dict[int, list[float]]]
"""Of all parameters, by scheme and rule, by depth."""


def verdicts(errors: Errors, depths: Sequence[int]) -> list[Verdict]:
    medians = {
        key: [median(of_depth[depth]) for depth in depths] for key, of_depth in errors.items()
    }

    def text(scheme: str, rule: str = "paper") -> str:
        values = medians[scheme, rule]
        return (
            ", ".join(
                f"{value:.1e} at {depth}" for depth, value in zip(depths, values, strict=True)
            )
            + f", slope {slope(depths, values):.2f}"
        )

    falls = {
        scheme: all(after < before for before, after in pairwise(medians[scheme, "paper"]))
        for scheme in NETWORKS
    }
    euler, heun = medians["euler", "paper"], medians["heun", "paper"]
    return [
        *(
            Verdict(
                f"the deeper, the better the gradients of a {name}", falls[scheme], text(scheme)
            )
            for scheme, name in NETWORKS.items()
        ),
        Verdict(
            "a HeunNet approximates the true gradient better than a ResNet, at every depth",
            all(h < e for h, e in zip(heun, euler, strict=True)),
            "medians relative to the ResNet's: "
            + ", ".join(
                f"{h / e:.2f} at {depth}" for depth, h, e in zip(depths, heun, euler, strict=True)
            ),
        ),
    ]


def run(options: Options) -> Result:
    depths = QUICK_DEPTHS if options.quick else DEPTHS
    data = load(options.data)
    recipe = SIMPLE[data.name]
    jobs = [
        Job(depth, scheme, recipe, options.data, options.device)
        for depth in reversed(depths)
        for scheme in ("heun", "euler")
    ]
    measured = side_by_side(measure_one, jobs, "figure 3c", options.device)
    rows = [row for of_job in measured for row in of_job]
    errors: Errors = {(scheme, rule): {} for scheme in NETWORKS for rule in RULES}
    for row in rows:
        of_depth = errors[row["scheme"], row["rule"]]
        of_depth.setdefault(row["depth"], []).append(row["relative_error"])
    return Result(
        "Figure 3c: error of the adjoint method's gradients against depth",
        rows,
        draw(errors, depths, data.name),
        verdicts(errors, depths),
        [
            f"{data.name}, {CHANNELS} channels, trained by backprop for {recipe.epochs} epochs; "
            f"gradients of {min(BATCH, len(data.train))} training images, in float32. The blocks' "
            "convolutions start independent of one another: weights are not smooth in depth.",
            "Errors can be compared if the stages do as much work at all depths. They change the "
            "state by, relative to its norm: "
            + ", ".join(
                f"{change:.2f} ({scheme}, N = {depth})"
                for depth, scheme, change in sorted(
                    {(row["depth"], row["scheme"], row["change_of_state"]) for row in rows}
                )
            )
            + ".",
        ],
    )


def draw(errors: Errors, depths: Sequence[int], name: str) -> Figure:
    figure, axes = panels(2, f"Each point is one parameter: trained simple ResNet on {name}")
    generator = torch.Generator().manual_seed(0)
    for one, rule in zip(axes, RULES, strict=True):
        for scheme, label in NETWORKS.items():
            for place, depth in enumerate(depths):
                values = errors[scheme, rule][depth]
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
        one.set_title("the paper's rule" if rule == "paper" else f"rule: {rule}")
        one.legend(frameon=False, loc="upper right")
    axes[0].set_ylabel("relative error of the gradient")
    low, high = (pick(one.get_ylim()[i] for one in axes) for i, pick in ((0, min), (1, max)))
    for one in axes:
        one.set_ylim(low, 2 * high)
    return figure


if __name__ == "__main__":
    main(run, __doc__)
