"""Pictures show the data and nothing that is not there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import resode_kernels as rk
from resode_kernels.diagnostics.drawing import Errors, _settings


def drawn(axes: Any) -> list[float]:
    """All values of lines with labels, without those that appear only in the legend."""
    return [
        float(y)
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
        for y in line.get_ydata()
        if not math.isnan(y)
    ]


def test_the_axis_is_limited_to_the_data() -> None:
    errors = Errors(Figure().subplots(), "", "")
    errors.line([0, 1, 2], [1e-3, 2e-3, 4e-3], color="black", label="errors")
    errors.level(1e-2, "near")
    errors.level(1e-9, "far")
    errors.finish({})
    low, high = errors.axes.get_ylim()
    assert 1e-4 < low < 1e-3
    assert 1e-2 < high < 1e-1
    labels = [text.get_text() for text in errors.axes.get_legend().get_texts()]
    assert labels == ["errors", "near", "far = 1.0e-09 (below the picture)"]


def test_zeros_are_drawn_on_a_line_of_their_own() -> None:
    errors = Errors(Figure().subplots(), "", "")
    errors.line([0, 1, 2, 3], [0.0, 2e-3, 4e-3, 0.0], color="black", label="errors")
    errors.finish({})
    assert drawn(errors.axes) == [2e-3, 4e-3]
    points = [line for line in errors.axes.get_lines() if line.get_label().startswith("_")]
    assert [float(p.get_xdata()[0]) for p in points] == [0, 3]
    low, _ = errors.axes.get_ylim()
    assert all(1e-4 < low < float(p.get_ydata()[0]) < 2e-3 for p in points)
    assert [text.get_text() for text in errors.axes.texts] == ["exact"]


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_errors_without_bound_are_drawn_at_the_top(value: float) -> None:
    errors = Errors(Figure().subplots(), "", "")
    errors.line([0, 1], [1e-1, value], color="black", label="errors")
    errors.finish({})
    assert drawn(errors.axes) == [1e-1, 1e6]


@pytest.mark.parametrize(("bound", "expected"), [(1e-12, "checkpoint"), (1.0, None)])
def test_the_recommended_setting_is_marked(bound: float, expected: str | None) -> None:
    stage, x = rk.MLPStage(8, 12, 16), torch.randn(5, 8)
    settings = [rk.Setting("adjoint", "refined", 2)]
    report = rk.diagnose(stage, x, settings=settings, max_gradient_error=bound)
    axes = Figure().subplots()
    _settings(axes, report)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    best = expected or str(report.recommended.setting)
    assert f"recommended: {best}" in labels
    rings = [line for line in axes.get_lines() if line.get_markersize() == 15]
    (ring,) = rings
    assert float(ring.get_xdata()[0]) == pytest.approx(
        report.recommended.memory / report.of(rk.Setting("checkpoint")).memory
    )
    low, high = axes.get_ylim()
    assert low < float(ring.get_ydata()[0]) < high


def test_pictures_of_exact_and_of_short_diagnoses_are_drawn(tmp_path: Any) -> None:
    still = rk.ConvStage(4, 4, zero_init=True)  # f = 0: every setting is exact
    rk.diagnose(still, torch.randn(2, 4, 3, 3)).plot(tmp_path / "still.png")
    rk.diagnose(rk.MLPStage(4, 4, 4), torch.randn(2, 4), seconds=0).plot(tmp_path / "short.svg")
    rk.monitor(rk.MLPStage(4, 4, 4)).plot(tmp_path / "empty.png")
    assert {path.name for path in tmp_path.iterdir()} == {"still.png", "short.svg", "empty.png"}
