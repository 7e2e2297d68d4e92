"""The reverse rule ``recorded``: the reverse pass stays within half a level of the forward pass,
and every backend computes the same."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    BLOCKS,
    by_kind,
    crews_of,
    gradients,
    kernel_gradients,
    make_conv_stage,
    make_stage,
    problem_of,
    relative_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import (
    SEQUENCES,
    Observed,
    assert_reversed_as_accurately,
    bits_of,
    forward_by,
    off_bound,
    reverse_by,
    rotated,
    scales_of,
    walk_back,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import resode_kernels as rk
from resode_kernels import recording, reference
from resode_kernels.backends import cpp
from resode_kernels.backends.engine import REFERENCE
from resode_kernels.fused import ops
from resode_kernels.options import BITS
from resode_kernels.problem import Problem
from resode_kernels.recording import Recorder, RowRecorder
from resode_kernels.states import parts

needs_cpp = pytest.mark.needs_cpp
DTYPES = [torch.float32, torch.float64]

# ---------------------------------------------------------------------------- |x[n] − x̂[n]|


class Wave:
    """A network of random functions of tensors of any shape."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.phases = torch.rand(64, 2, generator=generator, dtype=torch.float64) * 6

    def block(self, n: int) -> reference.Block:
        a, b = self.phases[n].tolist()
        return reference.Function(lambda x: torch.sin(3 * x + a) * torch.cos(5 * x.roll(1, -1) + b))


RECORDERS = {"modules": Recorder, "fused": RowRecorder}
if cpp.unavailable() is None:
    RECORDERS["C++"] = cpp.CppRecorder


@st.composite
def states(draw: st.DrawFn, recorder: str) -> Tensor:
    """Of any shape; images in both layouts."""
    if recorder == "fused":
        sizes = st.tuples(st.integers(1, 5), st.integers(1, 70))
    else:
        sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    images = st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 3), st.integers(1, 4))
    shape = draw(sizes | images)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(tuple(shape), generator=generator) * draw(st.sampled_from([1e-3, 1.0, 100.0]))
    if x.dim() == 4 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    return x.to(draw(st.sampled_from(DTYPES)))


