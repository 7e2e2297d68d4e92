"""Triton's layer-wise kernels keep the rule of accuracy and repeat bit by bit, alone and as stages.
Without a GPU they are run by Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    LONG_ACTIVATIONS,
    RULES,
    NearKink,
    Run,
    assert_as_accurate_as_pytorch,
    assert_error,
    gradients,
    in_dtype,
    long,
    make_conv_stage,
    make_stage,
    name,
    problem_of,
    relative_error,
)
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels import reference, residual
from resode_kernels.backends import reference as engine
from resode_kernels.options import How
from resode_kernels.problem import Problem, stream_dtype

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")

from resode_kernels.backends.triton import (  # noqa: E402
    elementwise,
    launch,
    layerwise,
    normalization,
    rows,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float64]
ALL = [*FLOATS, torch.float16, torch.bfloat16]
ACTIVATIONS = list(reference.ACTIVATIONS)
LAYOUTS = [torch.contiguous_format, torch.channels_last]

pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 off to bfloat16, where a GPU rounds."""
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source != triton.language.float32 or target != triton.language.bfloat16:
            result: np.ndarray = convert(data, source, target, mode)
            return result
        nearest = torch.from_numpy(np.array(data)).to("cpu", torch.bfloat16)
        return nearest.view(torch.uint16).numpy().copy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few numbers are many tiles, and more tiles than a reduction has programs."""
    monkeypatch.setattr(rows, "TILE", 32)
    monkeypatch.setattr(rows, "CHANNELS", 4)
    monkeypatch.setattr(normalization, "PROGRAMS", 5)


# -------------------------------------------------------------------------------------- combine


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_combine_is_as_accurate_as_pytorch(terms: int, dtype: torch.dtype) -> None:
    factors = [0.1, -2 / 3, 1, 1e-3][:terms]
    for shape in ((1,), (2500,), (3, 5, 7)):
        x, *ys = torch.randn(1 + terms, *shape).to(dtype)
        wide = stream_dtype(dtype)
        for first in (x, None):
            kernel = elementwise.combine(first, *zip(factors, ys, strict=True))
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
    ("first", "second", "launches"),
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
    first: str, second: str, launches: int, count_launches: list[Any]
) -> None:
    x, y, z = strided(first)(), strided(second)(), strided(second)()
    got = elementwise.combine(x, (0.5, y), (-3, z))
    torch.testing.assert_close(got, x + 0.5 * y - 3 * z)
    assert len(count_launches) == launches
    if launches:
        assert got.stride() == x.stride()


@pytest.fixture
def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels of elementwise.py that are launched."""
    seen: list[Any] = []

    def counted(kernel: Any, *args: Any, **constants: Any) -> None:
        seen.append(kernel)
        launch.launch(kernel, *args, **constants)

    monkeypatch.setattr(elementwise, "launch", counted)
    return seen


def test_combine_widens_as_pytorch_does(count_launches: list[Any]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    for count in (2, 3, 4):
        x, *ys = (torch.randn(7).to(dtype) for dtype in dtypes[:count])
        terms = [(0.3, y) for y in ys]
        got, expected = elementwise.combine(x, *terms), reference.combine(x, *terms)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)
    assert len(count_launches) == 3


def test_combine_of_tuples_and_of_nothing(count_launches: list[Any]) -> None:
    p, q, u = torch.randn(3, 4)
    r = torch.randn(2, 5, dtype=torch.float64)
    for combine in (elementwise.combine, reference.combine):
        got = combine((p, r), (2, (q, None)), (-1, None), (3, (u, r)))
        torch.testing.assert_close(got, (p + 2 * q + 3 * u, r + 3 * r))
        torch.testing.assert_close(combine(None, (2, (q, r))), (2 * q, 2 * r))
        assert combine(p, (2, None)) is p
        assert combine((p, r), (2, (None, None))) == (p, r)
        assert combine(None, (2, None)) is None
    assert len(count_launches) == 4


