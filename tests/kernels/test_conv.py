"""``ConvStage``: the paper's blocks, whose modules are ordinary ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    RECORDED,
    RULES,
    gradients,
    kernel_gradients,
    name,
    relative_error,
    start_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import rules
from torch import Tensor, nn
from torch.library import opcheck

import resode_kernels as rk
from resode_kernels.options import Options
from resode_kernels.problem import Problem

BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's own convolutions of a few pixels are slower with more."""
    before = torch.get_num_threads()
    if "threads" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def modules(stage: rk.ConvStage) -> rk.ResidualStage:
    """The same blocks in the same modes, run as modules."""
    blocks = list(copy.deepcopy(stage).blocks)
    depth = stage.depth if stage.tied else None
    return rk.ResidualStage(blocks, depth=depth, **{**vars(stage.options), "backend": "auto"})


def train_standard(stage: rk.ConvStage, x: Tensor, g: Tensor) -> tuple[rk.ResidualStage, Any]:
    """Standard training of the same blocks: plain autograd."""
    standard = modules(stage).configure(backward="stored")
    return standard, gradients(standard, x, g)


def assert_same_buffers(a: nn.Module, b: nn.Module) -> None:
    for (label, mine), (other, theirs) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert label == other
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=label)


def assert_same_as_modules(stage: rk.ConvStage, x: Tensor, g: Tensor) -> None:
    same = modules(stage)
    for a, b in zip(gradients(stage, x, g), gradients(same, x, g), strict=True):
        assert relative_error(a, b) < 1e-11
    assert_same_buffers(stage, same)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_it_computes_what_its_modules_compute(
    block: str, scheme: str, tied: bool, train: bool, backend: str
) -> None:
    for options in RULES:
        stage = rk.ConvStage(
            6, 5, block, hidden=4, tied=tied, activation="silu", scheme=scheme,
            dtype=torch.float64, backend=backend, **options,
        ).train(train)  # fmt: skip
        x, g = torch.randn(2, 3, 6, 5, 4, dtype=torch.float64)
        assert_same_as_modules(stage, x, g)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_running_statistics_move_as_in_standard_training(
    tied: bool, scheme: str, momentum: float | None, backend: str
) -> None:
    stage = rk.ConvStage(
        4, 6, tied=tied, scheme=scheme, dtype=torch.float64, reverse="predicted", backend=backend
    )
    for module in stage.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    x, g = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64)
    standard, _ = train_standard(stage, x, g)
    gradients(stage, x, g)
    evaluations = (6 if tied else 1) * (2 if scheme == "heun" else 1)
    assert stage.blocks[0].bn1.num_batches_tracked == (
        evaluations if tied or scheme == "euler" else 1
    )
    assert_same_buffers(stage, standard)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics_rest_in_the_backward_pass_and_in_eval_mode(backend: str) -> None:
    stage = rk.ConvStage(4, 6, backend=backend)
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    y = stage(x)
    before = copy.deepcopy(dict(stage.named_buffers()))
    y.sum().backward()
    stage.eval()(x).sum().backward()
    for label, buffer in stage.named_buffers():
        assert torch.equal(buffer, before[label]), label
    assert all(not module.training for module in stage.modules())


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_normalizations_can_be_frozen(backend: str) -> None:
    """``bn.eval()`` on some layers: they use their constants, the others the batch."""
    stage = rk.ConvStage(4, 3, activation="tanh", dtype=torch.float64, backend=backend)
    stage(torch.randn(8, 4, 5, 5, dtype=torch.float64))
    stage.blocks[1].bn1.eval()
    stage.blocks[2].bn2.eval()
    x, g = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64)
    standard, expected = train_standard(stage.configure(backward="stored"), x, g)
    for a, b in zip(gradients(stage, x, g), expected, strict=True):
        assert relative_error(a, b) < 1e-11
    assert_same_buffers(stage, standard)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_without_weights_or_running_statistics(backend: str, affine: bool) -> None:
    stage = rk.ConvStage(4, 3, activation="tanh", dtype=torch.float64, backend=backend)
    for block in stage.blocks:
        block.bn1 = nn.BatchNorm2d(4, affine=affine, track_running_stats=False, dtype=torch.float64)
    for train in (True, False):
        stage.train(train)
        x, g = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64)
        assert_same_as_modules(stage, x, g)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", RULES, ids=name)
