"""What tests of transforms and of forward-mode derivatives share: stages beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BLOCKS, make_conv_stage, make_stage, plain, steps
from torch import Tensor, nn

import resode_kernels as rk

BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]
KINDS = [*BLOCKS, "basic", "bottleneck"]
EXACT: dict[str, Any] = {"backward": "checkpoint"}


class Plain(nn.Module):
    """The network of a stage as anyone would write it, with the parameters of the stage."""

    def __init__(self, stage: rk.Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        stage = self.stage
        if isinstance(stage, rk.ConvStage):
            return steps(stage, lambda n, x: stage.blocks[0 if stage.tied else n](x), x)
        return plain(stage, x)


def pair(kind: str, backend: str, depth: int = 3, **options: Any) -> tuple[rk.Stage, Plain, Tensor]:
    """A stage in double precision, the same in plain PyTorch, and an input. Convolutional stages
    are in eval mode."""
    options = {"backend": backend, **EXACT, **options}
    if kind in BLOCKS:
        stage = make_stage(kind, 4, 5, depth, **options).double()
        x = torch.randn(3, 4, dtype=torch.float64)
    else:
        stage = make_conv_stage(kind, "tanh", 4, depth, **options).double().eval()
        x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    return stage, Plain(stage), x


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum() + y.pow(3).sum()
