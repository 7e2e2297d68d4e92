"""The emulation of CUDA itself: what kernels may rely on holds, and mistakes are found."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable

import emulated
import numpy as np
import pytest
import torch

Run = Callable[..., str | None]
LANES = np.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4  # "groupID" and "threadID_in_group" of the PTX manual
PRODUCTS = {"f16": 0, "bf16": 1, "tf32": 2}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    source, flags = emulated.EMULATION / "kernels.cu", emulated.more_flags()
    return ctypes.CDLL(str(emulated.link("kernels.so", [(source, [])], flags, ["-shared", *flags])))


@pytest.fixture
def run(library: ctypes.CDLL) -> Run:
    """Runs a kernel with arrays and integers; returns what went wrong."""

    def call(name: str, *arguments: np.ndarray | int) -> str | None:
        function = library[f"run_{name}"]
        function.restype = ctypes.c_char_p
        error = function(
            *(
                ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int64(a)
                for a in arguments
            )
        )
        return None if error is None else error.decode()

    return call


@pytest.fixture(params=["forward", "reverse", "shuffle"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RESODE_EMULATION_ORDER", request.param)
    return request.param


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# ---- threads, barriers, shared memory


@pytest.mark.parametrize("threads", [1, 31, 32, 100, 1024])
def test_a_barrier_shows_what_all_threads_wrote(run: Run, order: str, threads: int) -> None:
    x = np.arange(3 * threads, dtype=np.int32)
    y = np.full_like(x, -1)
    assert run("reverse_blocks", x, y, 3, threads) is None
    assert (y.reshape(3, -1) == x.reshape(3, -1)[:, ::-1]).all()


def test_the_order_of_threads_changes_nothing_behind_barriers(run: Run, order: str) -> None:
    x, y = np.arange(256, dtype=np.float32), np.zeros(1, np.float32)
    assert run("sum", x, y, 256) is None
    assert y[0] == x.sum()


def test_the_order_of_threads_is_the_one_asked_for(
    run: Run, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns() -> list[int]:
        noted = np.zeros(128, np.int32)
        assert run("note_turns", np.zeros(1, np.int32), noted, 2, 64) is None
        return list(noted)

    everyone = list(range(128))
    assert sorted(turns()) == everyone
    assert turns() == turns()
    assert (turns() == everyone) == (order == "forward")
    assert (turns() == everyone[::-1]) == (order == "reverse")
    monkeypatch.setenv("RESODE_EMULATION_ORDER", "backward")
    assert "RESODE_EMULATION_ORDER" in (run("return_early") or "")


def test_every_block_starts_with_nans_in_shared_memory(run: Run) -> None:
    y = np.zeros(3 * 64, np.float32)
    assert run("read_shared", y, 3, 64) is None
    assert np.isnan(y).all()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("return_early", r"32 have returned, 32 wait at kernels.cu:\d+"),
        ("meet_elsewhere", r"different places: kernels.cu:\d+ and kernels.cu:\d+"),
        ("meet_by_halves", r"16 wait at kernels.cu:\d+, 48 wait at kernels.cu:\d+"),
    ],
)
def test_a_barrier_that_not_all_reach_is_an_error(run: Run, kernel: str, message: str) -> None:
    error = run(kernel)
    assert error is not None
    assert re.search(message, error)
    test_every_block_starts_with_nans_in_shared_memory(run)  # the next launch is not disturbed


def test_launches_have_the_limits_of_a_gpu(run: Run) -> None:
    assert run("bare", 1024, 48 * 1024) is None
    assert "1024 threads" in (run("bare", 1025, 48 * 1024) or "")
    assert "shared memory" in (run("bare", 32, 48 * 1024 + 1) or "")
    assert "empty" in (run("bare", 0, 0) or "")
    x = np.zeros(0, np.int32)
    assert "shared memory" in (run("reverse_blocks", x, x, 1, 60 * 1024) or "")
    assert "empty" in (run("reverse_blocks", x, x, 0, 32) or "")


# ---- warps


@pytest.mark.parametrize("width", [32, 8])
def test_shuffles_move_numbers_between_lanes(run: Run, order: str, width: int) -> None:
    y = np.zeros(64, np.int32)
    lane = np.arange(64)
    first = lane // width * width
    assert run("shuffle", y, 0, 5, width, 64) is None
    assert (y == first + 5).all()
    assert run("shuffle", y, 1, 3, width, 64) is None
    assert (y == lane ^ 3).all()
    assert run("shuffle", y, 2, 2, width, 64) is None
    assert (y == np.where(lane + 2 < first + width, lane + 2, lane)).all()


def test_a_lane_that_is_not_there_has_no_number(run: Run) -> None:
    y = np.zeros(24, np.int32)
    assert run("shuffle", y, 2, 1, 32, 24) is None
    assert list(y) == [*range(1, 24), -1]


def encode(numbers: np.ndarray, product: str) -> np.ndarray:
    """Bits of the numbers in the precision, 16 or 32 of them."""
    if product == "tf32":
        return numbers.view(np.uint32)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[product]
    return torch.from_numpy(numbers).to(dtype).view(torch.int16).numpy().view(np.uint16)


def decode(bits: np.ndarray, product: str) -> np.ndarray:
    if product == "tf32":
        return (bits & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[product]
    return torch.from_numpy(bits.view(np.int16)).view(dtype).double().numpy()


@pytest.mark.parametrize("product", PRODUCTS)
def test_mma_multiplies_fragments(run: Run, order: str, product: str) -> None:
    """The PTX manual's rows and columns of the numbers a0, a1, … that a lane holds."""
    depth = 8 if product == "tf32" else 16
    a, b = (encode(normal(*shape), product) for shape in ((16, depth), (depth, 8)))
    c = normal(16, 8)
    if product == "tf32":
        rows = [GROUP, GROUP + 8, GROUP, GROUP + 8]
        columns = [MEMBER, MEMBER, MEMBER + 4, MEMBER + 4]
        b_rows = [MEMBER, MEMBER + 4]
    else:
        rows = [GROUP if i in (0, 1, 4, 5) else GROUP + 8 for i in range(8)]
        columns = [2 * MEMBER + (i & 1) + (0 if i < 4 else 8) for i in range(8)]
        b_rows = [2 * MEMBER + (i & 1) + (0 if i < 2 else 8) for i in range(4)]
    c_rows = [GROUP, GROUP, GROUP + 8, GROUP + 8]
    c_columns = [2 * MEMBER + (i & 1) for i in range(4)]

    of_a = np.stack([a[r, k] for r, k in zip(rows, columns, strict=True)], 1).copy()
    of_b = np.stack([b[r, GROUP] for r in b_rows], 1).copy()
    d = np.stack([c[r, k] for r, k in zip(c_rows, c_columns, strict=True)], 1).copy()
    assert run("multiply", d, of_a, of_b, PRODUCTS[product], 32) is None

    expected = c + decode(a, product) @ decode(b, product)
    expected = np.stack([expected[r, k] for r, k in zip(c_rows, c_columns, strict=True)], 1)
    np.testing.assert_allclose(d, expected, rtol=0, atol=2e-6)
    assert "whole warps" in (run("multiply", d, of_a, of_b, PRODUCTS[product], 16) or "")


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_deals_out_rows(run: Run, order: str, transposed: bool) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    fragments = np.zeros((32, 4, 2), np.uint16)
    assert run("load_matrices", matrices, fragments, transposed, 0) is None
    for i, matrix in enumerate(matrices):
        matrix = matrix.T if transposed else matrix
        assert (fragments[:, i, 0] == matrix[GROUP, 2 * MEMBER]).all()
        assert (fragments[:, i, 1] == matrix[GROUP, 2 * MEMBER + 1]).all()
    assert "aligned" in (run("load_matrices", matrices, fragments, transposed, 8) or "")
    assert "shared memory" in (run("load_matrices", matrices, fragments, transposed, 16) or "")


