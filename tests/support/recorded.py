"""What tests of the reverse rule ``recorded`` share: its promise about rounding, and the records of
forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from helpers import assert_error, problem_of
from torch import Tensor

import resode_kernels as rk
from resode_kernels import recording, reference
from resode_kernels.backends import cpp
from resode_kernels.backends.contract import Backend, ForwardIO, ReverseIO
from resode_kernels.backends.engine import REFERENCE, increments_of
from resode_kernels.fused import ops
from resode_kernels.options import BITS
from resode_kernels.problem import Kept, Problem
from resode_kernels.recording import GROUP, Increment

SEQUENCES = (*BITS, "sequence")
"""Numbers of bits, and a sequence of several with None."""


def bits_of(bits: Any, depth: int) -> Any:
    """An entry of ``SEQUENCES`` as the option ``bits``."""
    if bits != "sequence":
        return bits
    cycle = (5, None, 2, 16, 3, 12, None, 8)
    return [cycle[n % len(cycle)] for n in range(depth)]


# ------------------------------------------------------------------------------------ the promise


def most_off(bits: int) -> float:
    """How far Q(v) may be off, in scales: half a level, with 2 bits one level."""
    return 0.4 if bits == 2 else 0.5 / (2 ** (bits - 1) - 1)


def rotated(v: Tensor) -> Tensor:
    """R v in float64."""
    return recording.rotate(v.double())


def spread(scales: Tensor, row: int) -> Tensor:
    """For every element the scale of its group."""
    return scales.double().repeat_interleave(GROUP, -1)[..., :row]


def rounding_bound(scales: Tensor, row: int, dtype: torch.dtype) -> Tensor:
    """How much further Q(v) may be off, because it is computed in floats. With ε = 2 roundings:

    w = R v         4 ε s: two additions of numbers up to 4 s, then halved
    w/u             2 ε s: u, 1/u, the quotient and the shift are rounded
    (q + shift) u   1 ε s: u and the product
    R               4 ε s: as above, and R spreads the errors of four elements

    An element of a group that counts as zero is off by its magnitude, below 2^−100."""
    s = spread(scales, row)
    return torch.where(s > 0, 11 * torch.finfo(dtype).eps * s, 2.0**-100)


def off_bound(scales: Tensor, row: int, bits: int, dtype: torch.dtype) -> Tensor:
    return most_off(bits) * spread(scales, row) + rounding_bound(scales, row, dtype)


# ------------------------------------------------------------------------------------ two encoders

Encoder = Callable[[Tensor, int], tuple[Tensor, Increment]]
"""v [rows, row] and bits to Q(v) and its codes."""


def encode(v: Tensor, bits: int) -> tuple[Tensor, Increment]:
    """The specification's."""
    increment = recording.encode(v, bits)
    return recording.decode(increment, bits, v.shape[1], v.dtype), increment


def encode_by_kernels(v: Tensor, bits: int) -> tuple[Tensor, Increment]:
    rows, row = v.shape
    increment = Increment(
        torch.full((rows, recording.code_bytes(row, bits)), 0xAA, dtype=torch.uint8),
        torch.full((rows, recording.groups(row)), torch.nan, dtype=torch.bfloat16),
    )
    moved = torch.full_like(v, torch.nan)
    cpp.CppRecorder().run(bits, v, torch.zeros_like(v), moved, increment)
    return moved, increment


def decode_by_kernels(increment: Increment, bits: int, row: int, dtype: torch.dtype) -> Tensor:
    moved = torch.full((len(increment.codes), row), torch.nan, dtype=dtype)
    cpp.CppRecorder().run(bits, None, torch.zeros_like(moved), moved, increment)
    return -moved


def each_instruction_set() -> Iterator[str]:
    """Each of them in turn, selected."""
    before = cpp._C.selected()
    try:
        for name in cpp._C.supported():
            cpp._C.select(name)
            yield name
    finally:
        cpp._C.select(before)


# -------------------------------------------------------------------------------- records of passes


