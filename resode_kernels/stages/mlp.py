"""``MLPStage``: blocks f(x) = W2 σ(W1 x + b1) + b2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import checks, functional, reference
from ..defaults import KINKED, SmoothOptions
from ..options import Options, StageOptions, choice, documents_options, flag, positive_int
from .base import Fixed, StackedStage, init_linear
from .known import tensor_of


@documents_options
class MLPStage(StackedStage):
    """``depth`` residual steps with f(x) = W2 σ(W1 x + b1) + b2.

    ``stage(x)`` takes and returns [..., dim]. σ is one of ``rk.functional.ACTIVATIONS``. There are
    ``depth`` blocks, ``depth + 1`` with ``scheme="heun"``, and a single one if ``tied``. Parameters
    are stacked over blocks, each in ``nn.Linear``'s layout: w1 [blocks, hidden, dim], b1 [blocks,
    hidden], w2 [blocks, dim, hidden], b2 [blocks, dim]; b1 and b2 are None without ``bias``.
    """

    stacked = ("w1", "b1", "w2", "b2")
    dim, hidden = Fixed(), Fixed()

    def __init__(
        self,
        dim: int,
        hidden: int,
        depth: int,
        activation: str = "tanh",
        bias: bool = True,
        tied: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[StageOptions],
    ) -> None:
        choice("activation", activation, functional.ACTIVATIONS)
        kind = Options if activation in KINKED else SmoothOptions
        super().__init__(depth, tied, options, kind)
        flag("bias", bias)
        self.dim = dim = positive_int("dim", dim)
        self.hidden = hidden = positive_int("hidden", hidden)
        self.activation = activation
        checks.parameter_dtype(dtype)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(self.num_blocks, *shape, device=device, dtype=dtype))

        self.w1 = parameter(hidden, dim)
        self.b1 = parameter(hidden) if bias else None
        self.w2 = parameter(dim, hidden)
        self.b2 = parameter(dim) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            init_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        self.refuse_changes()
        self.warn_of_defaults()
        w1, b1, w2, b2 = (tensor_of(self, name) for name in self.stacked)
        return functional.run_mlp(x, w1, b1, w2, b2, self.activation, self.depth, self.options)

    def residual(self, n: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        theta = [self.in_block(n, p, x) for p in (self.w1, self.b1, self.w2, self.b2)]
        return reference.MLP(self.activation, *theta).f(x, n)

    def extra_repr(self) -> str:
        bias = [] if self.b1 is not None else ["bias=False"]
        return ", ".join(
            [
                f"dim={self.dim}",
                super().extra_repr(),
                f"hidden={self.hidden}",
                f"activation={self.activation!r}",
                *bias,
            ]
        )