def test_combine_leaves_to_pytorch_what_it_cannot_do(count_launches: list[Any]) -> None:
    ys = list(torch.randn(6, 5))
    torch.testing.assert_close(
        elementwise.combine(None, *[(2, y) for y in ys]), 2 * torch.stack(ys).sum(0)
    )
    gaps = torch.ones(8, dtype=torch.bfloat16)[::2]
    assert elementwise.combine(gaps, (1, gaps)).dtype == torch.float32
    x, y = torch.randn(2, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(elementwise.combine(x, (3, y)).sum(), y)
    assert (gradient == 3).all()
    assert not count_launches


@pytest.mark.parametrize(
    ("scheme", "rule", "order", "calls", "most_terms"),
    [
        ("euler", "refined", 1, 1 + 4, 1),
        ("euler", "predicted", 3, 1 + 4, 3),
        ("heun", "refined", 1, 3 + 9, 2),
        ("heun", "predicted", 3, 3 + 7, 3),
    ],
)
def test_every_update_is_one_call(
    scheme: str, rule: str, order: int, calls: int, most_terms: int
) -> None:
    """Of the engine, however many terms it has: so many per step, forward and back."""

    def terms_of_calls(depth: int) -> list[int]:
        counts = []

        def combine(x: Any, *terms: Any) -> Any:
            counts.append(len(terms))
            return reference.combine(x, *terms)

        blocks = [reference.Linear(torch.randn(3, 3)) for _ in range(depth)]
        solver = reference.SCHEMES[scheme](blocks, 0.1, combine)
        y, _ = reference.forward(solver, torch.randn(2, 3))
        pullbacks = reference.adjoint(rule, order, solver, y, {})
        reference.reverse(pullbacks, torch.randn(2, 3), reference.Sums().add)
        return counts

    assert len(terms_of_calls(8)) - len(terms_of_calls(7)) == calls
    assert max(terms_of_calls(8)) == most_terms


# ---------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(activation: str, dtype: torch.dtype, small_tiles: None) -> None:
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
            kernel = elementwise.activated(z, bias, activation)
            assert kernel.stride() == z.stride()
            assert_error(kernel, sigma(z + b), long_sigma(u), dtype)
            kernel = elementwise.times_slope(d, z, bias, activation)
            assert_error(kernel, d * slope(z + b), long(d) * long_slope(u), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_widened_and_rounded_once(dtype: torch.dtype) -> None:
    z, d = torch.randn(2, 5, 7).to(dtype)
    bias = torch.randn(7).to(dtype)
    u = z.float() + bias.float()
    got = elementwise.activated(z, bias, "silu")
    torch.testing.assert_close(got, F.silu(u).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert elementwise.activated(u, None, "silu", dtype).dtype == dtype
    got = elementwise.times_slope(d, z, bias, "relu")
    assert torch.equal(got, torch.where(u > 0, d, 0))
    assert elementwise.times_slope(d, u, None, "relu").dtype == torch.float32


def test_operands_of_other_layouts_are_copied() -> None:
    z = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for d in (torch.randn(2, 3, 4, 5), torch.randn(2, 1, 1, 5).expand(2, 3, 4, 5)):
        assert torch.equal(elementwise.times_slope(d, z, None, "relu"), d * (z > 0))
    gaps = strided("with gaps")()
    assert torch.equal(elementwise.activated(gaps, None, "relu"), gaps.relu())


# -------------------------------------------------------------------------------- normalization

AXES = (0, 2, 3)
# Beside the usual: one image, one channel, one position, more channels than a tile has.
SHAPES = [(3, 5, 4, 3), (1, 3, 3, 7), (2, 1, 5, 5), (9, 6, 1, 1), (2, 70, 2, 2)]


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
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_statistics(dtype: torch.dtype, layout: torch.memory_format, small_tiles: None) -> None:
    z = values((3, 13, 5, 3), layout, dtype)
    pytorch, exact = mean_and_variance(z), mean_and_variance(long(z))
    for k, p, e in zip(normalization.statistics(z), pytorch, exact, strict=True):
        assert_error(k, p, e, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_variance_of_values_far_from_zero(
    layout: torch.memory_format, small_tiles: None
) -> None:
    """Σ z²/m − μ² would have no digit right."""
    z = (1000 + 0.01 * torch.randn(4, 3, 5, 7)).to(memory_format=layout)
    _, variance = normalization.statistics(z)
    exact = long(z).var(AXES)
    assert relative_error(variance, exact) < 1e-6
    naive = z.square().mean(AXES) - z.mean(AXES).square()
    assert relative_error(naive, exact) > 1


def test_statistics_of_tiles_that_differ(small_tiles: None) -> None:
    """Every image has its own mean: what joins the partial results is most of the variance."""
    z = torch.randn(6, 3, 4, 4) + 100 * torch.arange(6.0)[:, None, None, None]
    _, variance = normalization.statistics(z)
    assert relative_error(variance, long(z).var(AXES)) < 1e-6


def layer_and_vjp(
    z: Any, d: Any, by: Sequence[Any], of_batch: bool, sigma: Any, slope: Any
) -> list[Any]:
    """σ(bn(z)), dz, dγ and dβ of tensors or arrays, in their own arithmetic."""
    mean, variance, gamma, beta, epsilon = by
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
        mean, variance = normalization.statistics(z)
    by = normalization.Normalization(
        mean, variance, gamma if affine else None, beta if affine else None, 1e-3
    )
    kernel = [
        normalization.normalized(z, by, activation, dtype),
        *normalization.vjp(d, z, by, of_batch, activation),
    ]
    assert kernel[0].stride() == kernel[1].stride() == z.stride()
    if not affine:
        gamma, beta = torch.ones_like(gamma), torch.zeros_like(beta)
    by = by._replace(gamma=gamma, beta=beta)
    nothing = identity, one
    pytorch = layer_and_vjp(
        z, d, by, of_batch, *(reference.ACTIVATIONS[activation] if activation else nothing)
    )
    exact = layer_and_vjp(
        long(z), long(d), [*map(long, by[:4]), np.longdouble(1e-3)], of_batch,
        *(LONG_ACTIVATIONS[activation] if activation else nothing),
    )  # fmt: skip
    return kernel, pytorch, exact


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("of_batch", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_normalization_and_its_vjp(
    layout: torch.memory_format,
    activation: str | None,
    of_batch: bool,
    affine: bool,
    dtype: torch.dtype,
) -> None:
    shape = (3, 13, 5, 3)
    results = layers(shape, layout, activation, of_batch, affine, dtype)
    for k, p, e, factor in zip(*results, (2, 2, 3, 3), strict=True):
        assert_error(k, p, e, dtype, factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_normalization_of_every_shape(
    shape: tuple[int, ...], layout: torch.memory_format, request: pytest.FixtureRequest
) -> None:
    if shape[1] < 70:
        request.getfixturevalue("small_tiles")
    for of_batch in (True, False):
        kernel, _, exact = layers(shape, layout, "tanh", of_batch, True, torch.float64)
        for k, e in zip(kernel, exact, strict=True):
            assert relative_error(k, e) < 1e-14


def test_half_precision_is_normalized_in_float32() -> None:
    z = values((2, 5, 3, 3), torch.channels_last, torch.float32).bfloat16()
    mean, variance = normalization.statistics(z)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean, z.float().mean(AXES))
    gamma, beta = torch.randn(2, 5).bfloat16()
    by = normalization.Normalization(mean, variance, gamma, beta, 1e-5)
    wide = normalization.Normalization(mean, variance, gamma.float(), beta.float(), 1e-5)
    d = torch.randn_like(z)
    u = normalization.normalized(z, by, "gelu", torch.float32)
    assert torch.equal(u, normalization.normalized(z.float(), wide, "gelu", torch.float32))
    dz, *sums = normalization.vjp(d, z, by, True, "gelu")
    wide_dz, *wide_sums = normalization.vjp(d.float(), z.float(), wide, True, "gelu")
    assert torch.equal(dz, wide_dz.bfloat16())
    assert all(map(torch.equal, sums, wide_sums))


# ---------------------------------------------------------------------------------------- stages


def passes(
    forward: Callable[..., None], reverse: Callable[..., None], problem: Problem
) -> Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor | None], Tensor]]:
    """x, g to the output, the gradients of x and of the parameters, and the statistics."""

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor]:
        x, g = (t.to(stream_dtype(t.dtype)) for t in (x, g))
        y, anchors = torch.empty_like(x), x.new_empty((problem.kept_states, *x.shape))
        statistics = x.new_zeros(problem.statistics if problem.block == "conv" else 0)
        forward(problem, x, y, anchors, statistics)
        start = x if problem.method.rule == "exact" else y
        gradients = [torch.empty_like(x)]
        gradients += [
            torch.empty_like(p) if isinstance(p, nn.Parameter) else None for p in problem.parameters
        ]
        reverse(problem, start, anchors, g, gradients)
        return y, gradients, statistics

    return run


def by_kit(kit: engine.Kit | None = None) -> Run:
    """``helpers.gradients`` by the layer-wise backend, or by blocks of another kind."""
    forward, reverse = layerwise.forward, layerwise.reverse
    if kit is not None:
        forward, reverse = (functools.partial(f, kit=kit) for f in (engine.forward, engine.reverse))

    @torch.no_grad()
    def run(stage: rk.Stage, x: Tensor, g: Tensor) -> list[Tensor]:
        y, gradients, _ = passes(forward, reverse, problem_of(stage))(x, g)
        return [y, *(t for t in gradients if t is not None)]

    return run


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_rules_and_schemes(block: str, options: dict[str, Any], scheme: str) -> None:
    stage = make_stage(block, 5, 7, 4, scheme=scheme, **options)
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 6, 5), by_kit(), by_kit(engine.PLAIN))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_dtypes_and_tied_weights(
    activation: str, dtype: torch.dtype, tied: bool
) -> None:
    for bias in (True, False):
        stage = make_stage(activation, 5, 7, 3, bias, tied=tied, dtype=dtype)
        x, g = torch.randn(2, 6, 5, dtype=dtype)
        assert_as_accurate_as_pytorch(stage, x, g, by_kit(), by_kit(engine.PLAIN))