def forward_by(backend: Backend, problem: Problem, x: Tensor) -> tuple[Tensor, Kept]:
    """x[N] and what is kept."""
    y, statistics, tensors = ops._new_states(x, problem)
    kept = problem.kept_of(tensors)
    backend.forward(problem, ForwardIO(x, y, kept, statistics))
    return y, kept


def reverse_by(backend: Backend, problem: Problem, kept: Kept, g: Tensor) -> list[Tensor]:
    """The gradients of x[0] and of every parameter that has one."""
    constant = [problem.block == "conv" and i % 5 >= 3 for i in range(len(problem.parameters))]
    wanted = [
        None if p is None or given else torch.empty_like(p)
        for p, given in zip(problem.parameters, constant, strict=True)
    ]
    gradients = [torch.empty_like(g), *wanted]
    backend.reverse(problem, ReverseIO(kept.anchors[-1], kept, g, gradients, None))
    return [t for t in gradients if t is not None]


def in_float64(problem: Problem) -> Problem:
    parameters = tuple(None if p is None else p.detach().double() for p in problem.parameters)
    return problem._replace(parameters=parameters)


def laid_out(kept: Kept, backend: Backend) -> Kept:
    """What a backend has kept as the reference lays it out: images of the C++ kernels are
    channels-last."""
    anchors = kept.anchors
    if backend is cpp and anchors.dim() == 5:
        count, images, channels, height, width = anchors.shape
        anchors = anchors.view(count, images, height, width, channels).movedim(-1, 2)
    return kept._replace(anchors=anchors)


@torch.no_grad()
def assert_reversed_as_accurately(
    stage: rk.Stage, x: Tensor, g: Tensor, backend: Backend, pytorch: Backend = REFERENCE
) -> None:
    """The rule of accuracy, for the reverse pass from one and the same record. (From records of
    their own the passes would start at states that differ by whole levels: a rounding of x[n+1]
    decides a code that lies between two.) Precise is the reference in float64."""
    problem = problem_of(stage)
    y, kept = forward_by(backend, problem, x)
    precise = in_float64(problem)
    same = laid_out(kept, backend)
    exact = [forward_by(REFERENCE, precise, x.double())[0]]
    same_in_float64 = same._replace(anchors=same.anchors.double())
    exact += reverse_by(REFERENCE, precise, same_in_float64, g.double())
    kernel = [y, *reverse_by(backend, problem, kept, g)]
    plain = [forward_by(pytorch, problem, x)[0], *reverse_by(pytorch, problem, same, g)]
    for i, (k, p, e) in enumerate(zip(kernel, plain, exact, strict=True)):
        assert_error(k, p, e, k.dtype, 2 if i < 2 else 3, f"result {i}")


def scales_of(problem: Problem, kept: Kept) -> dict[int, Tensor]:
    """The scales of every increment that is recorded, by its step."""
    steps = [n for n, bits in enumerate(problem.method.increments()) if bits]
    increments = increments_of(problem, kept)
    return {n: increment.scales for n, increment in zip(steps, increments, strict=True)}


class Observed:
    """A recorder that remembers x[n+1], x̂[n+1] and the increments d[n] of the steps that it
    records, and the states that it restores."""

    def __init__(self, recorder: recording.Recorder) -> None:
        self.recorder = recorder
        self.steps: list[tuple[Any, Any, Sequence[Increment]]] = []
        self.restored: list[Any] = []

    def estimate(self, x: Any) -> Any:
        return self.recorder.estimate(x)

    def record(self, estimate: Any, after: Any, bits: int) -> Any:
        moved, increments = self.recorder.record(estimate, after, bits)
        self.steps.append((after, moved, increments))
        return moved, increments

    def undo(self, estimate: Any, increments: Any, bits: int) -> Any:
        self.restored.append(self.recorder.undo(estimate, increments, bits))
        return self.restored[-1]


def walk_back(record: reference.Record, recorder: Any) -> dict[int, Any]:
    """The states x̂[n] as the reverse pass has them."""
    found: dict[int, Any] = {}
    for n in reversed(range(len(record.bits))):
        if n in record.kept:
            found[n] = record.kept[n]
        else:
            found[n] = recorder.undo(found[n + 1], record.increments[n], record.bits[n])
    return found
