"""How the layer-wise kernels traverse a tensor: a program takes tiles of positions × channels of
one group (see ``backends/rows.py``). Addresses are 64 bits wide."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import rows

# Elements of a tile: 8 for each of the 128 threads of a program (4 warps, Triton's default), which
# is one load of 16 bytes in half precision and two in float32.
TILE = 1024
# Neighbouring channels in a tile of a channels-last tensor: 128 bytes at least, a memory line.
CHANNELS = 64


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The dtype of arithmetic on tensors of ``dtype``: float32 at least."""
    return tl.float64 if dtype == torch.float64 else tl.float32


class Rows(rows.Rows):
    """The rows of a tensor, with the tiles that the programs take."""

    @property
    def tile(self) -> tuple[int, int]:
        """Positions and channels of a tile."""
        most = triton.next_power_of_2(max(self.positions, 1))
        if self.strides[1] == 1:  # neighbouring positions adjoin
            positions = min(TILE, most)
            return positions, min(TILE // positions, triton.next_power_of_2(self.channels))
        channels = min(CHANNELS, TILE, triton.next_power_of_2(self.channels))
        return min(TILE // channels, most), channels

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of tiles: over groups and positions, and over channels."""
        positions, channels = self.tile
        return (
            self.groups * triton.cdiv(self.positions, positions),
            triton.cdiv(self.channels, channels),
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of ``locate``."""
        return self.positions, self.channels, *self.strides, *self.tile


@triton.jit
def locate(
    tile,
    positions,
    channels,
    group_stride,
    position_stride,
    channel_stride,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The channels [CHANNELS], the offsets and the mask [POSITIONS, CHANNELS] and the number of
    positions of a tile. ``tile`` counts over groups and positions; the program's second index
    selects the channels."""
    per_group = tl.cdiv(positions, POSITIONS)
    first = (tile % per_group) * POSITIONS
    position = (first + tl.arange(0, POSITIONS)).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    offsets = (
        (tile // per_group).to(tl.int64) * group_stride
        + position[:, None] * position_stride
        + channel.to(tl.int64)[None, :] * channel_stride
    )
    mask = (position < positions)[:, None] & (channel < channels)[None, :]
    return channel, offsets, mask, tl.minimum(positions - first, POSITIONS)
