"""``tune`` keeps its bound on batches that it has not seen; ``monitor`` tells when one is left."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.diagnostics.budget import Budget, Display
from resode_kernels.diagnostics.choice import Choice, cheapest
from resode_kernels.diagnostics.gradients import GradientError
from resode_kernels.diagnostics.probe import Probe
from resode_kernels.diagnostics.settings import CHECKPOINT, STORED, Measurement, Setting


class Transformer(nn.Module):
    """The residual function of a pre-norm layer, feed-forward part and all."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            dim, 2, 2 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.branch = rk.residual_branch(layer)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.branch(x)
        return result


def make(kind: str, depth: int, **options: Any) -> tuple[rk.Stage, tuple[int, ...]]:
    if kind == "mlp":
        return rk.MLPStage(8, 16, depth, **options), (32, 8)
    if kind == "conv":
        return rk.ConvStage(4, depth, activation="silu", **options), (8, 4, 5, 5)
    if kind == "relu":
        return rk.ConvStage(8, depth, **options), (16, 8, 8, 8)
    if kind == "bottleneck":
        return rk.ConvStage(16, depth, "bottleneck", **options), (8, 16, 6, 6)
    return rk.ResidualStage([Transformer(8) for _ in range(depth)], **options), (2, 5, 8)


def error(stage: rk.Stage, x: Tensor, cotangent: Tensor) -> float:
    """Of a training step, taken by hand: the larger of the parameters' and the input's."""

    def gradients(**options: Any) -> list[Tensor]:
        before = stage.options
        stage.configure(**options)
        leaf = x.clone().requires_grad_()
        result = torch.autograd.grad(stage(leaf), [leaf, *stage.parameters()], cotangent)
        stage.options = before
        return [g.double().flatten() for g in result]

    mine, exact = gradients(), gradients(backward="checkpoint", anchor_every=None)
    pairs = [(mine[0], exact[0]), (torch.cat(mine[1:]), torch.cat(exact[1:]))]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


