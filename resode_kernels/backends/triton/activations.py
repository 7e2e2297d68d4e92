"""σ(z) and σ′(z) of every activation. The compiler removes the one that a caller does not use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(z):
    """tanh z, for small |z| as an odd function, because 1 − 2/(exp(2|z|) + 1) would cancel
    (coefficients: Cephes, tanh and tanhf)."""
    s = z * z
    if z.dtype == tl.float64:
        # No variable is set to a constant alone, which Triton would round to float32.
        q = -9.64399179425052238628e-1 * s - 9.92877231001918586564e1
        q = q * s - 1.61468768441708447952e3
        r = s + 1.12811678491632931402e2
        r = r * s + 2.23548839060100448583e3
        r = r * s + 4.84406305325125486048e3
        q = q / r
    else:
        q = -5.70498872745e-3
        q = q * s + 2.06390887954e-2
        q = q * s - 5.37397155531e-2
        q = q * s + 1.33314422036e-1
        q = q * s - 3.33332819422e-1
    near = z + z * s * q
    a = tl.abs(z)
    far = 1 - 2 / (tl.exp(2 * a) + 1)
    return tl.where(a < 0.625, near, tl.where(z < 0, -far, far))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """σ(z), σ′(z). A NaN gives a NaN."""
    if ACTIVATION == "relu":
        value = tl.where(z < 0, 0.0, z)
        slope = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "tanh":
        value = tanh(z)
        slope = 1 - value * value
    elif ACTIVATION == "gelu":  # z Φ(z), with the normal distribution's Φ
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        value = z * cdf
        slope = cdf + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        tl.static_assert(ACTIVATION == "silu")
        e = tl.exp(-tl.abs(z))
        larger = 1 / (1 + e)
        smaller = e * larger
        s = tl.where(z < 0, smaller, larger)  # the logistic function
        value = z * s
        slope = s + value * tl.where(z < 0, larger, smaller)  # 1 − s, without cancellation
    return value, slope
