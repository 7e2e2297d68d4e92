"""``LinearStage``: blocks f(x) = θ x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import checks, functional, reference
from ..defaults import LinearOptions
from ..options import StageOptions, documents_options, positive_int
from .base import Fixed, StackedStage, init_linear


@documents_options
class LinearStage(StackedStage):
    """``depth`` residual steps with f(x) = θ x.

    ``stage(x)`` takes and returns [..., dim]. The parameter ``weight`` is [blocks, dim, dim]. There
    are ``depth`` blocks, ``depth + 1`` with ``scheme="heun"``, and a single one if ``tied``.
    """

    stacked = ("weight",)
    dim = Fixed()

    def __init__(
        self,
        dim: int,
        depth: int,
        tied: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__(depth, tied, options, LinearOptions)
        self.dim = dim = positive_int("dim", dim)
        checks.parameter_dtype(dtype)
        self.weight = nn.Parameter(
            torch.empty(self.num_blocks, dim, dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.refuse_changes()
        self.warn_of_defaults()
        return functional.run_linear(x, self.weight, self.depth, self.options)

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        return reference.Linear(self.in_block(n, self.weight, x)).f(x, n)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {super().extra_repr()}"
