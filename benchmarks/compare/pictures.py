"""The pictures of compare.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from colours import COLOURS
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from networks import (
    BFLOAT16_STATES,
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    PER_BLOCK,
    PLAIN,
    RULES,
    STANDARD,
    Config,
    label,
)
from report import Row, listing_order

OTHERS = "#a0522d"
LEADER = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
# Short names, for the points of a picture.
SHORT = {
    STANDARD: "standard",
    CHANNELS_LAST: "channels last",
    COMPILED: "torch.compile",
    PER_BLOCK: "checkpoint per block",
    CHECKPOINT: "checkpoint √N",
    BFLOAT16_STATES: "bfloat16 states",
    PLAIN: "paper's rule, plain",
    "torchdiffeq, call per block": "torchdiffeq per block",
}
NAMES = {
    "mlp": "MLP, width",
    "conv": "convolutions, channels",
    "bottleneck": "bottlenecks, channels",
    "residual": "transformer, width",
    "residual-conv": "convolutional modules, channels",
}


Box = tuple[float, float, float, float]


def draw(rows: Sequence[Row], configs: dict[str, Config], out: Path) -> list[Path]:
    """Draws the pictures that the rows have data for."""
    timed = [row for row in rows if row.time_ratio is not None]
    pictures = {
        "compare_batch.png": draw_batches,
        "compare_peers.png": draw_peers,
        "compare_roofline.png": draw_roofline,
    }
    written = []
    for name, picture in pictures.items():
        figure = picture(timed, configs)
        if figure is not None:
            figure.savefig(out / name, dpi=150)
            plt.close(figure)
            written.append(out / name)
    return written


def draw_batches(rows: Sequence[Row], configs: dict[str, Config]) -> Any:
    """Time relative to standard backprop against the batch, for every width of MLPs."""
    mlps = [row for row in rows if configs[row.workload].stage == "mlp"]
    mlps = [row for row in mlps if configs[row.workload].scheme == "euler"]
    names = [COMPILED, CHECKPOINT, "paper", "predicted", "recorded"]
    mlps = [row for row in mlps if row.contestant in names]
    dims = sorted({configs[row.workload].dim for row in mlps})
    if not dims:
        return None
    figure, panels = plt.subplots(
        1, len(dims), figsize=(5 + 2 * len(dims), 4.4), sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes, dim in zip(panels[0], dims, strict=True):
        for name in names:
            points = _deepest(mlps, configs, dim, name)
            axes.plot(*zip(*points, strict=True) if points else ([], []), **_line(name))
        axes.axhline(1, color=COLOURS[STANDARD], linewidth=1.2, linestyle="--", label=STANDARD)
        axes.set(xscale="log", yscale="log", title=f"width {dim}", xlabel="batch (rows)")
        batches = sorted(
            {configs[r.workload].batch for r in mlps if configs[r.workload].dim == dim}
        )
        axes.set_xticks(batches, [_count(b) for b in batches])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        _tidy(axes)
    panels[0][0].set_ylabel("time of a training step")
    figure.suptitle("Residual MLP stages: time relative to standard backprop (lower is faster)")
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _deepest(
    rows: Iterable[Row], configs: dict[str, Config], dim: int, name: str
) -> list[tuple[int, float]]:
    """Batch and time of the deepest network at each batch."""
    best: dict[int, tuple[int, float]] = {}
    for row in rows:
        config = configs[row.workload]
        if (config.dim, row.contestant) == (dim, name):
            assert row.time_ratio is not None
            point = (config.depth, row.time_ratio)
            best[config.batch] = max(best.get(config.batch, point), point)
    return [(batch, best[batch][1]) for batch in sorted(best)]


def draw_peers(rows: Sequence[Row], configs: dict[str, Config]) -> Any:
    """Time against memory of all contestants, at up to four workloads. Of each stage it takes the
    workload for which standard backprop needs most memory."""
    by_workload: dict[str, list[Row]] = {}
    for row in rows:
        if row.memory_ratio:
            by_workload.setdefault(row.workload, []).append(row)
    kinds: dict[str, list[Row]] = {}
    for name, mine in by_workload.items():
        if any(row.contestant == PLAIN for row in mine):  # this workload had all contestants
            stage = configs[name].stage
            kinds[stage] = max(kinds.get(stage, mine), mine, key=_standard_memory)
    chosen = list(kinds.values())[:4]
    if not chosen:
        return None
    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(6.4 * columns, 4.7 * lines + 0.4), squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes in panels.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, mine in zip(panels.flat, chosen, strict=False):
        axes.set(xscale="log", yscale="log", title=describe(configs[mine[0].workload]))
        axes.axhline(1, color="#bbbbbb", linewidth=1, zorder=0)
        axes.axvline(1, color="#bbbbbb", linewidth=1, zorder=0)
        for row in mine:
            ours = _is_ours(row)
            axes.plot(
                row.memory_ratio, row.time_ratio, "o" if ours else "s", zorder=3,
                markersize=9 if ours else 6, color=COLOURS.get(row.contestant, OTHERS),
            )  # fmt: skip
        _pad(axes)
        axes.set(xlabel="peak memory, standard backprop = 1", ylabel="time, standard backprop = 1")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.text(0.02, 0.02, "↙ less memory, faster", transform=axes.transAxes, color="#666666")
        _tidy(axes)
    figure.suptitle("Time and memory of a training step, relative to standard backprop")
    figure.canvas.draw()  # places the axes
    for axes, mine in zip(panels.flat, chosen, strict=False):
        _annotate(axes, mine)
    return figure


def _standard_memory(rows: Sequence[Row]) -> int:
    return next((row.peak_bytes or 0 for row in rows if row.contestant == STANDARD), 0)


def _pad(axes: Any) -> None:
    """Makes room for the names on the right and for the text in the lower corner."""
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.15, high * (high / low) ** 0.4)
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.15, high * (high / low) ** 0.06)


def _annotate(axes: Any, rows: Sequence[Row]) -> None:
    """Writes a name beside each point, at the first free place around it."""
    size, scale = 8.5, axes.figure.dpi / 72
    points = [axes.transData.transform((row.memory_ratio, row.time_ratio)) for row in rows]
    taken = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in points]
    frame = axes.get_window_extent()
    ours_first = sorted(
        zip(rows, points, strict=True), key=lambda pair: _is_ours(pair[0]), reverse=True
    )
    for row, (x, y) in ours_first:
        ours = _is_ours(row)
        text = label(row.contestant) if ours else SHORT.get(row.contestant, row.contestant)
        width, height = 0.6 * size * len(text), 1.1 * size
        places = [
            (dx, dy - height / 2)
            for dy in (0, 7, -7, 14, -14, 22, -22, 30, -30, 40, -40, 50, -50, 60, -60, 70, -70)
            for dx in (8, -8 - width, 40)
        ]

        def box(place: tuple[float, float], x: float = x, y: float = y, w: float = width) -> Box:
            left, bottom = x + place[0] * scale, y + place[1] * scale
            return left, bottom, left + w * scale, bottom + 1.1 * size * scale

        free = (
            place
            for place in places
            if not any(_overlap(box(place), other) for other in taken)
            and frame.x0 < box(place)[0]
            and box(place)[2] < frame.x1
            and frame.y0 + 20 * scale < box(place)[1]
            and box(place)[3] < frame.y1
        )
        place = next(free, places[0])
        taken.append(box(place))
        axes.annotate(
            text,
            (row.memory_ratio, row.time_ratio),
            xytext=place,
            textcoords="offset points",
            fontsize=size,
            arrowprops=None if place == places[0] else LEADER,
            fontweight="bold" if ours else None,
            color=COLOURS.get(row.contestant, OTHERS),
        )


def _is_ours(row: Row) -> bool:
    return row.contestant in RULES


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def draw_roofline(rows: Sequence[Row], configs: dict[str, Config]) -> Any:
    """Fused stages: the rate of products over the peak, and of bytes over the bandwidth."""
    fused = [row for row in rows if row.fraction_of_bandwidth is not None]
    workloads = sorted(
        dict.fromkeys(row.workload for row in fused), key=lambda name: listing_order(configs[name])
    )
    if not workloads:
        return None
    figure, panels = plt.subplots(
        1, 2, figsize=(11, 1.9 + 0.27 * len(workloads)), sharey=True, constrained_layout=True
    )
    for axes, field in zip(panels, ("fraction_of_peak", "fraction_of_bandwidth"), strict=True):
        for rule in RULES:
            mine = [row for row in fused if row.contestant == rule]
            axes.plot(
                [getattr(row, field) for row in mine],
                [workloads.index(row.workload) for row in mine],
                "o", color=COLOURS[rule], label=label(rule), markersize=6,
            )  # fmt: skip
        most = max(getattr(row, field) for row in fused)
        axes.axvline(1, color="#4d4d4d", linewidth=1.2, linestyle="--")
        axes.set_xlim(0, max(1.05, 1.05 * most))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        _tidy(axes)
    names = [describe(configs[name]) for name in workloads]
    panels[0].set_yticks(range(len(workloads)), names, fontsize=8.5)
    panels[0].invert_yaxis()
    panels[0].set(title="Matrix products", xlabel="of the multiply-add peak")
    panels[1].set(title="Memory traffic, at least", xlabel="of a copy's bandwidth")
    figure.suptitle("Fused stages against the machine's limits, both measured in the same run")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def describe(config: Config) -> str:
    images = f", images {config.size}²" if config.size > 1 else ""
    return f"{NAMES[config.stage]} {config.dim}, batch {config.batch}{images}, depth {config.depth}"


def _count(batch: int) -> str:
    return f"{batch // 1024}k" if batch >= 1024 else str(batch)


def _line(name: str) -> dict[str, Any]:
    ours = name in RULES
    return {
        "color": COLOURS[name],
        "label": label(name),
        "marker": "o" if ours else "s",
        "linestyle": "-" if ours else "--",
        "markersize": 5,
        "linewidth": 2,
    }


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
