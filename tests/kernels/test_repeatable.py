"""Results repeat bit for bit at a given number of threads, whatever else goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import RECORDED, RULES, crews_of, gradients, make_stage, name, relative_error

import resode_kernels as rk

pytestmark = pytest.mark.needs_cpp


@pytest.mark.parametrize("options", [*RULES, *RECORDED], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("shape", [(401, 33, 65), (30, 264, 280)], ids=["rows", "columns"])
def test_bitwise(
    shape: tuple[int, int, int], options: dict[str, object], scheme: str, threads: int
) -> None:
    """Whether threads divide the rows or the columns."""
    rows, dim, hidden = shape
    stage = make_stage("tanh", dim, hidden, 7, scheme=scheme, **options)
    x, g = torch.randn(2, rows, dim)
    assert crews_of(stage, x) == ((threads, 1) if rows == 401 else (1, threads))
    first = gradients(stage, x, g)
    for _ in range(3):
        for a, b in zip(gradients(stage, x, g), first, strict=True):
            assert torch.equal(a, b)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Without parameter gradients rows are independent problems, to the last bit."""
    stage = rk.MLPStage(20, 30, 6).requires_grad_(False)
    x = torch.randn(100, 20)
    torch.testing.assert_close(stage(x)[17:19], stage(x[17:19]), rtol=0, atol=0)


def test_thread_counts_agree_to_rounding(threads: int) -> None:
    stage = make_stage("silu", 40, 40, 9, reverse="predicted")
    x, g = torch.randn(2, 1000, 40)
    many = gradients(stage, x, g)
    torch.set_num_threads(1)
    for a, b in zip(many, gradients(stage, x, g), strict=True):
        assert relative_error(a, b) < 1e-6


def test_python_threads_run_side_by_side() -> None:
    """The GIL is released, and nothing is shared between calls."""
    run_side_by_side(make_stage("gelu", 24, 24, 20), torch.randn(8, 2, 64, 24))


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_python_threads_run_wide_stages_side_by_side(threads: int) -> None:
    """Their teams of threads wait for one another, and may be more than there are cores."""
    stage, inputs = make_stage("gelu", 260, 260, 20), torch.randn(8, 2, 16, 260)
    assert crews_of(stage, inputs[0, 0]) == (1, threads)
    run_side_by_side(stage, inputs)


def test_python_threads_run_convolutions_side_by_side() -> None:
    """Their teams of threads wait for one another, and may be more than there are cores."""
    run_side_by_side(rk.ConvStage(8, 6), torch.randn(8, 2, 5, 8, 6, 6))


def run_side_by_side(stage: rk.Stage, inputs: torch.Tensor) -> None:
    expected = [gradients(stage, x, g) for x, g in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda pair: gradients(stage, *pair), inputs))
    for result, reference in zip(results, expected, strict=True):
        for a, b in zip(result, reference, strict=True):
            assert torch.equal(a, b)