@pytest.mark.parametrize(
    ("scheme", "options", "layout"),
    [
        ("euler", RULES[1], torch.contiguous_format),
        ("euler", RULES[1], torch.channels_last),
        ("euler", RULES[5], torch.channels_last),
        ("euler", RULES[9], torch.channels_last),
        ("heun", RULES[1], torch.channels_last),
    ],
    ids=str,
)
def test_convolutions(scheme: str, options: dict[str, Any], layout: torch.memory_format) -> None:
    depth = 4 if options.get("order") == 3 else 2
    stage = make_conv_stage("basic", "tanh", 16, depth, hidden=13, scheme=scheme, **options)
    x, g = torch.randn(2, 1, 16, 5, 4)
    x = x.to(memory_format=layout)
    assert_as_accurate_as_pytorch(stage, x, g, by_kit(), by_kit(engine.PLAIN))


@pytest.mark.parametrize(
    ("block", "activation", "dtype", "tied", "train"),
    [
        ("basic", "relu", torch.float32, True, True),
        ("basic", "relu", torch.float32, False, False),
        ("bottleneck", "gelu", torch.float32, True, False),
        ("bottleneck", "gelu", torch.float32, False, True),
        ("basic", "silu", torch.float64, True, True),
        ("basic", "silu", torch.float64, False, False),
    ],
)
def test_convolutions_of_every_kind(
    block: str, activation: str, dtype: torch.dtype, tied: bool, train: bool
) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        stage = make_conv_stage(block, activation, 16, 2, hidden=13, tied=tied, dtype=dtype)
        x, g = torch.randn(2, 3, 16, 3, 3, dtype=dtype)
        x = x.to(memory_format=torch.channels_last)
        try:
            assert_as_accurate_as_pytorch(stage.train(train), x, g, by_kit(), by_kit(engine.PLAIN))
        except NearKink:
            continue
        return
    raise AssertionError("every draw was near a kink")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", ["silu", "linear"])
