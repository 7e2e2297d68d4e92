"""Memory and time of a training step against depth, for standard backprop, checkpointing and the
reverse rules of resode_kernels.

    python benchmarks/memory_vs_depth.py [--stage conv] [--reverse recorded] [--redraw]

Peak memory is the rise of the process's peak over the memory in use before the step, in a fresh
process per point. It contains the gradients of the parameters, which every method needs and which
grow with depth. The activations' share is the peak less these gradients: the picture shows that.
Times are medians of steps that take turns in one process. The relative error is that of all
parameter gradients against those of standard backprop.

Prints the results of each depth as soon as it is measured, at the end by how many states the
activations grow with every block, and writes memory_vs_depth.csv and memory_vs_depth.png; the names
of other stages end in the stage. The picture shows the default rule and "recorded", the table and
the CSV show all. With --reverse the script compares only that rule, with the other ways to keep
less: checkpoints at every block and at every √N-th, and states in bfloat16. If the script is
stopped, it writes the depths that are complete.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from colours import COLOURS
from gate import relative_error, run_step
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from measure import in_fresh_process, interleaved, peak_memory
from networks import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    NETWORKS,
    PER_BLOCK,
    RULES,
    STANDARD,
    WEIGHTS,
    Config,
    Network,
    make_network,
)
from output import RESULTS, add_out, machine, megabytes, results_folder, write_csv
from progress import Progress, Stoppable

from resode_kernels.options import Options

PUBLISHED = ("mlp", "conv", "residual")
"""The stages whose results are published."""
DEFAULT = Options().reverse
LABELS = {
    STANDARD: "standard backprop",
    PER_BLOCK: "checkpoint per block",
    CHECKPOINT: "checkpoints, √N",
    BFLOAT16_STATES: "states in bfloat16",
    **{rule: f"resode: {rule}" for rule in RULES},
}
"""Of the contestants that pictures can show."""
SHOWN = (STANDARD, CHECKPOINT, DEFAULT, "recorded")
"""The contestants in the picture, unless ``--reverse`` chooses them."""
LABEL_HEIGHT = 0.15
"""Of a label of two lines, relative to the picture."""
SECONDS = 4.0
"""For the times of a depth."""
PROCESS = 0.7
"""Seconds that a process of its own takes to start."""
WIDTH = max(map(len, (CHECKPOINT, PER_BLOCK, CHANNELS_LAST)))
"""Of the names in the table."""


@dataclass
class Point:
    """One line of the table."""

    depth: int
    contestant: str
    peak_bytes: int | None
    seconds: float
    seconds_low: float
    seconds_high: float
    time_ratio: float
    gradient_error: float


Names = Sequence[str]


def contestants(config: Config, reverse: str | None) -> Names:
    """Their names; ``reverse``: the option of the script."""
    if reverse is None:
        return NETWORKS[config.stage].contestant_names
    baselines = (STANDARD, PER_BLOCK, CHECKPOINT, BFLOAT16_STATES)
    known = make_network(replace(config, depth=1, batch=1)).training_steps()
    return [name for name in (*baselines, reverse) if name in known]


def training_steps(network: Network, names: Names) -> dict[str, Callable[[], None]]:
    steps = network.training_steps()
    return {name: steps[name] for name in names}


def step_memory(config: Config, contestant: str) -> int:
    """Runs in a process of its own."""
    warm = make_network(replace(config, depth=4))
    warm.training_steps()[contestant]()
    warm.forget()
    network = make_network(config)
    return peak_memory(network.training_steps()[contestant], config.device)


def compare_gradients(network: Network, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Relative gradient errors. Exits if the outputs do not agree."""
    exact = run_step(network, steps[STANDARD])
    errors = {}
    for name, step in steps.items():
        mine = run_step(network, step)
        difference = relative_error(mine.output, exact.output)
        if not difference < 1e-4:
            raise SystemExit(
                f"{name}: the output differs from standard backprop's by {difference:.1e}"
            )
        errors[name] = relative_error(mine.gradients, exact.gradients)
    return errors


