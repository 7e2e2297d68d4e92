"""The CUDA backend beyond what test_fused.py and the tests of the layer-wise path ask of all: TF32,
tiles and chunks of every size, launches, errors and dispatch. Emulated where there is no GPU."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BLOCKS,
    RULES,
    Function,
    Run,
    assert_as_accurate_as_pytorch,
    gradients_by,
    make_stage,
    name,
    problem_of,
    relative_error,
    running,
    shifted,
)
from torch import Tensor

import resode_kernels as rk
from resode_kernels import backends, info
from resode_kernels.backends import cuda, native, triton
from resode_kernels.backends.contract import ForwardIO, ReverseIO
from resode_kernels.backends.cuda import gpu
from resode_kernels.backends.engine import EngineBackend
from resode_kernels.problem import Kept

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="the emulation is for machines without a GPU")
STORAGES = [torch.float32, torch.float16, torch.bfloat16]
H100 = {"index": 0, "processors": 132, "shared_memory": 227 << 10, "cache": 50 << 20}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        emulated.install(monkeypatch)
    elif cuda.unavailable():
        pytest.skip(f"the CUDA kernels are not there: {cuda.unavailable()}")


@pytest.fixture
def kernel(nan_memory: None) -> Run:
    return gradients_by("cuda")


def inputs(rows: int, dim: int, **options: Any) -> Tensor:
    return torch.randn(2, rows, dim, device=DEVICE, **options)


def with_facts(monkeypatch: pytest.MonkeyPatch, **facts: int) -> None:
    """Kernels are told so of the GPU."""
    before = gpu.EMULATED if DEVICE == "cpu" else gpu._facts(torch.device("cuda", 0))
    monkeypatch.setattr(gpu, "EMULATED", {**before, **facts})
    monkeypatch.setattr(gpu, "_facts", lambda _: {**before, **facts})


def plan_of(stage: rk.Stage, rows: int, reverse: bool = True, **facts: int) -> Any:
    """How a GPU, an H100 if nothing else is said, would run a pass over so many rows."""
    problem, module = problem_of(stage), gpu.module()
    parameters = native.all_contiguous(problem.parameters)
    state = torch.empty(rows, stage.dim)  # never touched, so it takes no memory
    tested = native.stage_of(module, problem, parameters, state)
    if reverse:
        io = native.reverse_of(
            module, problem, ReverseIO(state, Kept(state), state, [None, *parameters], None)
        )
    else:
        io = native.forward_of(module, ForwardIO(state, state, Kept(state), state))
    plan = module.plan(tested, io, module.Gpu(**{**H100, **facts}, tf32=False, stream=0))
    return None if plan is None else plan.layout


# ---------------------------------------------------------------------------------------- accuracy


def tf32(t: Tensor) -> Tensor:
    """To 10 bits of mantissa, to nearest, ties away from zero."""
    bits = t.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & -0x2000).view(torch.float32)


class TF32Linear(torch.autograd.Function):
    """A product whose operands, and those of its gradients, are rounded to TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tf32(x) @ tf32(weight).T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = map(tf32, ctx.saved_tensors)
        return tf32(g) @ weight, tf32(g).T @ x


