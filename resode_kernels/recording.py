"""Recorded increments, the quantiser of the reverse rule ``recorded``: the specification of every
kernel that records.

A state is a matrix of rows. A row is cut into groups of 32 elements, the last of which may be
shorter. An increment v is rounded group by group, in b bits an element:

    w = R v                          the rotated group
    s = max |w|, rounded up          its scale, a bfloat16
    q = round(w/u − shift)           the codes, integers from ``low`` to ``low`` + 2^b − 1, u = c s
    Q(v) = R (q + shift) u           the rounded increment, from codes and scale

R rotates every four elements that lie 8 apart in the group by the Hadamard matrix H/2 = (H/2)⁻¹. So
an element that is larger than the others is spread over four, which makes the scale smaller and the
rounding finer. Shorter groups are not rotated. With 3 bits or more there are 2^b − 1 levels, one of
them at zero; with 2 bits there are four, and none is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .states import in_stream, parts, state_like

GROUP = 32
OCTET = 8
"""Codes are packed by eight: those of an octet take b bytes."""
SMALLEST = 2.0**-100
"""Groups whose largest element is smaller count as zero."""
FIELDS = {
    **{2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)},
    **{8: (8,), 12: (8, 4), 16: (8, 8)},
}
"""A code of b bits is split into fields, the lowest bits first, whose widths divide 8."""


class Levels(NamedTuple):
    """The levels (q + shift) · c · s of b bits."""

    low: int
    shift: float
    c: float


def levels(bits: int) -> Levels:
    if bits == 2:  # ±0.2 s and ±0.6 s
        return Levels(-2, 0.5, 0.4)
    largest = 2 ** (bits - 1) - 1
    return Levels(-largest, 0.0, 1 / largest)


class Increment(NamedTuple):
    """The rounded increment of [rows, row]."""

    codes: Tensor
    """uint8 [rows, bits · octets of a row]"""
    scales: Tensor
    """bfloat16 [rows, groups of a row]"""


def code_bytes(row: int, bits: int) -> int:
    """The bytes of a row's codes."""
    return bits * -(-row // OCTET)


def groups(row: int) -> int:
    """The number of groups of a row."""
    return -(-row // GROUP)


def rotate(v: Tensor) -> Tensor:
    """R v for every row of v. R is its own inverse."""
    whole = v.shape[-1] // GROUP * GROUP
    a, b, c, d = v[..., :whole].unflatten(-1, (-1, 4, OCTET)).unbind(-2)
    total, other = (a + b, a - b), (c + d, c - d)
    rows = [
        *(0.5 * (x + y) for x, y in zip(total, other, strict=True)),
        *(0.5 * (x - y) for x, y in zip(total, other, strict=True)),
    ]
    return torch.cat([torch.stack(rows, -2).flatten(-3), v[..., whole:]], -1)


def encode(v: Tensor, bits: int) -> Increment:
    """Q(v) for v of [rows, row]."""
    low, shift, c = levels(bits)
    w = _padded(rotate(v), GROUP).unflatten(-1, (-1, GROUP))
    scales = _rounded_up(w.abs().amax(-1))
    unit = scales.to(v.dtype) * c
    inverse = torch.where(unit > 0, 1 / unit, 0)
    q = torch.round(w * inverse.unsqueeze(-1) - shift).clamp(low, low + 2**bits - 1)
    codes = (q.nan_to_num(0).to(torch.int32) - low).flatten(-2)
    octets = -(-v.shape[-1] // OCTET)
    return Increment(_pack(codes[..., : octets * OCTET], bits), scales)


def decode(increment: Increment, bits: int, row: int, dtype: torch.dtype) -> Tensor:
    """Q(v) as [rows, row]."""
    low, shift, c = levels(bits)
    codes = _padded(_unpack(increment.codes, bits), GROUP).unflatten(-1, (-1, GROUP))
    unit = increment.scales.to(dtype) * c
    w = (codes.to(dtype) + (low + shift)) * unit.unsqueeze(-1)
    return rotate(w.flatten(-2)[..., :row])


def _padded(t: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % multiple))


def _rounded_up(largest: Tensor) -> Tensor:
    """To bfloat16, to zero below ``SMALLEST``."""
    single = largest.to(torch.float32)
    single = torch.where(single < largest, torch.nextafter(single, single + math.inf), single)
    single = torch.where(single < SMALLEST, 0, single)
    pattern = torch.where(single.isnan(), 0x7FC00000, single.view(torch.int32))
    return ((pattern + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, 8 · octets] as bytes. With fields of w bits, byte i of an octet's w bytes holds
    the elements i, i + w, i + 2w, …, the lowest bits first."""
    octets, packed, start = codes.unflatten(-1, (-1, OCTET)), [], 0
    for width in FIELDS[bits]:
        field = (octets >> start) & (2**width - 1)
        field = field.unflatten(-1, (OCTET // width, width))
        places = torch.arange(0, 8, width, device=codes.device).unsqueeze(-1)
        packed.append((field << places).sum(-2))
        start += width
    return torch.cat(packed, -1).flatten(-2).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    octets = packed.to(torch.int32).unflatten(-1, (-1, bits))
    codes, start = torch.zeros_like(octets[..., :1]), 0
    for width, field in zip(FIELDS[bits], octets.split(FIELDS[bits], -1), strict=True):
        places = torch.arange(0, 8, width, device=packed.device).unsqueeze(-1)
        elements = (field.unsqueeze(-2) >> places) & (2**width - 1)
        codes = codes + (elements.flatten(-2) << start)
        start += width
    return codes.flatten(-2)


class Recorder:
    """Records the increments of states, in PyTorch. Backends have faster ones.

    A row is as many of the last dimensions of a tensor as have 32 elements together; of images that
    lie channels-last in memory it is the channels of a pixel.
    """

    def estimate(self, x: Any) -> Any:
        """x̂[n] = x[n], in float32 at least."""
        return in_stream(x)

    def record(self, estimate: Any, after: Any, bits: int) -> tuple[Any, tuple[Increment, ...]]:
        """x̂[n+1] = x̂[n] + d[n] and d[n] = Q(x[n+1] − x̂[n]), from x̂[n] and x[n+1]."""
        results = [
            self.encode(x, e, bits) for x, e in zip(parts(after), parts(estimate), strict=True)
        ]
        moved, increments = zip(*results, strict=True)
        return state_like(estimate, moved), increments

    def undo(self, estimate: Any, increments: tuple[Increment, ...], bits: int) -> Any:
        """x̂[n] = x̂[n+1] − d[n]."""
        moved = [
            self.decode(e, increment, bits)
            for e, increment in zip(parts(estimate), increments, strict=True)
        ]
        return state_like(estimate, moved)

    def encode(self, after: Tensor, estimate: Tensor, bits: int) -> tuple[Tensor, Increment]:
        rows = self.rows(estimate, like=estimate)
        increment = encode(self.rows(after, like=estimate) - rows, bits)
        moved = rows + decode(increment, bits, rows.shape[1], rows.dtype)
        return self.state(moved, like=estimate), increment

    def decode(self, estimate: Tensor, increment: Increment, bits: int) -> Tensor:
        rows = self.rows(estimate, like=estimate)
        moved = rows - decode(increment, bits, rows.shape[1], rows.dtype)
        return self.state(moved, like=estimate)

    def rows(self, state: Tensor, like: Tensor) -> Tensor:
        """A tensor as [rows, row], laid out as ``like`` is."""
        if is_channels_last(like):
            return state.permute(0, 2, 3, 1).reshape(-1, state.shape[1])
        row, dim = 1, state.dim()
        while dim > 0 and row < GROUP:
            dim -= 1
            row *= state.shape[dim]
        return state.reshape(-1, max(1, row))

    def state(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of ``rows``."""
        if is_channels_last(like):
            images, channels, height, width = like.shape
            return rows.reshape(images, height, width, channels).permute(0, 3, 1, 2)
        return rows.reshape(like.shape)


class RowRecorder(Recorder):
    """Of the states of fused stages that work row by row: a row is the last dimension."""

    def rows(self, state: Tensor, like: Tensor) -> Tensor:
        return state.reshape(-1, state.shape[-1])

    def state(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows.reshape(like.shape)


class PixelRecorder(Recorder):
    """Of the images of fused stages: a row is the channels of a pixel."""

    def rows(self, state: Tensor, like: Tensor) -> Tensor:
        return state.movedim(1, -1).reshape(-1, state.shape[1])

    def state(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows.reshape(like.movedim(1, -1).shape).movedim(-1, 1)


def recorder_for(block: str) -> Recorder:
    """For fused stages with this kind of block."""
    return PixelRecorder() if block == "conv" else RowRecorder()


def is_channels_last(state: Tensor) -> bool:
    return (
        state.dim() == 4
        and not state.is_contiguous()
        and state.is_contiguous(memory_format=torch.channels_last)
    )
