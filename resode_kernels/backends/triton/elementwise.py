"""Updates of states, and bias with activation, each in one pass over memory.

    combine      x + Σ a_i y_i         reads every tensor once and writes one
    activated    σ(z + b)              reads z, writes u
    times_slope  d · σ′(z + b)         reads d and z, writes one

Shapes: ``combine`` takes tensors of any one shape; the others take z and d as [rows, channels] or
[images, channels, height, width] and b as [channels]. Arithmetic is in float32, for float64 tensors
in float64. Inputs may be narrower, and so may the results of ``activated`` and ``times_slope``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import reference
from ..combining import empty_sum, in_pytorch, in_step
from ..rows import dense, laid_out_like
from .activations import activate
from .launch import launch
from .rows import TILE, Rows, accumulator, locate

MOST_TENSORS = 5


@triton.jit
def combine_kernel(
    out, y0, y1, y2, y3, y4,
    a0: tl.float64, a1: tl.float64, a2: tl.float64, a3: tl.float64, a4: tl.float64,
    elements,
    COUNT: tl.constexpr, ELEMENTS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """out = Σ a_i y_i over the first COUNT of the tensors, all laid out alike."""
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < elements
    # The factors are float64, so that none of them is rounded.
    total = tl.full([], a0, ACCUMULATOR) * tl.load(y0 + i, mask=mask).to(ACCUMULATOR)
    if COUNT > 1:
        total += tl.full([], a1, ACCUMULATOR) * tl.load(y1 + i, mask=mask).to(ACCUMULATOR)
    if COUNT > 2:
        total += tl.full([], a2, ACCUMULATOR) * tl.load(y2 + i, mask=mask).to(ACCUMULATOR)
    if COUNT > 3:
        total += tl.full([], a3, ACCUMULATOR) * tl.load(y3 + i, mask=mask).to(ACCUMULATOR)
    if COUNT > 4:
        total += tl.full([], a4, ACCUMULATOR) * tl.load(y4 + i, mask=mask).to(ACCUMULATOR)
    tl.store(out + i, total, mask=mask)


@reference.on_states
def combine(a: Sequence[float], y: Sequence[Tensor]) -> Tensor:
    """``reference.combine`` in one pass, for up to five tensors that are dense and laid out alike.
    PyTorch adds all others, and sums that autograd has to record."""
    out, count = empty_sum(y), len(y)
    if count > MOST_TENSORS or not in_step(out, y):
        return in_pytorch(a, y, out.dtype)
    unused = MOST_TENSORS - count
    launch(
        combine_kernel, (triton.cdiv(out.numel(), TILE),),
        out, *y, *[out] * unused, *map(float, a), *[0.0] * unused, out.numel(),
        COUNT=count, ELEMENTS=TILE, ACCUMULATOR=accumulator(out.dtype),
    )  # fmt: skip
    return out


@triton.jit
def activation_kernel(
    out, z, bias, d,
    positions, channels, group_stride, position_stride, channel_stride,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """out = σ(z + b), or d · σ′(z + b) if d is not None."""
    channel, offsets, mask, _ = locate(
        tl.program_id(0), positions, channels, group_stride, position_stride, channel_stride,
        POSITIONS, CHANNELS,
    )  # fmt: skip
    u = tl.load(z + offsets, mask=mask).to(ACCUMULATOR)
    if bias is not None:
        u += tl.load(bias + channel, mask=channel < channels).to(ACCUMULATOR)[None, :]
    value, slope = activate(u, ACTIVATION)
    if d is not None:
        value = tl.load(d + offsets, mask=mask).to(ACCUMULATOR) * slope
    tl.store(out + offsets, value, mask=mask)


def activated(
    z: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None = None
) -> Tensor:
    """σ(z + b), in ``dtype`` or, if that is None, in z's dtype."""
    z = dense(z)
    return _launch_activation(z, bias, None, activation, dtype or z.dtype)


def times_slope(d: Tensor, z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """d · σ′(z + b), in the wider of the dtypes of d and z."""
    z = dense(z)
    dtype = torch.promote_types(d.dtype, z.dtype)
    return _launch_activation(z, bias, laid_out_like(d, z), activation, dtype)


def slope_term(d: Tensor, z: Tensor, activation: str) -> Tensor:
    """d · σ′(z), for ``combine`` to add."""
    return times_slope(d, z, None, activation)


def _launch_activation(
    z: Tensor, bias: Tensor | None, d: Tensor | None, activation: str, dtype: torch.dtype
) -> Tensor:
    out, rows = torch.empty_like(z, dtype=dtype), Rows.of(z)
    launch(
        activation_kernel, rows.grid, out, z, bias, d, *rows.arguments,
        ACTIVATION=activation, ACCUMULATOR=accumulator(z.dtype),
    )  # fmt: skip
    return out
