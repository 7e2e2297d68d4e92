"""Sums of states: the conditions under which a kernel may compute one, and the sum in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference


def empty_sum(y: Sequence[Tensor]) -> Tensor:
    """Uninitialized memory for a sum, laid out like its first term, in float32 at least."""
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in y], torch.float32)
    return torch.empty_like(y[0], dtype=dtype)


def in_step(out: Tensor, y: Sequence[Tensor]) -> bool:
    """Whether a kernel may read the tensors in the order of memory: they are laid out like the
    result, and autograd does not have to record the sum."""
    return (
        all(t.stride() == out.stride() and t.device == out.device for t in y)
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in y)  # not DTensor and the like
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in y))
    )


def in_pytorch(a: Sequence[float], y: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ a_i y_i, one pass over memory per term."""
    total: Tensor = reference.combine(None, *zip(a, (y[0].to(dtype), *y[1:]), strict=True))
    return total