def measure(config: Config, names: Names, say: Callable[[str], None]) -> list[Point]:
    """All contestants at one depth."""
    peaks = {}
    for name in names:
        say(f"depth {config.depth}, memory of {name}")
        peaks[name] = in_fresh_process(step_memory, config, name)
    say(f"depth {config.depth}, times")
    network = make_network(config)
    steps = training_steps(network, names)
    errors = compare_gradients(network, steps)
    times = interleaved(
        steps,
        after=network.forget,
        device=config.device,
        seconds=SECONDS,
        rounds=(3, 50),
    )
    unit = times[STANDARD].median
    return [
        Point(
            config.depth, name, peaks[name], t.median, t.low, t.high, t.median / unit, errors[name]
        )
        for name, t in times.items()
    ]  # fmt: skip


def expected_seconds(config: Config, names: Names, depths: Sequence[int]) -> list[float]:
    """How long each depth will take, from the time of a step at the smallest."""
    network = make_network(replace(config, depth=depths[0]))
    steps = training_steps(network, names)
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        steps[STANDARD]()
        taken.append(time.perf_counter() - begin)
        network.forget()
    expected = []
    for depth in depths:
        turn = len(steps) * min(taken) * depth / depths[0]
        # A process takes PROCESS seconds. Memory and gradients take a turn and two, times at least
        # four, and up to three times that if the steps are short and warm up.
        expected.append(PROCESS * len(steps) + 3 * turn + max(SECONDS, 4 * turn))
    return expected


# ---------------------------------------------------------------------------------------- output


def parameter_bytes(config: Config) -> int:
    return sum(p.nbytes for p in make_network(replace(config, batch=1)).stage.parameters())


def activation_bytes(points: Sequence[Point], config: Config) -> list[int | None]:
    """Peaks less the gradients of the parameters."""
    gradients = {
        depth: parameter_bytes(replace(config, depth=depth)) for depth in {p.depth for p in points}
    }
    return [None if p.peak_bytes is None else p.peak_bytes - gradients[p.depth] for p in points]


def growth(points: Sequence[Point], config: Config) -> str:
    """By how many states the activations grow with every block, from the least to the largest depth
    that was measured; only peaks are known, so the numbers are of whole steps."""
    state = make_network(replace(config, depth=1)).x.nbytes
    lines = []
    for name in dict.fromkeys(p.contestant for p in points):
        known = [
            (p.depth, memory)
            for p, memory in zip(points, activation_bytes(points, config), strict=True)
            if p.contestant == name and memory is not None
        ]
        if len(known) > 1:
            (shallow, least), (deep, most) = known[0], known[-1]
            slope = (most - least) / (deep - shallow) / state
            lines.append(f"{name:<{WIDTH}}  {slope:>6.2f} states a block, {shallow} to {deep}")
    return "\n".join(["Growth of the activations with depth", *lines]) + "\n"


def describe(config: Config) -> str:
    hidden = "" if config.stage == "linear" else f", hidden {config.hidden}"
    images = f" images of {config.size} × {config.size}" if config.size > 1 else ""
    return f"width {config.dim}{hidden}, batch {config.batch}{images}"


def heading() -> str:
    line = (
        f"{'depth':>6}  {'':<{WIDTH}}  {'peak memory':>13}  {'activations':>13}  {'time/step':>10}"
        f"  {'vs standard':>11}  {'gradient error':>14}"
    )
    return f"{line}\n{'-' * len(line)}"


def table(points: Sequence[Point], config: Config) -> str:
    lines = []
    for p, activations in zip(points, activation_bytes(points, config), strict=True):
        approximate = p.contestant in (*RULES, BFLOAT16_STATES)
        error = f"{p.gradient_error:.1e}" if approximate else "exact"
        lines.append(
            f"{p.depth:>6}  {p.contestant:<{WIDTH}}  {megabytes(p.peak_bytes):>13}  "
            f"{megabytes(activations):>13}  {1e3 * p.seconds:>7,.1f} ms  {p.time_ratio:>9.2f} x  "
            f"{error:>14}"
        )
    return "\n".join(lines) + "\n"


