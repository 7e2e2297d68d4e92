"""The contestants: one residual network, trained in different ways.

Every contestant is a function that runs a training step (forward and backward) of the same network
on the same batch; ``gradients`` then tells what it computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk

STANDARD = "standard backprop"
CHECKPOINT = "checkpoint, √N segments"
RULES = ("paper", "refined", "predicted")
WEIGHTS = ("independent", "smooth", "tied")

# Matrix products per block and training step of an untied Euler MLP stage.
PRODUCTS = {STANDARD: 6, "paper": 9, "refined": 10, "predicted": 8}


@dataclass
class Config:
    """One network and one batch."""

    stage: str = "mlp"
    scheme: str = "euler"
    weights: str = "independent"
    dim: int = 64
    hidden: int = 64
    depth: int = 64
    batch: int = 1024
    device: str = "cpu"
    activation: str = "tanh"


class Network:
    """The network as a stage and as the plain PyTorch loop that anyone would write, with one tensor
    per layer's parameter, all holding the same numbers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {
            "tied": config.weights == "tied",
            "scheme": config.scheme,
            "device": config.device,
        }
        if config.stage == "linear":
            self.stage: rk.Stage = rk.LinearStage(config.dim, config.depth, **options)
        else:
            self.stage = rk.MLPStage(
                config.dim, config.hidden, config.depth, config.activation, **options
            )
        for parameter in self.stage.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 0.1
            with torch.no_grad():
                parameter.copy_(scale * self._draw(parameter.shape, generator))
        self.layers = [
            [p[n].detach().clone().requires_grad_() for p in self.stage.parameters()]
            for n in range(self.stage.num_blocks)
        ]
        batch = torch.randn(2, config.batch, config.dim, generator=generator)
        self.x, self.cotangent = batch.to(config.device)
        self.output: Tensor | None = None

    def _draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Standard normal entries: one draw per layer, or linear in depth between two draws."""
        if self.config.weights != "smooth":
            return torch.randn(shape, generator=generator)
        first, last = torch.randn(2, *shape[1:], generator=generator)
        t = torch.linspace(0, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return (1 - t) * first + t * last

    # -- the plain loop

    def _f(self, n: int, x: Tensor) -> Tensor:
        layer = self.layers[0 if self.config.weights == "tied" else n]
        if self.config.stage == "linear":
            return torch.mm(x, layer[0].t())
        w1, b1, w2, b2 = layer
        sigma = getattr(F, self.config.activation)
        return torch.addmm(b2, sigma(torch.addmm(b1, x, w1.t())), w2.t())

    def _steps(self, begin: int, end: int, x: Tensor) -> Tensor:
        h = 1 / self.config.depth
        for n in range(begin, end):
            a = self._f(n, x)
            if self.config.scheme == "heun":
                a = (a + self._f(n + 1, torch.add(x, a, alpha=h))) * 0.5
            x = torch.add(x, a, alpha=h)
        return x

    def _train(self, forward: Callable[[Tensor], Tensor]) -> None:
        x = self.x.detach().requires_grad_()
        y = forward(x)
        self.output = y.detach()
        y.backward(self.cotangent)

    # -- training steps

    def contestants(self) -> dict[str, Callable[[], None]]:
        def standard() -> None:
            self._train(lambda x: self._steps(0, self.config.depth, x))

        def checkpointed() -> None:
            length = math.ceil(math.sqrt(self.config.depth))

            def forward(x: Tensor) -> Tensor:
                for begin in range(0, self.config.depth, length):
                    end = min(begin + length, self.config.depth)
                    x = checkpoint(self._steps, begin, end, x, use_reentrant=False)
                return x

            self._train(forward)

        def rule(name: str) -> Callable[[], None]:
            def train() -> None:
                self._train(self.stage.configure(reverse=name))

            return train

        return {
            STANDARD: standard,
            CHECKPOINT: checkpointed,
            **{name: rule(name) for name in RULES},
        }

    def forget(self) -> None:
        """Drops gradients and the output, as between two steps."""
        self.output = None
        for p in (*self.stage.parameters(), *(p for layer in self.layers for p in layer)):
            p.grad = None

    def gradients(self) -> Tensor:
        """All parameter gradients of the step just taken, as one vector."""
        if self.layers[0][0].grad is not None:
            grads = [
                torch.stack([layer[i].grad for layer in self.layers])
                for i in range(len(self.layers[0]))
            ]
        else:
            grads = [p.grad for p in self.stage.parameters()]
        return torch.cat([g.flatten() for g in grads])