@pytest.mark.parametrize("recorder", RECORDERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_estimates_are_within_half_a_level(recorder: str, data: st.DataObject) -> None:
    """As the forward pass records them and, but for N roundings, as the reverse pass restores
    them."""
    x, bits = data.draw(states(recorder)), data.draw(st.sampled_from(BITS))
    depth = data.draw(st.integers(1, 12) | st.just(64))
    step = data.draw(st.sampled_from([1 / depth, 1.0]))
    network = Wave(data.draw(st.integers(0, 10**6)))
    scheme = reference.Euler([network.block(n) for n in range(depth)], step)
    observed = Observed(RECORDERS[recorder]())
    every = [bits] * (depth - 1) + [0]
    _, record = reference.record(scheme, x, every, observed)
    assert len(observed.steps) == depth - 1
    rows, eps, estimates = observed.recorder.rows, torch.finfo(x.dtype).eps, [x]
    for after, estimate, (increment,) in observed.steps:
        off = rotated(rows(after, estimate)) - rotated(rows(estimate, estimate))
        bound = off_bound(increment.scales, off.shape[1], bits, x.dtype)
        # x − x̂ and x̂ + Q(x − x̂) are rounded, and R spreads the errors of four elements.
        bound += 2 * eps * max(float(t.abs().max()) for t in (after, estimate))
        assert (off.abs() <= bound).all()
        estimates.append(estimate)
    drift = torch.zeros_like(x, dtype=torch.float64)
    restored = walk_back(record, RECORDERS[recorder]())
    for n in reversed(range(depth)):
        assert ((restored[n].double() - estimates[n].double()).abs() <= drift).all(), n
        if n:  # two sums are rounded, and two increments
            drift += eps * torch.maximum(estimates[n].abs(), estimates[n - 1].abs()).max()
            drift += 8 * eps * float(observed.steps[n - 1][2][0].scales.max())


def points_of(stage: rk.LinearStage, problem: Any, kept: Any, rows: int) -> dict[int, Tensor]:
    """Of a linear stage the points p of the C++ reverse pass. Their only trace is in the gradient
    of a weight, h gᵀ p. A cotangent that is zero in all rows but one shows that row's."""
    h, weight = stage.options.resolved_step(stage.depth), stage.weight.detach().double()
    dim = weight.shape[1]
    found = {n: torch.empty(rows, dim, dtype=torch.float64) for n in range(stage.depth)}
    for r in range(rows):
        g = torch.zeros(rows, dim, dtype=stage.weight.dtype)
        g[r] = torch.randn(dim)
        _, grad = reverse_by(cpp, problem, kept, g)
        cotangent = g[r].double()
        for n in reversed(range(stage.depth)):
            found[n][r] = cotangent @ grad[n].double() / (h * cotangent @ cotangent)
            cotangent = cotangent + h * cotangent @ weight[n]
    return found


@needs_cpp
@torch.no_grad()
@given(
    rows=st.integers(1, 4),
    dim=st.integers(1, 70),
    depth=st.integers(1, 9) | st.just(64),
    bits=st.sampled_from(SEQUENCES),
    anchor_every=st.none() | st.integers(1, 5),
    whole=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_points_of_fused_kernels_are_within_half_a_level(
    rows: int,
    dim: int,
    depth: int,
    bits: Any,
    anchor_every: int | None,
    whole: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """What the C++ kernels linearize at, against the states of their own forward pass."""
    torch.manual_seed(seed)
    options = {"bits": bits_of(bits, depth), "anchor_every": anchor_every}
    step = 1.0 if whole else None
    stage = rk.LinearStage(dim, depth, dtype=dtype, reverse="recorded", step=step, **options)
    stage.weight.mul_(0.3 / (math.sqrt(depth) if whole else 1))
    problem, x = problem_of(stage), torch.randn(rows, dim, dtype=dtype)
    _, kept = forward_by(cpp, problem, x)
    scales, points = scales_of(problem, kept), points_of(stage, problem, kept, rows)
    h, eps = stage.options.resolved_step(depth), torch.finfo(dtype).eps
    used = problem.method.increments()
    for n in range(depth):
        state = x
        if n:
            state = rk.functional.linear_stage(x, stage.weight[:n], step=h, backend="cpp")
        # Of the states, N roundings of the walk, and roundings of the gradients that show p.
        bound = (8 + 2 * depth + dim) * eps * float(state.abs().max())
        if n and used[n - 1]:
            bound = bound + off_bound(scales[n - 1], dim, used[n - 1], dtype)
        assert ((rotated(state) - rotated(points[n])).abs() <= bound).all(), n


# -------------------------------------------------------------------------- every backend the same


def stage_of(kind: str, dim: int, hidden: int, depth: int, **options: Any) -> rk.Stage:
    if kind in ("basic", "bottleneck"):
        return make_conv_stage(kind, "tanh", dim, depth, hidden=hidden, **options)
    return make_stage(kind, dim, hidden, depth, **options)


def assert_same(kernel: list[Tensor], stage: rk.Stage, x: Tensor, g: Tensor) -> None:
    """As the reference's output and gradients, in float64. A gradient may be the small difference
    of large numbers, so that its error is small beside the others."""
    expected = by_kind(stage, gradients(stage.configure(backend="reference"), x, g))
    largest = max(float(np.linalg.norm(r)) for r in expected[1:])
    for k, r in zip(by_kind(stage, kernel), expected, strict=True):
        error = float(np.linalg.norm(np.asarray(k) - np.asarray(r)))
        assert error < 1e-12 * max(float(np.linalg.norm(r)), 0.1 * largest)


@needs_cpp
@given(
    kind=st.sampled_from([*BLOCKS, "basic", "bottleneck"]),
    bits=st.sampled_from(SEQUENCES),
    scheme=st.sampled_from(["euler", "heun"]),
    anchor_every=st.none() | st.integers(1, 10),
    step=st.none() | st.floats(-0.5, 0.5) | st.just(1.0),
    rows=st.integers(1, 60),
    dim=st.integers(1, 70) | st.integers(128, 150),
    hidden=st.integers(1, 70),
    depth=st.integers(1, 9),
    tied=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=250, deadline=None)
def test_kernels_agree_with_the_reference(
    kind: str,
    bits: Any,
    rows: int,
    dim: int,
    hidden: int,
    depth: int,
    threads: int,
    seed: int,
    **options: Any,
) -> None:
    """In float64, where roundings of the states decide no code."""
    torch.manual_seed(seed)
    options |= {"reverse": "recorded", "bits": bits_of(bits, depth), "dtype": torch.float64}
    if kind in ("basic", "bottleneck"):
        # Norms of a few numbers only are of a large condition.
        dim, hidden = 4 + dim % 40, 4 + hidden % 20
        shape: tuple[int, ...] = (3, dim, 3, 2 + rows % 3)
    else:
        shape = (rows, dim)
    stage = stage_of(kind, dim, hidden, depth, **options)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    assert_same(kernel_gradients(stage, x, g, threads), stage, x, g)


@needs_cpp
@pytest.mark.parametrize("bits", SEQUENCES)
@pytest.mark.parametrize("kind", ["linear", "tanh", "basic"])
def test_instruction_sets_agree_with_the_reference(
    kind: str, bits: Any, instruction_set: str
) -> None:
    options = {"reverse": "recorded", "bits": bits_of(bits, 5), "dtype": torch.float64}
    stage = stage_of(kind, 37, 19, 5, **options)
    shape = (2, 37, 4, 3) if kind == "basic" else (21, 37)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    assert_same(kernel_gradients(stage, x, g, 1), stage, x, g)


@needs_cpp
@pytest.mark.parametrize("bits", SEQUENCES)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize(("threads", "rows"), [(2, 17), (8, 60)], indirect=["threads"])
def test_crews_of_threads(bits: Any, scheme: str, threads: int, rows: int) -> None:
    """Threads that divide the columns of a row divide its groups."""
    options = {"reverse": "recorded", "bits": bits_of(bits, 4), "anchor_every": 3, "scheme": scheme}
    stage = make_stage("tanh", 261, 270, 4, dtype=torch.float64, **options)
    x, g = torch.randn(2, rows, 261, dtype=torch.float64)
    crews, each = crews_of(stage, x)
    assert each > 1
    assert (crews > 1) == (threads > 2)
    assert_same(kernel_gradients(stage, x, g, threads), stage, x, g)


@needs_cpp
@pytest.mark.parametrize("bits", SEQUENCES)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["tanh", "gelu", "linear", "basic", "bottleneck"])
def test_as_accurate_as_pytorch(
    kind: str, bits: Any, scheme: str, instruction_set: str, nan_memory: None
) -> None:
    options = {"reverse": "recorded", "bits": bits_of(bits, 5), "scheme": scheme}
    stage = stage_of(kind, 39, 45 if kind == "tanh" else 17, 5, **options)
    shape = (2, 39, 5, 4) if kind in ("basic", "bottleneck") else (37, 39)
    x, g = torch.randn(2, *shape)
    assert_reversed_as_accurately(stage, x, g, cpp)


@needs_cpp
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters(storage: torch.dtype, nan_memory: None) -> None:
    stage = make_stage("gelu", 39, 45, 5, dtype=storage, reverse="recorded")
    assert_reversed_as_accurately(stage, *torch.randn(2, 37, 39), cpp)


# --------------------------------------------------------------------------------------- edges


@needs_cpp
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("bits", [2, 8, [None]])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("shape", [(0, 20), (1, 20), (3, 1), (2, 0, 20)], ids=str)
def test_one_step_records_nothing_and_is_exact(
    shape: tuple[int, ...], scheme: str, bits: Any, backend: str
) -> None:
    stage = make_stage("tanh", shape[-1], 8, 1, scheme=scheme, backend=backend, dtype=torch.float64)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    exact = gradients(stage.configure(backward="stored"), x, g)
    found = gradients(stage.configure(backward="adjoint", reverse="recorded", bits=bits), x, g)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


@needs_cpp
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("kind", ["tanh", "basic"])
def test_no_rows(kind: str, backend: str) -> None:
    stage = stage_of(kind, 20, 8, 4, reverse="recorded", backend=backend)
    stage.eval()
    x = torch.randn(0, 20, 3, 3) if kind == "basic" else torch.randn(0, 20)
    y, *grads = gradients(stage, x, x)
    assert y.shape == x.shape
    assert all((t == 0).all() for t in grads)


@needs_cpp
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("kind", ["tanh", "linear", "basic"])
@pytest.mark.parametrize("tied", [False, True])
def test_states_that_are_kept_are_exact(kind: str, scheme: str, tied: bool, backend: str) -> None:
    """To the bit the gradients of ``backward="stored"``. (States take a multiple of 64 bytes, since
    roundings of PyTorch's products may depend on where in memory they lie.)"""
    stage = stage_of(kind, 32, 8, 5, scheme=scheme, tied=tied, backend=backend, dtype=torch.float64)
    shape = (2, 32, 3, 3) if kind == "basic" else (8, 32)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    exact = gradients(stage.configure(backward="stored"), x, g)
    for options in ({"bits": [None] * 5}, {"bits": 2, "anchor_every": 1}):
        recorded = {"backward": "adjoint", "reverse": "recorded", **options}
        found = gradients(stage.configure(**recorded), x, g)
        assert all(map(torch.equal, found, exact))


@needs_cpp
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_increments_of_zero(backend: str) -> None:
    """A block that changes nothing, before one that does."""
    stage = rk.MLPStage(40, 8, 4, reverse="recorded", backend=backend, dtype=torch.float64)
    with torch.no_grad():
        stage.w2[0] = stage.b2[0] = stage.w2[2] = stage.b2[2] = 0
    x, g = torch.randn(2, 5, 40, dtype=torch.float64)
    found = gradients(stage, x, g)
    assert relative_error(found[1], gradients(stage.configure(backward="stored"), x, g)[1]) < 1e-3
    problem = problem_of(stage.configure(backward="adjoint"))
    _, kept = forward_by(cpp if backend == "cpp" else REFERENCE, problem, x)
    scales = scales_of(problem, kept)
    assert (scales[0] == 0).all()
    assert (scales[1] != 0).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_errors_do_not_add_up(backend: str) -> None:
    """Whatever the slopes: x + f(x) with expanding blocks, where every other rule is of no use."""
    torch.manual_seed(1)
    stage = rk.MLPStage(48, 96, 48, step=1.0, backend=backend, dtype=torch.float64)
    with torch.no_grad():
        stage.w1.mul_(2)
        stage.w2.mul_(2)
    x, g = torch.randn(2, 32, 48, dtype=torch.float64)
    _, *exact = gradients(stage.configure(backward="stored"), x, g)

    def error(**options: Any) -> float:
        stage.configure(**{"backward": "adjoint", "order": None, "nonfinite": "ignore", **options})
        _, *found = gradients(stage, x, g)
        flat = [torch.cat([t.flatten() for t in each]) for each in (found, exact)]
        return relative_error(*flat)

    errors = [error(reverse="recorded", bits=bits) for bits in (4, 8, 12, 16)]
    assert error(reverse="refined", order=3) > 0.3
    assert errors[-1] < 1e-3
    ratios = [a / b for a, b in pairwise(errors)]
    assert ratios == pytest.approx([16, 16, 16], rel=0.35)  # as the levels


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_without_gradients_nothing_is_recorded(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, x = rk.MLPStage(20, 8, 4, reverse="recorded", backend=backend), torch.randn(3, 20)
    expected, forward, problems = stage(x), ops.forward, []

    def seen(x: Tensor, problem: Problem, backend: str) -> Any:
        problems.append(problem)
        return forward(x, problem, backend)

    monkeypatch.setattr(ops, "forward", seen)
    with torch.no_grad():
        assert torch.equal(stage(x), expected)
    stage(x)
    assert [p.kept_names for p in problems] == [["anchors"], ["anchors", "codes", "scales"]]
    assert [p.anchor_count for p in problems] == [0, 1]


# ------------------------------------------------------------------------------------- the options


def test_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order does not apply to .*'recorded'.* by bits.*not 2"):
        rk.MLPStage(8, 8, 4, reverse="recorded", order=2)


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 17, 32, -2, [8, 8, 7, 8], [8, None, 0, 8]], ids=str)
def test_other_numbers_of_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"^bits(\[2\])? must be (one of 2, 3, 4|at least 1)"):
        rk.MLPStage(8, 8, 4, reverse="recorded", bits=bits)


