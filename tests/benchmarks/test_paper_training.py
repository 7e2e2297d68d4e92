"""What the training experiments of benchmarks/paper share, and the experiments in small."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import data
import fig3a_step
import fig3c_gradient_error
import fig4_depth
import jobs
import pytest
import torch
import trainer
from experiment import Options, Result, save
from torch import Tensor, nn
from trainer import Recipe

import resode_kernels as rk

TINY = Recipe(epochs=2, batch=50, rate=0.1, decay=5e-4)


def tiny_model(depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return rk.models.SimpleResNet(depth, in_channels=1, stride=2, padding=2)


# ------------------------------------------------------------------------------------ the trainer


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (trainer.CIFAR, [0.1, 0.0853553, 0.05, 0.0146447]),
        (trainer.CIFAR_SIMPLE, [0.1, 0.1, 0.01, 0.001]),
        (trainer.IMAGENET, [0.1, 0.1, 0.01, 0.001]),
        (trainer.IMAGENET_FINETUNING, [5e-4] * 4),
    ],
)
def test_learning_rates_follow_the_papers_schedules(recipe: Recipe, expected: list[float]) -> None:
    rates = [recipe.rate * recipe.factor(quarter / 4) for quarter in range(4)]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="'linear'"):
        trainer.train(tiny_model(), data.digits(100), replace(TINY, schedule="linear"))


def test_a_training_repeats_with_its_seed() -> None:
    digits = data.digits(200)
    first, again, other = (
        trainer.train(tiny_model(), digits, TINY, seed=seed) for seed in (0, 0, 1)
    )
    assert first.losses == again.losses
    assert first.error == again.error
    assert first.losses != other.losses
    assert len(first.losses) == 8
    assert len(first.errors) == 1


@pytest.mark.slow
def test_training_learns_and_leaves_frozen_parameters_alone() -> None:
    model = tiny_model()
    model.stem.requires_grad_(False)
    before = model.stem[0].weight.clone()
    history = trainer.train(
        model, data.digits(), replace(TINY, epochs=4, rate=0.3), every_epoch=True
    )
    assert torch.equal(model.stem[0].weight, before)
    assert len(history.errors) == 4
    assert history.error < 0.5
    assert history.failed is None
    assert history.error == trainer.evaluate(model, data.digits().test)
    assert model.training


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_training_that_cannot_go_on_counts_as_guessing(where: str) -> None:
    class Failing(nn.Module):
        """Fails in its third step."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(64, 10), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.linear(x.flatten(1))
            if self.calls == 3 and where == "loss":
                return y * torch.nan
            if self.calls == 3:
                y.register_hook(self.fail)
            return y

        def fail(self, gradient: Tensor) -> None:
            raise rk.NonFiniteReconstructionError("state x[3] is not finite")

    history = trainer.train(Failing(), data.digits(200), TINY)
    assert len(history.losses) == 3
    assert history.error == pytest.approx(0.9)
    assert history.failed is not None
    assert ("nan" if where == "loss" else "x[3]") in history.failed


# -------------------------------------------------------------------------------- the experiments


