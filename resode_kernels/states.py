"""States: a state is a tensor or a tuple of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]


def parts(x: Any) -> tuple[Any, ...]:
    """The tensors of a state."""
    return x if isinstance(x, tuple) else (x,)


def state_like(x: Any, tensors: Sequence[Any]) -> Any:
    """The tensors as a state of x's kind: one tensor, or a tuple."""
    return tuple(tensors) if isinstance(x, tuple) else tensors[0]


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and cotangents in a stage with ``stream="float32"``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def in_stream(x: State, stream: str = "float32") -> Any:
    """The input of a stage as the state x[0], in the dtype of the option ``stream``."""
    if stream == "input":
        return x
    return state_like(x, [t.to(stream_dtype(t.dtype)) for t in parts(x)])
