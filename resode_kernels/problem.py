"""What a backend is given to run: a block, its parameters and a method."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import Method


class Problem(NamedTuple):
    block: str
    """``"mlp"`` or ``"linear"``."""
    activation: str
    """``"identity"`` for blocks without one."""
    parameters: tuple[Tensor | None, ...]
    """mlp: w1, b1, w2, b2; linear: weight. Stacked over blocks; one block only: tied."""
    method: Method

    @property
    def tied(self) -> bool:
        first = self.parameters[0]
        return first is not None and first.shape[0] == 1

    @property
    def blocks(self) -> int:
        """How many blocks the steps use."""
        return self.method.steps + (1 if self.method.scheme == "heun" else 0)

    @property
    def kept_states(self) -> int:
        keep_every = self.method.keep_every
        return (self.method.steps - 1) // keep_every if keep_every else 0

    def fields(self) -> tuple[Any, ...]:
        return (self.block, self.activation, self.parameters, *self.method)


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and cotangents inside a stage: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