def in_tf32() -> EngineBackend:
    """Plain PyTorch with products in TF32, which it has on GPUs only."""
    linear = TF32Linear.apply

    def mlp(activation: str, *theta: Tensor) -> Function:
        def f(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
            return linear(getattr(F, activation)(linear(x, w1) + b1), w2) + b2

        return Function(f, *(t.detach().requires_grad_() for t in theta))

    return EngineBackend(
        "reference",
        mlp=mlp,
        linear=lambda w: Function(linear, w.detach().requires_grad_()),
    )


@pytest.fixture
def allow_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("options", [*RULES[:3], *RULES[5:8]], ids=name)
@pytest.mark.parametrize("block", BLOCKS)
def test_products_in_tf32(
    block: str, options: dict[str, Any], scheme: str, kernel: Run, allow_tf32: None
) -> None:
    tested = make_stage(block, 35, 41, 3, scheme=scheme, device=DEVICE, **options)
    x, g = inputs(33, 35)
    assert_as_accurate_as_pytorch(tested, x, g, kernel, running(in_tf32()))
    # They are: products of float32 numbers would be a thousand times nearer.
    y = gradients_by("reference")(tested, x, g)[0]
    assert relative_error(kernel(tested, x, g)[0], y) > 1e-6


def compare(tested: rk.Stage, x: Tensor, g: Tensor, kernel: Run, tolerance: float) -> None:
    for k, p in zip(kernel(tested, x, g), gradients_by("reference")(tested, x, g), strict=True):
        assert relative_error(k, p) < tolerance


# Of products of operands that are rounded to so many bits; a rounding is at most half of it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("shared_memory", [227 << 10, 99 << 10], ids=["large", "small"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dim", [15, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_every_width(
    block: str,
    dim: int,
    storage: torch.dtype,
    shared_memory: int,
    kernel: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From tiles that every warp has several parts of, to those that all warps share; with several
    chunks of weights, the last one of which is not full."""
    with_facts(monkeypatch, shared_memory=shared_memory, processors=1)
    tested = make_stage(block, dim, 72, 2, dtype=storage, device=DEVICE)
    compare(tested, *inputs(140, dim, dtype=storage), kernel, TOLERANCE[storage])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_addresses_off_16_bytes(block: str, storage: torch.dtype, kernel: Run) -> None:
    tested = make_stage(block, 16, 24, 2, dtype=storage, device=DEVICE)
    with torch.no_grad():
        for p in tested.parameters():
            p.set_(shifted(p))
            assert p.data_ptr() % 16 != 0
    x, g = map(shifted, inputs(20, 16))
    compare(tested, x, g, kernel, TOLERANCE[storage])


@ON_CPU
@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("block", ["gelu", "linear"])
def test_the_order_of_threads_does_not_matter(
    block: str, order: str, kernel: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = make_stage(block, 40, 70, 3, scheme="heun", reverse="predicted")
    x, g = inputs(90, 40)
    expected = kernel(tested, x, g)
    monkeypatch.setenv("RESODE_EMULATION_ORDER", order)
    for k, p in zip(kernel(tested, x, g), expected, strict=True):
        assert torch.equal(k, p)


# ---------------------------------------------------------------------------------------- launches


def test_a_stage_too_wide_for_a_thread_block_runs_layer_by_layer(kernel: Run) -> None:
    tested = make_stage("tanh", 260, 9, 2, device=DEVICE)
    assert plan_of(tested, 5) is None
    assert_as_accurate_as_pytorch(tested, *inputs(5, 260), kernel)


@pytest.mark.parametrize("dim", [1, 16, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("block", ["tanh", "linear"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_plan_keeps_to_the_shared_memory(block: str, dim: int, storage: torch.dtype) -> None:
    tested = make_stage(block, dim, 4 * dim, 8, dtype=storage)
    for shared_memory in (227 << 10, 163 << 10, 99 << 10, 48 << 10, 16 << 10):
        for reverse in (False, True):
            plan = plan_of(tested, 10_000, reverse, shared_memory=shared_memory)
            assert plan is None or plan["shared"] <= shared_memory
            if shared_memory >= 163 << 10:  # that of an A100
                assert plan is not None


def test_few_rows_are_spread_over_the_multiprocessors() -> None:
    tested = make_stage("tanh", 32, 32, 8)
    assert plan_of(tested, 132 * 16)["programs"] == 132
    assert plan_of(tested, 132 * 32)["programs"] == 132
    assert plan_of(tested, 10_000_000)["programs"] == 132
    assert plan_of(tested, 10_000_000)["rows"] == 128


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_partial_sums_are_bounded(scheme: str, tied: bool) -> None:
    """By the GPU: not by the batch, nor by the depth."""
    of_block = 4 * (2 * 64 * 64 + 2 * 64)
    for depth in (4, 64, 4096):
        for rows in (100, 10_000, 1_000_000):
            tested = make_stage("tanh", 64, 64, depth, scheme=scheme, tied=tied)
            plan = plan_of(tested, rows)
            assert plan["programs"] <= H100["processors"]
            if not tied:
                assert plan["programs"] * plan["steps"] * of_block <= H100["cache"] / 2


def test_frozen_parameters_need_no_sums() -> None:
    tested = make_stage("tanh", 64, 64, 4)
    problem, module = problem_of(tested), gpu.module()
    state = torch.empty(1000, 64)
    stage = native.stage_of(module, problem, problem.parameters, state)
    processor = module.Gpu(**H100, tf32=False, stream=0)

    def workspace(*gradients: Tensor | None) -> int:
        io = native.reverse_of(
            module, problem, ReverseIO(state, Kept(state), state, [state, *gradients], None)
        )
        return int(module.plan(stage, io, processor).workspace_bytes)

    assert workspace(None, None, None, None) < 1024
    assert 0 < workspace(None, tested.b1, None, None) < workspace(*problem.parameters) / 10


@ON_CPU
def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_facts(monkeypatch, shared_memory=1 << 20)
    tested = make_stage("tanh", 256, 256, 2, backend="cuda")
    with pytest.raises(RuntimeError, match="CUDA: "), torch.no_grad():
        tested(torch.zeros(300, 256))


# ---------------------------------------------------------------------------------------- dispatch


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Pretends that torch has one, and that the kernels were built for some."""
    has = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: has["capability"])
    monkeypatch.setattr(cuda, "architectures", lambda: ["80", "90", "120"])
    cuda._refuses_gpu.cache_clear()
    yield has
    cuda._refuses_gpu.cache_clear()