def test_input_and_output_keep_the_memory_format(options: dict[str, Any], backend: str) -> None:
    stage = rk.ConvStage(6, 4, backend=backend, **options).eval()
    x, g = torch.randn(2, 3, 6, 5, 4)
    expected = gradients(stage, x, g)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        y, grad_x, *grads = gradients(
            stage, x.to(memory_format=memory_format), g.to(memory_format=memory_format)
        )
        assert y.is_contiguous(memory_format=memory_format)
        for a, b in zip((y, grad_x, *grads), expected, strict=True):
            torch.testing.assert_close(a, b)
    # neither of the two, and weights that are not contiguous
    slanted = x.transpose(2, 3).contiguous().transpose(2, 3)
    stage.to(memory_format=torch.channels_last)
    for a, b in zip(gradients(stage, slanted, g), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_dicts_move_between_stages_of_the_same_blocks(backend: str) -> None:
    stage = rk.ConvStage(6, 4, "bottleneck", hidden=3, backend=backend)
    stage(torch.randn(3, 6, 5, 4))
    other = modules(rk.ConvStage(6, 4, "bottleneck", hidden=3))
    other.load_state_dict(stage.state_dict())
    again = rk.ConvStage(6, 4, "bottleneck", hidden=3)
    again.load_state_dict(other.state_dict())
    x = torch.randn(2, 6, 5, 4)
    torch.testing.assert_close(again.eval()(x), stage.eval()(x))
    torch.testing.assert_close(other.eval()(x), stage.eval()(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_frozen_parameters(backend: str, scheme: str) -> None:
    """Any subset of the gradients is what it is among all of them."""
    stage = rk.ConvStage(
        5, 4, scheme=scheme, activation="tanh", backend=backend, dtype=torch.float64
    )
    x, g = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64)
    _, grad_x, *every = gradients(stage, x, g)
    full = dict(zip((label for label, _ in stage.named_parameters()), every, strict=True))
    for keep in ("blocks.1.", "conv2", "bn1.bias", "blocks.0.bn2", "nothing"):
        for label, parameter in stage.named_parameters():
            parameter.requires_grad_(keep in label)
        for needs_x in (True, False):
            wanted = {n: p for n, p in stage.named_parameters() if p.requires_grad}
            inputs = [*wanted.values()]
            xx = x.clone().requires_grad_(needs_x)
            if needs_x:
                inputs.append(xx)
            if not inputs:
                assert not stage(xx).requires_grad
                continue
            found = torch.autograd.grad(stage(xx), inputs, g)
            expected = [full[n] for n in wanted] + ([grad_x] if needs_x else [])
            for a, b in zip(found, expected, strict=True):
                assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(backend: str, dtype: torch.dtype) -> None:
    stage = rk.ConvStage(6, 4, activation="tanh", dtype=dtype, backend=backend)
    x, g = torch.randn(2, 3, 6, 5, 4, dtype=dtype)
    wide = copy.deepcopy(stage).float()
    for a, b in zip(gradients(stage, x, g), gradients(wide, x.float(), g.float()), strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < torch.finfo(dtype).eps
    assert stage.blocks[0].bn1.running_mean.dtype == dtype


@pytest.mark.needs_cpp
@pytest.mark.parametrize("train", [True, False])
@given(
    options=rules(),
    images=st.integers(1, 9),
    channels=st.integers(1, 40),
    hidden=st.integers(1, 40),
    height=st.integers(1, 20),
    width=st.integers(1, 40),
    block=st.sampled_from(["basic", "bottleneck"]),
    depth=st.integers(1, 4),
    tied=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_whatever_the_shapes(
    options: dict[str, Any],
    images: int,
    channels: int,
    hidden: int,
    height: int,
    width: int,
    block: str,
    depth: int,
    tied: bool,
    threads: int,
    seed: int,
    train: bool,
) -> None:
    torch.manual_seed(seed)
    stage = rk.ConvStage(
        channels, depth, block, hidden=hidden, tied=tied, activation="tanh",
        dtype=torch.float64, **options,
    ).train(train)  # fmt: skip
    images = max(images, 3 if train else 1)  # statistics of two pixels amplify any rounding
    x, g = torch.randn(2, images, channels, height, width, dtype=torch.float64)
    kernel = kernel_gradients(stage, x, g, threads)
    for k, r in zip(kernel, gradients(stage.configure(backend="reference"), x, g), strict=True):
        assert relative_error(k, r) < 1e-8


@pytest.mark.needs_cpp
@pytest.mark.parametrize("threads", [5, 8])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_many_threads_take_turns_at_large_sums(
    scheme: str, tied: bool, train: bool, threads: int
) -> None:
    """Of weight gradients: with several bands of images for some of the threads and fewer for
    others, in crews of different size, and bit for bit the same every time."""
    stage = rk.ConvStage(
        96, 3, scheme=scheme, tied=tied, activation="silu", dtype=torch.float64
    ).train(train)
    x, g = torch.randn(2, 3 * threads + 1, 96, 10, 11, dtype=torch.float64)
    first = kernel_gradients(stage, x, g, threads)
    for k, r in zip(first, gradients(stage.configure(backend="reference"), x, g), strict=True):
        assert relative_error(k, r) < 1e-10
    for _ in range(2):
        for a, b in zip(kernel_gradients(stage, x, g, threads), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.needs_cpp
@pytest.mark.parametrize("options", RULES, ids=name)
def test_results_repeat_bit_for_bit(options: dict[str, Any], threads: int) -> None:
    stage = rk.ConvStage(20, 3, **options)
    x, g = torch.randn(2, 7, 20, 9, 9)
    first = gradients(stage, x, g)
    for _ in range(3):
        for a, b in zip(gradients(stage, x, g), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [*RULES, *RECORDED], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_opcheck(options: dict[str, Any], scheme: str, backend: str) -> None:
    stage = rk.ConvStage(3, 4, scheme=scheme)
    parameters: list[Tensor | None] = []
    for block in stage.blocks:
        for conv, bn in block.layers:
            parameters += [conv.weight.detach(), bn.weight.detach(), None, None, None]
    method = Options(scheme=scheme, **options).method(4)
    problem = Problem("conv", "gelu", tuple(parameters), method, 2, 1e-5)
    x, g = torch.randn(2, 2, 3, 4, 4)
    ops = torch.ops.resode_kernels
    opcheck(ops.forward.default, (x, *problem.flat(), backend))
    y, statistics, kept = ops.forward.default(x, *problem.flat(), backend)
    assert kept[0].shape == (problem.anchor_count, *x.shape)
    assert statistics.shape == (problem.evaluations, 12)
    start = start_of(problem, x, y, kept)
    needs = [True, *(p is not None for p in parameters)]
    opcheck(ops.reverse.default, (start, g, kept, needs, *problem.flat(), backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_graph_breaks(backend: str) -> None:
    stage = rk.ConvStage(4, 3, backend=backend)
    compiled = torch.compile(copy.deepcopy(stage), backend="aot_eager", fullgraph=True)
    x, g = torch.randn(2, 2, 4, 5, 5)
    for a, b in zip(gradients(compiled, x, g), gradients(stage, x, g), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(compiled.buffers(), stage.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_function_is_the_stage(backend: str) -> None:
    stage = rk.ConvStage(5, 4, "bottleneck", hidden=3, activation="gelu", backend=backend)
    layers = [
        rk.functional.ConvLayer(
            torch.stack([block.layers[i][0].weight for block in stage.blocks]),
            torch.stack([block.layers[i][1].weight for block in stage.blocks]),
            torch.stack([block.layers[i][1].bias for block in stage.blocks]),
        )
        for i in range(3)
    ]
    x, g = torch.randn(2, 3, 5, 4, 4)
    y = rk.functional.conv_stage(x, layers, activation="gelu", backend=backend)
    mine = torch.autograd.grad(y, list(stage.parameters()), g)
    expected = gradients(stage, x, g)
    for a, b in zip((y, *mine), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(a, b)


def test_zero_init_starts_as_the_identity() -> None:
    stage = rk.ConvStage(5, 3, zero_init=True)
    x = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(stage(x), x)
    assert stage.blocks[0].bn1.weight.eq(1).all()


def test_a_bottleneck_is_a_quarter_as_wide() -> None:
    stage = rk.ConvStage(64, 2, "bottleneck")
    shapes = [tuple(conv.weight.shape) for conv, _ in stage.blocks[0].layers]
    assert shapes == [(16, 64, 1, 1), (16, 16, 3, 3), (64, 16, 1, 1)]


@pytest.mark.parametrize("change", ["hook", "layer", "parametrization", "dilation", "circular"])
def test_changed_blocks_run_as_modules(change: str) -> None:
    stage = rk.ConvStage(4, 3, dtype=torch.float64, backward="stored")
    calls = []
    if change == "hook":
        stage.blocks[1].conv1.register_forward_hook(lambda *_: calls.append(1))
    elif change == "layer":
        stage.blocks[1].conv1 = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
    elif change == "dilation":
        stage.blocks[1].conv1.dilation = stage.blocks[1].conv1.padding = (2, 2)
    elif change == "circular":
        stage.blocks[1].conv1 = nn.Conv2d(
            4, 4, 3, padding=1, bias=False, padding_mode="circular", dtype=torch.float64
        )
    else:
        nn.utils.parametrizations.weight_norm(stage.blocks[1].conv1)
    x, g = torch.randn(2, 3, 4, 5, 5, dtype=torch.float64)
    _, expected = train_standard(stage, x, g)
    for a, b in zip(gradients(stage, x, g), expected, strict=True):
        assert relative_error(a, b) < 1e-11
    assert bool(calls) == (change == "hook")
    with pytest.raises(rk.BackendUnavailableError, match="block 1"):
        stage.configure(backend="cpp")(x)


def test_an_empty_batch_passes_through_in_eval_mode() -> None:
    stage = rk.ConvStage(4, 3).eval()
    x = torch.randn(0, 4, 5, 5, requires_grad=True)
    y = stage(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in stage.parameters())
