"""Both operators keep the contract of torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RULES, make_stage, name
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
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize(("block", "scheme"), [("tanh", "euler"), ("linear", "heun")])
def test_opcheck(block: str, scheme: str, options: dict[str, Any], backend: str) -> None:
    p = problem(block, options, scheme)
    x, g = torch.randn(2, 9, 5)
    ops = torch.ops.resode_kernels
    opcheck(ops.forward.default, (x, *p.flat(), backend))
    y, anchors, _ = ops.forward.default(x, *p.flat(), backend)
    assert anchors.shape == (p.anchor_count, 9, 5)
    start = x if p.method.reverse_rule == "exact" else y
    count = len(p.parameters)
    for needs in ([True] * (1 + count), [True] + [False] * count, [False] * count + [True]):
        opcheck(ops.reverse.default, (start, anchors, g, needs, *p.flat(), backend))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_inputs_are_never_written_to(backend: str) -> None:
    p = problem("gelu", {"reverse": "paper", "anchor_every": 2}, "heun")
    x, g = torch.randn(2, 9, 5)
    y, anchors, _ = torch.ops.resode_kernels.forward.default(x, *p.flat(), backend)
    inputs = [x, g, y, anchors, *p.parameters]
    before = [t.clone() for t in inputs]
    torch.ops.resode_kernels.forward.default(x, *p.flat(), backend)
    torch.ops.resode_kernels.reverse.default(y, anchors, g, [True] * 5, *p.flat(), backend)
    for a, b in zip(inputs, before, strict=True):
        assert torch.equal(a, b)
