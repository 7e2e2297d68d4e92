"""Measures gradient errors during training."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..defaults import GradientErrorWarning
from ..options import positive_int
from ..stages import Stage
from ..states import parts, state_like
from ..uncompiled import uncompiled
from .probe import Probe
from .settings import CHECKPOINT


class Observation(NamedTuple):
    call: int
    """The number of the stage's training step, from 1."""
    error: float
    """The relative error of all parameter gradients together, or of x's if that is larger."""
    cosine: float


class Monitor:
    """See ``monitor``."""

    def __init__(self, stage: Stage, every: int, max_gradient_error: float) -> None:
        positive_int("every", every)
        self.stage, self.every, self.max_gradient_error = stage, every, max_gradient_error
        self.calls = 0
        self.history: list[Observation] = []
        self.handle = stage.register_forward_hook(self._after_forward, with_kwargs=True)

    @property
    def last(self) -> Observation | None:
        return self.history[-1] if self.history else None

    def close(self) -> None:
        self.handle.remove()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @uncompiled
    def _after_forward(
        self, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any
    ) -> None:
        outputs = [t for t in parts(y) if t.requires_grad]
        if not torch.is_grad_enabled() or not outputs:
            return
        self.calls += 1
        if (self.calls - 1) % self.every:
            return
        call, (x, *more) = self.calls, args
        probe = Probe(stage, x, tuple(more), kwargs)

        def on_cotangent(grads: Any) -> None:
            known = dict(zip(map(id, outputs), grads, strict=True))
            given = [known.get(id(t)) for t in parts(y)]
            cotangent = [
                torch.zeros_like(t) if g is None else g.detach()
                for t, g in zip(parts(y), given, strict=True)
            ]
            self._observe(call, probe, state_like(y, cotangent))

        torch.autograd.graph.register_multi_grad_hook(outputs, on_cotangent, mode="all")

    def _observe(self, call: int, probe: Probe, cotangent: Any) -> None:
        exact = probe.gradients(cotangent, **CHECKPOINT._asdict())
        worst = max(probe.gradients(cotangent).errors(exact), key=lambda e: e.error)
        self.history.append(Observation(call, worst.error, worst.cosine))
        if not worst.error <= self.max_gradient_error:
            warnings.warn(
                f"training step {call} of {type(self.stage).__name__}: the relative gradient error "
                f"{worst.error:.1e} exceeds max_gradient_error={self.max_gradient_error:.1e}; "
                "rk.tune(stage, x, max_gradient_error=...) finds a setting that stays below it",
                GradientErrorWarning,
                stacklevel=2,
            )


def monitor(stage: Stage, every: int = 100, max_gradient_error: float = 1e-2) -> Monitor:
    """Measures the error of ``stage``'s gradients while it trains: in its first training step and
    in every ``every``-th after it, with the input and the cotangent of that step. Warns
    (``GradientErrorWarning``) when the error exceeds ``max_gradient_error``.

        with rk.monitor(stage) as watching:
            train(model)
        print(watching.history)

    Without ``with``, it measures until ``close()``. A measured training step costs two more forward
    and backward passes of the stage, one of them in checkpointed segments. Training is unchanged.
    """
    return Monitor(stage, every, max_gradient_error)
