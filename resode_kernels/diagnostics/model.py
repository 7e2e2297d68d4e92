"""The diagnosis of all stages of a model.

The error that counts is that of the gradients of all parameters of the model. The stages contribute
to it in two ways: each has errors in the gradients of its own parameters, and it hands an error in
its input's gradient to everything before it. So the model is run once with exact gradients, which
gives every stage its true input and cotangent. Each stage is examined and chosen for on its own,
and the model is run once more with all choices together. If the error then is above the bound, the
stages' limits are lowered until it is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..options import given
from ..replay.surroundings import Surroundings
from ..states import State, parts, state_like
from .budget import Budget
from .calls import Call, recorded, refuse_sharded, stages_of, uncompiled
from .choice import MARGIN
from .examination import Examination, described
from .gradients import GradientError, compare
from .model_report import ModelReport
from .probe import Loss, Probe, number, random_like, untouched
from .settings import CHECKPOINT, Measurement, Setting

Settings = Mapping[str, Setting]


class StageCalls(NamedTuple):
    """The calls of a stage in one forward pass of the model."""

    probe: Probe
    """Repeats the last of them."""
    cotangent: State
    times: int
    """Their number."""


class ModelProbe:
    """Repeats ``loss(model(...))`` without changing the model. Every run sees the same parameters,
    buffers and random numbers; see ``untouched``."""

    def __init__(self, model: nn.Module, batch: object, loss: Loss | None) -> None:
        self.model, self.loss = model, loss
        self.stages = stages_of(model)
        refuse_sharded(model)
        args, kwargs = arguments(batch)
        self.args, self.kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self.batch = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        self.around = Surroundings((*self.batch, *model.parameters(), *model.buffers()))
        self.generators = self.around.generators()

    def gradients(self, settings: Settings) -> list[Tensor]:
        """The gradients of the model's parameters. Stages without a setting keep their own."""
        options = {
            stage: settings[name]._asdict() if name in settings else {}
            for name, stage in self.stages.items()
        }
        with untouched(self.model, self.around, self.generators, options) as named:
            return list(
                torch.autograd.grad(
                    self._forward(),
                    tuple(named.values()),
                    allow_unused=True,
                    materialize_grads=True,
                )
            )

    def exact(self) -> tuple[list[Tensor], dict[str, StageCalls]]:
        """The exact gradients, and for every stage that they pass through its call."""
        options = dict.fromkeys(self.stages.values(), CHECKPOINT._asdict())
        with (
            untouched(self.model, self.around, self.generators, options) as named,
            recorded(self.stages.values()) as calls,
        ):
            value = self._forward()
            last = {call.stage: call for call in calls if any(call.edges)}
            count = Counter(call.stage for call in calls)
            edges = [edge for call in last.values() for edge in call.edges if edge is not None]
            inputs: Any = (*edges, *named.values())
            grads = torch.autograd.grad(value, inputs, allow_unused=True)
        arrived = iter(grads)
        names = {stage: name for name, stage in self.stages.items()}
        found = {
            names[stage]: StageCalls(call.probe, cotangent_of(call, arrived), count[stage])
            for stage, call in last.items()
        }
        pairs = zip(named.values(), arrived, strict=True)
        return [torch.zeros_like(p) if g is None else g for p, g in pairs], found

    def _forward(self) -> Tensor:
        with torch.enable_grad(), uncompiled():
            output = self.model(*self.args, **self.kwargs)
            if self.loss is not None:
                return number(self.loss(output))
            if not all(isinstance(t, Tensor) and t.is_floating_point() for t in parts(output)):
                raise TypeError(
                    f"loss must be given, because the model returns {given(output)}: a function of "
                    "the model's output that returns one number"
                )
            with torch.no_grad():
                weights = random_like(parts(output))
            return number(sum(map(inner, parts(output), weights)))