def test_loaded_fragments_multiply_to_the_product(run: Run, order: str) -> None:
    a, b, d = normal(16, 16).astype(np.float16), normal(16, 8).astype(np.float16), normal(16, 8)
    assert run("multiply_tile", a, b, d) is None
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64), rtol=0, atol=2e-6)


# ---- asynchronous copies


def test_a_copy_is_there_when_it_was_waited_for_and_not_before(run: Run) -> None:
    x, y = np.array([1, 2], np.float32), np.zeros((3, 2), np.float32)
    assert run("copy_two", x, y) is None
    np.testing.assert_array_equal(y, [[np.nan, np.nan], [1, np.nan], [1, 2]])


def test_a_copy_that_is_not_aligned_or_leaves_shared_memory_is_an_error(run: Run) -> None:
    x = np.zeros(16, np.float32)
    x = x[-x.ctypes.data % 16 // 4 :]
    assert run("copy_aside", x, 48) is None
    assert "aligned" in (run("copy_aside", x, 8) or "")
    assert "aligned" in (run("copy_aside", x[1:], 0) or "")
    assert "memory that is not" in (run("copy_aside", x, 64) or "")


# ---- numbers


def test_conversions_round_as_a_gpu_does(run: Run) -> None:
    """All numbers of 16 bits, what lies halfway between them and beside that, and any others."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    widened, widened_bfloat16 = np.zeros((2, 1 << 16), np.float32)
    assert run("widen_numbers", halves, widened, widened_bfloat16) is None
    np.testing.assert_array_equal(widened, halves.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(widened_bfloat16, (halves.astype(np.uint32) << 16).view("f4"))

    with np.errstate(invalid="ignore"):  # ∞ − ∞
        halfway = np.concatenate([(widened[:-1] + widened[1:]) / 2, widened_bfloat16])
    bits = np.concatenate(
        [
            halfway.view(np.uint32),
            (halves.astype(np.uint32) << 16) | 0x8000,
            np.arange(1 << 16, dtype=np.uint32) << 16 | 0x1000,  # halfway in TF32
            np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32),
        ]
    )
    x = np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)
    half, bfloat16, tf32 = (np.zeros(x.size, dtype) for dtype in (np.uint16, np.uint16, np.uint32))
    assert run("round_numbers", x, half, bfloat16, tf32, x.size) is None
    numbers = torch.from_numpy(x)
    for rounded, dtype in ((half, torch.float16), (bfloat16, torch.bfloat16)):
        got = torch.from_numpy(rounded.view(np.int16)).view(dtype)
        torch.testing.assert_close(got, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)

    with np.errstate(all="ignore"):
        spacing = np.exp2(np.maximum(np.frexp(x.astype(np.float64))[1], -125) - 11)
        expected = np.trunc(np.abs(x) / spacing + 0.5) * spacing  # ties away from zero
        expected = np.copysign(np.where(expected >= 2.0**128, np.inf, expected), x)
        expected = np.where(np.isfinite(x), expected, x).astype(np.float32)
    np.testing.assert_array_equal(tf32.view(np.float32), expected)
    assert not (tf32[~np.isnan(x)] & 0x1FFF).any()


# ---- what sanitizers see

RACES = [
    "no_barrier",
    "no_second_barrier",
    "too_small_a_barrier",
    "no_warp_barrier",
    "late_wait",
    "same_block",
]
OVERRUNS = ["off_by_one", "beyond_shared"]


def sanitized(sanitizer: str) -> list[str]:
    """The program of broken kernels, in the layout of memory that ThreadSanitizer knows best."""
    flags = [f"-fsanitize={sanitizer}"]
    program = emulated.link("broken", [(emulated.EMULATION / "broken.cu", [])], flags, flags)
    layout = ["setarch", "-R"]
    possible = shutil.which("setarch") and emulated.run_alone([*layout, "true"]).returncode == 0
    return [*(layout if possible else []), str(program)]


@pytest.mark.parametrize(
    ("sanitizer", "kernel"),
    [*(("thread", race) for race in RACES), *(("address", overrun) for overrun in OVERRUNS)],
)
def test_a_sanitizer_finds_the_mistake(sanitizer: str, kernel: str) -> None:
    def report(which: str) -> str:
        done = emulated.run_alone([*sanitized(sanitizer), kernel, which])
        assert (done.returncode == 0) == (which == "intact"), done.stderr
        return done.stderr

    assert "SUMMARY" not in report("intact")
    found = report("broken")
    assert {"thread": "data race", "address": "AddressSanitizer"}[sanitizer] in found
    assert f"{kernel}<true>" in found
