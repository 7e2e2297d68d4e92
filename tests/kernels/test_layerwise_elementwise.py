"""The layer-wise kernels that go over a tensor element by element keep the rule of accuracy, in
every layout and dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import LONG_ACTIVATIONS, assert_error, long, shifted
from providers import FLOATS, LAYOUTS, NARROW, Provider
from torch import Tensor

from resode_kernels import reference
from resode_kernels.backends.layerwise import Kernels
from resode_kernels.states import stream_dtype

ACTIVATIONS = list(reference.ACTIVATIONS)

# -------------------------------------------------------------------------------------- combine


@pytest.mark.parametrize(
    ("provider", "dtype"),
    [*FLOATS, *((name, dtype) for name in ("triton", "cuda") for dtype in NARROW)],
    indirect=["provider"],
    ids=str,
)
@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_combine_is_as_accurate_as_pytorch(
    kernels: Kernels, terms: int, dtype: torch.dtype
) -> None:
    factors = [0.1, -2 / 3, 1, 1e-3][:terms]
    for shape in ((1,), (2500,), (3, 5, 7)):
        x, *ys = torch.randn(1 + terms, *shape).to(dtype)
        wide = stream_dtype(dtype)
        for first in (x, None):
            kernel = kernels.combine(first, *zip(factors, ys, strict=True))
            pytorch = reference.combine(
                None if first is None else first.to(wide),
                *((a, y.to(wide)) for a, y in zip(factors, ys, strict=True)),
            )
            exact = sum(a * long(y) for a, y in zip(factors, ys, strict=True))
            exact = exact if first is None else exact + long(first)
            assert kernel.dtype == wide
            assert_error(kernel, pytorch, exact, wide)


def strided(layout: str) -> Callable[[], Tensor]:
    """Makes tensors of the shape [2, 3, 5, 4] in one layout."""
    return {
        "contiguous": lambda: torch.randn(2, 3, 5, 4),
        "channels-last": lambda: torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(4, 5, 3, 2).permute(3, 2, 1, 0),
        "with gaps": lambda: torch.randn(2, 3, 5, 8)[..., ::2],
        "expanded": lambda: torch.randn(1, 3, 1, 4).expand(2, 3, 5, 4),
    }[layout]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("contiguous", "contiguous", 1),
        ("channels-last", "channels-last", 1),
        ("transposed", "transposed", 1),
        ("contiguous", "channels-last", 0),
        ("with gaps", "with gaps", 0),
        ("contiguous", "expanded", 0),
    ],
)
def test_combine_takes_any_layout_and_fuses_equal_dense_ones(
    kernels: Kernels, first: str, second: str, expected: int, launches: list[str]
) -> None:
    x, y, z = strided(first)(), strided(second)(), strided(second)()
    got = kernels.combine(x, (0.5, y), (-3, z))
    torch.testing.assert_close(got, x + 0.5 * y - 3 * z)
    assert len(launches) == expected
    if expected:
        assert got.stride() == x.stride()


def test_combine_widens_as_pytorch_does(provider: Provider, launches: list[str]) -> None:
    kernels = provider.kernels
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    for count in (2, 3, 4):
        x, *ys = (torch.randn(7).to(dtype) for dtype in dtypes[:count])
        terms = [(0.3, y) for y in ys]
        got, expected = kernels.combine(x, *terms), reference.combine(x, *terms)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)
    assert len(launches) == (3 if provider.widest == torch.float64 else 2)


def test_combine_of_tuples_and_of_nothing(provider: Provider, launches: list[str]) -> None:
    kernels = provider.kernels
    p, q, u = torch.randn(3, 4)
    r = torch.randn(2, 5, dtype=provider.widest)
    for combine in (kernels.combine, reference.combine):
        got = combine((p, r), (2, (q, None)), (-1, None), (3, (u, r)))
        torch.testing.assert_close(got, (p + 2 * q + 3 * u, r + 3 * r))
        torch.testing.assert_close(combine(None, (2, (q, r))), (2 * q, 2 * r))
        assert combine(p, (2, None)) is p
        assert combine((p, r), (2, (None, None))) == (p, r)
        assert combine(None, (2, None)) is None
    assert len(launches) == 4


def test_combine_leaves_to_pytorch_what_it_cannot_do(kernels: Kernels, launches: list[str]) -> None:
    ys = list(torch.randn(6, 5))
    torch.testing.assert_close(
        kernels.combine(None, *[(2, y) for y in ys]), 2 * torch.stack(ys).sum(0)
    )
    gaps = torch.ones(8, dtype=torch.bfloat16)[::2]
    assert kernels.combine(gaps, (1, gaps)).dtype == torch.float32
    x, y = torch.randn(2, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(kernels.combine(x, (3, y)).sum(), y)
    assert (gradient == 3).all()
    assert not launches


# ---------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(("provider", "dtype"), FLOATS, indirect=["provider"], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(
    kernels: Kernels, activation: str, dtype: torch.dtype, small_tiles: None
) -> None:
    sigma, slope = reference.ACTIVATIONS[activation]
    long_sigma, long_slope = LONG_ACTIVATIONS[activation]
    for shape, layout in (
        ((9, 7), torch.contiguous_format),
        ((2, 3, 3, 5), torch.contiguous_format),
        ((2, 3, 3, 5), torch.channels_last),
    ):
        z, d = torch.randn(2, *shape, dtype=dtype)
        z, d = (3 * z).to(memory_format=layout), d.to(memory_format=layout)
        for bias in (torch.randn(shape[1], dtype=dtype), None):
            column = (1, -1) if len(shape) == 2 else (-1, 1, 1)
            b = torch.zeros((), dtype=dtype) if bias is None else bias.reshape(column)
            u = long(z) + long(b)
            kernel = kernels.activated(z, bias, activation)
            assert kernel.stride() == z.stride()
            assert_error(kernel, sigma(z + b), long_sigma(u), dtype)
            kernel = kernels.times_slope(d, z, bias, activation)
            assert_error(kernel, d * slope(z + b), long(d) * long_slope(u), dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("channels", [7, 16])
def test_half_precision_is_widened_and_rounded_once(
    kernels: Kernels, channels: int, dtype: torch.dtype
) -> None:
    z, d = torch.randn(2, 5, channels).to(dtype)
    bias = torch.randn(channels).to(dtype)
    u = z.float() + bias.float()
    got = kernels.activated(z, bias, "silu")
    torch.testing.assert_close(got, F.silu(u).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert kernels.activated(u, None, "silu", dtype).dtype == dtype
    got = kernels.times_slope(d, z, bias, "relu")
    assert torch.equal(got, torch.where(u > 0, d, 0))
    assert kernels.times_slope(d, u, None, "relu").dtype == torch.float32


def test_operands_of_other_layouts_are_copied(kernels: Kernels) -> None:
    z = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for d in (torch.randn(2, 3, 4, 5), torch.randn(2, 1, 1, 5).expand(2, 3, 4, 5)):
        assert torch.equal(kernels.times_slope(d, z, None, "relu"), d * (z > 0))
    gaps = strided("with gaps")()
    assert torch.equal(kernels.activated(gaps, None, "relu"), gaps.relu())


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_where_memory_begins(
    kernels: Kernels, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    """Aligned numbers are moved 16 bytes at a time, others one by one."""
    z, d = (t.to(memory_format=layout) for t in torch.randn(2, 3, 8, 2, 4))
    z, bias = z.to(dtype), torch.randn(8)
    by_vectors, one_by_one = (
        [
            kernels.activated(p, bias, "gelu"),
            kernels.times_slope(q, p, bias, "gelu"),
            kernels.combine(q, (0.3, p)),
        ]
        for p, q in ((z, d), (shifted(z), shifted(d)))
    )
    assert all(map(torch.equal, by_vectors, one_by_one))


def test_of_no_rows(kernels: Kernels) -> None:
    nothing = torch.empty(0, 5)
    assert kernels.combine(nothing, (2, nothing)).shape == nothing.shape
    assert kernels.activated(nothing, torch.ones(5), "relu").shape == nothing.shape


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_combine_takes_products_with_a_slope(kernels: Kernels, activation: str) -> None:
    """As if they had been computed before."""
    for layout in LAYOUTS:
        g, d, x = (t.to(memory_format=layout) for t in torch.randn(3, 2, 3, 5, 3))
        e, y = d.half(), x + 1
        first = kernels.slope_term(d, x, activation), kernels.times_slope(d, x, None, activation)
        second = kernels.slope_term(e, y, activation), kernels.times_slope(e, y, None, activation)
        term, product = (
            kernels.combine(g, (0.3, p), (1, q)) for p, q in zip(first, second, strict=True)
        )
        torch.testing.assert_close(term, product)
        # PyTorch adds what is not laid out alike.
        for other in LAYOUTS:
            moved = kernels.combine(g.to(memory_format=other), (0.3, first[0]), (1, second[0]))
            torch.testing.assert_close(moved, term)
