"""Remembered kinks: the forward pass keeps the sign of every argument of a relu, one bit each, and
in the backward pass relu(u) is m·u, m the kept sign. The slope does not jump then where an argument
changes its sign between x[n] and the point where the step is linearized.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Activation = tuple[Function, Function]
"""σ and σ'."""

# Eight flags are the bytes of an int64, the first the lowest, as in memory (little-endian).
GATHER = 0x0102040810204080
"""Its product with eight flags has them as the bits of the highest byte, the first the lowest."""
ONES = 0x0101010101010101
DIAGONAL = 0x8040201008040201 - 2**64
"""Bit j of byte j, for every j."""


def byte_count(entries: int) -> int:
    """The bytes of so many bits."""
    return -(-entries // 8)


def pack(flags: Tensor) -> Tensor:
    """bool [..., n] as uint8 [..., ⌈n/8⌉]: bit j of byte b is entry 8 b + j."""
    whole = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).flatten().view(torch.int64)
    packed = ((whole * GATHER) >> 56).to(torch.uint8)
    return packed.view(*flags.shape[:-1], byte_count(flags.shape[-1]))


def unpack(packed: Tensor, entries: int) -> Tensor:
    """bool [..., entries], what ``pack`` was given."""
    bits = (packed.to(torch.int64) * ONES) & DIAGONAL
    flags = (((bits + 0x7F * ONES) >> 7) & ONES).flatten().view(torch.bool)
    return flags.view(*packed.shape[:-1], 8 * packed.shape[-1])[..., :entries]


def select(where: Tensor, u: Tensor) -> Tensor:
    """u where the flag is set, 0 elsewhere, also if u is infinite or NaN there. Differentiable."""
    if u.is_cpu:  # many times as fast there
        result: Tensor = torch.ops.aten.threshold_backward(u, where.to(u.dtype), 0)
        return result
    return torch.where(where, u, 0)


class Signs:
    """The signs of the arguments of relu in a fused stage.

    signs  uint8 [evaluations, …]: of every evaluation one argument's signs after the other's, each
           packed by rows. The channels of a pixel are a row of images
    known  whether ``signs`` is what the forward pass has kept; else this is the forward pass
    """

    def __init__(self, signs: Tensor, known: bool) -> None:
        self.signs, self.known = signs.flatten(1), known

    def at(self, k: int, relu: Activation) -> Callable[[Tensor], Activation]:
        """A function that is called with every argument u of a relu in evaluation k, in their
        order, and returns what σ and σ' are there."""
        begin = 0

        def activation(u: Tensor) -> Activation:
            nonlocal begin
            rows = u.movedim(1, -1)
            shape = (*rows.shape[:-1], byte_count(rows.shape[-1]))
            place = self.signs[k][begin : begin + math.prod(shape)].view(shape)
            begin += place.numel()
            if not self.known:
                place.copy_(pack(rows > 0))
                return relu
            positive = unpack(place, rows.shape[-1]).movedim(-1, 1)
            return functools.partial(select, positive), lambda u: positive.to(u.dtype)

        return activation


def signs_shape(evaluations: int, rows: int, widths: Sequence[int], flat: bool) -> tuple[int, ...]:
    """The shape of ``Signs.signs`` for so many rows and arguments of these widths."""
    if flat:
        return evaluations, rows * sum(map(byte_count, widths))
    (width,) = widths
    return evaluations, rows, byte_count(width)
