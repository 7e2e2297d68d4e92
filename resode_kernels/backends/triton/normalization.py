"""Batch normalization with the activation around it, and its VJP.

z is [images, channels, height, width], channels-last or contiguous; the m = images·height·width
values of a channel share mean μ, variance v, γ and β (None: 1 and 0). With r = 1/√(v + ε):

    statistics  μ = Σ z / m,  v = Σ (z − μ)² / m                             reads z
    normalized  ẑ = (z − μ) r,  u = γ ẑ + β,  a = σ(u), or u itself          reads z, writes a
    vjp         g = da · σ′(u), or da itself;  dβ = Σ g,  dγ = Σ g ẑ         reads da and z,
                dz = γ r (g − (dβ + ẑ dγ)/m), or γ r g if μ, v are given     twice, writes dz

u, a and g are computed again from z wherever they are needed; only z is stored between the passes.

Sums over a channel have two stages and no atomics, so that a run repeats bit by bit. A fixed number
of programs each go through their tiles in order; their partial results are then joined in order.
For the variance they are (count, mean, Σ (z − mean)²), joined by Chan's formula, because Σ z² − m
μ² would cancel if the mean is large. For the same reason the sums are taken of z − z₀, where z₀ is
the first value of the channel. Arithmetic is in float32, for float64 tensors in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layerwise import Normalization
from ..rows import laid_out_like
from .activations import activate
from .launch import launch
from .rows import Rows, accumulator, locate

# Programs in the first stage of a reduction: several for each multiprocessor of a large GPU. The
# number is constant because it decides the order of summation.
PROGRAMS = 1024


def _partials(rows: Rows) -> int:
    """The number of parts into which a reduction divides a channel."""
    tiles, columns = rows.grid
    return min(tiles, -(-PROGRAMS // columns))


def _accumulators(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


# ------------------------------------------------------------------------------------- statistics


@triton.jit
def partial_statistics_kernel(
    partials, z, tiles,
    positions, channels, group_stride, position_stride, channel_stride,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """partials [3, channels, programs]: count, mean and Σ (z − mean)² of z − z₀ in each program's
    tiles."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    at = z + channel.to(tl.int64) * channel_stride
    first = tl.load(at, mask=inside, other=0).to(ACCUMULATOR)[None, :]
    count = tl.zeros([], ACCUMULATOR)
    mean = tl.zeros([CHANNELS], ACCUMULATOR)
    squares = tl.zeros([CHANNELS], ACCUMULATOR)
    for tile in range(program, tiles, programs):
        _, offsets, mask, more = locate(
            tile, positions, channels, group_stride, position_stride, channel_stride,
            POSITIONS, CHANNELS,
        )  # fmt: skip
        more = more.to(ACCUMULATOR)
        value = tl.load(z + offsets, mask=mask, other=0).to(ACCUMULATOR)
        value = tl.where(mask, value - first, 0)
        tile_mean = tl.sum(value, 0) / more
        deviation = tl.where(mask, value - tile_mean[None, :], 0)
        delta = tile_mean - mean
        squares += tl.sum(deviation * deviation, 0) + delta * delta * (
            count * more / (count + more)
        )
        count += more
        mean += delta * (more / count)
    out = partials + channel.to(tl.int64) * programs + program
    part = programs.to(tl.int64) * channels
    tl.store(out, tl.zeros([CHANNELS], ACCUMULATOR) + count, mask=inside)
    tl.store(out + part, mean, mask=inside)
    tl.store(out + 2 * part, squares, mask=inside)


