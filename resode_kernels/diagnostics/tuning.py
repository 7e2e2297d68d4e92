"""``diagnose`` measures the error of gradients, ``tune`` also sets options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor, nn

from ..options import checked_bits, given, number
from ..stages import Stage
from ..states import State, parts
from .budget import Budget, Display
from .calls import StageInput, refuse_sharded, stages_of
from .examination import Examination
from .model import diagnose_model
from .model_report import ModelReport
from .probe import Loss, Probe
from .report import Report
from .settings import Setting


@overload
def diagnose(
    stage: Stage,
    x: State | StageInput,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = ...,
    settings: Sequence[Setting] | None = ...,
    seconds: float = ...,
    args: tuple[Any, ...] = ...,
    kwargs: dict[str, Any] | None = ...,
) -> Report: ...


@overload
def diagnose(
    stage: nn.Module,
    x: Any,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = ...,
    settings: Sequence[Setting] | None = ...,
    seconds: float = ...,
) -> ModelReport: ...


def diagnose(
    stage: nn.Module,
    x: Any,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = 1e-2,
    settings: Sequence[Setting] | None = None,
    seconds: float = 60.0,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Report | ModelReport:
    """Measures the error of the gradients of a stage, or of a model and all stages in it, with the
    present settings and with others.

        print(rk.diagnose(model, batch, loss))

        seen = rk.input_of(model.blocks, lambda: model(batch))
        print(rk.diagnose(model.blocks, seen))

    stage               a stage, or a model that contains stages. A stage inside a block of another
                        stage belongs to that one
    x                   of a stage: its input, a tensor or a tuple of tensors, or what ``input_of``
                        returns, with all arguments. Of a model: a batch, which is a tensor, a tuple
                        of the model's positional arguments or a dict of its keyword arguments
    loss                takes the output of the stage or of the model and returns a number, say
                        ``lambda y: criterion(y, labels)``. None: a random linear function of the
                        output
    max_gradient_error  the bound on the error with the recommended setting
    settings            the settings to compare with checkpointing, the most important first. None:
                        every rule and order, without anchors and with anchors at several distances;
                        ``recorded`` with 4, 6 and 8 bits, and with the bits for each step that
                        keep the bound in the least memory
    seconds             the time that the call may take, about. At least it computes an exact
                        gradient, a gradient with the stage's own setting and one with another
                        setting (of every stage, and with a model three gradients of the whole
                        model), however long that takes. Then it measures the other settings, the
                        most promising first, and two yardsticks, errors that training has anyway.
                        It repeats the measurements of times for 5 s at most, finds the bits of each
                        step, tests nearby inputs, reconstructs the states and estimates the
                        constants of the paper's theory. The report says what there was no time for
    args, kwargs        further arguments of a stage: ``stage(x, *args, **kwargs)``

    Returns a ``Report`` of a stage or a ``ModelReport``. In a model every stage is given its input
    and the true gradient of the loss at its output. The error of the whole model is that of the
    gradients of all its parameters together.

    Exact gradients are computed in checkpointed segments. Therefore a stage can be diagnosed even
    if standard backprop does not fit into memory. Nothing is changed: parameters, gradients,
    buffers, modes, options and random number generators are as before. While the call takes longer,
    stderr shows what it does.
    """
    return _diagnose(
        "rk.diagnose", stage, x, loss, max_gradient_error, settings, seconds, args, kwargs
    )


@overload
def tune(
    stage: Stage,
    x: State | StageInput,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = ...,
    settings: Sequence[Setting] | None = ...,
    seconds: float = ...,
    args: tuple[Any, ...] = ...,
    kwargs: dict[str, Any] | None = ...,
) -> Report: ...


@overload
def tune(
    stage: nn.Module,
    x: Any,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = ...,
    settings: Sequence[Setting] | None = ...,
    seconds: float = ...,
) -> ModelReport: ...


def tune(
    stage: nn.Module,
    x: Any,
    loss: Loss | None = None,
    *,
    max_gradient_error: float = 1e-2,
    settings: Sequence[Setting] | None = None,
    seconds: float = 60.0,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Report | ModelReport:
    """Sets the fastest setting of a stage whose gradient error stays below ``max_gradient_error``
    with a margin of two and which takes less memory than checkpointing. If there is none, it sets
    checkpointing. Takes the arguments of ``diagnose`` and returns its report.

    The error is relative to exact gradients. For a stage it is that of all parameter gradients
    together, or of the input's gradient if that is larger, here and at nearby inputs, if there is
    time for those.

    In a model all stages are set under one bound: the error of the gradients of all parameters of
    the model together stays below it with a margin of two, measured with all settings at once. The
    error that a stage hands to the stages before it is part of that. Each stage keeps the bound by
    itself, as above, and a tighter limit if the errors add up to more.
    """
    report = _diagnose(
        "rk.tune", stage, x, loss, max_gradient_error, settings, seconds, args, kwargs
    )
    stages = stages_of(stage)
    for name, each in (report.stages if isinstance(report, ModelReport) else {"": report}).items():
        stages[name].configure(**each.recommended.setting._asdict())
    return report


def _diagnose(
    call: str,
    stage: nn.Module,
    x: Any,
    loss: Loss | None,
    max_gradient_error: float,
    settings: Sequence[Setting] | None,
    seconds: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Report | ModelReport:
    stages_of(stage)
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a function of the output that returns one number, or None, not "
            f"{given(loss)}"
        )
    max_gradient_error = number("max_gradient_error", max_gradient_error, above=0, finite=False)
    seconds = number("seconds", seconds, at_least=0, finite=False)
    if settings is not None and not isinstance(settings, list | tuple):
        raise TypeError(f"settings must be a list of rk.Setting or None, not {given(settings)}")
    if not isinstance(args, list | tuple):
        raise TypeError(f"args must be a tuple of arguments, not {given(args)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of keyword arguments or None, not {given(kwargs)}")
    for i, setting in enumerate(settings or []):
        if not isinstance(setting, Setting):
            raise TypeError(f"settings[{i}] must be an rk.Setting, not {given(setting)}")
    if settings is not None:  # a setting is looked up, so its bits may not be a list
        settings = [setting._replace(bits=checked_bits(setting.bits)) for setting in settings]
    with running(call, seconds) as budget:
        if isinstance(stage, Stage):
            probe = Probe(stage, *stage_input(x, args, kwargs))
            refuse_sharded(stage)
            examination = Examination(probe, loss, settings, budget, has_loss=loss is not None)
            best = examination.recommend(max_gradient_error, budget.part(0.6))
            examination.study(budget)
            return examination.report(best, max_gradient_error, seconds)
        if isinstance(x, StageInput):
            raise TypeError(
                "x is what rk.input_of returned for a stage, but a model was given: give that "
                "stage, or a batch of the model"
            )
        if args or kwargs:
            raise TypeError(
                "args and kwargs are arguments of a stage, but a model was given: give its batch "
                "as a tuple of positional arguments or a dict of keyword arguments"
            )
        return diagnose_model(stage, x, loss, max_gradient_error, settings, seconds, budget)


@contextmanager
def running(call: str, seconds: float) -> Iterator[Budget]:
    display = Display(call, seconds)
    try:
        yield Budget(seconds, display)
    finally:
        display.close()


def stage_input(x: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> StageInput:
    """All arguments of a stage."""
    if isinstance(x, StageInput):
        if args or kwargs:
            raise TypeError(
                "x is what rk.input_of returned and holds all arguments of the stage: leave out "
                "args and kwargs, or give x.x and them"
            )
        return x
    tensors = parts(x)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise TypeError(
            "x must be the stage's input, a tensor or a tuple of tensors, or what rk.input_of "
            f"returns, not {given(x)}"
        )
    return StageInput(x, tuple(args), dict(kwargs or {}))  # type: ignore[arg-type]
