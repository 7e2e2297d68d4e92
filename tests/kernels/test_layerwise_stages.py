"""Stages by the layer-wise kernels of Triton and CUDA keep the rule of accuracy and repeat bit by
bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    RECORDED,
    RULES,
    NearKink,
    Run,
    assert_as_accurate_as_pytorch,
    gradients,
    in_dtype,
    make_conv_stage,
    make_stage,
    name,
    problem_of,
    start_of,
)
from providers import FLOATS, NARROW, Provider
from recorded import assert_reversed_as_accurately
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels import reference
from resode_kernels.backends import REGISTRY
from resode_kernels.backends.contract import Backend, ForwardIO, ReverseIO
from resode_kernels.backends.engine import REFERENCE
from resode_kernels.fused import ops
from resode_kernels.options import Options
from resode_kernels.problem import Problem
from resode_kernels.replay import function
from resode_kernels.states import stream_dtype

ACTIVATIONS = list(reference.ACTIVATIONS)


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


# ---------------------------------------------------------------------------------------- stages


def passes(
    backend: Backend, problem: Problem
) -> Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor | None], Tensor]]:
    """x, g to the output, the gradients of x and of the parameters, and the statistics."""

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, list[Tensor | None], Tensor]:
        x, g = (t.to(stream_dtype(t.dtype)) for t in (x, g))
        y, _, tensors = ops._new_states(x, problem)
        kept = problem.kept_of(tensors)
        statistics = x.new_zeros(problem.statistics if problem.block == "conv" else 0)
        backend.forward(problem, ForwardIO(x, y, kept, statistics))
        start = start_of(problem, x, y, kept)
        gradients = [torch.empty_like(x)]
        gradients += [
            torch.empty_like(p) if isinstance(p, nn.Parameter) else None for p in problem.parameters
        ]
        backend.reverse(problem, ReverseIO(start, kept, g, gradients, None))
        return y, gradients, statistics

    return run


def passes_of(backend: Backend) -> Run:
    """``helpers.gradients`` by the passes of a backend, without autograd around them."""

    @torch.no_grad()
    def run(stage: rk.Stage, x: Tensor, g: Tensor) -> list[Tensor]:
        y, gradients, _ = passes(backend, problem_of(stage))(x, g)
        return [y, *(t for t in gradients if t is not None)]

    return run


@pytest.fixture
def by_kernels(provider: Provider) -> Run:
    return passes_of(provider.layerwise.LAYERWISE)


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_rules_and_schemes(
    by_kernels: Run, block: str, options: dict[str, Any], scheme: str
) -> None:
    stage = make_stage(block, 5, 7, 4, scheme=scheme, **options)
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 6, 5), by_kernels, passes_of(REFERENCE))


@pytest.mark.parametrize("bits", [2, 5, 8, [None, 12, 3, None]], ids=str)
@pytest.mark.parametrize(
    ("block", "scheme"), [("tanh", "euler"), ("linear", "heun"), ("basic", "euler")]
)
def test_recorded_increments(provider: Provider, block: str, scheme: str, bits: Any) -> None:
    """Of fused stages PyTorch records them, for every layer-wise backend."""
    options = {"reverse": "recorded", "bits": bits, "scheme": scheme, "anchor_every": 3}
    if block == "basic":
        stage: rk.Stage = make_conv_stage("basic", "tanh", 35, 4, hidden=5, **options)
        x, g = torch.randn(2, 2, 35, 3, 2)
    else:
        stage, (x, g) = make_stage(block, 35, 7, 4, **options), torch.randn(2, 6, 35)
    assert_reversed_as_accurately(stage, x, g, provider.layerwise.LAYERWISE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("provider", "dtype"), FLOATS, indirect=["provider"], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_dtypes_and_tied_weights(
    by_kernels: Run, activation: str, dtype: torch.dtype, tied: bool
) -> None:
    for bias in (True, False):
        stage = make_stage(activation, 5, 7, 3, bias, tied=tied, dtype=dtype)
        x, g = torch.randn(2, 6, 5, dtype=dtype)
        assert_as_accurate_as_pytorch(stage, x, g, by_kernels, passes_of(REFERENCE))


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
def test_convolutions(
    by_kernels: Run, scheme: str, options: dict[str, Any], layout: torch.memory_format
) -> None:
    depth = 4 if options.get("order") == 3 else 2
    stage = make_conv_stage("basic", "tanh", 16, depth, hidden=13, scheme=scheme, **options)
    x, g = torch.randn(2, 1, 16, 5, 4)
    x = x.to(memory_format=layout)
    assert_as_accurate_as_pytorch(stage, x, g, by_kernels, passes_of(REFERENCE))


@pytest.mark.parametrize(
    ("block", "activation", "wide", "tied", "train"),
    [
        ("basic", "relu", False, True, True),
        ("basic", "relu", False, False, False),
        ("bottleneck", "gelu", False, True, False),
        ("bottleneck", "gelu", False, False, True),
        ("basic", "silu", True, True, True),
        ("basic", "silu", True, False, False),
    ],
)
def test_convolutions_of_every_kind(
    provider: Provider,
    by_kernels: Run,
    block: str,
    activation: str,
    wide: bool,
    tied: bool,
    train: bool,
) -> None:
    dtype = provider.widest if wide else torch.float32
    for seed in range(20):
        torch.manual_seed(seed)
        stage = make_conv_stage(block, activation, 16, 2, hidden=13, tied=tied, dtype=dtype)
        x, g = torch.randn(2, 3, 16, 3, 3, dtype=dtype)
        x = x.to(memory_format=torch.channels_last)
        try:
            assert_as_accurate_as_pytorch(
                stage.train(train), x, g, by_kernels, passes_of(REFERENCE)
            )
        except NearKink:
            continue
        return
    raise AssertionError("every draw was near a kink")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", ["silu", "linear"])
def test_products_in_half_precision(
    by_kernels: Run, block: str, tied: bool, scheme: str, dtype: torch.dtype
) -> None:
    stage = make_stage(block, 9, 11, 3, tied=tied, scheme=scheme, dtype=dtype)
    x, g = torch.randn(2, 16, 9)
    assert_as_accurate_as_pytorch(stage, x, g, by_kernels, passes_of(in_dtype(dtype)))


@pytest.mark.parametrize(
    ("dtype", "scheme", "tied"),
    [(torch.bfloat16, "euler", False), (torch.float16, "heun", True)],
    ids=str,
)
def test_convolutions_in_half_precision(
    by_kernels: Run, dtype: torch.dtype, scheme: str, tied: bool
) -> None:
    stage = make_conv_stage("basic", "tanh", 16, 2, scheme=scheme, tied=tied, dtype=dtype)
    x, g = torch.randn(2, 3, 16, 3, 3)
    x = x.to(memory_format=torch.channels_last)
    assert_as_accurate_as_pytorch(stage, x, g, by_kernels, passes_of(in_dtype(dtype)))


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "affine"), [("euler", True), ("heun", False)])
def test_statistics_of_every_evaluation_and_no_affine(
    provider: Provider, affine: bool, scheme: str
) -> None:
    """Against the reference. The second of three layers normalizes by given numbers."""
    dtype = provider.widest

    def layer(out: int, inputs: int, size: int, given: bool) -> list[Tensor | None]:
        gamma, beta, mean, variance = torch.rand(4, out, dtype=dtype) + 0.5
        affine_part = (nn.Parameter(gamma), nn.Parameter(beta)) if affine else (None, None)
        weight = nn.Parameter(torch.randn(out, inputs, size, size, dtype=dtype))
        return [weight, *affine_part, *((mean, variance) if given else (None, None))]

    method = Options(scheme=scheme).method(2)
    blocks = 2 + (scheme == "heun")
    parameters = [
        tensor
        for _ in range(blocks)
        for arguments in ((3, 4, 1, False), (3, 3, 3, True), (4, 3, 1, False))
        for tensor in layer(*arguments)
    ]
    problem = Problem("conv", "silu", tuple(parameters), method, 3, 1e-5)
    x, g = torch.randn(2, 1, 4, 3, 3, dtype=dtype)
    got, expected = (
        passes(backend, problem)(x, g) for backend in (provider.layerwise.LAYERWISE, REFERENCE)
    )
    tolerance = 1000 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert (got[2][:, 6:12] == 0).all()
    assert (got[2][:, :6] != 0).all()


@pytest.mark.parametrize("block", ["gelu", "conv"])
def test_results_repeat_bit_by_bit(
    by_kernels: Run, block: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's blocks and threads run in another order the second time."""
    if block == "conv":
        stage: rk.Stage = make_conv_stage("basic", "tanh", 4, depth=1)
        x, g = torch.randn(2, 3, 4, 3, 3)
    else:
        stage, (x, g) = make_stage(block, 5, 7, 2), torch.randn(2, 6, 5)
    first = by_kernels(stage, x, g)
    monkeypatch.setenv("RESODE_EMULATION_ORDER", "reverse")
    second = by_kernels(stage, x, g)
    assert all(map(torch.equal, first, second))