@triton.jit
def join_statistics_kernel(
    mean, variance, partials, z, programs, channel_stride, COUNT: tl.constexpr
):
    """A channel's mean and variance from all its partial results."""
    channel, program = tl.program_id(0), tl.arange(0, COUNT)
    inside = program < programs
    at = partials + channel.to(tl.int64) * programs + program
    part = tl.num_programs(0).to(tl.int64) * programs
    count = tl.load(at, mask=inside, other=0)
    means = tl.load(at + part, mask=inside, other=0)
    squares = tl.load(at + 2 * part, mask=inside, other=0)
    total = tl.sum(count, 0)
    joined = tl.sum(count * means, 0) / total
    deviation = means - joined
    first = tl.load(z + channel.to(tl.int64) * channel_stride).to(joined.dtype)
    tl.store(mean + channel, first + joined)
    tl.store(variance + channel, tl.sum(squares + count * deviation * deviation, 0) / total)


def statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel."""
    rows = Rows.of(z)
    tiles, columns = rows.grid
    programs = _partials(rows)
    partials = _accumulators(z, 3, rows.channels, programs)
    launch(
        partial_statistics_kernel, (programs, columns), partials, z, tiles, *rows.arguments,
        ACCUMULATOR=accumulator(z.dtype),
    )  # fmt: skip
    mean, variance = _accumulators(z, 2, rows.channels)
    launch(
        join_statistics_kernel, (rows.channels,), mean, variance, partials, z, programs,
        rows.strides[2], COUNT=triton.next_power_of_2(programs),
    )  # fmt: skip
    return mean, variance


# ------------------------------------------------------------------------------------ normalizing


@triton.jit
def load_channel(values, channel, channels, default, ACCUMULATOR: tl.constexpr):
    """The values of the tile's channels as a row; ``default`` if there is no tensor."""
    if values is None:
        row = tl.full(channel.shape, default, ACCUMULATOR)
    else:
        row = tl.load(values + channel, mask=channel < channels, other=default).to(ACCUMULATOR)
    return row[None, :]


@triton.jit
def load_normalization(
    mean, variance, gamma, beta, epsilon, channel, channels, ACCUMULATOR: tl.constexpr
):
    """μ, r = 1/√(v + ε), γ and β of the tile's channels. r is rounded correctly: all values of a
    channel share its error."""
    v = load_channel(variance, channel, channels, 1.0, ACCUMULATOR)
    v += tl.full([], epsilon, ACCUMULATOR)
    if v.dtype == tl.float64:
        r = 1 / tl.sqrt(v)
    else:
        r = tl.div_rn(tl.full(v.shape, 1.0, ACCUMULATOR), tl.sqrt_rn(v))
    return (
        load_channel(mean, channel, channels, 0.0, ACCUMULATOR),
        r,
        load_channel(gamma, channel, channels, 1.0, ACCUMULATOR),
        load_channel(beta, channel, channels, 0.0, ACCUMULATOR),
    )


