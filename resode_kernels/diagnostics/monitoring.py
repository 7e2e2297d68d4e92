"""Measures gradient errors during training."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..defaults import GradientErrorWarning
from ..options import number, positive_int
from ..stages import Stage
from ..states import parts, state_like
from .calls import refuse_sharded, stages_of
from .probe import PROBING, Probe
from .report import drawing
from .settings import CHECKPOINT


class Observation(NamedTuple):
    call: int
    """The number of the stage's training step, from 1."""
    error: float
    """The relative error of all parameter gradients together, or of x's if that is larger."""
    cosine: float
    stage: str = ""
    """The name of the stage in its model; "" if the stage itself is watched."""


class Monitor:
    """Watches stages, see ``monitor``. ``print`` it for a summary.

    history             an ``Observation`` for every measurement
    last                the newest of them, or None
    stages              the stages by their names in the model
    max_gradient_error  the bound
    plot(path)          saves a picture of the errors over the training steps, and of the bound
    close()             ends it
    """

    def __init__(self, stages: Mapping[str, Stage], every: int, max_gradient_error: float) -> None:
        self.stages = dict(stages)
        self.every, self.max_gradient_error = every, max_gradient_error
        self.calls = Counter[str]()
        self.history: list[Observation] = []
        self.open = True
        self.handles = []
        for name, stage in self.stages.items():
            hook = torch.compiler.disable(partial(self._after_forward, name))
            self.handles.append(stage.register_forward_hook(hook, with_kwargs=True))

    @property
    def last(self) -> Observation | None:
        return self.history[-1] if self.history else None

    def close(self) -> None:
        self.open = False
        for handle in self.handles:
            handle.remove()

    def plot(self, path: str | Path) -> None:
        """Saves a picture of the gradient errors over the training steps, as PNG or in the format
        of the path's suffix."""
        drawing().draw_monitor(self, path)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        watched = ", ".join(
            f"{name}: {type(stage).__name__}" if name else type(stage).__name__
            for name, stage in self.stages.items()
        )
        count, last = len(self.history), "nothing measured yet"
        if self.last is not None:
            where = f" of {self.last.stage}" if self.last.stage else ""
            last = (
                f"{count} {'measurement' if count == 1 else 'measurements'}, the last {where[1:]}"
                f"{' ' if where else ''}at training step {self.last.call}: gradient error "
                f"{self.last.error:.1e}"
            )
        ended = "" if self.open else ", closed"
        return (
            f"Monitor({watched}; every {self.every} training steps; {last}; "
            f"max_gradient_error={self.max_gradient_error:.1e}{ended})"
        )

    def _after_forward(
        self, name: str, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any
    ) -> None:
        outputs = [t for t in parts(y) if t.requires_grad]
        if not torch.is_grad_enabled() or not outputs or PROBING.get():
            return
        self.calls[name] += 1
        if (self.calls[name] - 1) % self.every:
            return
        call, (x, *more) = self.calls[name], args
        probe = Probe(stage, x, tuple(more), kwargs)

        def on_cotangent(grads: Any) -> None:
            known = dict(zip(map(id, outputs), grads, strict=True))
            given = [known.get(id(t)) for t in parts(y)]
            cotangent = [
                torch.zeros_like(t) if g is None else g.detach()
                for t, g in zip(parts(y), given, strict=True)
            ]
            self._observe(name, call, probe, state_like(y, cotangent))

        torch.autograd.graph.register_multi_grad_hook(outputs, on_cotangent, mode="all")

    def _observe(self, name: str, call: int, probe: Probe, cotangent: Any) -> None:
        exact = probe.gradients(cotangent, **CHECKPOINT._asdict())
        worst = max(probe.gradients(cotangent).errors(exact), key=lambda e: e.error)
        self.history.append(Observation(call, worst.error, worst.cosine, name))
        if not worst.error <= self.max_gradient_error:
            stage = f"the stage {name!r} ({type(probe.stage).__name__})" if name else "the stage"
            given = "model, batch, loss" if name else "stage, x"
            warnings.warn(
                f"training step {call}: the relative gradient error of {stage} is "
                f"{worst.error:.1e}, above max_gradient_error={self.max_gradient_error:.1e}; "
                f"rk.tune({given}, max_gradient_error=...) finds a setting that stays below it",
                GradientErrorWarning,
                stacklevel=2,
            )


def monitor(stage: nn.Module, every: int = 100, max_gradient_error: float = 1e-2) -> Monitor:
    """Measures the errors of gradients while a stage, or a model with stages, trains: in the first
    training step of each stage and in every ``every``-th after it, with the input and the cotangent
    of that step. Warns (``GradientErrorWarning``) when an error exceeds ``max_gradient_error``.

        with rk.monitor(model) as watching:
            train(model)
        print(watching.history)
        watching.plot("errors.png")

    stage  a stage, or a model that contains stages, of which all are watched. A training step is a
           call of the stage that gradients pass through

    Without ``with``, it measures until ``close()``. A measured training step costs two more forward
    and backward passes of the stage, one of them in checkpointed segments. Training is unchanged.
    """
    stages = stages_of(stage)
    refuse_sharded(stage)
    return Monitor(
        stages,
        positive_int("every", every),
        number("max_gradient_error", max_gradient_error, above=0, finite=False),
    )
