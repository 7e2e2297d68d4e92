"""The blocks f of a depth-fused stage and their vector-Jacobian products, for a tile of rows.

    mlp      f(x) = W2 σ(W1 x + b1) + b2         linear   f(x) = θ x

A state is a float32 tile [rows, width] in registers, with zeros beyond column ``dim``. The weights
of an MLP are read in chunks of hidden units: ``chunk`` rows of W1 and columns of W2 at a time
([chunk, width] and [width, chunk]), once per evaluation or VJP. The VJP at p with the cotangent g
makes five or six products per chunk:

    z = p W1ᵀ + b1,  u = σ(z),  f += u W2ᵀ,       ∂x += dz W1
    dz = (g W2) σ′(z),  ∂W1 = dzᵀ p,  ∂b1 = Σ dz,  ∂W2ᵀ = uᵀ g,  ∂b2 = Σ g

The gradients of both weights are [chunk, width]. If rows and chunk are less than width, every
product of the kernel is wider than high. Triton then distributes all of them over the warps along
the width and converts no tile to another layout. This keeps the kernel free of register spills.

``theta`` and ``sums`` are tuples of pointers: the parameters, stacked over blocks, and the places
for their gradients, stacked over slots (None: not needed).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activate


@triton.jit
def int64(n):
    """n as int64, for addresses: tensors may have more than 2³¹ elements."""
    return n + tl.zeros((), tl.int64)


@triton.jit
def operand(a, theta, S: tl.constexpr):
    """a, rounded to the dtype of the weights, in which products are computed."""
    dtype: tl.constexpr = theta[0].dtype.element_ty
    if not S.widen:
        return a.to(dtype)
    elif (dtype == tl.bfloat16) & (a.dtype == tl.float32):
        # Rounds to nearest even, as GPUs do; the interpreter's own conversion truncates.
        bits = a.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        return a.to(dtype).to(tl.float32)


@triton.jit
def zeros(S: tl.constexpr):
    """A tile of zeros with the shape of a state."""
    ROWS: tl.constexpr = S.rows
    WIDTH: tl.constexpr = S.width
    return tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def product(a, b, S: tl.constexpr):
    return tl.dot(a, b, input_precision=S.precision)


@triton.jit
def load(pointer, at, inside, EVEN: tl.constexpr):
    return tl.load(pointer + at) if EVEN else tl.load(pointer + at, mask=inside, other=0.0)


@triton.jit
def add_to(pointer, at, value, inside, before, S: tl.constexpr):
    """Adds ``value`` to a gradient. Unless the spec says ``atomic``, only this program writes
    there. If ``before`` is 0 it has not written yet, and the memory is not initialized."""
    if S.atomic:
        tl.atomic_add(pointer + at, value, mask=inside, sem="relaxed")
    else:
        written = inside & (0 * at + before > 0)  # 0 * at: the interpreter needs at's shape
        value += tl.load(pointer + at, mask=written, other=0.0)
        tl.store(pointer + at, value, mask=inside)


# --------------------------------------------------------------------------------------------- mlp


@triton.jit
def mlp_chunk(theta, n, c, S: tl.constexpr):
    """W1 [chunk, width], b1 [1, chunk], W2 [width, chunk] of block n, from hidden unit c on."""
    EVEN: tl.constexpr = (S.hidden % S.chunk == 0) & (S.dim == S.width)
    w1, b1, w2, _ = theta
    d = tl.arange(0, S.width)
    j = tl.arange(0, S.chunk)
    left = S.hidden - c
    inside = (j[:, None] < left) & (d[None, :] < S.dim)
    W1 = load(w1 + (n * S.hidden + c) * S.dim, j[:, None] * S.dim + d[None, :], inside, EVEN)
    inside = (d[:, None] < S.dim) & (j[None, :] < left)
    W2 = load(w2 + n * (S.dim * S.hidden) + c, d[:, None] * S.hidden + j[None, :], inside, EVEN)
    if b1 is None:
        B1 = tl.zeros((1, 1), tl.float32)
    else:
        at = j[None, :]
        B1 = load(b1 + n * S.hidden + c, at, at < left, S.hidden % S.chunk == 0).to(tl.float32)
    return operand(W1, theta, S), B1, operand(W2, theta, S)


@triton.jit
def mlp_bias(theta, n, S: tl.constexpr):
    """b2 for every row."""
    if theta[3] is None:
        return zeros(S)
    else:
        d = tl.arange(0, S.width)[None, :]
        b2 = load(theta[3] + n * S.dim, d, d < S.dim, S.dim == S.width)
        return zeros(S) + b2.to(tl.float32)


@triton.jit
def mlp(x, theta, n, S: tl.constexpr):
    value = mlp_bias(theta, n, S)
    x = operand(x, theta, S)
    for c in tl.range(0, S.hidden, S.chunk, disable_licm=True):
        W1, B1, W2 = mlp_chunk(theta, n, c, S)
        u, _ = activate(product(x, tl.trans(W1), S) + B1, S.activation)
        value += product(operand(u, theta, S), tl.trans(W2), S)
    return value


@triton.jit
def mlp_vjp(p, g, theta, sums, n, slot, before, S: tl.constexpr, VALUE: tl.constexpr):
    s1, t1, s2, t2 = sums
    d = tl.arange(0, S.width)
    j = tl.arange(0, S.chunk)
    if t2 is not None:
        add_to(t2 + slot * S.dim, d, tl.sum(g, 0), d < S.dim, before, S)
    value = mlp_bias(theta, n, S)
    gx = zeros(S)
    p = operand(p, theta, S)
    g = operand(g, theta, S)
    for c in tl.range(0, S.hidden, S.chunk, disable_licm=True):
        W1, B1, W2 = mlp_chunk(theta, n, c, S)
        left = S.hidden - c
        inside = (j[:, None] < left) & (d[None, :] < S.dim)
        u, slope = activate(product(p, tl.trans(W1), S) + B1, S.activation)
        u = operand(u, theta, S)
        if VALUE:
            value += product(u, tl.trans(W2), S)
        if s2 is not None:
            at = d[None, :] * S.hidden + j[:, None]
            gradient = product(tl.trans(u), g, S)
            add_to(s2 + slot * (S.dim * S.hidden) + c, at, gradient, inside, before, S)
        dz = product(g, W2, S) * slope
        if t1 is not None:
            add_to(t1 + slot * S.hidden + c, j, tl.sum(dz, 0), j < left, before, S)
        dz = operand(dz, theta, S)
        gx += product(dz, W1, S)
        if s1 is not None:
            at = j[:, None] * S.dim + d[None, :]
            gradient = product(tl.trans(dz), p, S)
            add_to(s1 + (slot * S.hidden + c) * S.dim, at, gradient, inside, before, S)
    return value, gx


# ------------------------------------------------------------------------------------------ linear


@triton.jit
def linear_weight(theta, n, S: tl.constexpr):
    d = tl.arange(0, S.width)
    inside = (d[:, None] < S.dim) & (d[None, :] < S.dim)
    at = d[:, None] * S.dim + d[None, :]
    weight = load(theta[0] + n * (S.dim * S.dim), at, inside, S.dim == S.width)
    return operand(weight, theta, S)


@triton.jit
def linear(x, theta, n, S: tl.constexpr):
    return product(operand(x, theta, S), tl.trans(linear_weight(theta, n, S)), S)


@triton.jit
def linear_vjp(p, g, theta, sums, n, slot, before, S: tl.constexpr, VALUE: tl.constexpr):
    p = operand(p, theta, S)
    g = operand(g, theta, S)
    weight = linear_weight(theta, n, S)
    value = product(p, tl.trans(weight), S) if VALUE else zeros(S)
    gx = product(g, weight, S)
    if sums[0] is not None:
        d = tl.arange(0, S.width)
        inside = (d[:, None] < S.dim) & (d[None, :] < S.dim)
        at = d[:, None] * S.dim + d[None, :]
        gradient = product(tl.trans(g), p, S)
        add_to(sums[0] + slot * (S.dim * S.dim), at, gradient, inside, before, S)
    return value, gx


# -------------------------------------------------------------------------------------- any of them


@triton.jit
def f(x, theta, n, S: tl.constexpr):
    """f_n(x)."""
    n = int64(0 if S.tied else n)
    return mlp(x, theta, n, S) if S.block == "mlp" else linear(x, theta, n, S)


@triton.jit
def vjp(p, g, theta, sums, n, slots, before, S: tl.constexpr, VALUE: tl.constexpr = True):
    """f_n(p) (unless not VALUE) and ∂_x f_n(p)ᵀ g; adds ∂_θ f_n(p)ᵀ g to the block's sums.

    slots   the first block with slots, the number of groups, and the group of this program
    before  more than 0 if this program has written to the sums already
    """
    begin, groups, group = slots
    n = int64(0 if S.tied else n)
    slot = (n - begin) * groups + group
    if S.block == "mlp":
        value, gx = mlp_vjp(p, g, theta, sums, n, slot, before, S, VALUE)
    else:
        value, gx = linear_vjp(p, g, theta, sums, n, slot, before, S, VALUE)
    return value, gx
