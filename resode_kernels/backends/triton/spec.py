"""What a fused kernel is compiled for: everything about a launch that is known before it runs."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How much of a problem a program holds at a time, and how many threads it has."""

    rows: int
    """Of the state. A program's states and cotangents are [rows, width] in registers."""
    chunk: int
    """Of the hidden units of an MLP: so many rows of W1 and columns of W2 are on chip at a time."""
    threads: int


class KernelSpec(NamedTuple):
    block: str
    activation: str
    scheme: str
    tied: bool
    dim: int
    hidden: int
    width: int
    """dim, rounded up to a power of two."""
    rows: int
    chunk: int
    precision: str
    """Of products of float32 numbers: ``"ieee"`` or ``"tf32"``."""
    widen: bool
    """Multiply operands as float32 after rounding them: Triton's interpreter needs it."""
    atomic: bool
    """Add gradients by float atomics, in no particular order."""

    # How a reverse step finds its point p, and what it does with the evaluation φ(p).
    exact: bool = False
    """p is the state itself, an anchor or recomputed from one."""
    moves: bool = True
    """The next state is x − h φ(p); otherwise (``paper``) it is p."""
    shares: bool = False
    """f_n(p) is also the next step's first evaluation."""
    have: int = 0
    """Evaluations of φ to extrapolate from; none: p comes from the reverse-time step ψ."""
    keep: int = 0
    """Evaluations of φ to keep for the steps to come."""
    corrections: int = 0

    def of_forward_kernel(self) -> KernelSpec:
        """Without what only the reverse kernel needs to know: rules share a forward kernel."""
        return self._replace(
            exact=False, moves=True, shares=False, have=0, keep=0, corrections=0, atomic=False
        )