# A kink between a state and its reconstruction makes a jump in the gradient of some 1/√activations:
# networks as small as these keep tight bounds only with smooth activations.
# ResNet-101's third stage has 23 bottleneck blocks; step 1 is the classical rule, the hardest case.
CASES = [
    *(("mlp", depth, None, bound) for depth in (8, 64, 256) for bound in (1e-2, 1e-4)),
    *(("conv", depth, None, 1e-2) for depth in (8, 64)),
    ("conv", 256, None, 1e-4),
    *(("relu", depth, None, 1e-2) for depth in (8, 64)),
    *(("transformer", depth, None, bound) for depth, bound in ((8, 1e-2), (32, 1e-4))),
    ("bottleneck", 23, None, 1e-2),
    ("bottleneck", 23, 1.0, 1e-2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth", "step", "bound"), CASES)
def test_the_bound_holds_on_batches_not_seen(
    kind: str, depth: int, step: float | None, bound: float
) -> None:
    stage, shape = make(kind, depth, step=step)
    report = rk.tune(stage, torch.randn(shape), max_gradient_error=bound)
    assert Setting(*(getattr(stage.options, key) for key in Setting._fields)) == (
        report.recommended.setting
    )
    for _ in range(3):
        assert error(stage, *torch.randn(2, *shape)) <= bound


def test_a_stage_that_cannot_be_inverted_gets_checkpoints() -> None:
    stage = rk.MLPStage(8, 64, 16, "relu", step=20.0)
    report = rk.tune(stage, torch.randn(32, 8))
    assert stage.options.backward == "checkpoint"
    assert report.recommendation.startswith("Recommended: checkpoint, which is exact.")
    assert "No reverse rule keeps the gradient error below 1.0e-02" in report.recommendation
    assert error(stage, *torch.randn(2, 32, 8)) < 1e-5


def test_an_easy_stage_is_tuned_to_reconstruct_without_anchors() -> None:
    stage = rk.MLPStage(8, 16, 128, tied=True, backward="stored")
    rk.tune(stage, torch.randn(512, 8))
    assert (stage.options.backward, stage.options.anchor_every) == ("adjoint", None)


def test_the_loss_is_the_users() -> None:
    """A loss that only sees half of the rows makes the error that of those rows."""
    stage = rk.MLPStage(8, 16, 8, step=0.5)
    x = torch.randn(6, 8)
    x[3:] *= 100
    settings = [Setting("adjoint", "paper", 1)]
    tame, wild = (
        rk.diagnose(stage, x, lambda y, rows=rows: y[rows].sum(), settings=settings)
        for rows in (slice(0, 3), slice(3, 6))
    )
    assert tame.gradient != wild.gradient


def test_a_stage_is_tuned_inside_its_model() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
            return torch.tanh(self.linear(x)) * mask * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 8)
            self.stage = rk.ResidualStage([Masked() for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            return self.stage(self.first(x), torch.ones(8), scale=0.5)

    model, x = Model(), torch.randn(5, 3)
    seen = rk.input_of(model.stage, lambda: model(x))
    assert torch.equal(seen.x, model.first(x))
    assert not seen.x.requires_grad
    assert not model.stage._forward_pre_hooks
    report = rk.tune(model.stage, seen)
    assert report.recommended.error < 1e-2
    with pytest.raises(RuntimeError, match="did not call the stage"):
        rk.input_of(model.stage, lambda: model.first(x))


def test_a_setting_that_fails_nearby_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kink in f would have it: good at x, bad at an input one per cent away."""
    stage, x = rk.MLPStage(8, 8, 64), torch.randn(32, 8)
    lucky, honest = Setting("adjoint", "predicted", 2), Setting("adjoint", "refined", 3)
    probe = Probe(stage, x)
    found = [measured(lucky, 0.0, 50, 1e-3), measured(honest, 1e-6, 50, 2e-3), FALLBACK]
    true = Probe.gradients

    def gradients(self: Probe, cotangent: Any, **options: Any) -> Any:
        result = true(self, cotangent, **options)
        if options["reverse"] == "predicted" and self is not probe:
            return result._replace(x=tuple(2 * g for g in result.x))
        return result

    monkeypatch.setattr(Probe, "gradients", gradients)
    choice = Choice(probe, None, found)
    assert choice.best(1e-2, Budget(60.0, Display("", 60.0))).setting == honest
    assert choice.measurements[0].error > 0.9
    assert [m.nearby_inputs for m in choice.measurements] == [3, 3, 0]


# ---------------------------------------------------------------------------------------- choice


def measured(setting: Setting, error: float, memory: int, seconds: float) -> Measurement:
    exact = GradientError(0.0, 1.0)
    return Measurement(setting, GradientError(error, 1.0), exact, memory, seconds)


FALLBACK = measured(CHECKPOINT, 0.0, 100, 1.0)
PLAIN = Setting("adjoint", "refined", 1)
ANCHORED = Setting("adjoint", "refined", 1, 8)
FAST = Setting("adjoint", "predicted", 2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # the fastest that keeps the bound
        ([measured(PLAIN, 1e-3, 50, 0.9), measured(FAST, 1e-3, 60, 0.7)], FAST),
        # alike in time: the one with less memory
        ([measured(ANCHORED, 1e-4, 70, 0.7), measured(PLAIN, 1e-3, 50, 0.72)], PLAIN),
        # not within the margin of two
        ([measured(FAST, 6e-3, 50, 0.5), measured(PLAIN, 4e-3, 50, 0.9)], PLAIN),
        # more memory than checkpointing
        ([measured(ANCHORED, 1e-4, 120, 0.5)], CHECKPOINT),
        ([measured(PLAIN, float("inf"), 50, 0.5)], CHECKPOINT),
        # standard backprop is never chosen
        ([measured(STORED, 0.0, 10, 0.1)], CHECKPOINT),
        ([], CHECKPOINT),
    ],
)
def test_the_cheapest_setting_is_chosen(found: list[Measurement], expected: Setting) -> None:
    assert cheapest([*found, FALLBACK], 1e-2).setting == expected


def test_the_error_of_the_input_counts() -> None:
    wrong_input = Measurement(
        PLAIN, GradientError(1e-6, 1.0), GradientError(1.0, 0.5), memory=1, seconds=0.1
    )
    assert cheapest([wrong_input, FALLBACK], 1e-2) is FALLBACK


# --------------------------------------------------------------------------------------- monitor


def train(model: nn.Module, steps: int, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_a_monitor_measures_every_kth_training_step() -> None:
    stage = rk.MLPStage(8, 16, 12)
    model = nn.Sequential(stage, nn.Linear(8, 1))
    x = torch.randn(10, 8)
    with warnings.catch_warnings(), rk.monitor(stage, every=3) as watching:
        warnings.simplefilter("error")
        train(model, 7, x)
        with torch.no_grad():
            model(x)  # not a training step
    assert [seen.call for seen in watching.history] == [1, 4, 7]
    train(model, 3, x)
    assert len(watching.history) == 3  # closed
    assert watching.last is watching.history[-1]


def test_a_monitor_measures_the_gradients_of_the_training_step_itself() -> None:
    stage = rk.MLPStage(8, 16, 6, step=0.3)
    head = nn.Linear(8, 1)
    x = torch.randn(10, 8)
    with rk.monitor(stage, max_gradient_error=1.0) as watching:
        y = stage(x)
        y.retain_grad()
        head(y).exp().mean().backward()
    assert watching.last is not None
    assert watching.last.error == pytest.approx(error(stage, x, y.grad), rel=1e-2)


@pytest.mark.parametrize("kind", ["mlp", "conv", "transformer"])
def test_a_monitor_changes_nothing_in_training(kind: str) -> None:
    results = []
    for watch in (False, True):
        torch.manual_seed(0)
        stage, shape = make(kind, 6)
        model = nn.Sequential(stage, nn.Dropout(0.5))
        x = torch.randn(shape)
        if watch:
            with rk.monitor(stage, every=2, max_gradient_error=10.0):
                train(model, 4, x)
        else:
            train(model, 4, x)
        results.append([*stage.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_monitor_warns_when_the_bound_is_left() -> None:
    stage = rk.MLPStage(8, 16, 6, step=0.5, reverse="paper")
    x = torch.randn(10, 8)
    with rk.monitor(stage, every=1, max_gradient_error=1e-6) as watching:
        with pytest.warns(rk.GradientErrorWarning, match=r"gradient error .* above .*rk.tune"):
            stage(x).sum().backward()
        rk.tune(stage, x, max_gradient_error=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stage(x).sum().backward()
    assert watching.history[0].error > 1e-6 >= watching.history[1].error


def test_a_monitor_sees_arguments_and_tuples() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: tuple[Tensor, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x[1])) * scale, torch.tanh(x[0])

    stage = rk.ResidualStage(Pair(), depth=9)
    x = (torch.randn(3, 4), torch.randn(3, 4))
    with rk.monitor(stage, max_gradient_error=1.0) as watching:
        stage(x, scale=torch.tensor(0.5, requires_grad=True))[1].sum().backward()
    assert watching.last is not None
    assert 0 < watching.last.error < 1e-2


def test_a_monitor_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="every must be at least 1"):
        rk.monitor(rk.MLPStage(4, 4, 2), every=0)
