"""No result of the ops is made of memory that nothing has written: fresh memory is full of NaNs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    BLOCKS,
    RECORDED,
    RULES,
    make_conv_stage,
    make_stage,
    name,
    problem_of,
    start_of,
)

import resode_kernels as rk
from resode_kernels.fused import ops
from resode_kernels.problem import PER_LAYER, Problem

BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]
SHAPES = [{}, {"scheme": "heun"}, {"tied": True}, {"scheme": "heun", "tied": True}]
pytestmark = pytest.mark.usefixtures("nan_memory")


def case(kind: str, rows: int, training: bool = True, **options: Any) -> tuple[Problem, Any]:
    """A problem and its x[0]. Convolutions have ``rows`` images."""
    if kind in BLOCKS:
        stage = make_stage(kind, 5, 7, 4, **options)
        x = torch.randn(rows, 5)
    else:
        stage = make_conv_stage(kind, "tanh", 4, 4, **options).train(training)
        x = torch.randn(rows, 4, 3, 5)
    return problem_of(stage.requires_grad_(False)), x


def every_subset(problem: Problem) -> list[list[bool]]:
    """Which gradients are needed: all, none and each alone; x and each parameter of a block."""
    per_block = len(problem.parameters)
    if problem.block == "conv":
        per_block = PER_LAYER * problem.layers
    alone = [[i == j for j in range(1 + per_block)] for i in range(1 + per_block)]
    kinds = [[True] * (1 + per_block), [False] * (1 + per_block), *alone]
    blocks = len(problem.parameters) // per_block
    return [[need, *needs * blocks] for need, *needs in kinds]


def check(problem: Problem, x: torch.Tensor, backend: str) -> None:
    y, statistics, kept = ops.forward(x, problem, backend)
    for result in (y, statistics):
        assert result.isfinite().all()
    start = start_of(problem, x, y, kept)
    is_constant = [problem.block == "conv" and i % PER_LAYER > 2 for i in range(1000)]
    expected = None
    for needs in every_subset(problem):
        wanted = [needs[0]] + [
            need and p is not None and not constant
            for need, p, constant in zip(needs[1:], problem.parameters, is_constant, strict=False)
        ]
        results = ops.reverse(start, torch.ones_like(x), kept, wanted, problem, backend)
        expected = expected or results
        for result, need, same in zip(results, wanted, expected, strict=True):
            assert (result is not None) == need
            if result is not None:
                assert result.isfinite().all()
                torch.testing.assert_close(result, same)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("options", SHAPES, ids=name)
@pytest.mark.parametrize("rule", [*RULES, *RECORDED], ids=name)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["tanh", "linear"])
def test_row_wise_blocks(
    kind: str, backend: str, rule: dict[str, Any], options: dict[str, Any], rows: int
) -> None:
    check(*case(kind, rows, **rule, **options), backend)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("options", SHAPES, ids=name)
@pytest.mark.parametrize("rule", [RULES[i] for i in (0, 2, 4, 7, 9)], ids=name)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_convolutions(
    kind: str, backend: str, rule: dict[str, Any], options: dict[str, Any], training: bool
) -> None:
    problem, x = case(kind, 2, training, **rule, **options)
    check(problem, x, backend)
    if not training:
        check(problem, x[:0], backend)


@pytest.mark.parametrize("options", SHAPES, ids=name)
@pytest.mark.parametrize("rule", [RULES[6], RULES[4]], ids=name)
@pytest.mark.parametrize("kind", ["tanh", "linear"])
def test_triton(kind: str, rule: dict[str, Any], options: dict[str, Any]) -> None:
    for rows in (0, 3):
        problem, x = case(kind, rows, **rule, **options)
        y, _, kept = ops.forward(x, problem, "triton")
        needs = [True] * (1 + len(problem.parameters))
        gradients = ops.reverse(y, torch.ones_like(x), kept, needs, problem, "triton")
        for result in (y, *gradients):
            assert result.isfinite().all()


# ------------------------------------------------------------------------- constants of batch norm


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", ["mean", "variance"])
def test_gradients_of_a_given_mean_and_variance_are_refused(field: str, backend: str) -> None:
    layer = rk.functional.ConvLayer(
        torch.randn(2, 3, 3, 3, 3), mean=torch.randn(2, 3), variance=torch.rand(2, 3)
    )
    x = torch.randn(2, 3, 4, 4)
    constant = getattr(layer, field).requires_grad_()
    layers = [layer._replace(mean=None, variance=None), layer]
    with pytest.raises(ValueError, match=rf"^{field} of block 0, layer 2.*{field}\.detach\(\)"):
        rk.functional.conv_stage(x, layers, backend=backend)
    with pytest.raises(ValueError, match=rf"^{field} of block 0, layer 2.*{field}\.detach\(\)"):
        torch.func.grad(
            lambda t: torch.vmap(
                lambda x: rk.functional.conv_stage(
                    x, [layers[0], layer._replace(**{field: t})], backend=backend
                )
            )(x[None]).sum()
        )(constant.detach())
    with torch.no_grad():
        assert rk.functional.conv_stage(x, layers, backend=backend).isfinite().all()
    constant.requires_grad_(False)
    x.requires_grad_()
    assert (
        torch.autograd.grad(rk.functional.conv_stage(x, layers, backend=backend).pow(3).sum(), x)[0]
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_op_refuses_gradients_of_constants(backend: str) -> None:
    problem, x = case("basic", 2, training=False)
    y, _, kept = ops.forward(x, problem, backend)
    for i in range(3, 5):
        needs = [False] * (1 + len(problem.parameters))
        needs[1 + i] = True
        with pytest.raises(ValueError, match="of block 0, layer 1 requires a gradient"):
            ops.reverse(y, x, kept, needs, problem, backend)
