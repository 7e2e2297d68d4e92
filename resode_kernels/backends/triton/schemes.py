"""The schemes of a depth-fused stage, x[n+1] = x[n] + h φ_n(x[n]), for a tile of rows:

    Euler   φ_n(x) = f_n(x)
    Heun    φ_n(x) = (a + b)/2,  a = f_n(x),  b = f_{n+1}(x + h a)

as in ``resode_kernels.reference``, where the names are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import f, vjp


@triton.jit
def slope(x, theta, n, h, S: tl.constexpr):
    """φ_n(x)."""
    a = f(x, theta, n, S)
    if S.scheme == "heun":
        a = 0.5 * (a + f(x + h * a, theta, n + 1, S))
    return a


@triton.jit
def first_known(x, theta, n, S: tl.constexpr):
    """The first evaluation in ψ_n(x): f_n(x), with Heun f_{n+1}(x)."""
    return f(x, theta, n + 1 if S.scheme == "heun" else n, S)


@triton.jit
def reverse_slope(x, known, theta, n, h, S: tl.constexpr):
    """ψ_n(x), the slope of the reverse-time step, from its first evaluation."""
    if S.scheme == "heun":
        known = 0.5 * (f(x - h * known, theta, n, S) + known)
    return known


@triton.jit
def step_vjp(p, g, theta, sums, n, slots, tiles, steps, h, S: tl.constexpr):
    """φ_n(p), f_n(p) and the cotangent of x[n], from the cotangent g of x[n+1]. φ_n(p) is computed
    only if the reverse rule needs it.

    tiles  more than 0 if this program has finished a tile: then all blocks have sums
    steps  the number of steps made in this tile: if more than 0, block n + 1 (Heun) has sums, and
           so has block n if the weights are tied
    """
    if S.scheme == "heun":
        a = f(p, theta, n, S)
        half = (0.5 * h) * g
        b, gy = vjp(p + h * a, half, theta, sums, n + 1, slots, tiles + steps, S, S.moves)
        _, gx = vjp(p, half + h * gy, theta, sums, n, slots, tiles + S.tied, S, False)
        return 0.5 * (a + b), a, g + gy + gx
    else:
        before = tiles + steps if S.tied else tiles
        a, gx = vjp(p, h * g, theta, sums, n, slots, before, S, S.moves or S.shares)
        return a, a, g + gx