def test_products_in_half_precision(
    block: str, tied: bool, scheme: str, dtype: torch.dtype
) -> None:
    stage = make_stage(block, 9, 11, 3, tied=tied, scheme=scheme, dtype=dtype)
    x, g = torch.randn(2, 16, 9)
    assert_as_accurate_as_pytorch(stage, x, g, by_kit(), by_kit(in_dtype(dtype)))


@pytest.mark.parametrize(
    ("dtype", "scheme", "tied"),
    [(torch.bfloat16, "euler", False), (torch.float16, "heun", True)],
    ids=str,
)
def test_convolutions_in_half_precision(dtype: torch.dtype, scheme: str, tied: bool) -> None:
    stage = make_conv_stage("basic", "tanh", 16, 2, scheme=scheme, tied=tied, dtype=dtype)
    x, g = torch.randn(2, 3, 16, 3, 3)
    x = x.to(memory_format=torch.channels_last)
    assert_as_accurate_as_pytorch(stage, x, g, by_kit(), by_kit(in_dtype(dtype)))


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "affine"), [("euler", True), ("heun", False)])
def test_statistics_of_every_evaluation_and_no_affine(affine: bool, scheme: str) -> None:
    """In float64 against the reference. The second of three layers normalizes by given numbers."""

    def layer(out: int, inputs: int, size: int, given: bool) -> list[Tensor | None]:
        gamma, beta, mean, variance = torch.rand(4, out, dtype=torch.float64) + 0.5
        affine_part = (nn.Parameter(gamma), nn.Parameter(beta)) if affine else (None, None)
        weight = nn.Parameter(torch.randn(out, inputs, size, size, dtype=torch.float64))
        return [weight, *affine_part, *((mean, variance) if given else (None, None))]

    method = How(scheme=scheme).method(2)
    blocks = 2 + (scheme == "heun")
    parameters = [
        tensor
        for _ in range(blocks)
        for arguments in ((3, 4, 1, False), (3, 3, 3, True), (4, 3, 1, False))
        for tensor in layer(*arguments)
    ]
    problem = Problem("conv", "silu", tuple(parameters), method, 3, 1e-5)
    x, g = torch.randn(2, 1, 4, 3, 3, dtype=torch.float64)
    got, expected = (
        passes(backend.forward, backend.reverse, problem)(x, g) for backend in (layerwise, engine)
    )
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    assert (got[2][:, 6:12] == 0).all()
    assert (got[2][:, :6] != 0).all()