@pytest.fixture
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of 100 digits, in this process."""
    digits = data.digits(100)
    assert isinstance(digits.test, data.Images)
    few = replace(digits.test, pixels=digits.test.pixels[:50], labels=digits.test.labels[:50])
    small = replace(digits, test=few)
    for module in (fig3a_step, fig3c_gradient_error, fig4_depth):
        monkeypatch.setattr(module, "load", lambda directory: small)
        for recipes in ("TRAINING", "SIMPLE"):
            if hasattr(module, recipes):
                monkeypatch.setattr(module, recipes, {"digits": replace(TINY, rate=1.0)})
    monkeypatch.setattr(jobs, "WORKERS", 1)


def check(result: Result, name: str, out: Path) -> None:
    """What every experiment returns, and what is written."""
    assert all(verdict.claim and verdict.numbers for verdict in result.verdicts)
    assert result.notes
    save(result, name, out)
    assert (out / f"{name}.png").stat().st_size > 10_000
    with (out / f"{name}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(result.rows)


def test_jobs_in_processes_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [math.sqrt(n) for n in range(5)]
    for workers in (1, 2):
        monkeypatch.setattr(jobs, "WORKERS", workers)
        assert [root for _, root in jobs.side_by_side(math.sqrt, range(5))] == expected


@pytest.mark.slow
def test_figure_4_trains_every_network_with_every_method(
    in_small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fig4_depth, "QUICK_DEPTHS", (2, 3))
    result = fig4_depth.run(Options(quick=True, seeds=2))
    check(result, "fig4_depth", tmp_path)
    seen = {(row["depth"], row["scheme"], row["method"], row["seed"]) for row in result.rows}
    assert seen == {
        (depth, scheme, method, seed)
        for depth in (2, 3)
        for scheme in ("euler", "heun")
        for method in ("backprop", "adjoint")
        for seed in (0, 1)
    }
    assert len(result.rows) == len(seen)
    # From the same start with the same images, the methods differ by their gradients only.
    losses = {
        (row["scheme"], row["method"]): row["last_loss"]
        for row in result.rows
        if row["depth"] == 2 and row["seed"] == 0
    }
    assert len(set(losses.values())) == 4


def test_the_verdicts_of_figure_4_follow_the_numbers() -> None:
    depths = (2, 32, 64)

    def curves() -> dict[tuple[str, str], fig4_depth.Curve]:
        """As the paper has them."""
        exact = {2: [0.10, 0.11, 0.12], 32: [0.04, 0.05, 0.06], 64: [0.03, 0.04, 0.05]}
        return {
            ("euler", "backprop"): {**exact},
            ("heun", "backprop"): {**exact},
            ("euler", "adjoint"): {**exact, 2: [0.2, 0.3, 0.9]},
            ("heun", "adjoint"): {**exact, 2: [0.2, 0.25, 0.4]},
        }

    def failing(curve: tuple[str, str], depth: int, errors: list[float]) -> list[int]:
        broken = curves()
        broken[curve][depth] = errors
        return [i for i, v in enumerate(fig4_depth.verdicts(broken, depths)) if not v.holds]

    bad = [0.3, 0.31, 0.32]
    assert failing(("euler", "adjoint"), 2, [0.2, 0.3, 0.9]) == []
    assert failing(("euler", "backprop"), 32, bad) == [0, 2]
    assert failing(("euler", "adjoint"), 2, [0.10, 0.11, 0.12]) == [1, 4]
    assert failing(("euler", "adjoint"), 64, bad) == [2]
    assert failing(("heun", "adjoint"), 32, bad) == [3, 4]
    assert failing(("euler", "backprop"), 64, bad) == [0, 2, 5]


@pytest.mark.slow
def test_figure_3c_measures_every_parameter_of_trained_networks(
    in_small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fig3c_gradient_error, "QUICK_DEPTHS", (2, 4))
    monkeypatch.setattr(fig3c_gradient_error, "CHANNELS", 4)
    monkeypatch.setattr(fig3c_gradient_error, "BASE", 4)
    result = fig3c_gradient_error.run(Options(quick=True))
    check(result, "fig3c_gradient_error", tmp_path)
    blocks = (2 + 4) + (3 + 5)  # Euler's, Heun's
    assert len(result.rows) == blocks * 6 * len(fig3c_gradient_error.KINDS)
    errors = [row["relative_error"] for row in result.rows]
    # The cotangent that reaches the last block is exact, and so is the gradient of its last bias.
    assert 0 <= min(errors) < 1e-5 < median(errors) < max(errors) < 2
    assert all(row["change_of_state"] > 0 for row in result.rows)

    def of_base(kind: str) -> list[float]:
        rows = (row for row in result.rows if row["kind"] == kind and row["depth"] == 4)
        return [row["relative_error"] for row in rows]

    assert of_base("transferred") == of_base("paper")  # to its own depth


def test_a_network_transferred_to_a_multiple_of_its_depth_repeats_its_blocks() -> None:
    model = tiny_model(2)
    other = fig3c_gradient_error.transferred(model, 4)
    for i, block in enumerate(other.stage.blocks):
        assert torch.equal(block.conv1.weight, model.stage.blocks[i // 2].conv1.weight)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(other(x), model(x))  # f = 0 at first
    assert model.stage.depth == 2


def test_the_errors_of_figure_3c_are_those_of_the_gradients() -> None:
    model = tiny_model()
    model.stage.configure(backward="stored")
    digits = data.digits(100)
    trainer.train(model, digits, TINY)
    x, labels = next(digits.train.batches(50))
    found = []
    for backward in ("stored", "adjoint"):
        found.append(fig3c_gradient_error.gradients(model, x, labels, backward=backward))
        model.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        assert all(torch.equal(found[-1][n], p.grad) for n, p in model.stage.named_parameters())
    assert not all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_verdicts_of_figure_3c_follow_the_numbers() -> None:
    depths = (4, 8, 16)

    def verdicts(euler: list[float], heun: list[float]) -> list[bool]:
        errors = {
            (scheme, kind): {d: [v / 2, v, 3 * v] for d, v in zip(depths, values, strict=True)}
            for scheme, values in (("euler", euler), ("heun", heun))
            for kind in fig3c_gradient_error.KINDS
        }
        return [verdict.holds for verdict in fig3c_gradient_error.verdicts(errors, depths)]

    assert verdicts([0.4, 0.2, 0.1], [0.3, 0.1, 0.05]) == 2 * [True, True, True]
    assert verdicts([0.4, 0.5, 0.1], [0.3, 0.1, 0.05]) == 2 * [False, True, True]
    assert verdicts([0.4, 0.2, 0.1], [0.3, 0.1, 0.15]) == 2 * [True, False, False]


@pytest.mark.slow
def test_figure_3a_trains_tied_and_untied_networks_with_both_steps(
    in_small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fig3a_step, "QUICK_BLOCKS", (2, 3))
    monkeypatch.setattr(fig3a_step, "RESNET_101", (2, 2, 3, 2))
    result = fig3a_step.run(Options(quick=True, seeds=1))
    check(result, "fig3a_step", tmp_path)
    seen = {(row["layers"], row["weights"], row["step"]) for row in result.rows}
    assert seen == {
        (layers, weights, step)
        for layers, weights in (
            ("2 2 3 2", "untied"),
            ("2 2 2 2", "tied"),
            ("3 3 3 3", "tied"),
        )
        for step in ("1/N", "1")
    }
    losses = {(row["layers"], row["step"]): row["last_loss"] for row in result.rows}
    # One step of 1/1 is the classical rule.
    assert losses["2 2 2 2", "1/N"] == losses["2 2 2 2", "1"]
    assert losses["3 3 3 3", "1/N"] != losses["3 3 3 3", "1"]
    assert result.table.count("|") == 12


def test_the_verdicts_of_figure_3a_follow_the_numbers() -> None:
    good, bad = [0.94, 0.95, 0.96], [0.1, 0.1, 0.5]

    def verdicts(scaled: list[float], tied: list[float], classical: list[float]) -> list[bool]:
        depths = {2: {"1/N": good, "1": good}, 32: {"1/N": tied, "1": classical}}
        result = fig3a_step.verdicts({"1/N": scaled, "1": good}, depths)
        return [verdict.holds for verdict in result]

    assert verdicts(good, good, bad) == [True, True, True]
    assert verdicts(bad, good, bad) == [False, True, True]
    assert verdicts(good, bad, bad) == [True, False, True]
    assert verdicts(good, good, good) == [True, True, False]
