"""Does a language model learn as well with recorded increments as with exact gradients?

    python benchmarks/train_lm.py [--steps 1500] [--seeds 3] [--quick] [--resume]

A byte-level GPT (8 pre-norm layers of width 96, context 64, batch 32) is trained on the Python
files of the standard library, of which every tenth is held out. Its layers compute x + f(x). It is
trained with exact backprop, under bfloat16 autocast, and with the reverse rule ``recorded`` of 8, 4
and 2 bits: the same initial weights and the same batches for the same seed. The loss on text that
is held out is measured every 50 steps, in float32.

A setting *ends within the spread of exact backprop* if the mean of its last losses over the seeds
is above that of exact backprop by no more than the seeds of exact backprop differ.

Writes train_lm.csv and train_lm.png and prints the verdicts. If the script is stopped, trainings
that are complete are kept; ``--resume`` goes on with the others.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import matplotlib as mpl

mpl.use("Agg")
import jobs
import matplotlib.pyplot as plt
import torch
from colours import COLOURS
from networks import STANDARD
from networks.gpt import ByteGPT
from output import add_out, machine, results_folder, write_csv
from progress import Stoppable, duration
from samples import standard_library, windows
from torch import Generator, Tensor

EXACT, AUTOCAST = "exact backprop", "bfloat16 autocast"
WAYS: dict[str, dict[str, Any]] = {
    EXACT: {"backward": "stored"},
    AUTOCAST: {"backward": "stored"},
    **{f"recorded, {b} bits": {"reverse": "recorded", "bits": b} for b in (8, 4, 2)},
}
"""The options of the stage."""
COLOUR = {
    EXACT: COLOURS[STANDARD],
    AUTOCAST: "#e69f00",
    **dict(zip(list(WAYS)[2:], ("#0072b2", "#009e73", "#cc3399"), strict=True)),
}
LAYERS, WIDTH, CONTEXT, BATCH = 8, 96, 64, 32
EVERY = 50
"""Steps between two measurements of the loss on held-out text; in short trainings there are ten
measurements."""
HELD_OUT_BATCHES = 8
RATE, WARM_UP = 2e-3, 100
"""The largest learning rate, and the steps until it is reached. Then it falls to zero by the half
of a cosine."""
STEP_SECONDS = 0.28
"""Of a training step on a free core, in the mean of all settings."""


@dataclass(frozen=True)
class Job:
    way: str
    seed: int
    steps: int


@dataclass
class Point:
    """A line of the CSV."""

    way: str
    seed: int
    steps: int
    """Of the whole training."""
    step: int
    loss: float
    """On held-out text, in nats per byte."""


def measured_at(steps: int) -> list[int]:
    """The steps of a training after which the loss on held-out text is measured."""
    every = min(EVERY, math.ceil(steps / 10))
    return [*range(every, steps, every), steps]


def train(job: Job) -> list[Point]:
    torch.manual_seed(job.seed)
    generator = Generator().manual_seed(job.seed)
    model = ByteGPT(LAYERS, WIDTH, CONTEXT)
    model.stage.configure(**WAYS[job.way])
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    held_out, measured = held_out_batches(), set(measured_at(job.steps))
    points = [Point(job.way, job.seed, job.steps, 0, evaluate(model, held_out))]
    for step in range(1, job.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * factor(step, job.steps)
        inputs, targets = model.batch(BATCH, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.way == AUTOCAST):
            loss = model.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in measured:
            points.append(Point(job.way, job.seed, job.steps, step, evaluate(model, held_out)))
            jobs.part_done()
    return points


def factor(step: int, steps: int) -> float:
    """What the largest learning rate is multiplied by."""
    warm_up = min(WARM_UP, steps // 2)
    if step <= warm_up:
        return step / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def held_out_batches() -> list[tuple[Tensor, Tensor]]:
    """The same for all trainings."""
    generator, text = Generator().manual_seed(0), standard_library().held_out
    return [windows(text, BATCH, CONTEXT, generator) for _ in range(HELD_OUT_BATCHES)]


@torch.no_grad()
def evaluate(model: ByteGPT, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    losses = [model.loss(model(inputs), targets).item() for inputs, targets in batches]
    return sum(losses) / len(losses)


# ---------------------------------------------------------------------------------------- results


def last_losses(points: Sequence[Point], way: str) -> list[float]:
    return [p.loss for p in points if p.way == way and p.step == p.steps]


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def verdicts(points: Sequence[Point]) -> list[str]:
    """One for each setting beside exact backprop."""
    exact = last_losses(points, EXACT)
    if len(exact) < 2:
        return [f"no verdict: the spread of {EXACT} takes two seeds, {len(exact)} of it complete"]
    lines = [f"{EXACT} ends at {said(exact)}"]
    for way in WAYS:
        mine = last_losses(points, way)
        if way == EXACT or not mine:
            continue
        above = statistics.mean(mine) - statistics.mean(exact)
        within = above <= spread(exact)
        lines.append(
            f"{way} {'ends within' if within else 'DOES NOT END within'} the spread of {EXACT}: "
            f"{said(mine)}, {abs(above):.3f} {'above' if above > 0 else 'below'} in the mean, "
            f"spread {spread(exact):.3f}"
        )
    return lines


def said(losses: Sequence[float]) -> str:
    return f"{statistics.mean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"


def plot(points: Sequence[Point], path: Path) -> None:
    """The curves, mean and range over the seeds, and the last losses in large."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.8), width_ratios=(1.5, 1), constrained_layout=True
    )
    ways = [way for way in WAYS if last_losses(points, way)]
    for way in ways:
        steps = sorted({p.step for p in points if p.way == way})
        losses = [[p.loss for p in points if (p.way, p.step) == (way, step)] for step in steps]
        exact = way == EXACT
        style = {"linewidth": 4, "alpha": 0.5} if exact else {"linewidth": 1.6}
        left.plot(steps, list(map(statistics.mean, losses)), color=COLOUR[way], **style, label=way)
        left.fill_between(
            steps, list(map(min, losses)), list(map(max, losses)), color=COLOUR[way], alpha=0.15
        )
    left.set(
        title="While training", xlabel="step", ylabel="loss on held-out text, nats per byte",
        ylim=(None, 1.05 * max(p.loss for p in points if p.step >= p.steps / 15)),
    )  # fmt: skip
    left.legend(frameon=False)
    exact_losses = last_losses(points, EXACT)
    if exact_losses:
        right.axhspan(
            statistics.mean(exact_losses) - spread(exact_losses),
            statistics.mean(exact_losses) + spread(exact_losses),
            color=COLOUR[EXACT], alpha=0.15, linewidth=0,
            label="mean of exact backprop ± spread of its seeds",
        )  # fmt: skip
    for place, way in enumerate(ways):
        mine = last_losses(points, way)
        right.plot([place] * len(mine), mine, "o", color=COLOUR[way], markersize=5, alpha=0.6)
        right.plot(place, statistics.mean(mine), "_", color=COLOUR[way], markersize=30, mew=3)
    right.set(title="At the end: every seed, and the mean", xlim=(-0.6, len(ways) - 0.4))
    right.set_xticks(range(len(ways)), [way.replace(" ", "\n", 1) for way in ways])
    if exact_losses:
        right.legend(frameon=False, loc="upper left")
        low, high = right.get_ylim()
        right.set_ylim(low, high + 0.15 * (high - low))
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"A byte-level GPT of {LAYERS} layers, x + f(x), trained with exact gradients, under "
        "autocast and with recorded increments"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def read(path: Path, steps: int) -> list[Point]:
    """The points of trainings of so many steps; none, if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        points = [
            Point(r["way"], int(r["seed"]), int(r["steps"]), int(r["step"]), float(r["loss"]))
            for r in csv.DictReader(file)
        ]
    return [point for point in points if point.steps == steps]


def write(path: Path, points: Sequence[Point]) -> None:
    about = {"machine": machine()}
    write_csv(path, [{**asdict(point), **about} for point in points])


# -------------------------------------------------------------------------------------- the script


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="of a training (default: 1500)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default: 3)")
    parser.add_argument("--quick", action="store_true", help="30 steps, two seeds")
    parser.add_argument("--resume", action="store_true", help="keep trainings that are complete")
    add_out(parser)
    args = parser.parse_args(arguments)
    if args.quick:
        args.steps, args.seeds = 30, 2
    if min(args.steps, args.seeds) < 1:
        parser.error("--steps and --seeds must be at least 1")

    # Its own file: other runs write other results while this one is stopped.
    partial = results_folder(parser, args, published=False) / f"train_lm_{args.steps}_steps.csv"
    points = read(partial, args.steps) if args.resume else []
    complete = {(p.way, p.seed) for p in points if p.step == p.steps}
    todo = [
        Job(way, seed, args.steps)
        for seed in range(args.seeds)
        for way in reversed(WAYS)  # those that take longest first
        if (way, seed) not in complete
    ]
    seconds = len(todo) * args.steps * STEP_SECONDS / jobs.WORKERS
    print(f"{len(todo)} trainings of {args.steps} steps, about {duration(seconds)} on free cores")
    with Stoppable() as run:
        parts = len(measured_at(args.steps))
        for _, mine in jobs.side_by_side(train, todo, unit="measurement", parts=parts):
            points += mine
            write(partial, points)  # after each: nothing is lost
    if points:
        order = list(WAYS)
        points.sort(key=lambda p: (order.index(p.way), p.seed, p.step))
        folder = results_folder(parser, args, besides=["resume"], published=not run.stopped)
        write(folder / "train_lm.csv", points)
        plot(points, folder / "train_lm.png")
        if not run.stopped:
            partial.unlink(missing_ok=True)
        print(f"{machine()}\n", *verdicts(points), sep="\n")
        print(f"\nWrote {folder / 'train_lm'}.csv and .png")
    run.end()


if __name__ == "__main__":
    main()