@triton.jit
def normalized_kernel(
    out, z, mean, variance, gamma, beta, epsilon: tl.float64,
    positions, channels, group_stride, position_stride, channel_stride,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    channel, offsets, mask, _ = locate(
        tl.program_id(0), positions, channels, group_stride, position_stride, channel_stride,
        POSITIONS, CHANNELS,
    )  # fmt: skip
    mu, r, scale, shift = load_normalization(
        mean, variance, gamma, beta, epsilon, channel, channels, ACCUMULATOR
    )
    u = scale * ((tl.load(z + offsets, mask=mask).to(ACCUMULATOR) - mu) * r) + shift
    if ACTIVATION is not None:
        u, _ = activate(u, ACTIVATION)
    tl.store(out + offsets, u, mask=mask)


def normalized(
    z: Tensor, normalization: Normalization, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """σ(γ (z − μ) r + β), without σ if ``activation`` is None."""
    out, rows = torch.empty_like(z, dtype=dtype), Rows.of(z)
    launch(
        normalized_kernel, rows.grid, out, z, *normalization, *rows.arguments,
        ACTIVATION=activation, ACCUMULATOR=accumulator(z.dtype),
    )  # fmt: skip
    return out


# -------------------------------------------------------------------------------------------- VJP


@triton.jit
def vjp_tile(
    d, z, offsets, mask, mu, r, scale, shift, ACTIVATION: tl.constexpr, ACCUMULATOR: tl.constexpr
):
    """g and ẑ of a tile, zero outside the mask."""
    normal = (tl.load(z + offsets, mask=mask, other=0).to(ACCUMULATOR) - mu) * r
    g = tl.load(d + offsets, mask=mask, other=0).to(ACCUMULATOR)
    if ACTIVATION is not None:
        _, slope = activate(scale * normal + shift, ACTIVATION)
        g = g * slope
    return g, normal


@triton.jit
def vjp_sums_kernel(
    partials, d, z, mean, variance, gamma, beta, epsilon: tl.float64, tiles,
    positions, channels, group_stride, position_stride, channel_stride,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """partials [2, channels, programs]: Σ g and Σ g ẑ of each program's tiles."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mu, r, scale, shift = load_normalization(
        mean, variance, gamma, beta, epsilon, channel, channels, ACCUMULATOR
    )
    sums = tl.zeros([CHANNELS], ACCUMULATOR)
    products = tl.zeros([CHANNELS], ACCUMULATOR)
    for tile in range(program, tiles, programs):
        _, offsets, mask, _ = locate(
            tile, positions, channels, group_stride, position_stride, channel_stride,
            POSITIONS, CHANNELS,
        )  # fmt: skip
        g, normal = vjp_tile(d, z, offsets, mask, mu, r, scale, shift, ACTIVATION, ACCUMULATOR)
        sums += tl.sum(g, 0)
        products += tl.sum(g * normal, 0)
    out = partials + channel.to(tl.int64) * programs + program
    inside = channel < channels
    tl.store(out, sums, mask=inside)
    tl.store(out + programs.to(tl.int64) * channels, products, mask=inside)


@triton.jit
def vjp_kernel(
    out, d, z, mean, variance, gamma, beta, epsilon: tl.float64, d_beta, d_gamma, count,
    positions, channels, group_stride, position_stride, channel_stride,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """out = γ r (g − (dβ + ẑ dγ)/m), or γ r g if dβ and dγ are None."""
    channel, offsets, mask, _ = locate(
        tl.program_id(0), positions, channels, group_stride, position_stride, channel_stride,
        POSITIONS, CHANNELS,
    )  # fmt: skip
    mu, r, scale, shift = load_normalization(
        mean, variance, gamma, beta, epsilon, channel, channels, ACCUMULATOR
    )
    g, normal = vjp_tile(d, z, offsets, mask, mu, r, scale, shift, ACTIVATION, ACCUMULATOR)
    if d_beta is not None:
        mean_g = load_channel(d_beta, channel, channels, 0.0, ACCUMULATOR) / count
        mean_product = load_channel(d_gamma, channel, channels, 0.0, ACCUMULATOR) / count
        g -= mean_g + normal * mean_product
    tl.store(out + offsets, scale * r * g, mask=mask)


def vjp(
    d: Tensor, z: Tensor, normalization: Normalization, of_batch: bool, activation: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dz in z's dtype, dγ and dβ, from d = ∂L/∂a. ``of_batch``: μ and v are z's own."""
    d, rows = laid_out_like(d, z), Rows.of(z)
    tiles, columns = rows.grid
    programs = _partials(rows)
    partials = _accumulators(z, 2, rows.channels, programs)
    constants: dict[str, Any] = {"ACTIVATION": activation, "ACCUMULATOR": accumulator(z.dtype)}
    launch(
        vjp_sums_kernel, (programs, columns), partials, d, z, *normalization, tiles,
        *rows.arguments, **constants,
    )  # fmt: skip
    d_beta, d_gamma = partials.sum(-1)
    dz = torch.empty_like(z)
    sums = (d_beta, d_gamma) if of_batch else (None, None)
    launch(
        vjp_kernel, rows.grid, dz, d, z, *normalization, *sums, rows.groups * rows.positions,
        *rows.arguments, **constants,
    )  # fmt: skip
    return dz, d_gamma, d_beta
