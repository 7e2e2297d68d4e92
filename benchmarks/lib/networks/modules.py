"""Stages of any modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import resode_kernels as rk

from .config import Config
from .names import CHECKPOINT, PER_BLOCK, RULES, STANDARD
from .network import Layer, Network


class ModuleNetwork(Network):
    """A stage of modules; the plain loop calls the same modules."""

    contestant_names = (STANDARD, PER_BLOCK, CHECKPOINT, *RULES)
    depths = (4, 16, 64)
    compiled_length = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.stage = self.make_stage().to(config.device)
        if config.weights == "smooth":
            self._interpolate(self.stage.blocks)
        self.x, self.cotangent = torch.randn(2, *self.shape()).to(config.device)

    def make_stage(self) -> rk.ResidualStage:
        raise NotImplementedError

    def shape(self) -> tuple[int, ...]:
        """The shape of the batch."""
        raise NotImplementedError

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        return self.stage.blocks

    def block(self, layer: Layer, x: Tensor) -> Tensor:
        return layer(x)

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return list(self.stage.parameters())

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.stage.parameters()])

    @staticmethod
    def _interpolate(blocks: nn.ModuleList) -> None:
        """Makes parameters linear in depth between those of the first and the last block."""
        for n, block in enumerate(blocks):
            between = zip(
                block.parameters(), blocks[0].parameters(), blocks[-1].parameters(), strict=True
            )
            with torch.no_grad():
                for p, first, last in between:
                    p.copy_(torch.lerp(first, last, n / (len(blocks) - 1)))
