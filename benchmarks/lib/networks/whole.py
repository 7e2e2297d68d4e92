"""Whole networks: a stem, a stage and a head, with a loss on data that is there. Their stages
compute x + f(x), as networks do that people have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samples import digits
from torch import Generator, Tensor, nn

import resode_kernels as rk

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


class WholeNetwork(nn.Module):
    """The stem makes the state x[0] of a batch, the head the logits of the state x[N]."""

    stem: nn.Module
    stage: rk.ResidualStage
    head: nn.Module
    training_batch = 64
    relu = False
    """Whether the stage's activation has a kink."""
    shape: tuple[int, ...]
    """Of a state, without the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.stage(self.stem(inputs)))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def batch(self, count: int, generator: Generator) -> Batch:
        """Some of the data, to train with."""
        raise NotImplementedError

    def state(self, count: int, generator: Generator) -> Tensor:
        """A random state, in which a block behaves as at initialisation."""
        return torch.randn(count, *self.shape, generator=generator)


class DigitsNetwork(WholeNetwork):
    """Classifies handwritten digits."""

    def batch(self, count: int, generator: Generator) -> Batch:
        images, labels = digits()
        chosen = torch.randint(len(labels), (count,), generator=generator)
        return images[chosen], labels[chosen]