def test_the_slope_of_a_convolution_is_a_part_of_the_update(
    provider: Provider, by_kernels: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernels need no pass of their own for it."""
    if provider.name != "cuda":
        pytest.skip("Triton's kernels do")

    def refused(*_: Any) -> None:
        raise AssertionError("a pass for the slope")

    monkeypatch.setattr(provider.elementwise, "times_slope", refused)
    x, g = torch.randn(2, 2, 4, 3, 3)
    for scheme in ("euler", "heun"):
        by_kernels(make_conv_stage("basic", "tanh", 4, 2, scheme=scheme), x, g)


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


def run_modules(
    modules: list[nn.Module], x: Any, options: Options, backend: str
) -> tuple[Tensor, ...]:
    """Outputs and gradients of a ResidualStage."""
    depth = len(modules) - (options.scheme == "heun")
    stored, combine = options.backward == "stored", REGISTRY[backend].combine
    y = function.run(modules, x, (), {}, options.method(depth), stored, combine)
    outputs, states = (t if isinstance(t, tuple) else (t,) for t in (y, x))
    inputs = [*states, *(p for module in modules for p in module.parameters())]
    return (*outputs, *torch.autograd.grad(outputs, inputs, outputs))


@pytest.mark.parametrize("options", [*RULES, *RECORDED], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_stages_of_modules(
    provider: Provider, kind: str, scheme: str, options: dict[str, Any], launches: list[str]
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
    checked = Options(scheme=scheme, **options)
    expected = run_modules(modules, x, checked, "reference")
    assert not launches
    torch.testing.assert_close(run_modules(modules, x, checked, provider.name), expected)
    assert bool(launches) == (checked.backward != "stored")


def test_stages_of_half_precision_modules(provider: Provider, launches: list[str]) -> None:
    modules: list[nn.Module] = [nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    results = [
        run_modules(modules, x, Options(), backend) for backend in (provider.name, "reference")
    ]
    torch.testing.assert_close(*results)
    assert launches


@pytest.mark.parametrize("backward", ["adjoint", "stored"])
def test_who_updates_the_states_of_modules(
    provider: Provider, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend's kernel where one is asked for, but what autograd records is PyTorch's own."""
    calls = []
    elementwise, combine = provider.elementwise, provider.elementwise.combine
    monkeypatch.setattr(
        elementwise, "combine", lambda *terms: calls.append(terms) or combine(*terms)
    )
    modules = [nn.Linear(3, 3) for _ in range(2)]
    x, g = torch.randn(2, 4, 3)
    results = []
    for backend in ("reference", provider.name):
        stage = rk.ResidualStage(modules, backward=backward, backend=backend)
        results.append(gradients(stage, x, g))
        assert bool(calls) == (backend == provider.name and backward == "adjoint")
    torch.testing.assert_close(*results)
    with torch.no_grad():
        stage(x)
    assert calls
