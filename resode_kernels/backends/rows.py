"""The layout in which the layer-wise kernels see a tensor.

A tensor is a set of rows, [groups, positions, channels] with a stride for each, so that one kernel
serves every layout:

    [rows, channels]                  1 group, a row per position
    channels-last [n, c, h, w]        1 group, n·h·w positions, neighbouring channels adjoin
    contiguous [n, c, h, w]           n groups, h·w positions, neighbouring positions adjoin
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor


def dense(t: Tensor) -> Tensor:
    """t, copied unless it is contiguous or, with four dimensions, channels-last."""
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return t
    return t.contiguous()


def laid_out_like(t: Tensor, other: Tensor) -> Tensor:
    """t, copied unless it has the strides of the dense tensor ``other``."""
    return t if t.stride() == other.stride() else torch.empty_like(other, dtype=t.dtype).copy_(t)


class Rows(NamedTuple):
    """A dense tensor as the kernels see it."""

    groups: int
    positions: int
    channels: int
    strides: tuple[int, int, int]

    @classmethod
    def of(cls: type[Kind], t: Tensor) -> Kind:
        if t.dim() == 2:
            return cls(1, t.shape[0], t.shape[1], (0, t.shape[1], 1))
        images, channels, height, width = t.shape
        positions = height * width
        if t.is_contiguous(memory_format=torch.channels_last):
            return cls(1, images * positions, channels, (0, channels, 1))
        return cls(images, positions, channels, (channels * positions, 1, positions))


Kind = TypeVar("Kind", bound=Rows)