@pytest.mark.parametrize("bits", [8.0, "8", True, None, [8, 2.0, 8, 8], [8, "4", 8, 8]], ids=str)
def test_bits_are_integers(bits: Any) -> None:
    with pytest.raises(TypeError, match=r"^bits(\[1\])? must be an int, not"):
        rk.MLPStage(8, 8, 4, reverse="recorded", bits=bits)


@pytest.mark.parametrize("bits", [[8, 8, 8], [8] * 5, []], ids=str)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_a_sequence_has_an_entry_for_each_step(bits: Any, scheme: str) -> None:
    stage = rk.MLPStage(8, 8, 4, reverse="recorded", bits=bits, scheme=scheme)
    with pytest.raises(ValueError, match=r"bits must have an entry for each of the 4 steps, not "):
        stage(torch.randn(2, 8))
    stage.configure(bits=(8, None, 2, 4))(torch.randn(2, 8)).sum().backward()


def test_configure_to_recorded_and_back() -> None:
    stage = rk.MLPStage(32, 8, 6, reverse="refined", order=3, dtype=torch.float64)
    x, g = torch.randn(2, 5, 32, dtype=torch.float64)
    before = gradients(stage, x, g)
    with pytest.raises(ValueError, match="order does not apply to reverse='recorded'"):
        stage.configure(reverse="recorded")
    assert stage.options.reverse == "refined"  # a refused change changes nothing
    coarse = gradients(stage.configure(reverse="recorded", order=None, bits=[4] * 6), x, g)
    fine = gradients(stage.configure(bits=16), x, g)
    after = gradients(stage.configure(reverse="refined", order=3), x, g)
    assert all(map(torch.equal, before, after))
    exact = gradients(stage.configure(backward="stored"), x, g)
    errors = [relative_error(found[1], exact[1]) for found in (coarse, fine)]
    assert 1e-6 < errors[0] < 1e-2
    assert errors[1] < 1e-3 * errors[0]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["tanh", "linear", "basic"])
