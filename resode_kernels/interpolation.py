"""Interpolation of tensors and modules between two blocks.

A position counts blocks: 2 is block 2, and 2 + ¼ is a quarter of the way from block 2 to block 3.
Positions are exact fractions, so that the position of a block gives that block bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain

import torch
from torch import Tensor, nn

HALF = Fraction(1, 2)


def nearest(position: Fraction) -> int:
    """The nearest block; in the middle between two blocks, the later one."""
    return math.floor(position + HALF)


@torch.no_grad()
def tensor_at(tensors: Sequence[Tensor] | Tensor, position: Fraction) -> Tensor:
    """A new tensor, linear between two neighbours. Integers and booleans (counters, masks) are
    those of the nearest block."""
    n, weight = math.floor(position), float(position % 1)
    if weight == 0 or not (tensors[n].is_floating_point() or tensors[n].is_complex()):
        return tensors[nearest(position)].clone()
    return torch.lerp(tensors[n], tensors[n + 1], weight)


@torch.no_grad()
def module_at(modules: Sequence[nn.Module] | nn.ModuleList, position: Fraction) -> nn.Module:
    """A copy of the nearest module, with parameters and buffers linear between two neighbours."""
    result = copy.deepcopy(modules[nearest(position)])
    if position % 1 != 0:
        n = math.floor(position)
        neighbours = [_tensors(modules[i]) for i in (n, n + 1)]
        if _structure(modules[n]) != _structure(modules[n + 1]):
            raise ValueError(
                f"blocks {n} ({type(modules[n]).__name__}) and {n + 1} "
                f"({type(modules[n + 1]).__name__}) differ in their modules or in the shapes of "
                "their tensors and cannot be interpolated; interpolation='nearest' copies one of "
                "them"
            )
        for name, tensor in _tensors(result).items():
            tensor.copy_(tensor_at([tensors[name] for tensors in neighbours], position % 1))
    return result


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _structure(module: nn.Module) -> object:
    """What two modules must have in common to be interpolated."""
    modules = {name: type(part) for name, part in module.named_modules()}
    tensors = {name: (t.shape, t.dtype, t.device) for name, t in _tensors(module).items()}
    return modules, tensors
