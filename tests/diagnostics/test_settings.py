"""Settings describe what a stage does, set it, and name it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_tuning import error, train

import resode_kernels as rk
from resode_kernels.diagnostics.choice import cheapest
from resode_kernels.diagnostics.gradients import GradientError
from resode_kernels.diagnostics.settings import (
    CHECKPOINT,
    Measurement,
    Setting,
    candidates,
    mean_bits,
    most_promising_first,
)

SEQUENCE = (8, 6, None, 4, 4, 4)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (Setting("adjoint", "recorded"), "recorded 8 bits"),
        (Setting("adjoint", "recorded", bits=4), "recorded 4 bits"),
        (
            Setting("adjoint", "recorded", bits=4, anchor_every=3),
            "recorded 4 bits, anchors every 3",
        ),
        (Setting("adjoint", "recorded", bits=SEQUENCE), "recorded, 5.5 bits on average"),
        (Setting("adjoint", "recorded", bits=(None, 4)), "recorded, 0.0 bits on average"),
        (Setting("adjoint", "refined", 2), "refined 2"),
        (Setting("adjoint", "predicted"), "predicted 2"),
        (Setting("adjoint", "paper", 1, 4), "paper, anchors every 4"),
    ],
)
def test_settings_have_names(setting: Setting, name: str) -> None:
    assert str(setting) == name


def test_the_last_step_records_nothing_and_does_not_count() -> None:
    assert mean_bits((4, 4, 16)) == mean_bits(4) == 4


@pytest.mark.parametrize("bits", [4, 8, SEQUENCE])
def test_a_setting_is_what_the_stage_has(bits: Any) -> None:
    stage = rk.MLPStage(8, 12, 6, reverse="recorded", bits=bits)
    setting = Setting("adjoint", "recorded", None, None, bits)
    assert Setting.of(stage.options) == Setting.in_force(stage.options) == setting
    other = rk.MLPStage(8, 12, 6, reverse="refined", order=3, anchor_every=2)
    other.configure(**setting.options)
    assert Setting.in_force(other.options) == setting
    other.configure(**CHECKPOINT.options)
    assert Setting.in_force(other.options) == CHECKPOINT


def test_bits_are_no_part_of_other_settings() -> None:
    stage = rk.MLPStage(8, 12, 6, reverse="refined", order=1, bits=4)
    assert Setting.of(stage.options) == Setting("adjoint", "refined", 1)
    assert "bits" not in Setting("adjoint", "refined", 1).options
    assert "bits" not in CHECKPOINT.options


def test_recorded_is_a_candidate_without_anchors_and_tried_soon() -> None:
    settings = most_promising_first(candidates(64))
    recorded = [s for s in settings if s.records]
    assert sorted(s.bits for s in recorded) == [4, 6, 8]
    assert all((s.order, s.anchor_every) == (None, None) for s in recorded)
    assert [str(s) for s in settings[:2]] == ["refined 1", "recorded 8 bits"]
    assert len(settings) == len(set(settings))


def test_first_runs_are_ranked_by_their_products() -> None:
    """Their times count the warming up; afterwards times decide."""
    exact = GradientError(0.0, 1.0)

    def measured(setting: Setting, seconds: float, runs: int) -> Measurement:
        return Measurement(setting, exact, exact, 10, seconds, runs)

    settings = [
        *(Setting("adjoint", "refined", 1), Setting("adjoint", "paper", 1)),
        *(Setting("adjoint", "predicted", 2), Setting("adjoint", "recorded")),
    ]
    assert [s.products for s in settings] == [10, 9, 8, 7]
    for runs, first in ((1, settings[-1]), (2, settings[0])):
        found = [measured(s, 1.0 + i, runs) for i, s in enumerate(settings)]
        checkpoint = Measurement(CHECKPOINT, exact, exact, 100, 9.0)
        assert cheapest([*found, checkpoint], 1e-2).setting == first


def test_bits_may_be_a_list_and_wrong_ones_are_refused() -> None:
    stage, x = rk.MLPStage(8, 12, 6), torch.randn(4, 8)
    listed: Any = Setting("adjoint", "recorded", bits=list(SEQUENCE))
    report = rk.diagnose(stage, x, settings=[listed], seconds=0)
    assert report.of(Setting("adjoint", "recorded", bits=SEQUENCE)).gradient.error > 0
    for bits, message in (((8, 7), r"bits\[1\] must be one of"), ((8, 8), "each of the 6 steps")):
        with pytest.raises(ValueError, match=message):
            rk.diagnose(stage, x, settings=[Setting("adjoint", "recorded", bits=bits)])


def test_the_recommended_call_sets_what_it_says() -> None:
    x = torch.randn(4, 32)
    bits = (*[6] * 12, *[4] * 12)
    setting = Setting("adjoint", "recorded", bits=bits)
    stage = rk.MLPStage(32, 12, 24, step=1.0, **setting.options)
    report = rk.tune(stage, x, settings=[setting], max_gradient_error=1.0)
    assert report.recommended.setting == Setting.in_force(stage.options) == setting
    call = report.recommendation.split("Set it by stage.")[1].rstrip(".")
    other = rk.MLPStage(32, 12, 24, order=3, step=1.0)
    eval(f"other.{call}", {"other": other})
    assert other.options == stage.options


# ---------------------------------------------------------------------------- during training


@pytest.mark.parametrize("bits", [4, (8, 8, 4, 4, 4, 4)])
def test_a_monitor_measures_stages_that_record(bits: Any) -> None:
    stage = rk.MLPStage(8, 16, 6, step=1.0, reverse="recorded", bits=bits)
    x = torch.randn(10, 8)
    with rk.monitor(stage, every=2, max_gradient_error=1.0) as watching:
        y = stage(x)
        y.retain_grad()
        y.square().sum().backward()
        train(torch.nn.Sequential(stage, torch.nn.Linear(8, 1)), 2, x)
    fresh = [seen.call for seen in watching.history]
    assert fresh == [1, 3]
    assert 1e-4 < watching.history[0].error < 0.2
    assert stage.options.bits == bits


def test_a_monitor_finds_the_error_found_by_hand() -> None:
    stage = rk.MLPStage(8, 16, 6, step=1.0, reverse="recorded", bits=4)
    x = torch.randn(10, 8)
    with rk.monitor(stage, max_gradient_error=1.0) as watching:
        y = stage(x)
        y.retain_grad()
        y.square().sum().backward()
    assert watching.last is not None
    assert watching.last.error == pytest.approx(error(stage, x, y.grad), rel=1e-2)


def test_a_monitor_warns_of_too_few_bits() -> None:
    stage = rk.MLPStage(8, 16, 6, step=1.0, reverse="recorded", bits=2)
    x = torch.randn(10, 8)
    with rk.monitor(stage, every=1, max_gradient_error=1e-3):
        with pytest.warns(rk.GradientErrorWarning, match=r"gradient error .* above .*rk.tune"):
            stage(x).sum().backward()
        stage.configure(bits=16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stage(x).sum().backward()
