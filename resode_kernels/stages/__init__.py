"""Stages as modules: stacks of residual blocks that train in constant memory.

base.py      Stage, and StackedStage for parameters that are stacked over blocks
mlp.py       MLPStage
linear.py    LinearStage
conv.py      ConvStage and its ConvBlock
known.py     whether a block is still the one that the kernels know
residual.py  ResidualStage: blocks that are modules; residual_branch
"""

from .base import StackedStage, Stage
from .conv import ConvStage
from .linear import LinearStage
from .mlp import MLPStage
from .residual import ResidualStage, residual_branch

__all__ = [
    "ConvStage",
    "LinearStage",
    "MLPStage",
    "ResidualStage",
    "StackedStage",
    "Stage",
    "residual_branch",
]
