"""``diagnose`` measures the error of a stage's gradients, ``tune`` also sets its options."""

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
    """Measures the error of the gradients of ``stage`` at the input x, with its own setting and
    with others.

    loss                takes the stage's output and returns a number, say ``lambda y:
                        criterion(head(y), labels)``. None: a random linear function
    max_gradient_error  the bound on the error of the recommended setting
    settings            the settings to compare with checkpointing. None: every rule and order,
                        without anchors and with anchors at several distances
    seconds             the time spent on timing; every setting is timed once at least
    args, kwargs        passed on: ``stage(x, *args, **kwargs)``

    Exact gradients are computed in checkpointed segments. Therefore a stage can be diagnosed even
    if standard backprop does not fit into memory. The stage is not changed: parameters, gradients,
    buffers, modes, options and random number generators are as before.
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
    """Sets the fastest setting of ``stage`` whose gradient error stays below ``max_gradient_error``
    with a margin of two and which takes less memory than checkpointing. If there is none, it sets
    checkpointing.

    The error is relative to exact gradients. It is that of all parameter gradients together, or of
    the input's gradient if that is larger. Takes the arguments of ``diagnose`` and returns its
    report.
    """
    report = diagnose(stage, x, loss, max_gradient_error=max_gradient_error, **more)
    stage.configure(**report.recommended.setting._asdict())
    return report


def _progress(settings: Iterable[Any]) -> Iterable[Any]:
    """The settings, with a progress bar on terminals if tqdm is installed."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return settings
    bar: Iterable[Any] = tqdm(settings, desc="diagnose", unit="setting", leave=False, disable=None)
    return bar
