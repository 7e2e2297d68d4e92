"""Stages that keep the parameters of all blocks in one tensor: residual MLP and linear stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resode_kernels as rk

from .config import Config
from .names import STANDARD
from .network import Layer, Network


class StackedNetwork(Network):
    """A stage with the parameters of all blocks in one tensor. The plain loop has one tensor per
    layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(0)
        self.stage = self.make_stage(tied=config.tied, scheme=config.scheme, device=config.device)
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

    def make_stage(self, **options: Any) -> rk.Stage:
        raise NotImplementedError

    def product_flops(self) -> float:
        return 2 * self.config.batch * self.config.dim * self.config.hidden

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        return self.layers

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return [*self.stage.parameters(), *(p for layer in self.layers for p in layer)]

    def gradients(self) -> Tensor:
        if self.layers[0][0].grad is not None:
            grads = [
                torch.stack([layer[i].grad for layer in self.layers])
                for i in range(len(self.layers[0]))
            ]
        else:
            grads = [p.grad for p in self.stage.parameters()]
        return torch.cat([g.flatten() for g in grads])

    def _draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Standard normal entries: one draw per layer, or linear in depth between two draws."""
        if self.config.weights != "smooth":
            return torch.randn(shape, generator=generator)
        first, last = torch.randn(2, *shape[1:], generator=generator)
        t = torch.linspace(0, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return (1 - t) * first + t * last


class MLPNetwork(StackedNetwork):
    title = "Residual MLP stage"
    products: ClassVar = {STANDARD: 6, "paper": 9, "refined": 10, "predicted": 8, "recorded": 7}
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9, "recorded": 8.5}

    def make_stage(self, **options: Any) -> rk.Stage:
        c = self.config
        return rk.MLPStage(c.dim, c.hidden, c.depth, c.activation, **options)

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        w1, b1, w2, b2 = layer
        sigma = getattr(F, self.config.activation)
        return torch.addmm(b2, sigma(torch.addmm(b1, x, w1.t())), w2.t())


class LinearNetwork(StackedNetwork):
    title = "Residual linear stage"
    products: ClassVar = {STANDARD: 3, "paper": 4, "refined": 5, "predicted": 4, "recorded": 3}
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9, "recorded": 8.5}

    def make_stage(self, **options: Any) -> rk.Stage:
        return rk.LinearStage(self.config.dim, self.config.depth, **options)

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        return torch.mm(x, layer[0].t())