def diagnose_model(
    model: nn.Module,
    batch: object,
    loss: Loss | None,
    max_gradient_error: float,
    settings: Sequence[Setting] | None,
    seconds: float,
    budget: Budget,
) -> ModelReport:
    budget.show("computing exact gradients of the model")
    probe = ModelProbe(model, batch, loss)
    exact, calls = probe.exact()
    if not calls:
        raise RuntimeError(
            f"no gradient passes through a stage of the model ({type(model).__name__}): its "
            f"forward pass did not call {' or '.join(probe.stages)}, or not with gradients"
        )
    gradient = compare(probe.gradients({}), exact)
    examinations: dict[str, Examination] = {}
    for name, call in calls.items():
        part = budget.part(0.8 / (len(calls) - len(examinations)), name)
        linear = partial(inner_product, call.cotangent)
        examination = Examination(call.probe, linear, settings, part, has_loss=loss is not None)
        examination.recommend(max_gradient_error, part)
        examination.study(part)
        examination.choice.inputs.clear()  # gradients of all stages at once take memory
        examinations[name] = examination
    chosen, limit, error = choose(probe, exact, examinations, max_gradient_error, budget)
    return ModelReport(
        model=type(model).__name__,
        input=described(probe.batch),
        gradient=gradient,
        recommended_gradient=error,
        stages={
            name: examination.report(chosen[name], limit, seconds, python_name(name))
            for name, examination in examinations.items()
        },
        in_force={name: Setting.in_force(probe.stages[name].options) for name in calls},
        calls={name: call.times for name, call in calls.items()},
        left_out=[name for name in probe.stages if name not in calls],
        max_gradient_error=max_gradient_error,
        seconds=seconds,
    )


def choose(
    probe: ModelProbe,
    exact: list[Tensor],
    examinations: Mapping[str, Examination],
    max_gradient_error: float,
    budget: Budget,
) -> tuple[dict[str, Measurement], float, GradientError]:
    """The settings of all stages, the limit on the error of each, and the measured error of the
    model's gradients with all of them. If there is no time to find others, all stages get
    checkpoints, which are exact. The limit falls by half at least in every turn, so the search
    ends."""
    limit = max_gradient_error
    known: dict[tuple[Setting, ...], GradientError] = {}
    while True:
        chosen = {name: e.recommend(limit, budget) for name, e in examinations.items()}
        settings = {name: m.setting for name, m in chosen.items()}
        key = tuple(settings.values())
        if all(setting == CHECKPOINT for setting in key):
            return chosen, limit, GradientError(0.0, 1.0)
        if key not in known:
            budget.show("measuring the gradients of the model with the chosen settings")
            known[key] = compare(probe.gradients(settings), exact)
        error = known[key].error
        if error * MARGIN <= max_gradient_error:
            return chosen, limit, known[key]
        share = max_gradient_error / (MARGIN * error) if math.isfinite(error) else 0.0
        limit *= min(0.5, share) if budget.left > 0 else 0.0


def arguments(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model that a batch stands for."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise TypeError(
        "batch must be a tensor, a tuple of the model's positional arguments or a dict of its "
        f"keyword arguments, not {given(batch)}; write (batch,) to pass it as it is"
    )


def cotangent_of(call: Call, arrived: Any) -> State:
    """The cotangent of a call: what has arrived at its edges, zeros elsewhere."""
    found = [None if edge is None else next(arrived) for edge in call.edges]
    pairs = zip(call.output, found, strict=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in pairs]
    result: State = state_like(call.probe.x, filled)
    return result


def inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def inner_product(cotangent: State, y: State) -> Tensor:
    """The loss of a stage whose gradient is this cotangent."""
    result: Any = sum(map(inner, parts(y), parts(cotangent)))
    return result  # type: ignore[no-any-return]


def python_name(name: str) -> str:
    if all(part.isidentifier() for part in name.split(".")):
        return f"model.{name}"
    return f"model.get_submodule({name!r})"
