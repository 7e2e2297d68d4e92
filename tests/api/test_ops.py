"""Both operators keep the contract of torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RECORDED, RULES, make_stage, name, problem_of, start_of
from torch import Tensor
from torch.library import opcheck

from resode_kernels.problem import Problem

BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]
ALL_BACKENDS = [*BACKENDS, "triton"]  # the last by Triton's interpreter, so rarely


def problem(block: str, options: dict[str, Any], scheme: str) -> Problem:
    stage = make_stage(block, 5, 7, 6, scheme=scheme, **options)
    parameters = tuple(p.detach() for p in stage.parameters())
    kind = ("linear", "identity") if block == "linear" else ("mlp", block)
    return Problem(*kind, parameters, stage.options.method(6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [*RULES, *RECORDED], ids=name)
@pytest.mark.parametrize(("block", "scheme"), [("tanh", "euler"), ("linear", "heun")])
def test_opcheck(block: str, scheme: str, options: dict[str, Any], backend: str) -> None:
    p = problem(block, options, scheme)
    x, g = torch.randn(2, 9, 5)
    ops = torch.ops.resode_kernels
    opcheck(ops.forward.default, (x, *p.flat(), backend))
    y, _, kept = ops.forward.default(x, *p.flat(), backend)
    assert kept[0].shape == (p.anchor_count, 9, 5)
    start = start_of(p, x, y, kept)
    count = len(p.parameters)
    for needs in ([True] * (1 + count), [True] + [False] * count, [False] * count + [True]):
        opcheck(ops.reverse.default, (start, g, kept, needs, *p.flat(), backend))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_inputs_are_never_written_to(backend: str) -> None:
    p = problem("gelu", {"reverse": "paper", "anchor_every": 2}, "heun")
    x, g = torch.randn(2, 9, 5)
    y, _, kept = torch.ops.resode_kernels.forward.default(x, *p.flat(), backend)
    inputs = [x, g, y, *kept, *p.parameters]
    before = [t.clone() for t in inputs]
    torch.ops.resode_kernels.forward.default(x, *p.flat(), backend)
    torch.ops.resode_kernels.reverse.default(y, g, kept, [True] * 5, *p.flat(), backend)
    for a, b in zip(inputs, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [RULES[1], RULES[6], RULES[9]], ids=name)
def test_the_forward_op_is_differentiable_once(options: dict[str, Any], backend: str) -> None:
    """Also where it is called by itself, as exported programs do. Its gradient was lost."""
    stage = make_stage("tanh", 5, 7, 6, backend=backend, **options)
    p = problem_of(stage)
    x = torch.randn(9, 5, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return torch.ops.resode_kernels.forward.default(x, *p.flat(), backend)[0]

    inputs = [x, *stage.parameters()]
    got = torch.autograd.grad(forward(x).sin().sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(stage(x).sin().sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    y, _, kept = torch.ops.resode_kernels.forward.default(x.detach(), *p.flat(), backend)
    gradients = torch.ops.resode_kernels.reverse.default(
        y.detach(), x, [t.detach() for t in kept], [True] * 5, *p.flat(), backend
    )
    for gradient in (*got, *gradients):
        with pytest.raises(RuntimeError, match="second time"):
            gradient.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func cannot differentiate the ops of a stage"):
        torch.func.grad(lambda x: forward(x).sum())(x.detach())
