"""Triton's depth-fused kernels beyond what test_fused.py asks of all: launches, tiles, tuning and
dispatch. By Triton's interpreter where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers import (
    RULES,
    assert_as_accurate_as_pytorch,
    gradients,
    gradients_by,
    make_stage,
    problem_of,
    relative_error,
)
from torch import Tensor

import resode_kernels as rk
from resode_kernels import backends
from resode_kernels.backends.triton import device as devices
from resode_kernels.backends.triton import fused, plan, stage, tiles, tuning
from resode_kernels.backends.triton.spec import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = gradients_by("triton")
# Not a whole tile, more hidden units than a chunk, nothing a power of two. The interpreter takes
# 50 µs for an operation on a tile, so there is no more than needed.
ROWS, DIM, HIDDEN, DEPTH = 13, 11, 18, 4


def inputs(rows: int = ROWS, dim: int = DIM, **options: Any) -> Tensor:
    return torch.randn(2, rows, dim, device=DEVICE, **options)


def stage_of(block: str, *sizes: int, **options: Any) -> rk.Stage:
    return make_stage(block, *(sizes or (DIM, HIDDEN, DEPTH)), device=DEVICE, **options)


# --------------------------------------------------------------------------- launches and programs


def test_a_problem_too_wide_for_a_tile_runs_layer_by_layer(nan_memory: None) -> None:
    tested = stage_of("tanh", 130, 9, 2)
    assert fused.layout(problem_of(tested), torch.empty(5, 130), reverse=True) is None
    assert_as_accurate_as_pytorch(tested, *inputs(5, 130), TRITON)


def test_shared_memory_limits_the_tiles() -> None:
    spec = plan.spec_of(problem_of(stage_of("tanh", 128, 128, 2)))
    a100 = devices.Device("cuda:80", 32, 108, 166_912, 40 << 20)
    assert tiles.tiles_of(spec._replace(precision="tf32"), a100, 4, reverse=True)
    needed = [tiles.shared_bytes(tile, spec, 4) for tile in tiles.REVERSE[128]]
    assert len(set(needed)) > 1
    tight = a100._replace(shared=min(needed))
    few = tiles.tiles_of(spec._replace(precision="tf32"), tight, 4, reverse=True)
    assert 0 < len(few) < len(needed)
    none = a100._replace(shared=min(needed) - 1)
    assert tiles.tiles_of(spec._replace(precision="tf32"), none, 4, reverse=True) == ()


def test_partial_sums_fit_the_cache() -> None:
    """Their number is bounded by the device, not by the batch or the depth."""
    tested = stage_of("tanh", 64, 64, 300)
    problem = problem_of(tested)
    h100 = devices.Device("cuda:90", 32, 132, 232_448, 50 << 20)
    for rows in (100, 10_000, 1_000_000):
        layout = plan.plan_of(problem, h100, rows, plan.spec_of(problem), Tile(32, 32, 256))
        of_block = 4 * sum(p[0].numel() for p in tested.parameters())
        assert layout.programs <= h100.processors
        assert layout.programs * layout.steps * of_block <= h100.cache / 2


def test_frozen_parameters_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = stage_of("tanh")
    tested.w1.requires_grad_(False)
    tested.b2.requires_grad_(False)
    x, g = inputs()
    expected = torch.autograd.grad(
        tested.configure(backend="reference")(x), [tested.b1, tested.w2], g
    )
    seen: list[Any] = []
    prepare = fused.Sums.prepare
    monkeypatch.setattr(
        fused.Sums,
        "prepare",
        lambda sums, *steps: seen.append(sums.partial) or prepare(sums, *steps),
    )
    result = torch.autograd.grad(tested.configure(backend="triton")(x), [tested.b1, tested.w2], g)
    for k, p in zip(result, expected, strict=True):
        assert relative_error(k, p) < 2e-6
    assert [partial is None for partial in seen[0]] == [True, False, False, True]


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_by_atomics(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = stage_of("tanh", scheme="heun", tied=tied)
    x, g = inputs(40)
    expected = gradients_by("reference")(tested, x, g)
    monkeypatch.setenv("RESODE_ATOMICS", "1")
    assert plan.spec_of(problem_of(tested)).atomic
    for k, p in zip(TRITON(tested, x, g), expected, strict=True):
        assert relative_error(k, p) < 2e-6
    torch.use_deterministic_algorithms(True)
    try:
        assert not plan.spec_of(problem_of(tested)).atomic
    finally:
        torch.use_deterministic_algorithms(False)


@triton.jit
def where_a_tile_begins(out, tile, rows, S: tl.constexpr):
    begin, _, _ = stage.tile_of(tile, rows, S)
    tl.store(out, begin)


def test_addresses_have_64_bits() -> None:
    spec = plan.spec_of(problem_of(stage_of("tanh", 64, 64, 2)))._replace(rows=32, chunk=32)
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    where_a_tile_begins[(1,)](out, 2_000_000, 70_000_000, spec)
    assert out.item() == 2_000_000 * 32 * 64 > 2**31


def test_tf32_only_if_torch_allows_it() -> None:
    """By the old setting and by the new one; the old one may not be asked after the new was set."""
    script = """
