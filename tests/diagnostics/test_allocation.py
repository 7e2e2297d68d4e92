"""The bits of each step of ``recorded``: as few as keep the bound."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from test_diagnostics import make
from test_tuning import error
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.allocation import (
    Allocator,
    Forecast,
    fewest_bits,
    forecast,
    recorded,
)
from resode_kernels.diagnostics.budget import Budget, Display
from resode_kernels.diagnostics.measuring import Measurer
from resode_kernels.diagnostics.probe import Probe
from resode_kernels.diagnostics.settings import CHECKPOINT, Setting, mean_bits
from resode_kernels.diagnostics.trajectory import (
    Trajectory,
    reconstructed,
    recorder_of,
    rounding_errors,
)
from resode_kernels.options import BITS
from resode_kernels.recording import levels


def budget(seconds: float = 60.0) -> Budget:
    return Budget(seconds, Display("", seconds))


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("max_error", [0.3, 3e-2, 1e-2])
def test_no_other_bits_need_less(power: float, max_error: float) -> None:
    """Compared with all there are. A step may overshoot the bound by what its last bits give."""
    found = Forecast([1.0, 0.3, 0.02], power, 1.0)
    bits = fewest_bits(found, max_error)
    fewest = min(
        (sum(b) for b in itertools.product(BITS, repeat=3) if found.error(b) <= max_error),
        default=None,
    )
    assert fewest is not None
    assert found.error(bits) <= max_error
    assert sum(bits) <= fewest + 2


def test_steps_that_make_the_error_get_the_bits() -> None:
    bits = fewest_bits(Forecast([1.0, 0.1, 0.01, 0.01], 1.0, 1.0), 1e-2)
    assert list(bits) == sorted(bits, reverse=True)
    assert bits[0] > bits[-1] + 3


def test_an_impossible_bound_gets_the_most_bits_and_an_easy_one_the_fewest() -> None:
    assert fewest_bits(Forecast([1.0, 1.0], 1.0, 1.0), 1e-9) == (16, 16)
    assert fewest_bits(Forecast([0.0, 0.0], 1.0, 1.0), 1e-9) == (2, 2)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_forecast_is_fitted_to_what_was_measured(power: float) -> None:
    """Kinks make the error fall with the root of a level."""
    true = Forecast([1.0, 0.3], power, 0.7)
    found = forecast([1.0, 0.3], {b: true.error([b, b]) for b in (4, 8)})
    assert found.power == pytest.approx(power)
    assert found.factor == pytest.approx(0.7)
    assert forecast([1.0, 0.3], {6: 0.1}).error([6, 6]) == pytest.approx(0.1)


def test_equal_bits_are_one_number() -> None:
    assert recorded([4, 4, 4]).bits == 4
    assert recorded([8, 4]).bits == (8, 4, 4)
    assert str(recorded([8, 6, 4])) == "recorded, 6.0 bits on average"


class Branch(nn.Module):
    """Blocks whose updates have very different sizes."""

    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * self.f(x)
        return result


def uneven(depth: int = 12) -> tuple[rk.Stage, Tensor]:
    blocks = [Branch(32, 6.0 if n < 2 else 0.5) for n in range(depth)]
    return rk.ResidualStage(blocks, step=1.0), torch.randn(16, 32)


@pytest.mark.parametrize("max_error", [2e-2, 2e-3])
def test_an_allocation_takes_fewer_bits_than_one_number_for_all_steps(max_error: float) -> None:
    stage, x = uneven()
    probe = Probe(stage, x)
    measurer = Measurer(probe, probe.cotangent(None))

    def measured(bits: int) -> float:
        found = measurer.measure(Setting("adjoint", "recorded", bits=bits))
        return max(e.error for e in found.errors(measurer.exact))

    enough = min(bits for bits in BITS if measured(bits) <= max_error)
    best = Allocator(measurer).best(max_error, budget())
    assert best is not None
    assert best.error <= max_error
    assert mean_bits(best.setting.bits) < enough
    first, *_, last = best.setting.bits
    assert first > last
    assert len(best.setting.bits) == stage.depth


def test_a_missed_bound_raises_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that promises too much is corrected by measurements."""
    stage, x = uneven()
    probe = Probe(stage, x)
    measurer = Measurer(probe, probe.cotangent(None))
    measurer.measure(Setting("adjoint", "recorded", bits=8))
    allocator = Allocator(measurer)
    true = allocator._forecast(1e-2, budget())
    assert true is not None
    optimist = true._replace(factor=true.factor / 30)
    monkeypatch.setattr(allocator, "_forecast", lambda *_: optimist)
    best = allocator.best(1e-2, budget())
    assert best is not None
    assert best.error <= 1e-2
    tried = [s for s in measurer.found if s.records and s.bits != 8]
    assert len(tried) >= 2
    assert mean_bits(tried[0].bits) < mean_bits(best.setting.bits)


