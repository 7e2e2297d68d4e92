"""``diagnose`` looks at a stage's gradients, ``tune`` acts on what it sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..stages import Stage
from ..states import State, parts
from . import constants
from .gradients import compare
from .probe import Loss, Probe
from .report import Bound, Report
from .settings import (
    CHECKPOINT,
    STORED,
    Setting,
    candidates,
    choose,
    measure,
    memory,
    stored_fits,
)
from .trajectory import Trajectory, reconstructed


def diagnose(
    stage: Stage,
    x: State,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = 1e-2,
    settings: Sequence[Setting] | None = None,
    seconds: float = 5.0,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Report:
    """What the adjoint method does to the gradients of ``stage`` at the input x.

    loss                takes the stage's output and returns a number, say ``lambda y:
                        criterion(head(y), labels)``. None: a random linear function
    max_gradient_error  what the recommendation keeps to
    settings            to compare, beside checkpointing. None: every rule and order, with anchors
                        at several distances
    seconds             spent on timing the settings, beside one step with each
    args, kwargs        passed on: ``stage(x, *args, **kwargs)``

    Exact gradients come from checkpointed segments, so a network that does not fit into memory can
    be diagnosed, too. Nothing in the stage changes: parameters, gradients, buffers, modes, options
    and random number generators are as before.
    """
    probe = Probe(stage, x, args, kwargs)
    cotangent = probe.cotangent(loss)
    exact = probe.gradients(cotangent, **CHECKPOINT._asdict())
    setting = Setting.of(stage.options)
    gradients = probe.gradients(cotangent, **setting._asdict())
    gradient, input_gradient = gradients.errors(exact)

    asked = candidates(stage.depth) if settings is None else list(settings)
    own = [] if setting in asked else [setting]
    stored = [STORED] if stored_fits(probe, memory(probe, CHECKPOINT)) else []
    compared = dict.fromkeys([*own, *asked, CHECKPOINT, *(stored if settings is None else [])])
    measurements = measure(probe, cotangent, exact, list(compared), seconds, _progress)
    recommended = choose(probe, loss, measurements, max_gradient_error)

    with probe.untouched():
        trajectory = Trajectory(probe)
        layers = reconstructed(
            trajectory, setting.reverse, setting.order or 1, setting.anchor_every or 0
        )
        found = constants.estimate(trajectory, stage)
        paper = reconstructed(trajectory, "paper", 1)
        limits = [constants.bound(found, stage, layer.n) for layer in paper]
    return Report(
        stage=f"{type(stage).__name__}({stage.extra_repr()})",
        input=" and ".join(f"{list(t.shape)} {t.dtype}".replace("torch.", "") for t in parts(x)),
        depth=stage.depth,
        step=stage.options.method(stage.depth).step,
        setting=setting,
        layers=layers,
        gradient=gradient,
        input_gradient=input_gradient,
        parameters={
            name: compare([gradients.parameters[name]], [g]) for name, g in exact.parameters.items()
        },
        blocks=[
            compare(mine, true)
            for mine, true in zip(
                *(stage.by_block(g.parameters) for g in (gradients, exact)), strict=True
            )
        ],
        constants=found,
        bound=Bound(
            proposition=3 if stage.options.scheme == "euler" else 5,
            layers=[
                limit / layer.size if layer.size else float("inf")
                for limit, layer in zip(limits, paper, strict=True)
                if limit is not None
            ]
            or None,
            measured=[layer.state_error for layer in paper],
        ),
        settings=measurements,
        max_gradient_error=max_gradient_error,
        recommended=recommended,
    )


def tune(
    stage: Stage,
    x: State,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = 1e-2,
    **more: Any,
) -> Report:
    """Sets the cheapest way of computing ``stage``'s gradients whose error, relative to exact
    backprop, stays below ``max_gradient_error`` with a margin of two: the fastest of those that
    take less memory than checkpointing; checkpointing if there is none.

    The error is that of all parameter gradients together, or of the input's gradient if that is
    larger. Takes what ``diagnose`` takes and returns its report.
    """
    report = diagnose(stage, x, loss, max_gradient_error=max_gradient_error, **more)
    stage.configure(**report.recommended.setting._asdict())
    return report


def _progress(settings: Iterable[Any]) -> Iterable[Any]:
    """A bar on terminals, if tqdm is there."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return settings
    bar: Iterable[Any] = tqdm(settings, desc="diagnose", unit="setting", leave=False, disable=None)
    return bar