def test_auto_picks_cuda_where_it_was_built_for_the_gpu(
    a_gpu: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton.unavailable() is not None:
        pytest.skip(f"auto would fall back to the reference: {triton.unavailable()}")
    device = torch.device("cuda")
    for dtype in STORAGES:
        assert backends.choose("auto", device, dtype) == "cuda"
    assert backends.choose("auto", device, torch.float64) == "reference"
    assert any('cuda       available  <- "auto"' in line for line in info.lines())

    cuda._refuses_gpu.cache_clear()
    a_gpu["capability"] = (7, 5)
    assert backends.choose("auto", device) == "triton"
    with pytest.raises(rk.BackendUnavailableError, match=r"from 8\.0 on, and this GPU has 7\.5"):
        backends.choose("cuda", device)
    assert any("this GPU has 7.5" in line for line in info.lines())

    monkeypatch.setattr(cuda, "_reason", "no nvcc was found")
    assert backends.choose("auto", device) == "triton"
    with pytest.raises(rk.BackendUnavailableError, match="no nvcc was found"):
        backends.choose("cuda", device)


def test_what_the_kernels_were_built_for(a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX serves what is later than the lowest architecture."""
    assert not cuda.serves((7, 5))
    assert all(map(cuda.serves, [(8, 0), (8, 6), (9, 0), (11, 0), (12, 1)]))
    monkeypatch.setattr(cuda, "architectures", lambda: ["90"])
    assert not cuda.serves((8, 9))


def test_what_cuda_does_not_take_is_refused_by_name(a_gpu: Any) -> None:
    def refused(device: str, dtype: torch.dtype = torch.float32) -> str:
        with pytest.raises(rk.BackendUnavailableError) as error:
            backends.choose("cuda", torch.device(device), dtype)
        return str(error.value)

    assert "not float64" in refused("cuda", torch.float64)
    assert "runs on NVIDIA GPUs, not on 'cpu'" in refused("cpu")
    assert "runs on NVIDIA GPUs, not on 'meta'" in refused("meta")
