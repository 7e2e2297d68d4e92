"""The picture of ``unchanged.py``: gradient error against what is kept of the states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from colours import COLOURS
from matplotlib.ticker import FuncFormatter
from networks import BFLOAT16_STATES
from unchanged import AUTOCAST, Row

LOWEST, HIGHEST = 2e-5, 2.0
"""Errors. Larger ones are drawn at the upper edge: such gradients are of no use."""
FORGETTING = {"paper": "paper", "refined": "refined 3", "predicted": "predicted 2"}
"""The rules that keep nothing, and of each the setting that is shown."""
MARKERS = {"paper": "v", "refined": "D", "predicted": "^"}


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each network that was trained; of others there is none, and nothing is drawn."""
    shown = [row for row in rows if row.weights != "initial"]
    names = list(dict.fromkeys(row.network for row in shown))
    if not names:
        return
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(1 + 3.3 * columns, 1.5 + 3 * lines), sharex=True, sharey=True,
        squeeze=False, constrained_layout=True,
    )  # fmt: skip
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, names, strict=False):
        draw(axes, [row for row in shown if row.network == name])
    labelled = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(
        "Gradient error of networks as they are, x + f(x), against the memory that is kept of "
        "their states\n(trained or pretrained; below the dashed line: more precise than training "
        "under bfloat16 autocast)"
    )
    figure.supylabel("relative error of the gradients")
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(axes: Any, rows: Sequence[Row]) -> None:
    def line(name: str, kinks: bool = False) -> list[tuple[int, float]]:
        found = [r for r in rows if r.setting == name and r.kinks == kinks]
        return sorted((r.bits or 0, min(max(r.error, LOWEST), HIGHEST)) for r in found)

    remembered = any(row.kinks for row in rows)
    for rule, setting in FORGETTING.items():
        axes.plot(
            *columns(line(setting, remembered)), MARKERS[rule], color=COLOURS[rule], markersize=8,
            alpha=0.8, clip_on=False, label=f"{rule} (keeps no state)",
        )  # fmt: skip
    axes.plot(*columns(line("states rounded")), "s--", color=COLOURS[BFLOAT16_STATES],
              label="states in 8 bits and in bfloat16")  # fmt: skip
    style = {"color": COLOURS["recorded"], "clip_on": False}
    if remembered:
        axes.plot(*columns(line("recorded")), "o:", alpha=0.5, markersize=4, **style,
                  label="recorded, kinks forgotten")  # fmt: skip
    axes.plot(*columns(line("recorded", remembered)), "o-", linewidth=2.5, **style,
              label="recorded increments")  # fmt: skip
    (_, yardstick), *_ = line(AUTOCAST.name)
    axes.axhline(yardstick, color="#4d4d4d", linestyle="--", label="bfloat16 autocast, exact rule")
    weights = "" if rows[0].weights == "trained" else f" ({rows[0].weights})"
    axes.set(title=rows[0].network + weights, yscale="log", ylim=(LOWEST, 1.2 * HIGHEST))
    axes.set(xlim=(-0.5, 16.5), xticks=[0, 2, 4, 6, 8, 12, 16])
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("bits kept per element of a state", fontsize=9)
    axes.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:g} %"))
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def columns(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    return [[x for x, _ in points], [y for _, y in points]]