import torch
from resode_kernels.backends.triton.plan import precision
assert precision() == "ieee"
torch.set_float32_matmul_precision("high")
assert precision() == "tf32"
torch.set_float32_matmul_precision("highest")
assert precision() == "ieee"
torch.backends.cuda.matmul.fp32_precision = "tf32"
assert precision() == "tf32"
torch.backends.cuda.matmul.fp32_precision = "none"
torch.backends.fp32_precision = "tf32"
assert precision() == "tf32"
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ------------------------------------------------------------------------------------------- tuning


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RESODE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "_remembered", {})
    return tuning.cache_file()


def test_the_fastest_tile_is_found_once_and_remembered(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = tiles.REVERSE[64]
    measured: list[Tile] = []

    def seconds(tile: Tile) -> float:
        measured.append(tile)
        return {candidates[0]: 3.0, candidates[1]: 1.0}.get(tile, 2.0)

    assert tuning.best(("a", 1), candidates, seconds) == candidates[1]
    assert measured == list(candidates)
    assert tuning.best(("a", 1), candidates, seconds) == candidates[1]
    monkeypatch.setattr(tuning, "_remembered", {})  # another process: it reads the file
    assert tuning.best(("a", 1), candidates, seconds) == candidates[1]
    assert len(measured) == len(candidates)
    assert tuning.best(("a", 2), candidates, seconds) == candidates[1]
    assert len(measured) == 2 * len(candidates)


def test_a_tile_that_does_not_fit_is_not_taken(cache: Any) -> None:
    from triton.runtime.errors import OutOfResources

    first, *others = tiles.REVERSE[64]

    def seconds(tile: Tile) -> float:
        if tile == first:
            raise OutOfResources(2, 1, "shared memory")
        return 1.0

    assert tuning.best(("b",), (first, *others), seconds) == others[0]


def test_a_broken_or_unwritable_cache_does_no_harm(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = tiles.REVERSE[64]
    cache.write_text('{"c": [1')
    assert tuning.best(("c",), candidates, lambda tile: tile.rows) in candidates
    blocked = cache.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("RESODE_CACHE", str(blocked))
    assert tuning.best(("d",), candidates, lambda tile: -tile.rows) == candidates[0]


def test_a_trial_runs_the_problem_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed on a GPU: a few steps, without touching x."""
    import triton.testing

    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **_: run() or 1.0)
    for options in (RULES[1], RULES[4], RULES[8], RULES[9]):
        problem = problem_of(stage_of("tanh", DIM, HIDDEN, 9, **options))
        x = inputs()[0]
        before = x.clone()
        for reverse in (False, True):
            assert fused._seconds(problem, x, Tile(16, 16, 128), reverse) == 1.0
        assert torch.equal(x, before)


def test_nothing_is_measured_under_deterministic_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuning.measures(OnGPU())  # type: ignore[arg-type]
    assert not tuning.measures(torch.zeros(1))
    torch.use_deterministic_algorithms(True)
    try:
        assert not tuning.measures(OnGPU())  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tuning.measures(OnGPU())  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- dispatch


def test_auto_picks_triton_on_gpus_and_only_for_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert backends.choose("auto", gpu, dtype) == "triton"
        assert backends.choose("triton", gpu, dtype) == "triton"
    assert backends.choose("auto", gpu, torch.float64) == "reference"
    monkeypatch.setattr(backends.triton, "unavailable", lambda: "no")
    assert backends.choose("auto", gpu, torch.float32) == "reference"


def refused(match: str, **options: Any) -> None:
    dtype = options.pop("dtype", torch.float32)
    device = options.pop("device", "cpu")
    with pytest.raises(rk.BackendUnavailableError, match=match):
        rk.MLPStage(4, 5, 2, backend="triton", dtype=dtype, device=device)(
            torch.zeros(3, 4, dtype=dtype, device=device)
        )


def test_what_triton_does_not_take_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("takes float32, float16 and bfloat16, not float64", dtype=torch.float64)
    refused("'meta'", device="meta")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused("runs on GPUs, not on the CPU; to try it there, set TRITON_INTERPRET=1")
    with pytest.raises(rk.BackendUnavailableError, match="TRITON_INTERPRET=1"):
        rk.ResidualStage([torch.nn.Linear(4, 4)], backend="triton")(torch.zeros(2, 4))


def test_a_missing_or_old_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backends.triton, "installed", lambda: "3.1.0")
        refused(r"Triton 3\.1\.0 is too old; the kernels need 3\.\d or later")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(backends.triton, "_found", backends.triton._find())
    refused("Triton is not installed; `pip install triton`")


def test_the_package_does_without_triton() -> None:
    """And does not import it before something is to run."""
    script = """
import sys, importlib.util
import torch
loaded = "triton" in sys.modules  # torch may have needed it
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)
sys.modules["triton"] = None
import resode_kernels as rk
rk.MLPStage(4, 5, 2)(torch.zeros(3, 4)).sum().backward()
rk.ResidualStage([torch.nn.Linear(4, 4)])(torch.zeros(3, 4)).sum().backward()
assert not loaded or "resode_kernels.backends.triton.stage" not in sys.modules
from resode_kernels import info
assert any("Triton is not installed" in line for line in info.lines())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_torch_compile_sees_one_graph() -> None:
    tested = stage_of("tanh", DIM, HIDDEN, 2, backend="triton")
    x, g = inputs(5)
    expected = gradients(tested, x, g)
    compiled = torch.compile(tested, fullgraph=True, backend="aot_eager")
    x = x.detach().requires_grad_()
    y = compiled(x)
    result = [y.detach(), *torch.autograd.grad(y, [x, *tested.parameters()], g)]
    for k, p in zip(result, expected, strict=True):
        assert torch.equal(k, p)
