"""``seconds`` bounds the whole call; the report says what there was no time for, and stderr what is
being done."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.probe import Probe
from resode_kernels.diagnostics.settings import candidates

EVERYTHING = 1e9


class Clock:
    """A clock that moves when a stage runs: a second for a training step."""

    def __init__(self) -> None:
        self.time = 0.0
        self.steps = 0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    gradients, evaluate, cotangent = Probe.gradients, Probe.evaluate, Probe.cotangent

    def step(self: Probe, *args: Any, **options: Any) -> Any:
        begin = clock.time
        result = gradients(self, *args, **options)
        clock.steps += 1
        clock.time += 1.0
        return result._replace(seconds=clock.time - begin)

    def evaluation(self: Probe, n: int, x: Any) -> Any:
        clock.time += 1.0 / (4 * self.stage.depth)
        return evaluate(self, n, x)

    def forward(self: Probe, loss: Any) -> Any:
        clock.time += 0.25
        return cotangent(self, loss)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Probe, "gradients", step)
    monkeypatch.setattr(Probe, "evaluate", evaluation)
    monkeypatch.setattr(Probe, "cotangent", forward)
    return clock


def stage() -> tuple[rk.Stage, Tensor]:
    return rk.MLPStage(8, 12, 16), torch.randn(5, 8)


@pytest.mark.parametrize("seconds", [0, 1, 3, 5, 10, 20, 40, 80])
def test_a_call_takes_its_seconds_or_what_it_must(clock: Clock, seconds: float) -> None:
    report = rk.diagnose(*stage(), seconds=seconds)
    must = 3.5  # an exact gradient, one with the own setting, one candidate, and a cotangent
    assert clock.time <= max(seconds, must) + 0.5
    assert clock.time >= min(0.8 * seconds, 35)
    assert report.seconds == seconds


def test_without_time_a_report_has_what_it_must(clock: Clock) -> None:
    report = rk.diagnose(*stage(), seconds=0)
    assert clock.steps == 3
    assert report.gradient.error > 0
    assert [str(m.setting) for m in report.settings] == [
        *("refined 1", "recorded 8 bits", "checkpoint")
    ]


@pytest.mark.parametrize("seconds", [0, 8, 20, EVERYTHING])
def test_what_was_not_measured_is_said(clock: Clock, seconds: float) -> None:
    report = rk.diagnose(*stage(), seconds=seconds)
    text, numbers = str(report), json.loads(json.dumps(report.to_dict()))
    wanted = {*map(str, candidates(16)), "checkpoint", "stored"}
    measured = {str(m.setting) for m in report.settings}
    allocated = measured - wanted
    assert len(allocated) <= 1
    assert all(name.startswith("recorded") for name in allocated)
    assert (measured - allocated) | set(numbers["not_measured"]) == wanted
    assert len(report.settings) + len(report.not_measured) == len(wanted) + len(allocated)
    assert ("the yardstick autocast" in text) == (report.yardsticks.autocast is None)
    assert (f"{len(report.not_measured)} settings (–)" in text) == bool(report.not_measured)
    assert ("errors of the states" in text) == (report.layers is None)
    assert ("constants of the paper's theory" in text) == (report.constants is None)
    assert ("Not measured for lack of time" in text) == (seconds != EVERYTHING)
    if report.not_measured:
        with pytest.raises(KeyError, match=r"was not measured; give .* more than seconds="):
            report.of(report.not_measured[0])


def test_with_time_for_it_a_report_is_complete(clock: Clock) -> None:
    report = rk.diagnose(*stage(), seconds=EVERYTHING)
    assert report.not_measured == []
    assert report.layers is not None
    assert report.constants is not None
    assert report.constants.blocks == report.constants.blocks_wanted == 8
    assert report.recommended.nearby_inputs == 3


def test_settings_are_measured_in_the_order_given(clock: Clock) -> None:
    settings = [rk.Setting("adjoint", "predicted", k) for k in (3, 1, 2)]
    report = rk.diagnose(*stage(), settings=settings, seconds=0)
    assert report.not_measured == settings[1:]


def test_a_model_shares_its_seconds_among_its_stages(clock: Clock) -> None:
    model = nn.Sequential(*[rk.MLPStage(8, 12, 16) for _ in range(3)])
    report = rk.diagnose(model, torch.randn(5, 8), seconds=60)
    assert clock.time <= 62
    counts = [len(r.settings) for r in report.stages.values()]
    assert min(counts) >= 6
    assert "not measured for lack of time, seconds=60" in str(report)


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        return torch.tanh(self.linear(x))


def test_the_seconds_are_seconds() -> None:
    """A training step takes a tenth of a second here, all measurements together 20 seconds."""
    slow, x = rk.ResidualStage([Sleepy() for _ in range(10)]), torch.randn(3, 4)
    begin = time.perf_counter()
    rk.diagnose(slow, x, seconds=1)
    assert time.perf_counter() - begin < 2


# -------------------------------------------------------------------------------------- progress


def test_a_short_call_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    rk.diagnose(*stage(), seconds=9)
    assert clock.time < 10
    assert capsys.readouterr() == ("", "")


def test_a_long_call_prints_a_line_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    rk.tune(*stage(), seconds=70)
    out, lines = capsys.readouterr()
    assert out == ""
    assert 4 <= len(lines.splitlines()) <= clock.time / 10
    assert lines.startswith("rk.tune: measuring ")
    assert " of 31 settings (10 of 70 s)" in lines.splitlines()[0]
    assert "estimating" in lines
    assert "\r" not in lines


def test_on_a_terminal_one_line_is_overwritten_and_removed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    rk.diagnose(*stage(), seconds=EVERYTHING)
    text = terminal.getvalue()
    assert "\n" not in text
    assert text.endswith("\r\x1b[K")
    for phase in ("measuring", "timing", "testing", "reconstructing", "estimating"):
        assert f"rk.diagnose: {phase}" in text


def test_a_model_says_which_stage_it_measures(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    rk.diagnose(nn.Sequential(*[rk.MLPStage(8, 12, 16) for _ in range(2)]), torch.randn(5, 8))
    text = capsys.readouterr().err
    assert "rk.diagnose: 0: measuring" in text
    assert "rk.diagnose: 1: " in text
