"""What the experiments of this folder share: their options, what they return, and how that is
written down.

An experiment is a script with a function ``run(options) -> Result`` and

    if __name__ == "__main__":
        main(run, __doc__)

which runs it, writes a CSV and a PNG named after the script, and prints the verdicts on the paper's
claims. A script that is stopped writes the rows of the CSV that it has. ``all.py`` runs every
script and writes one report.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import matplotlib as mpl
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from output import add_out, machine, results_folder, write_csv
from progress import Progress, Stoppable, duration

SECONDS = {
    # quick, and as published
    "fig1_trajectories": (3, 67),
    "prop1_distance": (2, 9),
    "fig2_linear_weights": (2, 14),
    "props3_6_orders": (4, 258),
    "fig3a_step": (20, 161),
    "fig3b_failure": (60, 110),
    "fig3c_gradient_error": (10, 45),
    "fig4_depth": (30, 230),
    "table2_finetune": (30, 175),
}
"""What the experiments take on two free cores, on digits: quick ones are estimates from processor
time, the others are the times in the published report."""

COLOURS = {
    "exact": "#222222",
    "euler": "#0072b2",
    "heun": "#d55e00",
    "paper": "#0072b2",
    "refined": "#009e73",
    "predicted": "#cc79a7",
    "recorded": "#e69f00",
    "tuned": "#009e73",
}
"""One colour means one thing in all figures (Okabe and Ito's palette)."""


@dataclass(frozen=True)
class Options:
    quick: bool = False
    """A smaller version that takes seconds, for ``all.py`` and for the tests."""
    data: Path | None = None
    """A local directory with CIFAR-10 or ImageNet; None: scikit-learn's digits."""
    seeds: int | None = None
    """None: the experiment's own number."""
    device: str = "cpu"
    rows: list[dict[str, Any]] = field(default_factory=list, compare=False)
    """The experiment adds the rows of its CSV as soon as it has them. If it is stopped, they are
    written."""


@dataclass(frozen=True)
class Verdict:
    claim: str
    """In words, as the paper states it."""
    holds: bool
    numbers: str
    """What was measured, and what it was compared with."""

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.claim} ({self.numbers})"


@dataclass
class Result:
    title: str
    rows: list[dict[str, Any]]
    """Of the CSV."""
    figure: Figure
    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)
    """What a reader should know: the setting, what differs from the paper, and why."""
    table: str = ""
    """In Markdown, where numbers say more than the figure."""


Run = Callable[[Options], Result]


def progress(things: Iterable[Any], unit: str, total: int) -> Iterator[Any]:
    """The things, with a line now and then that says how many are done."""
    yield from Progress(unit, total).over(things)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line through the points (log x, log y), by least squares: the order p of y ~ x^p."""
    u, v = ([math.log(value) for value in values] for values in (x, y))
    centre_u, centre_v = sum(u) / len(u), sum(v) / len(v)
    covariance = sum((a - centre_u) * (b - centre_v) for a, b in zip(u, v, strict=True))
    return covariance / sum((a - centre_u) ** 2 for a in u)


def depth_axis(axes: Axes, depths: Sequence[int], label: str = "depth N") -> None:
    """Depth as every figure shows it: by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_xticks(list(depths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def panels(count: int, title: str, width: float = 5.2, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """``count`` in each of the rows; row after row."""
    figure, axes = plt.subplots(
        rows, count, figsize=(width * count, 4.4 * rows), constrained_layout=True, squeeze=False
    )
    figure.suptitle(title)
    for one in axes.flat:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def save_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Numbers with six digits."""
    write_csv(
        path,
        [
            {k: f"{value:.6g}" if isinstance(value, float) else value for k, value in row.items()}
            for row in rows
        ],
    )


def save(result: Result, name: str, out: Path) -> None:
    save_rows(result.rows, out / f"{name}.csv")
    result.figure.savefig(out / f"{name}.png", dpi=150)
    plt.close(result.figure)


def parser(description: str | None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help="a smaller version")
    add_out(result)
    result.add_argument("--data", type=Path, help="CIFAR-10 or ImageNet instead of digits")
    result.add_argument("--seeds", type=int, help="how many runs to take the median of")
    result.add_argument("--device", default="cpu")
    return result


def announce(names: Sequence[str], options: Options) -> None:
    """Says how long the experiments will take, where that is known."""
    if (options.data, options.seeds, options.device) == (None, None, "cpu"):
        seconds = sum(SECONDS[name][not options.quick] for name in names if name in SECONDS)
        print(f"about {duration(seconds)} on two free cores", file=sys.stderr)


def main(run: Run, description: str | None) -> None:
    arguments = parser(description)
    args = arguments.parse_args()
    options = Options(args.quick, args.data, args.seeds, args.device)
    name = Path(sys.argv[0]).stem
    announce([name], options)
    torch.manual_seed(0)
    with Stoppable() as stoppable:
        result = run(options)
    if stoppable.stopped:
        save_unfinished(
            options, name, results_folder(arguments, args, folder="paper", published=False)
        )
        return stoppable.end()
    out = results_folder(arguments, args, folder="paper")
    save(result, name, out)
    print(f"{result.title}\n{machine(options.device)}\n")
    for text in (*result.notes, result.table):
        if text:
            print(text + "\n")
    for verdict in result.verdicts:
        print(verdict)
    print(f"\nWrote {out / name}.csv and .png")


def save_unfinished(options: Options, name: str, out: Path) -> None:
    if options.rows:
        save_rows(options.rows, out / f"{name}.csv")
        print(f"Wrote {len(options.rows)} rows to {out / name}.csv")