@pytest.mark.parametrize("block", ["gelu", "conv"])
def test_results_repeat_bit_by_bit(block: str, small_tiles: None) -> None:
    if block == "conv":
        stage: rk.Stage = make_conv_stage("basic", "tanh", 4, depth=1)
        x, g = torch.randn(2, 3, 4, 3, 3)
    else:
        stage, (x, g) = make_stage(block, 5, 7, 2), torch.randn(2, 6, 5)
    first, second = (by_kit()(stage, x, g) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_gradients_of_half_precision_weights_are_summed_in_float32() -> None:
    sums, block, one = reference.Sums(), reference.Block(), torch.ones(1, dtype=torch.bfloat16)
    for _ in range(300):
        sums.add(block, (one, None))
    assert sums[block] == (300, None)


# ----------------------------------------------------------------------------- stages of modules


class Halves(nn.Module):
    """A state of two tensors of different shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        p, q = state
        return torch.tanh(self.a(p)) + q.mean().float(), torch.sin(self.b(q))


def run_modules(modules: list[nn.Module], x: Any, how: How, backend: str) -> tuple[Tensor, ...]:
    """Outputs and gradients of a ResidualStage."""
    depth = len(modules) - (how.scheme == "heun")
    stored = how.backward == "stored"
    y = residual.run(modules, x, (), {}, how.method(depth), stored, backend=backend)
    outputs, states = (t if isinstance(t, tuple) else (t,) for t in (y, x))
    inputs = [*states, *(p for module in modules for p in module.parameters())]
    return (*outputs, *torch.autograd.grad(outputs, inputs, outputs))


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_stages_of_modules(
    kind: str, scheme: str, options: dict[str, Any], count_launches: list[Any]
) -> None:
    if kind == "tuple":
        modules: list[nn.Module] = [Halves() for _ in range(4)]
        x: Any = torch.randn(2, 4), torch.randn(5, 3, dtype=torch.float64)
    else:
        modules, x = (
            [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)],
            torch.randn(2, 4),
        )
    for t in x if isinstance(x, tuple) else (x,):
        t.requires_grad_()
    how = How(scheme=scheme, **options)
    expected = run_modules(modules, x, how, "reference")
    assert not count_launches
    torch.testing.assert_close(run_modules(modules, x, how, "triton"), expected)
    assert bool(count_launches) == (how.backward != "stored")


def test_stages_of_half_precision_modules(count_launches: list[Any]) -> None:
    modules: list[nn.Module] = [nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    results = [run_modules(modules, x, How(), backend) for backend in ("triton", "reference")]
    torch.testing.assert_close(*results)
    assert count_launches


@pytest.mark.parametrize("backward", ["adjoint", "stored"])
def test_who_updates_the_states_of_modules(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel where the backend is Triton, but what autograd records is PyTorch's own."""
    calls = []
    combine = elementwise.combine
    monkeypatch.setattr(
        elementwise, "combine", lambda *terms: calls.append(terms) or combine(*terms)
    )
    modules = [nn.Linear(3, 3) for _ in range(2)]
    x, g = torch.randn(2, 4, 3)
    results = []
    for backend in ("auto", "triton"):
        made = rk.ResidualStage(modules, backward=backward, backend=backend)
        results.append(gradients(made, x, g))
        assert bool(calls) == (backend == "triton" and backward == "adjoint")
    torch.testing.assert_close(*results)
    with torch.no_grad():
        made(x)
    assert calls
