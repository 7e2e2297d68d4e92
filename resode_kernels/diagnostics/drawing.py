"""The picture of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .settings import CHECKPOINT, STORED

if TYPE_CHECKING:
    from .report import Report

COLOURS = {"paper": "#0072b2", "refined": "#009e73", "predicted": "#cc79a7"}
MARKERS = {1: "o", 2: "s", 3: "^"}
LIMIT = "#d55e00"


def draw(report: Report, path: str | Path) -> None:
    figure = Figure(figsize=(15, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    states, gradients, settings = figure.subplots(1, 3)
    _states(states, report)
    _gradients(gradients, report)
    _settings(settings, report)
    for axes in (states, gradients, settings):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        columns = 1 + (axes is settings)
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14),
                    ncols=columns)  # fmt: skip
    figure.suptitle(f"{report.stage} on {report.input}")
    figure.savefig(path, dpi=150)


def _states(axes: Any, report: Report) -> None:
    layers = [layer.n for layer in report.layers]
    errors = [layer.state_error for layer in report.layers]
    label = f"{report.setting}: state x̃[n]"
    axes.plot(layers, _drawable(errors), color=COLOURS[report.setting.reverse], label=label)
    points = _drawable([layer.point_error for layer in report.layers])
    axes.plot(layers, points, color=COLOURS[report.setting.reverse], linestyle=":",
              label=f"{report.setting}: linearization point p")  # fmt: skip
    if report.setting.reverse != "paper" or report.setting.anchor_every:
        measured = _drawable(report.bound.measured)
        axes.plot(layers, measured, color=COLOURS["paper"], label="paper: state x̃[n]")
    if report.bound.layers is not None and any(report.bound.layers):
        label = f"paper: estimated bound on x̃[n] (Prop. {report.bound.proposition})"
        axes.plot(layers, _drawable(report.bound.layers), color="#999999", linestyle="--",
                  label=label)  # fmt: skip
    axes.set(yscale="log", xlabel="step n", ylabel="relative error",
             title="Error of the reconstructed states")  # fmt: skip


def _gradients(axes: Any, report: Report) -> None:
    errors = _drawable([e.error for e in report.blocks])
    colour = COLOURS[report.setting.reverse]
    axes.plot(range(len(errors)), errors, "o-", color=colour, markersize=3,
              label=f"{report.setting}: parameters of block n")  # fmt: skip
    axes.axhline(max(report.gradient.error, 1e-16), color=colour, linestyle=":",
                 label=f"{report.setting}: all parameters together")  # fmt: skip
    axes.axhline(report.max_gradient_error, color=LIMIT, linestyle="--", label="max_gradient_error")
    axes.set(
        yscale="log", xlabel="block n", ylabel="relative error", title="Error of the gradients"
    )


def _settings(axes: Any, report: Report) -> None:
    unit = report.of(CHECKPOINT)
    adjoint = [m for m in report.settings if m.setting.backward == "adjoint"]
    for work in dict.fromkeys(m.setting.work for m in adjoint):
        mine = [m for m in adjoint if m.setting.work == work]
        axes.plot(
            [m.memory / unit.memory for m in mine],
            _drawable([m.error for m in mine]),
            color=COLOURS[work.reverse],
            marker=MARKERS.get(work.order or 1, "D"),
            markersize=6,
            linewidth=1,
            label=f"{work}: {mine[0].seconds / unit.seconds:.2f} × checkpointing's time",
        )
    best = report.recommended
    if best.setting not in (CHECKPOINT, STORED):
        axes.plot(best.memory / unit.memory, _drawable([best.error])[0], "o", markersize=15,
                  markerfacecolor="none", markeredgecolor="black", label="recommended")  # fmt: skip
    axes.axhline(report.max_gradient_error, color=LIMIT, linestyle="--", label="max_gradient_error")
    axes.axvline(1, color="#999999", linestyle=":", label="memory of checkpointing (exact)")
    axes.set(yscale="log", xlabel="memory relative to checkpointing", ylabel="relative error",
             title="Error of the gradients against memory", xlim=(0, None))  # fmt: skip


def _drawable(values: Sequence[float]) -> list[float]:
    """The values limited to 1e-16 … 1e6, because the axis is logarithmic."""
    return [min(max(value, 1e-16), 1e6) if not math.isnan(value) else 1e6 for value in values]
