"""The cost model of benchmarks/gpu/costs.py: what it counts, how it extends counts to the size of a
GPU's problem, and the figures that the kernels keep to."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from costs import GPU, GPUS, costs
from pass_traffic import (
    Case,
    count_kernels,
    count_standard,
    kernel_traffic,
    pass_size,
    plan_on,
    standard_traffic,
)
from traffic import Launch, counting, sum_by_kernel

from resode_kernels.backends import triton as backend
from resode_kernels.backends.triton import normalization
from resode_kernels.backends.triton.device import INTERPRETER

if not backend.interpreted():
    pytest.skip("what it counts runs in the interpreter", allow_module_level=True)

# ------------------------------------------------------------------------------------- counting


@triton.jit
def copy_kernel(x, y, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def shared_kernel(x, y, SIZE: tl.constexpr):
    """Every program reads all of x."""
    i = tl.arange(0, SIZE)
    tl.store(y + tl.program_id(0) * SIZE + i, tl.load(x + i))


@triton.jit
def atomic_kernel(x, total, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.atomic_add(total + i, tl.load(x + tl.program_id(0) * SIZE + i), mask=i < SIZE - 1)


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    x = tl.load(a + m * K + k[None, :])
    tl.store(c + m * N + n, tl.dot(x, tl.load(b + k[:, None] * N + n)))


def test_masked_elements_are_not_counted() -> None:
    x, y = torch.randn(100), torch.zeros(128)
    with counting() as launches:
        copy_kernel[(2,)](x, y, 100, 64)
    expected = Launch(
        "copy_kernel", (2, 1, 1), issued_loads=400, issued_stores=400, loads=400, stores=400
    )
    assert launches == [expected]
    assert torch.equal(y[:100], x)


def test_bytes_that_programs_share_cross_dram_once() -> None:
    x, y = torch.randn(32, dtype=torch.float16), torch.zeros(96, dtype=torch.float16)
    with counting() as launches:
        shared_kernel[(3,)](x, y, 32)
    expected = Launch(
        "shared_kernel",
        (3, 1, 1),
        issued_loads=192,
        issued_stores=192,
        loads=64,
        stores=192,
        revisited=64,
    )
    assert launches == [expected]


@triton.jit
def sum_kernel(x, y, SIZE: tl.constexpr):
    """y = Σ of the rows of x, in y itself."""
    i = tl.arange(0, SIZE)
    for row in range(3):
        before = tl.load(y + i, mask=tl.full((SIZE,), row, tl.int32) > 0, other=0.0)
        tl.store(y + i, before + tl.load(x + row * SIZE + i))


def test_what_a_launch_has_stored_is_not_loaded_from_dram() -> None:
    x, y = torch.randn(3, 16), torch.full((16,), float("nan"))
    with counting() as launches:
        sum_kernel[(1,)](x, y, 16)
    torch.testing.assert_close(y, x.sum(0))
    [launch] = launches
    assert (launch.issued_loads, launch.issued_stores) == (192 + 128, 192)
    assert (launch.loads, launch.stores, launch.revisited) == (192, 64, 64)


def test_atomics_read_and_write() -> None:
    x, total = torch.randn(2, 16), torch.zeros(16)
    with counting() as launches:
        atomic_kernel[(2,)](x, total, 16)
    [launch] = launches
    assert (launch.issued_loads, launch.issued_stores) == (128 + 120, 120)
    assert (launch.loads, launch.stores, launch.revisited) == (128 + 60, 60, 60)


def test_products_count_two_flops_per_multiply_add() -> None:
    a, b, c = torch.randn(16, 32), torch.randn(32, 64), torch.zeros(16, 64)
    with counting() as launches:
        dot_kernel[(1,)](a, b, c, 16, 32, 64)
        torch.mm(a, b)
    assert [launch.flops for launch in launches] == [2 * 16 * 32 * 64] * 2
    assert [launch.dram for launch in launches] == [a.nbytes + b.nbytes + c.nbytes] * 2


def test_torch_operations_read_their_arguments_and_write_their_results() -> None:
    x, y, row = torch.randn(8, 16), torch.randn(8, 16), torch.randn(16)
    n = x.nbytes
    with counting() as launches:
        x.t().view(16, 8)[1:].detach()  # no launches
        torch.empty_like(x)
        x.new_empty(4)
        x.zero_()
        x.copy_(y)
        x.add_(row)
        torch.add(x, x)
        torch.zeros(8, 16)
        x.fill_(1)
        x + row.expand(8, 16)
        torch.mm(x, x.t())
    assert [(one.name, one.loads, one.stores) for one in launches] == [
        ("zero_", 0, n),
        ("copy_", n, n),
        ("add_", n + 64, n),
        ("add", n, n),
        ("zeros", 0, n),
        ("fill_", 0, n),
        ("add", n + 64, n),
        ("mm", n, 8 * 8 * 4),
    ]


def test_what_a_gpu_needs_two_launches_for_is_read_twice() -> None:
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    weight, gamma = torch.randn(4, 4, 3, 3, requires_grad=True), torch.ones(4)
    n, w = x.nbytes, weight.nbytes
    with counting() as launches:
        z = torch.conv2d(x, weight, padding=1)
        y = torch.batch_norm(z, gamma, None, None, None, True, 0.0, 1e-5, False)
    with counting() as backward:
        y.backward(torch.ones_like(x))
    normalizing, normalized = launches[-1], backward[-2]
    assert (normalizing.loads, normalizing.stores, normalizing.count) == (2 * n + 16, n + 32, 2)
    assert normalized.loads == 4 * n + 3 * 16
    assert (backward[-1].loads, backward[-1].stores) == (3 * n + w, n + w)
    assert backward[-1].flops == 2 * launches[0].flops == 4 * 9 * 4 * x.numel()


def test_nothing_is_watched_afterwards() -> None:
    x, y = torch.randn(64), torch.zeros(64)
    with counting() as launches:
        pass
    copy_kernel[(1,)](x, y, 64, 64)
    torch.add(x, y)
    assert launches == []


# ------------------------------------------------------------------------------------ extending

SMALL = Case(dim=12, hidden=12, depth=5, batch=72)
LINEAR = replace(SMALL, stage="linear")
CONV = Case(stage="conv", dim=3, depth=4, batch=3, size=20, activation="relu")


@pytest.mark.parametrize(
    ("case", "programs", "steps"),
    [
        (SMALL, 2, 2),
        (replace(LINEAR, rule="predicted", dtype=torch.bfloat16), 3, 2),
        (replace(LINEAR, rule="paper", scheme="heun"), 4, 3),
        (replace(LINEAR, rule="paper", tied=True), 3, 5),
        (replace(LINEAR, scheme="heun", order=2), 5, 1),
    ],
    ids=["mlp", "predicted-bfloat16", "heun-paper", "tied", "heun-refined-2"],
)
def test_a_pass_is_predicted_exactly(case: Case, programs: int, steps: int) -> None:
    for reverse in (False, True):
        layout = plan_on(case, INTERPRETER, reverse=reverse)
        assert layout is not None
        layout = layout._replace(programs=programs, steps=steps)
        counted = sum_by_kernel(count_kernels(case, layout, reverse=reverse))
        predicted = kernel_traffic(case, layout, reverse=reverse)
        assert set(predicted) == set(counted)
        for name, launch in counted.items():
            # A program with a single tile does not come back to its sums: revisited is a bound.
            assert predicted[name].revisited >= launch.revisited
            assert replace(predicted[name], revisited=0) == replace(launch, revisited=0)


@pytest.mark.parametrize(
    ("case", "programs"),
    [
        (CONV, 3),
        (replace(CONV, rule="paper", tied=True, dtype=torch.bfloat16), 1024),
    ],
    ids=["refined", "tied-bfloat16"],
)
def test_a_pass_by_layers_is_predicted_exactly(case: Case, programs: int) -> None:
    """With five tiles, the last of them not full, and at most so many programs for a reduction."""
    for reverse in (False, True):
        assert plan_on(case, INTERPRETER, reverse=reverse) is None
        with patch.object(normalization, "PROGRAMS", programs):
            counted = sum_by_kernel(count_kernels(case, None, reverse=reverse))
            assert kernel_traffic(case, None, reverse=reverse) == counted
            at = pass_size(case, None, reverse=reverse)
        assert (at.rows, at.tiles, at.programs) == (1200, 5, min(5, programs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("stage", ["mlp", "linear", "conv"])
@pytest.mark.parametrize("tied", [False, True])
def test_standard_backprop_is_predicted_exactly(
    stage: str, scheme: str, tied: bool, dtype: torch.dtype
) -> None:
    case = replace(
        CONV if stage == "conv" else SMALL, stage=stage, scheme=scheme, tied=tied, dtype=dtype
    )
    for reverse, counted in enumerate(count_standard(case)):
        assert standard_traffic(case, reverse=bool(reverse)) == sum_by_kernel(counted)


def test_what_the_cache_has_to_hold_is_predicted_exactly() -> None:
    case = replace(LINEAR, batch=128)
    layout = plan_on(case, INTERPRETER, reverse=True)
    assert layout is not None
    layout = layout._replace(programs=2, steps=3)  # two tiles or more for each
    counted = max(one.revisited for one in count_kernels(case, layout, reverse=True))
    assert kernel_traffic(case, layout, reverse=True)["reverse_kernel"].revisited == counted
    assert pass_size(case, layout, reverse=True).longest == 3


# --------------------------------------------------------------------------------- the figures


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_reverse_pass_moves_a_tenth_of_standard_backprops_bytes(gpu: GPU) -> None:
    reverse = costs(Case(), gpu, reverse=True)
    assert reverse is not None
    assert reverse.standard_dram > 10 * reverse.dram


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_passes_move_hardly_more_than_the_minimum_per_tile(gpu: GPU) -> None:
    for direction in (False, True):
        row = costs(Case(), gpu, reverse=direction)
        assert row is not None
        assert row.dram < 1.2 * row.minimum_per_tile
        assert row.revisited < row.cache