def plot(points: Sequence[Point], config: Config, path: Path) -> None:
    memory = activation_bytes(points, config)
    with plt.rc_context({"font.size": 12, "axes.titlesize": 14, "axes.titleweight": "bold"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8))
        figure.subplots_adjust(left=0.08, right=0.84, bottom=0.25, top=0.92, wspace=0.72)
        ends: dict[Axes, dict[str, tuple[float, str]]] = {left: {}, right: {}}
        for name in shown(points):
            known = [
                (p.depth, peak / 2**20)
                for p, peak in zip(points, memory, strict=True)
                if p.contestant == name and peak is not None and peak > 0
            ]
            times = [(p.depth, p.time_ratio) for p in points if p.contestant == name]
            for axes, line, text in (
                (left, known, mebibytes),
                (right, times, lambda ratio: f"{ratio:.2f}×"),
            ):
                if line:
                    draw_line(axes, name, line)
                    ends[axes][name] = line[-1][1], text(line[-1][1])
        left.set(yscale="log", title="Activation memory", ylabel="MiB, without parameter gradients")
        left.set_ylim(left.get_ylim()[0] / 2, left.get_ylim()[1] * 2)
        left.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        right.set(title="Time, standard backprop = 1")
        right.set_ylim(0, right.get_ylim()[1])
        right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("depth (residual blocks)")
            axes.set_xticks(sorted({p.depth for p in points}))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            draw_labels(axes, ends[axes])
        figure.text(
            0.5,
            0.02,
            f"{NETWORKS[config.stage].title}, {describe(config)}.\n"
            "Activation memory: peak of a training step less the gradients of the parameters. "
            "Checkpointing: √N segments.",
            ha="center",
            fontsize=11,
            color="#444444",
        )
        figure.savefig(path, dpi=160)
    plt.close(figure)


def shown(points: Sequence[Point]) -> list[str]:
    """The contestants in the picture."""
    names = {p.contestant for p in points}
    chosen = LABELS if BFLOAT16_STATES in names else SHOWN
    return [name for name in chosen if name in names]


def draw_line(axes: Axes, name: str, line: list[tuple[int, float]]) -> None:
    ours = name in RULES
    axes.plot(
        *zip(*line, strict=True),
        color=COLOURS[name],
        marker="o" if ours else "s",
        markersize=7 if ours else 5,
        linewidth=3.5 if ours else 2,
        linestyle="-" if ours else "--",
    )


def draw_labels(axes: Axes, ends: dict[str, tuple[float, str]]) -> None:
    """The name and the last value of every line, right of the picture, at the height of its end and
    below each other."""
    low, high = (axes.transScale.transform((1, y))[1] for y in axes.get_ylim())
    heights = {
        name: (axes.transScale.transform((1, value))[1] - low) / (high - low)
        for name, (value, _) in ends.items()
    }
    top = 1.0 + LABEL_HEIGHT / 2
    room = LABEL_HEIGHT * (len(heights) - 1)
    for name in sorted(heights, key=lambda name: -heights[name]):
        top = max(min(heights[name], top - LABEL_HEIGHT), room)
        room -= LABEL_HEIGHT
        axes.annotate(
            f"{LABELS[name]}\n{ends[name][1]}",
            (1.02, top),
            xycoords="axes fraction",
            va="center",
            fontsize=11,
            color=COLOURS[name],
            weight="bold" if name in RULES else "normal",
            annotation_clip=False,
        )


def mebibytes(value: float) -> str:
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


# -------------------------------------------------------------------------------------- the script


