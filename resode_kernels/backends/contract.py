"""What a backend is: it runs the two passes of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..problem import Kept, Problem
from ..reference import Combine


class ForwardIO(NamedTuple):
    """The tensors of a forward pass (shapes: ``resode_kernels.fused.ops``)."""

    x: Tensor
    """x[0]."""
    y: Tensor
    """Result: x[N]."""
    kept: Kept
    """Results: what the reverse pass needs."""
    statistics: Tensor
    """Result: the batch statistics (``Problem.statistics``), initialized to zero."""


class ReverseIO(NamedTuple):
    """The tensors of a reverse pass."""

    start: Tensor
    """x[N]; with the reverse rule ``exact`` x[0], with ``recorded`` the last anchor."""
    kept: Kept
    """As the forward pass left it."""
    cotangent: Tensor
    """∂L/∂x[N]."""
    gradients: Sequence[Tensor | None]
    """Results: the gradients of x[0] and of every parameter; None: not needed."""
    nonfinite: Tensor | None
    """Result: an int32, raised to the largest n whose point p is not finite; None: not checked."""


class Backend(Protocol):
    """A module, or an object, with these members."""

    @property
    def name(self) -> str:
        """The value of the option ``backend``."""

    @property
    def automatic_on(self) -> tuple[str, ...]:
        """The types of devices on which ``"auto"`` may pick this backend."""

    @property
    def combine(self) -> Combine | None:
        """Updates the states of a stage of modules; None if this backend cannot."""

    def unavailable(self) -> str | None:
        """Why this backend cannot be used on this machine, or None if it can."""

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run an x of this device and dtype, or None if it can."""

    def forward(self, problem: Problem, io: ForwardIO) -> None: ...

    def reverse(self, problem: Problem, io: ReverseIO) -> None: ...


class BackendUnavailableError(RuntimeError):
    """The option ``backend`` names a backend that cannot be used."""