def test_hooks_of_saved_tensors_see_codes_and_scales(kind: str, backend: str) -> None:
    """They move them to a list and back, and the backward pass reads what they give back."""
    options = {"bits": [4, None, 16, 2, 8], "backend": backend, "dtype": torch.float64}
    stage = stage_of(kind, 40, 8, 5, reverse="recorded", **options)
    x, g = torch.randn(2, *((2, 40, 3, 2) if kind == "basic" else (12, 40)), dtype=torch.float64)
    expected, moved = gradients(stage, x, g), []

    def pack(t: Tensor) -> int:
        moved.append(t.detach().clone())
        return len(moved) - 1

    def run() -> list[Tensor]:
        moved.clear()
        leaf = x.clone().requires_grad_()
        with saved_tensors_hooks(pack, lambda i: moved[i]):
            y = stage(leaf)
        for change in changes:
            change(next(t for t in moved if t.dtype == torch.uint8))
        return [y.detach(), *torch.autograd.grad(y, [leaf, *stage.parameters()], g)]

    changes: list[Any] = []
    assert all(map(torch.equal, run(), expected))
    kept = {t.dtype: t for t in moved if t.dtype in (torch.uint8, torch.bfloat16)}
    assert kept[torch.uint8].nbytes == 12 * 5 * (4 + 16 + 2)
    assert kept[torch.bfloat16].shape == (3, 12, 2)
    changes.append(Tensor.zero_)
    assert max(map(relative_error, run(), expected)) > 1e-6


