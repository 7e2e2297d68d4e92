"""The depth-fused kernels for GPUs: Triton's by its interpreter and CUDA's emulated, where there is
no GPU."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
from helpers import (
    RULES,
    Run,
    assert_as_accurate_as_pytorch,
    gradients_by,
    in_dtype,
    make_stage,
    name,
    relative_error,
    running,
)
from torch import Tensor

import resode_kernels as rk
from resode_kernels.backends import cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Not a whole tile, more hidden units than a chunk, nothing a power of two. Triton's interpreter
# takes 50 µs for an operation on a tile, so there is no more than needed.
ROWS, DIM, HIDDEN, DEPTH = 13, 11, 18, 4


def inputs(rows: int = ROWS, dim: int = DIM, **options: Any) -> Tensor:
    return torch.randn(2, rows, dim, device=DEVICE, **options)


def stage_of(block: str, *sizes: int, **options: Any) -> rk.Stage:
    return make_stage(block, *(sizes or (DIM, HIDDEN, DEPTH)), device=DEVICE, **options)


@pytest.fixture(params=["triton", "cuda"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and DEVICE == "cpu":
        emulated.install(monkeypatch)
    elif request.param == "cuda" and cuda.unavailable():
        pytest.skip(f"the CUDA kernels are not there: {cuda.unavailable()}")
    return str(request.param)


@pytest.fixture
def kernel(backend: str, nan_memory: None) -> Run:
    return gradients_by(backend)


@pytest.fixture
def small_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs, which have to share three tiles, and a launch for every step."""
    if backend == "triton":
        from resode_kernels.backends.triton import device, fused

        small = device.INTERPRETER._replace(processors=2, cache=1)
        monkeypatch.setattr(fused, "device_of", lambda _: small)
    else:
        from resode_kernels.backends.cuda import gpu

        facts = {**gpu.EMULATED, "processors": 2, "cache": 1}
        monkeypatch.setattr(gpu, "EMULATED", facts)
        monkeypatch.setattr(gpu, "_facts", lambda _: facts)


# ---------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_kernels_are_as_accurate_as_pytorch(
    block: str, options: dict[str, Any], scheme: str, kernel: Run
) -> None:
    assert_as_accurate_as_pytorch(stage_of(block, scheme=scheme, **options), *inputs(), kernel)


@pytest.mark.parametrize("options", RULES[:5], ids=name)
@pytest.mark.parametrize("block", ["relu", "gelu", "silu"])
def test_every_activation(block: str, options: dict[str, Any], kernel: Run) -> None:
    assert_as_accurate_as_pytorch(stage_of(block, **options), *inputs(), kernel)


@pytest.mark.parametrize("options", [*RULES[:2], *RULES[4:]], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_tied_weights_and_no_bias(
    block: str, scheme: str, options: dict[str, Any], kernel: Run
) -> None:
    tested = stage_of(block, bias=False, tied=True, scheme=scheme, **options)
    assert_as_accurate_as_pytorch(tested, *inputs(), kernel)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (17, 40, 20), (3, 70, 33), (70, 16, 16), (40, 3, 50)], ids=str
)
def test_odd_shapes(shape: tuple[int, int, int], kernel: Run) -> None:
    rows, dim, hidden = shape
    tested = stage_of("silu", dim, hidden, 2, reverse="predicted", order=1)
    assert_as_accurate_as_pytorch(tested, *inputs(rows, dim), kernel)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("options", [*RULES[:2], RULES[4]], ids=name)
@pytest.mark.parametrize("block", ["gelu", "linear"])
def test_half_precision_weights(
    block: str,
    options: dict[str, Any],
    x_dtype: torch.dtype | None,
    storage: torch.dtype,
    kernel: Run,
) -> None:
    tested = stage_of(block, dtype=storage, scheme="heun", **options)
    x, g = inputs(dtype=x_dtype or storage)
    assert_as_accurate_as_pytorch(tested, x, g, kernel, running(in_dtype(storage)))


