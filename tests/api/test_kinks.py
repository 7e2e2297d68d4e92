"""Remembered kinks of fused stages: with ``kinks=True`` every rule has its order with relu too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gradients, make_conv_stage, problem_of, relative_error
from providers import Provider
from test_orders import slope
from torch import Tensor
from torch.library import opcheck

import resode_kernels as rk
from resode_kernels.backends import cpp
from resode_kernels.backends.contract import Backend, ForwardIO, ReverseIO
from resode_kernels.backends.engine import REFERENCE
from resode_kernels.kinks import pack, select, unpack
from resode_kernels.problem import Kept

REVERSE: list[dict[str, Any]] = [
    {"reverse": "paper"},
    {"reverse": "refined", "order": 2},
    {"reverse": "predicted", "order": 2},
    {"reverse": "refined", "anchor_every": 3},
    {"reverse": "recorded"},
    {"reverse": "recorded", "anchor_every": 3},
]


def relu_stage(depth: int, **options: Any) -> rk.MLPStage:
    options = {"dtype": torch.float64, "backend": "reference", **options}
    stage = rk.MLPStage(32, 40, depth, "relu", **options)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(1.7)
    return stage


def gradient_error(stage: rk.Stage, x: Tensor, **options: Any) -> float:
    """Of all parameters together."""
    torch.manual_seed(1)
    g = torch.randn_like(x)
    exact = gradients(stage.configure(backward="stored"), x, g)[2:]
    found = gradients(stage.configure(backward="adjoint", **options), x, g)[2:]
    a, e = (torch.cat([t.flatten() for t in ts]) for ts in (found, exact))
    return relative_error(a, e)


# -------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize(("rule", "order"), [("paper", 1.5), ("refined", 2.0)])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_the_orders_are_restored(scheme: str, rule: str, order: float) -> None:
    """Of a relu MLP with independent weights: the powers of 1/N by which the error falls. Without
    kinks they are half of that."""
    x = torch.randn(256, 32, dtype=torch.float64)
    stages = {depth: relu_stage(depth, scheme=scheme, reverse=rule) for depth in (8, 32, 128)}
    for kinks, expected in ((True, order), (False, order / 2)):
        errors = {depth: gradient_error(stages[depth], x, kinks=kinks) for depth in stages}
        assert slope(errors) == pytest.approx(expected, abs=0.15), errors


@pytest.mark.parametrize(("order", "with_kinks"), [(1, 2.0), (2, 3.0)])
def test_convolutions_have_the_full_order(order: int, with_kinks: float) -> None:
    x = torch.randn(4, 12, 5, 5, dtype=torch.float64)
    stages = {
        depth: rk.ConvStage(12, depth, "bottleneck", hidden=5, dtype=torch.float64)
        for depth in (16, 32, 64)
    }
    options = {"reverse": "refined", "order": order, "backend": "reference"}
    errors = {
        depth: gradient_error(stage, x, kinks=True, **options) for depth, stage in stages.items()
    }
    assert slope(errors) > with_kinks - 0.3, errors
    assert errors[16] < 0.2 * gradient_error(stages[16], x, kinks=False, **options)


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", REVERSE, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_every_rule_and_scheme(options: dict[str, Any], scheme: str, tied: bool) -> None:
    stage = relu_stage(24, scheme=scheme, tied=tied, step=0.1)
    x = torch.randn(64, 32, dtype=torch.float64)
    errors = [gradient_error(stage, x, kinks=kinks, **options) for kinks in (True, False)]
    # A tied stage contracts: few arguments change their signs.
    assert errors[0] < max(0.8 * errors[1], 1e-4 if tied else 0), errors


def test_a_network_as_it_is() -> None:
    """23 bottlenecks x + f(x), in which every other rule fails."""
    stage = rk.ConvStage(64, 23, "bottleneck", step=1.0, dtype=torch.float64, backend="reference")
    x = torch.randn(16, 64, 8, 8, dtype=torch.float64)
    assert gradient_error(stage, x, reverse="recorded", kinks=True) <= 5e-3
    assert gradient_error(stage, x, kinks=False) > 0.1


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_a_tied_stage_takes_the_signs_of_each_evaluation(scheme: str) -> None:
    """`paper` shares evaluations of a tied stage; their signs differ."""
    tied = relu_stage(6, scheme=scheme, tied=True, reverse="paper", kinks=True)
    untied = relu_stage(6, scheme=scheme, reverse="paper", kinks=True)
    with torch.no_grad():
        for own, other in zip(untied.parameters(), tied.parameters(), strict=True):
            own.copy_(other.expand_as(own))
    x, g = torch.randn(2, 64, 32, dtype=torch.float64)
    for together, each in zip(gradients(tied, x, g)[2:], gradients(untied, x, g)[2:], strict=True):
        torch.testing.assert_close(together, each.sum(0, keepdim=True), rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------- what it leaves be


@pytest.mark.parametrize("options", REVERSE, ids=str)
@pytest.mark.parametrize("block", ["mlp", "conv"])
def test_the_forward_pass_is_unchanged(block: str, options: dict[str, Any]) -> None:
    if block == "mlp":
        stage, x = rk.MLPStage(8, 12, 4, "relu"), torch.randn(5, 8)
    else:
        stage, x = make_conv_stage("basic", "relu", 8), torch.randn(2, 8, 4, 4)
    stage.configure(backend="reference", **options)
    outputs = [stage.configure(kinks=kinks)(x).detach() for kinks in (True, False)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("block", "options"),
    [
        ("tanh", {"reverse": "refined"}),
        ("gelu", {"reverse": "recorded"}),
        ("linear", {"reverse": "paper"}),
        ("relu", {"backward": "stored"}),
        ("relu", {"backward": "checkpoint"}),
    ],
)
def test_without_a_kink_and_for_exact_rules_it_does_nothing(
    block: str, options: dict[str, Any]
) -> None:
    make = {"linear": lambda **o: rk.LinearStage(8, 4, **o)}.get(
        block, lambda **o: rk.MLPStage(8, 12, 4, block, **o)
    )
    stage = make(kinks=True, **options)
    assert "signs" not in problem_of(stage).kept((5, 8))
    x, g = torch.randn(2, 5, 8)
    found = [gradients(stage.configure(kinks=kinks), x, g) for kinks in (True, False)]
    for with_kinks, without in zip(*found, strict=True):
        assert torch.equal(with_kinks, without)


def test_a_forward_pass_without_gradients_keeps_nothing() -> None:
    method = relu_stage(4, kinks=True, reverse="recorded").options.method(4)
    assert method.kinks
    assert not method.without_keeping().kinks


def test_a_state_that_overflows_is_reported() -> None:
    """f(x) = −1.99 x: the state shrinks, and its reconstruction grows threefold in every step."""
    options: dict[str, Any] = {"step": 1.0, "reverse": "paper", "backend": "reference"}
    stage = rk.MLPStage(1, 2, 8, "relu", bias=False, kinks=True, **options)
    with torch.no_grad():
        stage.w1.copy_(torch.tensor([[1.0], [-1.0]]))
        stage.w2.copy_(torch.tensor([[-1.99, 1.99]]))
    y = stage(torch.tensor([[6e36], [1.0]], requires_grad=True))
    assert y.isfinite().all()
    with pytest.raises(rk.NonFiniteReconstructionError, match=r"x\[4\]"):
        y.sum().backward()


# -------------------------------------------------------------------------------------- the signs


def arguments(stage: rk.Stage, x: Tensor) -> list[list[Tensor]]:
    """The arguments of relu in every evaluation, [rows, channels] each."""
    found: list[list[Tensor]] = []
    for n in range(stage.depth):
        if isinstance(stage, rk.MLPStage):
            u = [F.linear(x, stage.w1[n], stage.b1[n])]
            x = x + F.linear(u[0].relu(), stage.w2[n], stage.b2[n]) / stage.depth
            found.append(u)
        else:
            block, u, y = stage.blocks[n], [], x
            for conv, bn in block.layers:
                u.append(y.movedim(1, -1).flatten(0, 2))
                y = bn(conv(y.relu()))
            x = x + y / stage.depth
            found.append(u)
    return found


@pytest.mark.parametrize("block", ["mlp", "basic", "bottleneck"])
@torch.no_grad()
def test_signs_are_laid_out_as_documented(block: str) -> None:
    """Bit j of byte b of a row is the sign of argument 8 b + j."""
    if block == "mlp":
        stage, x = rk.MLPStage(8, 13, 3, "relu", kinks=True), torch.randn(5, 8)
    else:
        stage, x = make_conv_stage(block, "relu", 12, 3, kinks=True), torch.randn(2, 12, 3, 4)
    problem = problem_of(stage)
    ops = torch.ops.resode_kernels
    _, _, (_, signs) = ops.forward.default(x, *problem.flat(), "reference")
    assert signs.dtype == torch.uint8
    if block == "mlp":
        assert signs.shape == (3, 5, 2)
    for row, of_evaluation in zip(signs, arguments(stage, x), strict=True):
        expected = []
        for u in of_evaluation:
            bits = torch.zeros(len(u), -(-u.shape[1] // 8), dtype=torch.int64)
            for c in range(u.shape[1]):
                bits[:, c // 8] += (u[:, c] > 0).long() << c % 8
            expected.append(bits.flatten())
        assert torch.equal(row.flatten().long(), torch.cat(expected))


@pytest.mark.parametrize("entries", [0, 1, 7, 8, 9, 64, 67])
@pytest.mark.parametrize("rows", [(), (0,), (1,), (3, 2)])
def test_packing_loses_nothing(rows: tuple[int, ...], entries: int) -> None:
    flags = torch.rand(*rows, entries) > 0.5
    packed = pack(flags)
    assert packed.shape == (*rows, -(-entries // 8))
    assert torch.equal(unpack(packed, entries), flags)


def test_selection_takes_infinite_numbers() -> None:
    u = torch.tensor([1.0, -torch.inf, torch.inf, torch.nan, torch.nan], requires_grad=True)
    where = torch.tensor([True, False, True, False, True])
    result = select(where, u)
    torch.testing.assert_close(
        result.detach(), torch.tensor([1.0, 0, torch.inf, 0, torch.nan]), equal_nan=True
    )
    (gradient,) = torch.autograd.grad(result.sum(), u)
    assert torch.equal(gradient, where.float())


def saved_bytes(stage: rk.Stage, x: Tensor) -> int:
    """The bytes that autograd keeps between the passes."""
    total = 0

    def pack_hook(t: Tensor) -> Tensor:
        nonlocal total
        total += t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t):
        stage(x)
    return total


@pytest.mark.parametrize(
    ("scheme", "options"), [("euler", {"reverse": "refined"}), ("heun", {"reverse": "recorded"})]
)
def test_memory_is_one_bit_per_argument(scheme: str, options: dict[str, Any]) -> None:
    stage = rk.MLPStage(16, 24, 6, "relu", scheme=scheme, backend="reference", **options)
    x = torch.randn(32, 16)
    with_kinks, without = (saved_bytes(stage.configure(kinks=k), x) for k in (True, False))
    evaluations = 6 * (2 if scheme == "heun" else 1)
    assert with_kinks - without == evaluations * 32 * 24 // 8


# ---------------------------------------------------------------------------------- who can run it


@pytest.mark.parametrize("options", [REVERSE[1], REVERSE[4]], ids=str)
@pytest.mark.parametrize("block", ["mlp", "basic", "bottleneck"])
@torch.no_grad()
def test_layer_by_layer_as_in_the_reference(
    block: str, options: dict[str, Any], provider: Provider
) -> None:
    """The same signs, and the same gradients up to rounding."""
    if block == "mlp":
        stage, x = rk.MLPStage(5, 7, 3, "relu", kinks=True, **options), torch.randn(6, 5)
    else:
        stage = make_conv_stage(block, "relu", 8, 3, kinks=True, **options)
        x = torch.randn(2, 8, 4, 3)
    problem, g = problem_of(stage), torch.randn_like(x)

    def passes(backend: Backend) -> tuple[Kept, list[Tensor | None]]:
        shapes = problem.kept(x.shape)
        kept = problem.kept_of([x.new_empty(s, dtype=dtype) for s, dtype in shapes.values()])
        y, statistics = torch.empty_like(x), x.new_zeros(problem.statistics)
        backend.forward(problem, ForwardIO(x, y, kept, statistics))
        results = [None if p is None else torch.empty_like(p) for p in (x, *problem.parameters)]
        start = kept.anchors[-1] if problem.is_recorded else y
        backend.reverse(problem, ReverseIO(start, kept, g, results, None))
        return kept, results

    (kept, found), (expected_kept, expected) = map(
        passes, (provider.layerwise.LAYERWISE, REFERENCE)
    )
    assert kept.signs is not None
    assert expected_kept.signs is not None
    assert torch.equal(kept.signs, expected_kept.signs)
    for own, other in zip(found, expected, strict=True):
        if own is not None and other is not None:
            assert relative_error(own, other) < 1e-4


KINKED: dict[str, tuple[Callable[..., rk.Stage], tuple[int, ...]]] = {
    "mlp": (functools.partial(rk.MLPStage, 40, 44, 5, "relu"), (17, 40)),
    "narrow": (functools.partial(rk.MLPStage, 16, 10, 5, "relu"), (200, 16)),
    "tied": (functools.partial(rk.MLPStage, 33, 70, 5, "relu", tied=True), (50, 33)),
    "few wide rows": (functools.partial(rk.MLPStage, 200, 100, 5, "relu"), (5, 200)),
    "basic": (functools.partial(rk.ConvStage, 12, 5, hidden=20), (3, 12, 9, 6)),
    "bottleneck": (functools.partial(rk.ConvStage, 40, 5, "bottleneck", hidden=10), (3, 40, 5, 6)),
}


@pytest.mark.needs_cpp
@pytest.mark.parametrize("isa", cpp._C.supported() if cpp._C is not None else [])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", KINKED)
def test_cpp_equals_the_reference(kind: str, scheme: str, isa: str) -> None:
    make, shape = KINKED[kind]
    cpp._C.select(isa)
    try:
        for options in REVERSE:
            stage = make(scheme=scheme, step=0.1, dtype=torch.float64, kinks=True, **options)
            x, g = torch.randn(2, *shape, dtype=torch.float64)
            own, other = (
                gradients(stage.configure(backend=backend), x, g)
                for backend in ("cpp", "reference")
            )
            for a, b in zip(own, other, strict=True):
                assert relative_error(a, b) < 1e-11, options
    finally:
        cpp._C.select("auto")


@pytest.mark.needs_cpp
@pytest.mark.parametrize("kind", KINKED)
def test_cpp_keeps_the_signs_of_the_reference(kind: str) -> None:
    make, shape = KINKED[kind]
    p, x = problem_of(make(kinks=True, dtype=torch.float64)), torch.randn(*shape).double()
    signs = [
        torch.ops.resode_kernels.forward.default(x, *p.flat(), b)[2][1]
        for b in ("cpp", "reference")
    ]
    assert torch.equal(*signs)


def test_opcheck() -> None:
    p = problem_of(rk.MLPStage(5, 7, 3, "relu", kinks=True, reverse="recorded"))
    p = p._replace(parameters=tuple(t.detach() for t in p.parameters if t is not None))
    x, g = torch.randn(2, 9, 5)
    ops = torch.ops.resode_kernels
    opcheck(ops.forward.default, (x, *p.flat(), "reference"))
    _, _, kept = ops.forward.default(x, *p.flat(), "reference")
    assert len(kept) == 4
    arguments = (kept[0][-1].clone(), g, kept, [True] * 5, *p.flat(), "reference")
    opcheck(ops.reverse.default, arguments)
    with pytest.raises(ValueError, match="kept must be the tensors anchors, codes, scales, signs"):
        ops.reverse.default(*arguments[:2], kept[:3], *arguments[3:])
    with pytest.raises(ValueError, match=r"signs must have the shape \[3, 9, 1\]"):
        ops.reverse.default(*arguments[:2], [*kept[:3], kept[3][1:]], *arguments[3:])
    exact = p._replace(
        method=p.method._replace(reverse_rule="exact", bits=(), anchor_every=1, kinks=True)
    )
    with pytest.raises(ValueError, match="kinks must be False with the reverse rule 'exact'"):
        ops.forward.default(x, *exact.flat(), "reference")


def test_the_option_is_a_boolean() -> None:
    with pytest.raises(TypeError, match="kinks must be True or False, not 1"):
        rk.MLPStage(4, 4, 4, kinks=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["refined", "recorded"])
def test_batches_of_torch_func(rule: str) -> None:
    """The signs of the batch's entries stay apart."""
    stage = rk.MLPStage(8, 12, 3, "relu", kinks=True, reverse=rule, backend="reference")
    x = torch.randn(4, 5, 8)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: stage(x).square().sum())(x)

    batched = torch.vmap(gradient)(x)
    for own, each in zip(batched, x, strict=True):
        torch.testing.assert_close(own, gradient(each))


def test_compiled_stages() -> None:
    stage = rk.MLPStage(8, 12, 3, "relu", kinks=True, reverse="recorded", backend="reference")
    compiled = torch.compile(stage, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 8)
    results = []
    for run in (stage, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *stage.parameters()])])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