def write(
    folder: Path, config: Config, points: Sequence[Point], reverse: str | None = None
) -> None:
    name = file_name(config.stage, reverse)
    about = {"machine": machine(config.device)}
    rows = [{**asdict(replace(config, depth=p.depth)), **asdict(p), **about} for p in points]
    write_csv(folder / f"{name}.csv", rows)
    plot(points, config, folder / f"{name}.png")
    print(f"Wrote {folder / name}.csv and .png")


def read(path: Path) -> tuple[Config, list[Point]]:
    """What ``write`` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return _parse(Config, rows[0]), [_parse(Point, row) for row in rows]


def _parse(kind: Any, row: dict[str, str]) -> Any:
    kinds = {**get_type_hints(kind), "peak_bytes": int}
    values = {field.name: row[field.name] for field in fields(kind)}
    return kind(**{n: kinds[n](value) if value else None for n, value in values.items()})


def file_name(stage: str, reverse: str | None = None) -> str:
    more = ["" if stage == "mlp" else stage, reverse or ""]
    return "_".join(["memory_vs_depth", *filter(None, more)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--stage", default="mlp", choices=list(NETWORKS))
    parser.add_argument(
        "--reverse",
        choices=RULES,
        help="only this rule, beside checkpoints at every block and at every √N-th and states in "
        "bfloat16 (default: all rules)",
    )
    parser.add_argument("--scheme", default="euler", choices=["euler", "heun"])
    parser.add_argument(
        "--weights",
        default="independent",
        choices=WEIGHTS,
        help="across depth: independent draws as at initialisation (default), smooth (linear "
        "between two draws), or tied",
    )
    parser.add_argument("--dim", type=int, default=64, help="width of the state (default: 64)")
    parser.add_argument(
        "--hidden", type=int, help="width of the hidden layer (default: dim; residual: 4 dim)"
    )
    parser.add_argument("--batch", type=int, help="default: 1024 (conv: 32)")
    parser.add_argument("--size", type=int, help="conv: side of the images (default: 16)")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        help="default: 4 16 64 256 1024 (residual: 4 16 64; conv: 4 16 64 128)",
    )
    add_out(parser)
    parser.add_argument("--redraw", action="store_true", help="the picture, from the CSV")
    args = parser.parse_args(arguments)
    if args.redraw:
        folder = args.out or RESULTS
        name = file_name(args.stage, args.reverse)
        config, points = read(folder / f"{name}.csv")
        return plot(points, config, folder / f"{name}.png")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here")
    kind = NETWORKS[args.stage]
    depths = sorted(args.depths or kind.depths)
    hidden = int(kind.hidden_factor * args.dim) if args.hidden is None else args.hidden
    batch, size = args.batch or kind.batch, args.size or kind.size
    if min(args.dim, hidden, batch, size, *depths) < 1:
        parser.error("--dim, --hidden, --batch, --size and --depths must be at least 1")

    config = Config(
        stage=args.stage,
        scheme=args.scheme,
        weights=args.weights,
        dim=args.dim,
        hidden=hidden,
        batch=batch,
        size=size,
        activation=kind.activation,
        device=args.device,
    )
    print(f"{kind.title}, {config.scheme}, {describe(config)}, {config.weights} weights, float32")
    print(f"{machine(config.device)}\n", flush=True)
    points: list[Point] = []
    with Stoppable() as run:
        names = contestants(config, args.reverse)
        progress = Progress("depth", expected_seconds(config, names, depths))
        print(heading(), flush=True)
        for depth in progress.over(depths):
            measured = measure(replace(config, depth=depth), names, progress.say)
            points += measured
            print(table(measured, config), flush=True)
    if points:
        print(growth(points, config))
        published = (
            args.stage in PUBLISHED and args.reverse in (None, "recorded") and not run.stopped
        )
        folder = results_folder(parser, args, besides=["stage", "reverse"], published=published)
        write(folder, config, points, args.reverse)
    run.end()


if __name__ == "__main__":
    main()
