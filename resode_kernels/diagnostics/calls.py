"""Calls of stages inside a model: which stages there are, and with what they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from ..options import given
from ..replay.parameters import is_sharded
from ..stages import Stage
from ..states import State, parts
from .probe import Probe


class StageInput(NamedTuple):
    """The arguments of a call of a stage."""

    x: State
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Call(NamedTuple):
    """A call of a stage while ``recorded`` watches."""

    stage: Stage
    probe: Probe
    """Repeats the call."""
    output: tuple[Tensor, ...]
    """The tensors of x[N], detached."""
    edges: tuple[GradientEdge | None, ...]
    """Where their cotangents arrive; None: it does not require grad."""


@contextmanager
def recorded(stages: Iterable[Stage]) -> Iterator[list[Call]]:
    """Context that collects the calls of stages. Inputs are copies, because a model may change a
    tensor in place after the stage has used it."""
    calls: list[Call] = []

    def after(stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        kept = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        (x, *more), named = kept
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in parts(y)]
        output = tuple(t.detach() for t in parts(y))
        calls.append(Call(stage, Probe(stage, x, tuple(more), named), output, tuple(edges)))

    handles = [
        stage.register_forward_hook(after, prepend=True, with_kwargs=True) for stage in stages
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which modules run without ``torch.compile``, which would compile them again for
    hooks and for other parameters, and finally give up."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def input_of(stage: Stage, run: Callable[[], Any]) -> StageInput:
    """The arguments with which ``run()`` calls ``stage``, for ``diagnose`` and ``tune``:

        seen = rk.input_of(model.layer3, lambda: model(images))
        rk.tune(model.layer3, seen)

    The result holds x, the further arguments ``args`` and the keywords ``kwargs``, with copies of
    all tensors. If the stage is called several times, the last call counts.
    """
    if not isinstance(stage, Stage):
        raise TypeError(
            "stage must be a stage inside your model (rk.MLPStage, rk.ResidualStage, …), not "
            f"{given(stage)}"
        )
    if not callable(run):
        raise TypeError(f"run must be a function that calls the model, not {given(run)}")
    with recorded([stage]) as calls, torch.no_grad(), uncompiled():
        run()
    if not calls:
        raise RuntimeError(
            f"run() did not call the stage ({type(stage).__name__}): it must run the model that "
            "contains this stage"
        )
    probe = calls[-1].probe
    return StageInput(probe.x, probe.args, probe.kwargs)


def stages_of(module: object) -> dict[str, Stage]:
    """The stages of a model by name, each once. A stage inside a block of another stage belongs to
    that other one. A stage is its own stage, by the name ""."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            "stage must be a stage (rk.MLPStage, rk.ResidualStage, …) or a model that contains "
            f"stages, not {given(module)}"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise TypeError("give model.module, the model inside DistributedDataParallel")
    found: dict[str, Stage] = {}
    inside: set[nn.Module] = set()
    for name, m in module.named_modules():
        if isinstance(m, Stage) and m not in inside:
            found[name] = m
            inside.update(m.modules())
    if not found:
        raise ValueError(
            f"the model ({type(module).__name__}) contains no stage, so its gradients are exact; "
            "replace a stack of residual blocks by a stage first, such as rk.ResidualStage"
        )
    return found


def refuse_sharded(module: nn.Module) -> None:
    if any(map(is_sharded, module.modules())):
        raise TypeError(
            f"the parameters of {type(module).__name__} are sharded; diagnose it before fully_shard"
        )