def test_settings_that_differ_in_bits_have_one_time() -> None:
    """A line of the table and the recommendation agree, also about allocations, which are measured
    after the others."""
    stage, x = uneven()
    report = rk.diagnose(stage, x, max_gradient_error=2e-2)
    recorded = [m for m in report.settings if m.setting.records]
    assert len(recorded) > 3
    assert len({(m.seconds, m.runs) for m in recorded}) == 1


def test_without_time_nothing_is_allocated() -> None:
    stage, x = uneven()
    probe = Probe(stage, x)
    measurer = Measurer(probe, probe.cotangent(None))
    measurer.measure(Setting("adjoint", "recorded", bits=8))
    assert Allocator(measurer).best(1e-2, budget(0.0)) is None


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["rows", "images", "modules", "pair"])
def test_the_rounding_errors_are_those_of_the_stage(kind: str, scheme: str) -> None:
    """The forward pass that measures them records as the stage does, whose reverse pass finds the
    states again to within rounding."""
    names = {"rows": "mlp", "images": "conv"}
    stage, x = make(names.get(kind, kind), scheme=scheme, step=1.0)
    stage.eval()
    probe = Probe(stage, x)
    with probe.untouched():
        errors = rounding_errors(probe, 6)
        method = Setting("adjoint", "recorded", bits=6).method(stage)
        layers = reconstructed(Trajectory(probe), method)
    assert layers[0].state_error < 1e-6
    found = [layer.state_error for layer in layers[1:]]
    assert found == pytest.approx(errors, rel=1e-3)
    assert all(0 < e < levels(6).c * 10 for e in errors)


@pytest.mark.parametrize("kind", ["mlp", "tied", "conv", "modules", "pair"])
def test_rows_are_those_that_the_stage_records(kind: str) -> None:
    """It saves as many scales as the recorder of the diagnosis makes."""
    stage, x = make(kind, reverse="recorded", bits=4)
    scales: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        scales.extend([t] if t.dtype == torch.bfloat16 else [])
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage(x)
    _, increments = recorder_of(stage).record(x, x, 4)
    each = sum(increment.scales.numel() for increment in increments)
    assert sum(t.numel() for t in scales) == (stage.depth - 1) * each


# ------------------------------------------------------------------- stages that had checkpoints


def stage_of(kind: str) -> tuple[rk.Stage, tuple[int, ...]]:
    """x + f(x), where no rule that reconstructs keeps the bound of one per cent."""
    if kind == "fused":
        stage: rk.Stage = rk.MLPStage(32, 64, 16, step=1.0)
        with torch.no_grad():
            for p in stage.parameters():
                p.mul_(1.3)
        return stage, (128, 32)
    if kind == "modules":
        blocks = [Branch(32, 4.0) for _ in range(16)]
        return rk.ResidualStage(blocks, step=1.0), (128, 32)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 256, 0.0, kind, batch_first=True, norm_first=True)
        for _ in range(24)
    ]
    return rk.ResidualStage([rk.residual_branch(layer) for layer in layers], step=1.0), (8, 16, 64)


@pytest.mark.parametrize("kind", ["fused", "modules", "gelu", "relu"])
def test_networks_as_they_are_are_tuned_to_record(kind: str) -> None:
    """In less memory than checkpoints, and below the bound on five batches not seen. The layers
    named by an activation are those of an unchanged transformer."""
    stage, shape = stage_of(kind)
    report = rk.tune(stage, torch.randn(shape), seconds=60)
    assert stage.options.reverse == "recorded"
    assert stage.options.backward == "adjoint"
    assert report.recommended.memory < report.of(CHECKPOINT).memory
    rules = [m for m in report.settings if m.setting.backward == "adjoint"]
    assert min(m.error for m in rules if not m.setting.records) > 5e-3
    for _ in range(5):
        assert error(stage, *torch.randn(2, *shape)) <= 1e-2


def test_an_allocation_that_fails_nearby_gets_more_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, shape = stage_of("modules")
    x = torch.randn(shape)
    true = Probe.gradients

    def gradients(self: Probe, cotangent: Any, **options: Any) -> Any:
        result = true(self, cotangent, **options)
        near = self.x.data_ptr() != x.data_ptr()
        bits = options.get("bits")
        if near and options.get("reverse") == "recorded" and mean_bits(bits) < 9:
            return result._replace(x=tuple(1.02 * g for g in result.x))
        return result

    monkeypatch.setattr(Probe, "gradients", gradients)
    report = rk.tune(stage, x, seconds=60)
    best = report.recommended
    assert best.setting.records
    assert mean_bits(best.setting.bits) >= 9
    assert best.nearby_inputs == 3
    assert best.error < 5e-3
    assert math.isfinite(best.seconds)
