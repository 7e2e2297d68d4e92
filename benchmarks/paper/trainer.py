"""Training and testing a classifier, the same for every experiment: stochastic gradient descent
with momentum, by one of the recipes of the paper's appendix B."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from data import Data, Split
from torch import Generator, nn
from torch.optim import SGD

import resode_kernels as rk


@dataclass(frozen=True)
class Recipe:
    epochs: int
    batch: int
    rate: float
    """The learning rate of the first step."""
    decay: float
    """Weight decay, constant."""
    schedule: str = "cosine"
    """Of the learning rate: ``"cosine"``, to zero by the half of a cosine, step by step;
    ``"steps"``, by a factor of ten ``every`` so many epochs; ``"constant"``."""
    every: int = 30
    momentum: float = 0.9

    def factor(self, progress: float) -> float:
        """What the first learning rate is multiplied by when so much of the training is done."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        if self.schedule == "steps":
            return 0.1 ** int(progress * self.epochs / self.every)
        if self.schedule == "constant":
            return 1.0
        raise ValueError(f"schedule must be 'cosine', 'steps' or 'constant', not {self.schedule!r}")


# The paper's.
CIFAR = Recipe(200, 128, 0.1, 5e-4)
CIFAR_SIMPLE = Recipe(90, 256, 0.1, 5e-4, "steps")  # for the network of section 5.2
CIFAR_FINETUNING = Recipe(5, 128, 1e-3, 5e-4, "constant")
IMAGENET = Recipe(100, 256, 0.1, 1e-4, "steps")
IMAGENET_FINETUNING = Recipe(3, 256, 5e-4, 1e-4, "constant")
# Digits are fewer and easier by far: smaller batches, so that an epoch has steps enough, and few
# epochs. The rate and the weight decay are CIFAR's.
DIGITS = Recipe(15, 50, 0.1, 5e-4)
# A block's gradient is proportional to h, and so is what a change of the block does to the output:
# N blocks move it by N h² = 1/N. The paper's 17,600 steps make up for that; in a few hundred at its
# rate deep networks would learn little.
DIGITS_SIMPLE = replace(DIGITS, rate=1.0)
DIGITS_FINETUNING = Recipe(5, 50, 1e-3, 5e-4, "constant")

# By the name of the data.
TRAINING = {"digits": DIGITS, "CIFAR-10": CIFAR, "ImageNet": IMAGENET}
SIMPLE = {"digits": DIGITS_SIMPLE, "CIFAR-10": CIFAR_SIMPLE, "ImageNet": IMAGENET}
FINETUNING = {
    "digits": DIGITS_FINETUNING,
    "CIFAR-10": CIFAR_FINETUNING,
    "ImageNet": IMAGENET_FINETUNING,
}


@dataclass
class History:
    """Of a training."""

    losses: list[float] = field(default_factory=list)
    """Of every step."""
    errors: list[float] = field(default_factory=list)
    """The fraction of test images that were classified wrong, after every epoch if that was asked
    for, and after the last."""
    failed: str | None = None
    """Why the training could not go on: a loss or a reconstructed state that was not finite. The
    network then counts as one that guesses."""

    @property
    def error(self) -> float:
        return self.errors[-1]

    @property
    def last_loss(self) -> float:
        """The mean over the last twenty steps."""
        return sum(self.losses[-20:]) / len(self.losses[-20:])

    @property
    def accuracy(self) -> float:
        return 1 - self.error


def train(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    seed: int = 0,
    device: str = "cpu",
    every_epoch: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> History:
    """Trains the parameters of ``model`` that require gradients, and tests it. ``seed`` decides the
    order of the images and their augmentation; weights are the model's. ``say`` is told which
    step of how many is done."""
    model.to(device)
    optimizer = SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        recipe.rate,
        recipe.momentum,
        weight_decay=recipe.decay,
    )
    generator = Generator().manual_seed(seed)
    history = History()
    steps = recipe.epochs * max(1, len(data.train) // recipe.batch)
    for epoch in range(recipe.epochs):
        model.train()
        for x, labels in data.train.batches(recipe.batch, generator):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * recipe.factor(len(history.losses) / steps)
            loss = F.cross_entropy(model(x.to(device)), labels.to(device))
            history.losses.append(loss.item())
            optimizer.zero_grad()
            history.failed = _backward(loss)
            if history.failed:
                history.errors.append(1 - 1 / data.classes)
                return history
            optimizer.step()
            say(f"step {len(history.losses)} of {steps}")
        if every_epoch or epoch == recipe.epochs - 1:
            history.errors.append(evaluate(model, data.test, recipe.batch, device))
    return history


def _backward(loss: torch.Tensor) -> str | None:
    """What went wrong, if something did."""
    if not loss.isfinite():
        return f"the loss is {loss.item()}"
    try:
        loss.backward()
    except rk.NonFiniteReconstructionError as error:
        return str(error)
    return None


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch: int = 250, device: str = "cpu") -> float:
    """The fraction of images that are classified wrong, in evaluation mode."""
    mode = model.training
    model.eval()
    wrong = 0
    for x, labels in split.batches(batch):
        wrong += int((model(x.to(device)).argmax(1) != labels.to(device)).sum())
    model.train(mode)
    return wrong / len(split)
