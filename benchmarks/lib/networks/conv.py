"""Convolutional stages: basic blocks, bottlenecks, and the basic blocks as modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.stages.conv import WINDOWS

from .config import Config
from .modules import ModuleNetwork
from .names import CHANNELS_LAST, CHECKPOINT, PER_BLOCK, RULES, STANDARD
from .network import Layer


class ConvNetwork(ModuleNetwork):
    """The paper's basic blocks. The plain loop runs in both memory formats of PyTorch."""

    title = "Residual convolutional stage"
    kind = "basic"
    states_moved: ClassVar = {"paper": 6, "refined": 6, "predicted": 9, "recorded": 8.5}
    contestant_names = (STANDARD, CHANNELS_LAST, CHECKPOINT, *RULES)
    baselines = (STANDARD, CHANNELS_LAST)
    products: ClassVar = {
        **{STANDARD: 6, CHANNELS_LAST: 6},
        **{"paper": 10, "refined": 10, "predicted": 8, "recorded": 8},
    }
    depths = (4, 16, 64, 128)
    batch, size, activation = 32, 16, "relu"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        last = torch.channels_last
        self.blocks_channels_last = copy.deepcopy(self.stage.blocks).to(memory_format=last)
        self.batch_channels_last = [
            t.contiguous(memory_format=last) for t in (self.x, self.cotangent)
        ]

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        options = {"activation": c.activation, "tied": c.tied, "scheme": c.scheme}
        return rk.ConvStage(c.dim, c.depth, self.kind, hidden=c.hidden, **options)

    def shape(self) -> tuple[int, ...]:
        return self.config.batch, self.config.dim, self.config.size, self.config.size

    def product_flops(self) -> float:
        c = self.config
        return 2 * c.batch * c.size**2 * 9 * c.dim * c.hidden

    def kernel_flops(self) -> float:
        """By Winograd's scheme: 16 products for each patch of 2 × 2 pixels, in both directions."""
        c = self.config
        return 2 * c.batch * 16 * math.ceil(c.size / 2) ** 2 * c.dim * c.hidden

    def bytes_moved(self, rule: str) -> float:
        """An evaluation of a layer reads its input and writes its result. A VJP moves the gradients
        of both as well. It has two products, so each of them moves as much as an evaluation."""
        c = self.config
        layers = len(WINDOWS[self.kind])
        inside = 2 * (c.dim + (layers - 1) * c.hidden) * c.batch * c.size**2 * self.x.itemsize
        evaluations = self.products[rule] / (self.products[STANDARD] / 3)
        return super().bytes_moved(rule) + c.depth * evaluations * inside

    def training_steps(self) -> dict[str, Callable[[], None]]:
        depth = self.config.depth
        return {
            **super().training_steps(),
            CHANNELS_LAST: lambda: self.train(
                lambda x: self.plain_loop(0, depth, x), *self.batch_channels_last
            ),
        }

    def layers_of(self, x: Tensor) -> Sequence[Layer]:
        last = x.is_contiguous(memory_format=torch.channels_last)
        return self.blocks_channels_last if last else self.stage.blocks

    def parameters(self) -> list[nn.Parameter | Tensor]:
        return [*self.stage.parameters(), *self.blocks_channels_last.parameters()]

    def gradients(self) -> Tensor:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        return torch.cat(grads)


class BottleneckNetwork(ConvNetwork):
    title = "Residual stage of bottlenecks"
    kind = "bottleneck"
    products: ClassVar = {
        **{STANDARD: 3, CHANNELS_LAST: 3},
        **{"paper": 5, "refined": 5, "predicted": 4, "recorded": 4},
    }
    hidden_factor = 0.25

    def product_flops(self) -> float:
        """FLOPs of all three convolutions in one direction."""
        c = self.config
        return 2 * c.batch * c.size**2 * c.hidden * (2 * c.dim + 9 * c.hidden)

    def kernel_flops(self) -> float:
        c = self.config
        patches = math.ceil(c.size / 2) ** 2
        return 2 * c.batch * c.hidden * (2 * c.size**2 * c.dim + 16 * patches * c.hidden)


class ConvModulesNetwork(ConvNetwork):
    """The same blocks, run as modules."""

    title = "Stage of convolutional modules"
    contestant_names = (STANDARD, PER_BLOCK, CHECKPOINT, *RULES)
    products: ClassVar = {
        **{STANDARD: 6, PER_BLOCK: 8},
        **{"paper": 10, "refined": 10, "predicted": 8, "recorded": 8},
    }
    states_moved: ClassVar = {}

    def make_stage(self) -> rk.ResidualStage:
        c = self.config
        blocks = list(super().make_stage().blocks)
        return rk.ResidualStage(blocks, depth=c.depth if c.tied else None, scheme=c.scheme)
