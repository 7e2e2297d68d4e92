"""Table 1 and figure 3a: what the factor 1/N does to the accuracy of a ResNet.

    python benchmarks/paper/fig3a_step.py
    python benchmarks/paper/fig3a_step.py --data cifar-10-batches-py --device cuda

The paper: a ResNet-101 with the step 1/N is as accurate as the classical one, x + f(x) (table 1).
When the blocks of a layer share their weights, the classical one behaves badly at large depth, and
the one with 1/N still works well (figure 3a). Everything is trained by backprop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from architectures import deep
from data import load
from experiment import Options, Result, Verdict, depth_axis, main, panels
from jobs import side_by_side
from matplotlib.figure import Figure
from trainer import TRAINING, History, Recipe, train

RESNET_101 = (3, 4, 23, 3)
BLOCKS = (2, 4, 8, 16)
"""Per layer, with tied weights."""
QUICK_BLOCKS = (2, 4, 16)
SEEDS = 3
STEPS = {"1/N": None, "1": 1.0}
COLOURS = {"1/N": "#0072b2", "1": "#e69f00"}


@dataclass(frozen=True)
class Job:
    layers: tuple[int, ...]
    tied: bool
    step: str
    seed: int
    recipe: Recipe
    data: Path | None
    device: str


def train_one(job: Job) -> History:
    torch.manual_seed(job.seed)
    data = load(job.data)
    model = deep(data, job.layers, tied=job.tied, step=STEPS[job.step], backward="stored")
    return train(model, data, job.recipe, seed=job.seed, device=job.device)


# ------------------------------------------------------------------------------------------ claims


Accuracies = dict[str, list[float]]
"""Of all seeds, by step."""


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def text(values: Sequence[float]) -> str:
    return f"{median(values):.1%} [{min(values):.1%}, {max(values):.1%}]"


def verdicts(untied: Accuracies, tied: dict[int, Accuracies]) -> list[Verdict]:
    """A deep tied network works if it is within a tenth of the best depth's accuracy, and behaves
    badly if it is not."""
    medians = {
        step: {blocks: median(of_step[step]) for blocks, of_step in tied.items()} for step in STEPS
    }
    deepest, best = max(tied), max(max(by_depth.values()) for by_depth in medians.values())
    numbers = {
        step: ", ".join(f"{text(of_step[step])} with {blocks}" for blocks, of_step in tied.items())
        for step in STEPS
    }
    return [
        Verdict(
            "the step 1/N does not cost accuracy (table 1)",
            median(untied["1/N"])
            >= median(untied["1"]) - max(spread(untied["1/N"]), spread(untied["1"])),
            f"ResNet-101: {text(untied['1/N'])} with 1/N against {text(untied['1'])} without",
        ),
        Verdict(
            "with tied weights and the step 1/N networks work at all depths (figure 3a)",
            min(medians["1/N"].values()) >= 0.9 * best,
            f"blocks per layer: {numbers['1/N']}",
        ),
        Verdict(
            "with tied weights and without 1/N they behave badly at large depth (figure 3a)",
            medians["1"][deepest] < 0.9 * best,
            f"blocks per layer: {numbers['1']}",
        ),
    ]


# -------------------------------------------------------------------------------------- experiment


def run(options: Options) -> Result:
    data = load(options.data)
    recipe = TRAINING[data.name]
    if options.quick:
        recipe = replace(recipe, epochs=5)
    depths = QUICK_BLOCKS if options.quick else BLOCKS
    networks = [(RESNET_101, False), *(((blocks,) * 4, True) for blocks in reversed(depths))]
    jobs = [
        Job(layers, tied, step, seed, recipe, options.data, options.device)
        for layers, tied in networks
        for step in STEPS
        for seed in range(options.seeds or (2 if options.quick else SEEDS))
    ]
    untied: Accuracies = {step: [] for step in STEPS}
    tied: dict[int, Accuracies] = {blocks: {step: [] for step in STEPS} for blocks in depths}
    rows = options.rows
    for job, history in side_by_side(train_one, jobs, options.device):
        (tied[job.layers[0]] if job.tied else untied)[job.step].append(history.accuracy)
        rows.append(
            {
                "layers": " ".join(map(str, job.layers)),
                "weights": "tied" if job.tied else "untied",
                "step": job.step,
                "seed": job.seed,
                "accuracy": history.accuracy,
                "last_loss": history.last_loss,
                "failed": history.failed or "",
            }
        )
    failed = {
        step: sum(row["failed"] != "" for row in rows if row["step"] == step) for step in STEPS
    }

    def last_loss(step: str) -> float:
        return median(
            row["last_loss"] for row in rows if (row["weights"], row["step"]) == ("untied", step)
        )

    return Result(
        "Table 1, figure 3a: the factor 1/N",
        rows,
        draw(untied, tied, data.name),
        verdicts(untied, tied),
        [
            f"{data.name}, bottlenecks in four layers"
            + (" with a sixteenth of the usual channels" if options.data is None else "")
            + f", {recipe.epochs} epochs of batches of {recipe.batch}, "
            f"{len(untied['1'])} seeds, medians. Not finite, and counted as guessing: "
            f"{failed['1/N']} trainings with 1/N, {failed['1']} without.",
            f"The untied networks end at a training loss of {last_loss('1/N'):.2g} with 1/N, "
            f"{last_loss('1'):.2g} without: if these differ much, the network with the larger one "
            "has not learned its training images yet.",
        ],
        table(untied, data.name),
    )


def table(untied: Accuracies, name: str) -> str:
    return "\n".join(
        [
            "| test accuracy | ResNet-101, x + f(x) | with the step 1/N |",
            "|---|---|---|",
            f"| {name} | {text(untied['1'])} | {text(untied['1/N'])} |",
        ]
    )


def draw(untied: Accuracies, tied: dict[int, Accuracies], name: str) -> Figure:
    figure, (left, right) = panels(2, f"The step 1/N against the classical step 1, on {name}")
    labels = {"1/N": "x + f(x)/N", "1": "x + f(x)"}
    for place, step in enumerate(("1", "1/N")):
        values = [100 * accuracy for accuracy in untied[step]]
        left.bar(place, median(values), 0.5, color=COLOURS[step], alpha=0.35)
        left.plot([place] * len(values), values, "o", color=COLOURS[step], markersize=5)
    left.set_xticks([0, 1], [labels["1"], labels["1/N"]])
    left.set_xlim(-0.6, 1.6)
    left.set_ylim(0, 100)
    left.set_ylabel("test accuracy in %")
    left.set_title("Table 1: ResNet-101, untied (median, seeds)")
    depths = sorted(tied)
    for step, colour in COLOURS.items():
        values = [[100 * accuracy for accuracy in tied[blocks][step]] for blocks in depths]
        right.plot(depths, [median(v) for v in values], "o-", color=colour, label=labels[step])
        right.fill_between(
            depths,
            [min(v) for v in values],
            [max(v) for v in values],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    depth_axis(right, depths, "blocks per layer")
    right.set_ylim(0, 100)
    right.set_ylabel("test accuracy in %")
    right.set_title("Figure 3a: tied weights (median, range)")
    right.legend(frameon=False, loc="center right")
    return figure


if __name__ == "__main__":
    main(run, __doc__)
