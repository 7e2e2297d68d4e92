"""The pictures of reports and of monitors.

Errors are drawn on a logarithmic axis that is limited to the data. Zeros, that is, exact gradients
and states, are drawn on a line of their own below them, labelled "exact"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .settings import CHECKPOINT, STORED

if TYPE_CHECKING:
    from .model_report import ModelReport
    from .monitoring import Monitor
    from .report import Report

COLOURS = {
    **{"paper": "#0072b2", "refined": "#009e73", "predicted": "#cc79a7"},
    **{"recorded": "#e69f00"},
}
CYCLE = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = {1: "o", 2: "s", 3: "^"}
LIMIT, GREY = "#d55e00", "#999999"
LARGEST = 1e6
"""Errors above it, infinite ones among them, are drawn at it."""
WIDE, HIGH = 15, 5.8
"""The size of the picture of a report in inches."""


class Errors:
    """One axis for errors. Collects what is drawn and sets the limits at the end."""

    def __init__(self, axes: Any, title: str, xlabel: str) -> None:
        self.axes = axes
        self.values: list[float] = []
        self.exact: list[tuple[float, dict[str, Any]]] = []
        self.limits: list[tuple[float, str, dict[str, Any]]] = []
        axes.set(yscale="log", title=title, xlabel=xlabel, ylabel="relative error")

    def line(self, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
        """A line through the errors that are not zero. Zeros become points on the line "exact"."""
        drawn = [math.nan if v == 0 else LARGEST if not v < LARGEST else v for v in y]
        self.values += [v for v in drawn if not math.isnan(v)]
        self.axes.plot(x, drawn, **style)
        point = {"color": style["color"], "marker": style.get("marker", ".")}
        self.exact += [(at, point) for at, v in zip(x, y, strict=True) if v == 0]

    def mark(self, x: float, y: float, **style: Any) -> None:
        """One point, without an influence on the limits."""
        if y == 0:
            self.exact.append((x, style))
        else:
            self.axes.plot(x, y, linestyle="none", **style)

    def level(self, value: float, label: str, **style: Any) -> None:
        """A horizontal line, or only its label if it is far from the data."""
        self.limits.append((value, label, style))

    def finish(self, legend: Any) -> None:
        low, high = min(self.values, default=1e-3), max(self.values, default=1e-3)
        far = [v for v, _, _ in self.limits if not low / 10 < v < 10 * high]
        near = [v for v, _, _ in self.limits if v not in far]
        low, high = min([low, *near]) / 1.6, max([high, *near]) * 1.6
        if high / low < 10:  # at least a decade
            low, high = low / math.sqrt(10 * low / high), high * math.sqrt(10 * low / high)
        for value, label, style in self.limits:  # those far away appear in the legend only
            if value in far:
                where = "above" if value > high else "below"
                label = f"{label} = {value:.1e} ({where} the picture)"
                self.axes.plot([], [], label=label, **style)
            else:
                self.axes.axhline(value, label=label, **style)
        if self.exact:
            low = self._exact(low, high)
        self.axes.set_ylim(low, high)
        self.axes.grid(alpha=0.25)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.legend(**legend)

    def _exact(self, low: float, high: float) -> float:
        """Draws the line "exact" below ``low`` and returns the new lower limit."""
        room = (high / low) ** 0.07
        at = low / room
        self.axes.axhspan(at / room, low, color="#f2f2f2", zorder=0)
        for x, style in self.exact:
            self.axes.plot(x, at, **{"linestyle": "none", "markersize": 4, **style})
        place = self.axes.get_yaxis_transform()
        self.axes.text(0.01, at, "exact", va="center", fontsize=9, color="#555555", transform=place)
        lowest: float = at / room
        return lowest


def draw(report: Report, path: str | Path) -> None:
    _save([(f"{report.stage} on {report.input}", report)], path)


def draw_model(report: ModelReport, path: str | Path) -> None:
    _save(
        [
            (f"{name}: {each.stage} on {each.input}", each)
            for name, each in report.stages.items()
        ],
        path,
    )  # fmt: skip


def _save(reports: Sequence[tuple[str, Report]], path: str | Path) -> None:
    """A row of three pictures for every report."""
    figure = Figure(figsize=(WIDE, HIGH * len(reports)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(reports), 1, squeeze=False)
    for row, (title, report) in zip(rows[:, 0], reports, strict=True):
        row.suptitle(title)
        for axes, content in zip(row.subplots(1, 3), (_states, _gradients, _settings), strict=True):
            content(axes, report)
    figure.savefig(path, dpi=150)


def _below(columns: int = 1) -> dict[str, Any]:
    """A legend below the axes."""
    return {
        "frameon": False,
        "fontsize": 9,
        "loc": "upper center",
        "bbox_to_anchor": (0.5, -0.14),
        "ncols": columns,
    }


def _states(axes: Any, report: Report) -> None:
    if report.layers is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "states: not measured for lack of time", ha="center")
        return
    errors = Errors(axes, "Error of the reconstructed states", "step n")
    layers = [layer.n for layer in report.layers]
    colour = COLOURS[report.setting.reverse]
    errors.line(layers, [layer.state_error for layer in report.layers], color=colour,
                label=f"{report.setting}: state x̃[n]")  # fmt: skip
    errors.line(layers, [layer.point_error for layer in report.layers], color=colour,
                linestyle=":", label=f"{report.setting}: linearization point p")  # fmt: skip
    bound = report.bound
    if bound is not None and (report.setting.reverse != "paper" or report.setting.anchor_every):
        errors.line(layers, bound.measured, color=COLOURS["paper"], label="paper: state x̃[n]")
    if bound is not None and bound.layers is not None and any(bound.layers):
        # Not a part of the data: where it is far above, it leaves the picture.
        top = max(bound.layers)
        label = f"paper: bound on x̃[n] (Prop. {bound.proposition}), estimated; up to {top:.1e}"
        axes.plot(layers, bound.layers, color=GREY, linestyle="--", label=label)
    errors.finish(_below())


def _gradients(axes: Any, report: Report) -> None:
    errors = Errors(axes, "Error of the gradients", "block n")
    found = [e.error for e in report.blocks]
    colour = COLOURS[report.setting.reverse]
    errors.line(range(len(found)), found, color=colour, marker="o", markersize=3,
                label=f"{report.setting}: parameters of block n")  # fmt: skip
    if report.gradient.error > 0:
        errors.level(report.gradient.error, f"{report.setting}: all parameters together",
                     color=colour, linestyle=":")  # fmt: skip
    errors.level(report.max_gradient_error, "max_gradient_error", color=LIMIT, linestyle="--")
    errors.finish(_below())


def _settings(axes: Any, report: Report) -> None:
    errors = Errors(
        axes, "Error of the gradients against memory", "memory relative to checkpointing"
    )
    unit = report.of(CHECKPOINT)
    adjoint = [m for m in report.settings if m.setting.backward == "adjoint"]
    for work in dict.fromkeys(m.setting.work for m in adjoint):
        name = "recorded" if work.records else work
        mine = sorted((m for m in adjoint if m.setting.work == work), key=lambda m: m.memory)
        errors.line(
            [m.memory / unit.memory for m in mine],
            [m.error for m in mine],
            color=COLOURS[work.reverse],
            marker=MARKERS.get(work.order or 1, "D"),
            markersize=6,
            linewidth=1,
            label=f"{name}: {mine[0].seconds / unit.seconds:.2f} × checkpointing's time",
        )
    right = max([1.0, *(m.memory / unit.memory for m in adjoint)])
    for m in (m for m in report.settings if m.setting in (CHECKPOINT, STORED)):
        filled = "black" if m.setting == CHECKPOINT else "white"
        style = {"color": "black", "marker": "d", "markerfacecolor": filled}
        memory = m.memory / unit.memory
        label = f"{m.setting}: {m.seconds / unit.seconds:.2f} × checkpointing's time"
        if memory > 1.5 * right:
            label += f",\n{memory:.1f} × its memory (right of the picture)"
        else:
            errors.mark(memory, 0, markersize=7, **style)
            right = max(right, memory)
        axes.plot([], [], linestyle="none", label=label, **style)
    best = report.recommended
    ring = {"marker": "o", "color": "black", "markerfacecolor": "none", "markersize": 15}
    errors.mark(best.memory / unit.memory, best.error, **ring)
    axes.plot([], [], linestyle="none", label=f"recommended: {best.setting}",
              **{**ring, "markersize": 9})  # fmt: skip
    errors.level(report.max_gradient_error, "max_gradient_error", color=LIMIT, linestyle="--")
    axes.axvline(1, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlim(0, 1.08 * right)
    errors.finish(_below(2))


def draw_monitor(monitor: Monitor, path: str | Path) -> None:
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    errors = Errors(axes, "Error of the gradients during training", "training step")
    for i, (name, stage) in enumerate(monitor.stages.items()):
        seen = [o for o in monitor.history if o.stage == name]
        errors.line([o.call for o in seen], [o.error for o in seen], color=CYCLE[i % len(CYCLE)],
                    marker="o", markersize=4, label=name or type(stage).__name__)  # fmt: skip
    errors.level(monitor.max_gradient_error, "max_gradient_error", color=LIMIT, linestyle="--")
    errors.finish({"frameon": False, "fontsize": 9})
    figure.savefig(path, dpi=150)
