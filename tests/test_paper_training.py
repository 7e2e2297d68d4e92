"""What the training experiments of benchmarks/paper share, and the experiments in small."""

from __future__ import annotations

from dataclasses import replace

import data
import pytest
import torch
import trainer
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
            raise RuntimeError("state x[3] is not finite")

    history = trainer.train(Failing(), data.digits(200), TINY)
    assert len(history.losses) == 3
    assert history.error == pytest.approx(0.9)
    assert history.failed is not None
    assert ("nan" if where == "loss" else "x[3]") in history.failed
