"""The depth-fused kernels: a program owns a tile of rows and walks through the steps of a stage.

    forward   for n = begin … end − 1: x[n+1] = x[n] + h φ_n(x[n])
    reverse   for n = end − 1 … begin: a point p, the step's VJP there, the state before the step

States and cotangents stay in registers, in float32, from the first step of a launch to its last.
DRAM traffic of the forward pass: x is read once and y is written once. Of a launch in the reverse
pass: the state and the cotangent are read and written once, the weights are read once (programs
keep pace, so the cache serves all but the first), and one partial sum of the parameter gradients is
written per block and program. Every program has its own partial sums and adds to them tile after
tile; ``reduce_kernel`` then adds up the sums of all programs in a fixed order. There are no float
atomics, and results repeat bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import int64
from .schemes import first_known, reverse_slope, slope, step_vjp


@triton.jit
def tile_of(tile, rows, S: tl.constexpr):
    """Where a tile begins, the offsets of its elements from there, and which of them exist."""
    r = tl.arange(0, S.rows)[:, None]
    d = tl.arange(0, S.width)[None, :]
    begin = int64(tile) * S.rows
    return begin * S.dim, r * S.dim + d, (r < rows - begin) & (d < S.dim)


@triton.jit
def states_of(tile, rows, S: tl.constexpr):
    """Offsets of a tile's states from where it begins, and which of its columns exist. Rows beyond
    the last one have the state of the last one: from an arbitrary state the reverse pass might
    overflow."""
    r = tl.minimum(tl.arange(0, S.rows), rows - int64(tile) * S.rows - 1)[:, None]
    d = tl.arange(0, S.width)[None, :]
    return r * S.dim + d, d < S.dim


@triton.jit(do_not_specialize=["rows", "begin", "end", "anchor_every"])
def forward_kernel(x, y, anchors, theta, rows, begin, end, anchor_every, h, S: tl.constexpr):
    """From x[begin] = x to x[end] = y, both [rows, dim]; anchors [·, rows, dim] takes the states
    k, 2k, … steps after begin that come before end, k = anchor_every."""
    rows = int64(rows)
    here, at, inside = tile_of(tl.program_id(0), rows, S)
    state = tl.load(x + here + at, mask=inside, other=0.0)
    for i in tl.range(0, end - begin, disable_licm=True):
        if (i > 0) & (i % anchor_every == 0):
            anchor = (i // anchor_every - 1) * rows * S.dim
            tl.store(anchors + anchor + here + at, state, mask=inside)
        state += h * slope(state, theta, begin + i, h, S)
    tl.store(y + here + at, state, mask=inside)


@triton.jit
def extrapolate(history, S: tl.constexpr):
    """φ̂_n from the evaluations at the steps n + 1, n + 2, …"""
    if S.have == 1:
        return history[0]
    elif S.have == 2:
        return 2 * history[0] - history[1]
    else:
        return 3 * (history[0] - history[1]) + history[2]


@triton.jit
def point(x, history, known, theta, n, h, S: tl.constexpr):
    """The point p of step n, from the state x = x̃[n+1]."""
    if S.have > 0:
        p = x - h * extrapolate(history, S)
    else:
        if not S.shares:
            known = first_known(x, theta, n, S)
        p = x - h * reverse_slope(x, known, theta, n, h, S)
    for _ in tl.range(0, S.corrections, disable_licm=True):
        p = x - h * slope(p, theta, n, h, S)
    return p


@triton.jit
def has_nonfinite(p):
    """Whether an entry is infinite or NaN."""
    return tl.max((~(tl.abs(p) < float("inf"))).to(tl.int32)) > 0


@triton.jit
def reverse_step(
    x, g, history, known, theta, sums, nonfinite, n, slots, tiles, steps, h, S: tl.constexpr
):  # fmt: skip
    p = point(x, history, known, theta, n, h, S)
    found = has_nonfinite(p)
    value, first, g = step_vjp(p, g, theta, sums, n, slots, tiles, steps, h, S)
    if S.moves:
        x -= h * value
    else:
        x = p
    if S.keep > 0:
        history = (value,) + history[: S.keep - 1]
    if S.shares:
        known = first
    if nonfinite is not None:  # last, because weights do not stay on chip across a write to memory
        tl.atomic_max(nonfinite, n, mask=found, sem="relaxed")
    return x, g, history, known


@triton.jit(do_not_specialize=["rows", "begin", "end", "first_block", "states_begin"])
def reverse_kernel(
    start, end_state, cotangent, end_cotangent, history, states, theta, sums, nonfinite,
    rows, begin, end, first_block, states_begin, h, S: tl.constexpr,
):  # fmt: skip
    """From x̃[end] = start to x̃[begin] = end_state, and likewise for the cotangent.

    start, …   [rows, dim]
    history    [keep, rows, dim], newest first: read and written
    states     exact: [·, rows, dim], the states x[states_begin + 1], …; x[states_begin] is start
    sums       per parameter [slots, …]; slot (block − first_block) · programs + program
    nonfinite  an int32, raised to the largest n whose point is not finite; None: not checked
    """
    rows = int64(rows)
    group = tl.program_id(0)
    slots = (first_block, tl.num_programs(0) if not S.atomic else 1, group if not S.atomic else 0)
    for tile in tl.range(group, tl.cdiv(rows, S.rows), tl.num_programs(0), disable_licm=True):
        here, at, inside = tile_of(tile, rows, S)
        tiles = int64(tile - group)  # 0 for this program's first tile
        g = tl.load(cotangent + here + at, mask=inside, other=0.0)
        if S.exact:
            for i in tl.range(0, end - begin, disable_licm=True):
                n = end - 1 - i
                if n == states_begin:
                    p = tl.load(start + here + at, mask=inside, other=0.0)
                else:
                    state = (n - states_begin - 1) * rows * S.dim
                    p = tl.load(states + state + here + at, mask=inside, other=0.0)
                _, _, g = step_vjp(p, g, theta, sums, n, slots, tiles, i, h, S)
        else:
            of, columns = states_of(tile, rows, S)
            x = tl.load(start + here + of, mask=columns, other=0.0)
            past = ()
            for i in tl.static_range(S.have):
                past = past + (  # type: ignore[assignment]
                    tl.load(history + i * rows * S.dim + here + of, mask=columns, other=0.0),
                )
            known = x
            if S.shares:
                known = first_known(x, theta, end - 1, S)
            if S.have < S.keep:  # the history grows: this launch makes one step
                x, g, past, known = reverse_step(
                    x, g, past, known, theta, sums, nonfinite, end - 1, slots, tiles, 0, h, S
                )
            else:
                for i in tl.range(0, end - begin, disable_licm=True):
                    x, g, past, known = reverse_step(
                        x, g, past, known, theta, sums, nonfinite,
                        end - 1 - i, slots, tiles, i, h, S,
                    )  # fmt: skip
            for i in tl.static_range(S.keep):
                tl.store(history + i * rows * S.dim + here + at, past[i], mask=inside)
            tl.store(end_state + here + at, x, mask=inside)
        tl.store(end_cotangent + here + at, g, mask=inside)


@triton.jit(do_not_specialize=["groups", "size"])
def reduce_kernel(sums, total, groups, size, SIZE: tl.constexpr):
    """total[b, i] += Σ_g sums[b, g, i], in the order of g; sums [blocks, groups, size]."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    block = int64(tl.program_id(1))
    value = tl.load(total + block * size + i, mask=i < size, other=0.0)
    for g in range(groups):
        value += tl.load(sums + (block * groups + g) * size + i, mask=i < size, other=0.0)
    tl.store(total + block * size + i, value, mask=i < size)
