"""Updates of states, and bias with activation, each in one pass over memory (csrc/cuda/
elementwise.cu). Tensors are float32, float16 or bfloat16; arithmetic is in float32.

    combine      x + Σ a_i y_i         reads every tensor once and writes one
    activated    σ(z + b)              reads z, writes u
    times_slope  d · σ′(z + b)         reads d and z, writes one
    slope_term   d · σ′(z)             reads d and z when ``combine`` adds it, writes nothing
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import reference
from ..combining import empty_sum, in_pytorch, in_step
from ..rows import dense, laid_out_like
from .arguments import DTYPES, array, rows_of
from .gpu import gpu_of, module


class Term:
    """The term y σ′(x), or y if x is None. ``combine`` computes it when it adds it."""

    def __init__(self, y: Tensor, x: Tensor | None = None, activation: str = "identity") -> None:
        self.y, self.x, self.activation = y, x, activation

    @property
    def tensors(self) -> list[Tensor]:
        return [self.y] if self.x is None else [self.y, self.x]

    def computed(self) -> Tensor:
        return self.y if self.x is None else times_slope(self.y, self.x, None, self.activation)


def slope_term(d: Tensor, z: Tensor, activation: str) -> Term:
    """d · σ′(z), which ``combine`` computes when it adds it."""
    z = dense(z)
    return Term(laid_out_like(d, z), z, activation)


@reference.on_states
def combine(a: Sequence[float], y: Sequence[Tensor | Term]) -> Tensor:
    """``reference.combine`` in one pass, for up to five terms that are dense and laid out alike.
    PyTorch adds all others, terms of other dtypes, and sums that autograd has to record."""
    terms = [t if isinstance(t, Term) else Term(t) for t in y]
    tensors = [t for term in terms for t in term.tensors]
    out = empty_sum(tensors)
    if (
        len(terms) > module().most_terms
        or not in_step(out, tensors)
        or any(t.dtype not in DTYPES for t in tensors)
    ):
        return in_pytorch(a, [term.computed() for term in terms], out.dtype)
    module().combine(
        gpu_of(out),
        array(out),
        out.numel(),
        [
            (float(factor), array(term.y), array(term.x), term.activation)
            for factor, term in zip(a, terms, strict=True)
        ],
    )
    return out


def activated(
    z: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype | None = None
) -> Tensor:
    """σ(z + b), in ``dtype`` or, if that is None, in z's dtype."""
    z = dense(z)
    return _apply_activation(z, bias, None, activation, dtype or z.dtype)


def times_slope(d: Tensor, z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """d · σ′(z + b), in the wider of the dtypes of d and z."""
    z = dense(z)
    dtype = torch.promote_types(d.dtype, z.dtype)
    return _apply_activation(z, bias, laid_out_like(d, z), activation, dtype)


def _apply_activation(
    z: Tensor, bias: Tensor | None, d: Tensor | None, activation: str, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_like(z, dtype=dtype)
    module().apply_activation(
        gpu_of(z), rows_of(z), array(out), array(z), array(bias), array(d), activation
    )
    return out
