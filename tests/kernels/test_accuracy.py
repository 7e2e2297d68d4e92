"""A kernel's error is at most 2 × that of the same algorithm in plain PyTorch (3 × for parameter
gradients), both in the kernel's dtype and measured against a more precise run of the algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    BLOCKS,
    LONG_ACTIVATIONS,
    RULES,
    NearKink,
    assert_as_accurate_as_pytorch,
    crews_of,
    gradients,
    make_conv_stage,
    make_stage,
    name,
    relative_error,
)

import resode_kernels as rk

pytestmark = pytest.mark.needs_cpp

DTYPES = [torch.float32, torch.float64]
# rows, dim, hidden: sizes of every kind, below, at and above the kernels' tiles
SHAPES = [(37, 19, 45), (64, 32, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("block", BLOCKS)
def test_kernels_are_as_accurate_as_pytorch(
    block: str,
    options: dict[str, Any],
    scheme: str,
    dtype: torch.dtype,
    instruction_set: str,
    nan_memory: None,
) -> None:
    for rows, dim, hidden in SHAPES if block == "tanh" else SHAPES[:1]:
        stage = make_stage(block, dim, hidden, 5, dtype=dtype, scheme=scheme, **options)
        x, g = torch.randn(2, rows, dim, dtype=dtype)
        assert_as_accurate_as_pytorch(stage, x, g)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_convolutions_are_as_accurate_as_pytorch(
    block: str,
    options: dict[str, Any],
    scheme: str,
    dtype: torch.dtype,
    instruction_set: str,
    nan_memory: None,
) -> None:
    stage = make_conv_stage(block, "tanh", 19, hidden=17, dtype=dtype, scheme=scheme, **options)
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 3, 19, 7, 6, dtype=dtype))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", RULES[:4], ids=name)
def test_convolutions_of_every_kind(
    options: dict[str, Any], activation: str, tied: bool, train: bool, nan_memory: None
) -> None:
    for shape in ((2, 16, 6, 6), (3, 8, 5, 5)):
        for seed in range(20):
            torch.manual_seed(seed)
            stage = make_conv_stage("basic", activation, shape[1], tied=tied, **options)
            try:
                assert_as_accurate_as_pytorch(stage.train(train), *torch.randn(2, *shape))
            except NearKink:
                continue
            break
        else:
            raise AssertionError("every draw was near a kink")


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", ["tanh", "linear"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_weights_and_no_bias(
    block: str, options: dict[str, Any], scheme: str, tied: bool, bias: bool, nan_memory: None
) -> None:
    stage = make_stage(block, 24, 40, 6, bias, tied=tied, scheme=scheme, **options)
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 50, 24))


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", ["tanh", "linear"])
@pytest.mark.parametrize(("threads", "rows"), [(2, 17), (8, 60)], indirect=["threads"])
def test_few_wide_rows(
    block: str, options: dict[str, Any], scheme: str, threads: int, rows: int, nan_memory: None
) -> None:
    """Threads divide the columns among them, all of them or in crews."""
    stage = make_stage(block, 261, 270, 4, tied=scheme == "heun", scheme=scheme, **options)
    x, g = torch.randn(2, rows, 261)
    crews, each = crews_of(stage, x)
    assert each > 1
    assert (crews > 1) == (threads > 2)
    assert_as_accurate_as_pytorch(stage, x, g)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", RULES[:3], ids=name)
@pytest.mark.parametrize("block", ["gelu", "linear"])
def test_half_precision_parameters(
    block: str,
    options: dict[str, Any],
    storage: torch.dtype,
    instruction_set: str,
    nan_memory: None,
) -> None:
    """They are widened without error; gradients come back rounded to their dtype."""
    stage = make_stage(block, 19, 45, 5, dtype=storage, **options)
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 37, 19, dtype=storage))
    assert_as_accurate_as_pytorch(stage, *torch.randn(2, 37, 19))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 2), (700, 3, 130), (13, 257, 65)], ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_extreme_shapes(
    shape: tuple[int, int, int], scheme: str, threads: int, instruction_set: str, nan_memory: None
) -> None:
    rows, dim, hidden = shape
    stage = rk.MLPStage(
        dim, hidden, 3, "silu", scheme=scheme, reverse="predicted", dtype=torch.float64
    )
    x, g = torch.randn(2, rows, dim, dtype=torch.float64)
    for k, p in zip(
        gradients(stage.configure(backend="cpp"), x, g),
        gradients(stage.configure(backend="reference"), x, g),
        strict=True,
    ):
        assert relative_error(k, p) < 1e-13


def test_the_residual_stream_is_float32_in_bfloat16_networks() -> None:
    """A bfloat16 stream would lose every one of these updates."""
    depth = 2000
    stage = rk.LinearStage(4, depth, tied=True, dtype=torch.bfloat16)
    with torch.no_grad():
        stage.weight.copy_(torch.eye(4))
    y = stage(torch.ones(1, 4, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), torch.full((1, 4), 2.71828), rtol=1e-2, atol=0)


@pytest.mark.parametrize("activation", rk.functional.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_over_their_whole_range(
    activation: str, dtype: torch.dtype, instruction_set: str
) -> None:
    """One step with weights of one and h = 1 is x + σ(x), within a few roundings everywhere."""
    small = torch.logspace(-30, 2, 999)
    z = torch.cat([torch.linspace(-60, 60, 4001), small, -small]).to(dtype).unsqueeze(1)
    one = torch.ones(1, 1, 1, dtype=dtype)

    def step(z: torch.Tensor) -> torch.Tensor:
        options = {"activation": activation, "step": 1.0, "backward": "stored", "backend": "cpp"}
        return rk.functional.mlp_stage(z, one, None, one, None, **options)

    z.requires_grad_()
    y = step(z)
    (slope,) = torch.autograd.grad(y.sum(), z)
    sigma, sigma_slope = LONG_ACTIVATIONS[activation]
    exact_z = z.detach().double().numpy().astype(np.longdouble)
    eps = torch.finfo(dtype).eps
    for value, exact in ((y, exact_z + sigma(exact_z)), (slope, 1 + sigma_slope(exact_z))):
        # Relative to the largest term: z + σ(z) itself may cancel.
        scale = np.maximum(np.abs(exact_z), 1) if value is y else 1
        assert np.max(np.abs(value.detach().double().numpy() - exact) / scale) < 4 * eps
    if activation == "tanh":  # odd, and precise down to the smallest numbers
        tiny = small[small < 1e-3].to(dtype).unsqueeze(1)
        torch.testing.assert_close(step(tiny), 2 * tiny, rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", rk.functional.ACTIVATIONS)
def test_a_nan_is_never_swallowed(activation: str, instruction_set: str) -> None:
    x = torch.randn(9, 5)
    x[3, 2] = float("nan")
    y = rk.MLPStage(5, 7, 2, activation, backend="cpp")(x)
    assert y[3].isnan().all()
    assert y[torch.arange(9) != 3].isfinite().all()
