"""A row of a fused stage is recorded by itself, however short it is."""

from __future__ import annotations

import pytest
import torch
from helpers import gradients, relative_error

import resode_kernels as rk


@pytest.mark.parametrize("dim", [1, 8, 31, 33])
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_the_reference_records_narrow_rows(dim: int, shape: tuple[int, ...]) -> None:
    stage = rk.MLPStage(dim, 12, 6, step=1.0, backend="reference")
    x, g = torch.randn(2, *shape, dim)
    exact = gradients(stage.configure(backward="stored"), x, g)
    stage.configure(backward="adjoint", reverse="recorded", bits=16)
    for mine, true in zip(gradients(stage, x, g), exact, strict=True):
        assert relative_error(mine, true) < 1e-3
