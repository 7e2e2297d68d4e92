"""Whatever the shapes and options: the kernels compute what the reference computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BLOCKS, gradients, kernel_gradients, make_stage, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.needs_cpp


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {"anchor_every": draw(st.none() | st.integers(1, 12))}
    options["backward"] = draw(st.sampled_from(["adjoint", "adjoint", "stored", "checkpoint"]))
    options["reverse"] = draw(st.sampled_from(["paper", "refined", "predicted"]))
    most = {"paper": 1, "refined": 4, "predicted": 3}[options["reverse"]]
    options["order"] = draw(st.none() | st.integers(1, most))
    options["scheme"] = draw(st.sampled_from(["euler", "heun"]))
    options["step"] = draw(st.none() | st.floats(-0.5, 0.5))
    return options


@given(
    options=rules(),
    block=st.sampled_from(BLOCKS),
    rows=st.integers(1, 220),
    dim=st.integers(1, 70) | st.integers(128, 150),
    hidden=st.integers(1, 70) | st.integers(128, 150),
    depth=st.integers(1, 9),
    tied=st.booleans(),
    bias=st.booleans(),
    threads=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=300, deadline=None)
def test_kernels_agree_with_the_reference(
    options: dict[str, Any],
    block: str,
    rows: int,
    dim: int,
    hidden: int,
    depth: int,
    tied: bool,
    bias: bool,
    threads: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    stage = make_stage(block, dim, hidden, depth, bias, tied=tied, dtype=dtype, **options)
    x, g = torch.randn(2, rows, dim, dtype=dtype)
    kernel = kernel_gradients(stage, x, g, threads)
    tolerance = 500 * torch.finfo(dtype).eps
    for k, r in zip(kernel, gradients(stage.configure(backend="reference"), x, g), strict=True):
        # relu's slope jumps at zero: there a rounding may decide a whole element
        assert relative_error(k, r) < (tolerance if block != "relu" else 0.1)


@given(
    rows=st.integers(1, 40),
    dim=st.integers(1, 40),
    depth=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=50, deadline=None)
def test_a_linear_stage_is_a_product_of_matrices(
    rows: int, dim: int, depth: int, seed: int
) -> None:
    torch.manual_seed(seed)
    stage = make_stage("linear", dim, dim, depth, dtype=torch.float64)
    x = torch.randn(rows, dim, dtype=torch.float64)
    expected = x
    for weight in stage.weight.detach():
        expected = expected @ (torch.eye(dim, dtype=torch.float64) + weight / depth).T
    torch.testing.assert_close(stage(x).detach(), expected, rtol=1e-12, atol=1e-12)
