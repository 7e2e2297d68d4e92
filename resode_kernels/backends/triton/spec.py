"""The constants that a depth-fused kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The part of a problem that a program works on at a time, and its number of threads."""

    rows: int
    """Rows of the state. A program's states and cotangents are [rows, width] in registers."""
    chunk: int
    """Hidden units of an MLP: the rows of W1 and columns of W2 that are on chip at a time."""
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
    """The precision of products of float32 numbers: ``"ieee"`` or ``"tf32"``."""
    widen: bool
    """Multiply operands as float32 after rounding them: Triton's interpreter needs it."""
    atomic: bool
    """Add gradients by float atomics, in no particular order."""

    # How a reverse step finds its point p, and what it does with the evaluation φ(p).
    exact: bool = False
    """p is the exact state: an anchor, or recomputed from one."""
    moves: bool = True
    """The next state is x − h φ(p); otherwise (``paper``) it is p."""
    shares: bool = False
    """f_n(p) is also the next step's first evaluation."""
    have: int = 0
    """The number of evaluations of φ to extrapolate from; 0: p = x − h ψ(x), the reverse step."""
    keep: int = 0
    """The number of evaluations of φ to keep for the next steps."""
    corrections: int = 0

    def of_forward_kernel(self) -> KernelSpec:
        """The spec without the fields of the reverse kernel: all rules share a forward kernel."""
        return self._replace(
            exact=False, moves=True, shares=False, have=0, keep=0, corrections=0, atomic=False
        )