def test_what_is_kept_has_the_documented_size() -> None:
    """bits · ⌈row/8⌉ bytes and 2 · ⌈row/32⌉ bytes for each row and step."""
    for dim in (1, 8, 31, 33, 64):
        for bits in BITS:
            problem = problem_of(rk.LinearStage(dim, 5, reverse="recorded", bits=bits))
            _, kept = forward_by(REFERENCE, problem, torch.randn(7, dim))
            assert kept.codes is not None
            assert kept.scales is not None
            assert kept.codes.nbytes == 4 * 7 * bits * math.ceil(dim / 8)
            assert kept.codes.nbytes == 4 * 7 * recording.code_bytes(dim, bits)
            assert kept.scales.nbytes == 4 * 7 * 2 * math.ceil(dim / 32)
            assert kept.anchors.shape == (1, 7, dim)


def test_a_tuple_is_recorded_part_by_part() -> None:
    x = torch.randn(3, 40), torch.randn(2, 5, 8, dtype=torch.float64)
    block = reference.Function(torch.sin)
    pair = type(
        "Pair", (reference.Block,), {"f": lambda self, x, k: tuple(block.f(t, k) for t in x)}
    )
    scheme = reference.Euler([pair()] * 3, 0.5)
    _, both = reference.record(scheme, x, [4, 4, 0], Recorder())
    alone = reference.Euler([block] * 3, 0.5)
    for i, part in enumerate(parts(x)):
        _, one = reference.record(alone, part, [4, 4, 0], Recorder())
        for n in (0, 1):
            assert all(map(torch.equal, both.increments[n][i], one.increments[n][0]))
        assert torch.equal(both.kept[2][i], one.kept[2])
