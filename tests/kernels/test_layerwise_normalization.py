"""Batch normalization by the layer-wise kernels keeps the rule of accuracy, in every layout and
dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LONG_ACTIVATIONS, assert_error, long, relative_error, shifted
from providers import FLOATS, LAYOUTS, NARROW, Provider
from torch import Tensor

from resode_kernels import reference
from resode_kernels.backends.layerwise import Kernels, Normalization

AXES = (0, 2, 3)
# Beside the usual: one image, one channel, one position, more channels than a tile has, and numbers
# that are moved four at a time.
SHAPES = [(3, 5, 4, 3), (1, 3, 3, 7), (2, 1, 5, 5), (9, 6, 1, 1), (2, 70, 2, 2), (4, 16, 4, 2)]


def values(shape: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
    scale, shift = torch.rand(2, shape[1], 1, 1, dtype=dtype)
    z = torch.randn(shape, dtype=dtype) * (0.5 + scale) + 3 * shift
    return z.to(memory_format=layout)


def mean_and_variance(z: Any) -> tuple[Any, Any]:
    """Of every channel, of a tensor or an array, in its own arithmetic."""
    mean = z.sum(AXES) / z[:, 0].size if isinstance(z, np.ndarray) else z.mean(AXES)
    deviation = z - mean[:, None, None]
    return mean, (deviation * deviation).mean(AXES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("provider", "dtype"), FLOATS, indirect=["provider"], ids=str)
def test_statistics(
    kernels: Kernels, dtype: torch.dtype, layout: torch.memory_format, small_tiles: None
) -> None:
    z = values((3, 13, 5, 3), layout, dtype)
    pytorch, exact = mean_and_variance(z), mean_and_variance(long(z))
    for k, p, e in zip(kernels.statistics(z), pytorch, exact, strict=True):
        assert_error(k, p, e, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_variance_of_values_far_from_zero(
    kernels: Kernels, layout: torch.memory_format, small_tiles: None
) -> None:
    """Σ z²/m − μ² would have no digit right."""
    z = (1000 + 0.01 * torch.randn(4, 3, 5, 7)).to(memory_format=layout)
    _, variance = kernels.statistics(z)
    exact = long(z).var(AXES)
    assert relative_error(variance, exact) < 1e-6
    naive = z.square().mean(AXES) - z.mean(AXES).square()
    assert relative_error(naive, exact) > 1


def test_statistics_of_tiles_that_differ(kernels: Kernels, small_tiles: None) -> None:
    """Every image has its own mean: what joins the partial results is most of the variance."""
    z = torch.randn(6, 3, 4, 4) + 100 * torch.arange(6.0)[:, None, None, None]
    _, variance = kernels.statistics(z)
    assert relative_error(variance, long(z).var(AXES)) < 1e-6


def test_statistics_of_two_values(kernels: Kernels) -> None:
    for shape in ((2, 5, 1, 1), (1, 5, 2, 1)):
        z = torch.randn(shape)
        for k, e in zip(kernels.statistics(z), mean_and_variance(long(z)), strict=True):
            assert relative_error(k, e) < torch.finfo(torch.float32).eps


def layer_and_vjp(
    z: Any, d: Any, normalization: Sequence[Any], of_batch: bool, sigma: Any, slope: Any
) -> list[Any]:
    """σ(bn(z)), dz, dγ and dβ of tensors or arrays, in their own arithmetic."""
    mean, variance, gamma, beta, epsilon = normalization
    if of_batch:
        mean, variance = mean_and_variance(z)
    mean, variance, gamma, beta = (v[:, None, None] for v in (mean, variance, gamma, beta))
    r = (variance + epsilon) ** -0.5
    normal = (z - mean) * r
    u = gamma * normal + beta
    g = d * slope(u)
    d_beta, d_gamma = g.sum(AXES), (g * normal).sum(AXES)
    dz = g
    if of_batch:
        count = z.shape[0] * z.shape[2] * z.shape[3]
        dz = g - (d_beta[:, None, None] + normal * d_gamma[:, None, None]) / count
    return [sigma(u), gamma * r * dz, d_gamma, d_beta]


def identity(u: Any) -> Any:
    return u


def one(u: Any) -> Any:
    return 0 * u + 1


Layer = tuple[list[Tensor], list[Any], list[Any]]


def layers(
    kernels: Kernels,
    shape: tuple[int, ...],
    layout: torch.memory_format,
    activation: str | None,
    of_batch: bool,
    affine: bool,
    dtype: torch.dtype,
) -> Layer:
    """A layer and its VJP by the kernels, in plain PyTorch and in long double."""
    z, d, channels = values(shape, layout, dtype), torch.randn(shape, dtype=dtype), shape[1]
    gamma, beta, mean, variance = torch.rand(4, channels, dtype=dtype) + 0.5
    if of_batch:
        mean, variance = kernels.statistics(z)
    normalization = Normalization(
        mean, variance, gamma if affine else None, beta if affine else None, 1e-3
    )
    kernel = [
        kernels.normalized(z, normalization, activation, dtype),
        *kernels.vjp(d, z, normalization, of_batch, activation),
    ]
    assert kernel[0].stride() == kernel[1].stride() == z.stride()
    if not affine:
        gamma, beta = torch.ones_like(gamma), torch.zeros_like(beta)
    normalization = normalization._replace(gamma=gamma, beta=beta)
    nothing = identity, one
    pytorch = layer_and_vjp(
        z,
        d,
        normalization,
        of_batch,
        *(reference.ACTIVATIONS[activation] if activation else nothing),
    )
    exact = layer_and_vjp(
        long(z), long(d), [*map(long, normalization[:4]), np.longdouble(1e-3)], of_batch,
        *(LONG_ACTIVATIONS[activation] if activation else nothing),
    )  # fmt: skip
    return kernel, pytorch, exact


@pytest.mark.parametrize(("provider", "dtype"), FLOATS, indirect=["provider"], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("of_batch", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_normalization_and_its_vjp(
    kernels: Kernels,
    layout: torch.memory_format,
    activation: str | None,
    of_batch: bool,
    affine: bool,
    dtype: torch.dtype,
) -> None:
    shape = (3, 13, 5, 3)
    results = layers(kernels, shape, layout, activation, of_batch, affine, dtype)
    for k, p, e, factor in zip(*results, (2, 2, 3, 3), strict=True):
        assert_error(k, p, e, dtype, factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_normalization_of_every_shape(
    provider: Provider,
    shape: tuple[int, ...],
    layout: torch.memory_format,
    request: pytest.FixtureRequest,
) -> None:
    if shape[1] < 70:
        request.getfixturevalue("small_tiles")
    dtype = provider.widest
    tolerance = 50 * torch.finfo(dtype).eps
    for of_batch in (True, False):
        kernel, _, exact = layers(provider.kernels, shape, layout, "tanh", of_batch, True, dtype)
        for k, e in zip(kernel, exact, strict=True):
            np.testing.assert_allclose(long(k), e, tolerance, tolerance)


def test_half_precision_is_normalized_in_float32(kernels: Kernels) -> None:
    z = values((2, 5, 3, 3), torch.channels_last, torch.float32).bfloat16()
    mean, variance = kernels.statistics(z)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean, z.float().mean(AXES))
    gamma, beta = torch.randn(2, 5).bfloat16()
    normalization = Normalization(mean, variance, gamma, beta, 1e-5)
    wide = Normalization(mean, variance, gamma.float(), beta.float(), 1e-5)
    d = torch.randn_like(z)
    u = kernels.normalized(z, normalization, "gelu", torch.float32)
    assert torch.equal(u, kernels.normalized(z.float(), wide, "gelu", torch.float32))
    dz, *sums = kernels.vjp(d, z, normalization, True, "gelu")
    wide_dz, *wide_sums = kernels.vjp(d.float(), z.float(), wide, True, "gelu")
    assert torch.equal(dz, wide_dz.bfloat16())
    assert all(map(torch.equal, sums, wide_sums))


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_where_memory_begins(
    kernels: Kernels, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    """Aligned numbers are moved 16 bytes at a time, others one by one; only sums may differ, by
    the order of summation."""
    z = values((3, 16, 2, 4), layout, torch.float32).to(dtype)
    d = torch.randn_like(z)
    mean, variance, gamma, beta = torch.rand(4, 16) + 0.5
    normalization = Normalization(mean, variance, gamma, beta, 1e-3)
    by_vectors, one_by_one = (
        [
            kernels.normalized(p, normalization, "silu", dtype),
            *kernels.vjp(q, p, normalization, False, "silu"),
            *kernels.statistics(p),
        ]
        for p, q in ((z, d), (shifted(z), shifted(d)))
    )
    for i, (v, s) in enumerate(zip(by_vectors, one_by_one, strict=True)):
        if i < 2:
            assert torch.equal(v, s)
        else:
            torch.testing.assert_close(v, s)
    pytorch, exact = (mean_and_variance(t) for t in (z.float(), long(z)))
    for k, p, e in zip(by_vectors[-2:], pytorch, exact, strict=True):
        assert_error(k, p, e, torch.float32)