def test_the_residual_stream_is_float32_in_bfloat16_networks(backend: str) -> None:
    """A bfloat16 stream would lose every one of these updates."""
    tested = rk.LinearStage(4, 300, tied=True, dtype=torch.bfloat16, backend=backend, device=DEVICE)
    with torch.no_grad():
        tested.weight.copy_(torch.eye(4))
        y = tested(torch.ones(1, 4, dtype=torch.bfloat16, device=DEVICE))
    torch.testing.assert_close(y.float().cpu(), torch.full((1, 4), 2.71828), rtol=1e-2, atol=0)


def test_a_nan_is_never_swallowed(backend: str) -> None:
    for activation in rk.functional.ACTIVATIONS:
        x = torch.randn(9, 5, device=DEVICE)
        x[3, 2] = float("nan")
        with torch.no_grad():
            y = rk.MLPStage(5, 7, 2, activation, backend=backend, device=DEVICE)(x)
        assert y[3].isnan().all()
        assert y[torch.arange(9) != 3].isfinite().all()


@pytest.mark.parametrize("options", RULES[:2], ids=name)
def test_rows_that_only_fill_a_tile_do_no_harm(options: dict[str, Any], kernel: Run) -> None:
    """At x = −1 this block is zero. At x = 0, where a tile's empty rows begin, its steps back grow
    a million times each and overflow."""
    tested = stage_of("relu", 1, 1, 10, step=1.0, **options)
    with torch.no_grad():
        for parameter, value in zip(tested.parameters(), (1e3, 500, -1e3, 0), strict=True):
            parameter.fill_(value)
    x, g = -torch.ones(3, 1, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    for k, p in zip(kernel(tested, x, g), gradients_by("reference")(tested, x, g), strict=True):
        assert torch.equal(k, p)


# ---------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_a_pass_may_be_cut_into_launches(
    options: dict[str, Any], scheme: str, kernel: Run, small_device: None
) -> None:
    """However many steps a launch makes, and whether two programs share three tiles or not."""
    tied = options.get("reverse") == "paper"
    tested = stage_of("tanh", DIM, HIDDEN, 3 + tied, scheme=scheme, tied=tied, **options)
    x, g = inputs(37)
    for k, p in zip(kernel(tested, x, g), gradients_by("reference")(tested, x, g), strict=True):
        assert relative_error(k, p) < 2e-6


def test_some_parameters_may_be_frozen(backend: str) -> None:
    tested = stage_of("tanh")
    tested.w1.requires_grad_(False)
    tested.b2.requires_grad_(False)
    x, g = inputs()

    def run(backend: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(tested.configure(backend=backend)(x), [tested.b1, tested.w2], g)

    for k, p in zip(run(backend), run("reference"), strict=True):
        assert relative_error(k, p) < 2e-6


def test_results_repeat_bit_by_bit(kernel: Run) -> None:
    tested = stage_of("gelu", scheme="heun")
    x, g = inputs(50)
    for first, second in zip(kernel(tested, x, g), kernel(tested, x, g), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("options", [RULES[1], RULES[8]], ids=name)
def test_inputs_of_any_layout(options: dict[str, Any], kernel: Run) -> None:
    tested = stage_of("tanh", **options)
    x, g = (t.T for t in torch.randn(2, DIM, ROWS, device=DEVICE))
    assert not x.is_contiguous()
    with torch.no_grad():
        for p in tested.parameters():
            p.set_(p.transpose(0, -1).contiguous().transpose(0, -1))
    assert not tested.w1.is_contiguous()
    before = x.clone(), g.clone()
    for k, p in zip(kernel(tested, x, g), gradients_by("reference")(tested, x, g), strict=True):
        assert relative_error(k, p) < 2e-6
    assert torch.equal(torch.stack([x, g]), torch.stack(before))
