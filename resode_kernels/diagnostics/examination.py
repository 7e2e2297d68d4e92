"""The diagnosis of one stage at one input, part by part, within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..states import parts
from . import constants, yardsticks
from .allocation import Allocator
from .budget import Budget
from .choice import Choice
from .constants import Constants
from .gradients import compare
from .measuring import Measurer
from .memory import stored_fits
from .probe import Loss, Probe
from .report import Bound, Report
from .settings import (
    CHECKPOINT,
    PAPER,
    STORED,
    Measurement,
    Setting,
    candidates,
    most_promising_first,
)
from .trajectory import Layer, Trajectory, reconstructed

STATES = 5
"""The time that the errors of the states take, in evaluations of every block: the trajectory, its
second half of states again, and a reverse pass."""


class Examination:
    """Measures the stage's own setting and one other at least, and the others while there is time.
    ``settings`` are those to compare, None: ``candidates``. ``has_loss``: whether the loss, here or
    of the model around the stage, is the user's."""

    def __init__(
        self,
        probe: Probe,
        loss: Loss | None,
        settings: Sequence[Setting] | None,
        budget: Budget,
        *,
        has_loss: bool,
    ) -> None:
        self.probe, stage = probe, probe.stage
        budget.show("computing exact gradients")
        self.measurer = Measurer(probe, probe.cotangent(loss))
        self.own = Setting.of(stage.options)
        mine, exact = self.measurer.measure(self.own), self.measurer.exact
        self.gradient, self.input_gradient = mine.errors(exact)
        self.parameters = {
            name: compare([mine.parameters[name]], [g]) for name, g in exact.parameters.items()
        }
        blocks = (stage.by_block(g.parameters) for g in (mine, exact))
        self.blocks = [compare(one, true) for one, true in zip(*blocks, strict=True)]
        asked = candidates(stage.depth) if settings is None else list(settings)
        own = [] if self.own in asked else [self.own]
        fits = stored_fits(probe, self.measurer.block)
        stored = [STORED] if settings is None and fits else []
        self.settings = list(dict.fromkeys([*own, *asked, CHECKPOINT, *stored]))
        first = most_promising_first(asked) if settings is None else asked
        self.measurer.measure_all([*first, *stored], budget.part(0.6))
        self.yardsticks = yardsticks.measure(
            self.measurer, has_loss=has_loss, budget=budget.part(0.5)
        )
        self.measurer.repeat(budget.part(0.25))
        allocator = Allocator(self.measurer) if settings is None else None
        measured = self.measurer.measurements(self.settings)
        self.choice = Choice(probe, loss, measured, allocator)
        self.layers: list[Layer] | None = None
        self.paper: list[Layer] | None = None
        self.constants: Constants | None = None

    def recommend(self, max_gradient_error: float, budget: Budget) -> Measurement:
        return self.choice.best(max_gradient_error, budget)

    def study(self, budget: Budget) -> None:
        """The errors of the states and the constants of the theory, while there is time."""
        stage, own = self.probe.stage, self.own
        evaluation = self.probe.evaluation_time()
        cost = STATES * stage.options.blocks(stage.depth) * evaluation
        if not budget.allows(cost):
            return
        budget.show("reconstructing the states")
        with self.probe.untouched():
            trajectory = Trajectory(self.probe)
            self.layers = reconstructed(trajectory, own.method(stage))
            if not budget.allows(cost):
                return
            self.paper = reconstructed(trajectory, PAPER.method(stage))
            if budget.allows(constants.EVALUATIONS * evaluation):
                self.constants = constants.estimate(trajectory, stage, budget, evaluation)

    def report(
        self,
        recommended: Measurement,
        max_gradient_error: float,
        seconds: float,
        name: str = "stage",
    ) -> Report:
        stage, found = self.probe.stage, self.choice.measurements
        measured = {m.setting for m in found}
        return Report(
            stage=f"{type(stage).__name__}({stage.extra_repr()})",
            input=described(parts(self.probe.x)),
            depth=stage.depth,
            step=stage.options.method(stage.depth).step,
            setting=self.own,
            layers=self.layers,
            gradient=self.gradient,
            input_gradient=self.input_gradient,
            parameters=self.parameters,
            blocks=self.blocks,
            constants=self.constants,
            bound=self._bound(),
            yardsticks=self.yardsticks,
            settings=found,
            not_measured=[s for s in self.settings if s not in measured],
            max_gradient_error=max_gradient_error,
            recommended=recommended,
            seconds=seconds,
            name=name,
        )

    def _bound(self) -> Bound | None:
        if self.paper is None:
            return None
        stage, found = self.probe.stage, self.constants
        limits = [
            None if found is None else constants.bound(found, stage, layer.n)
            for layer in self.paper
        ]
        return Bound(
            proposition=3 if stage.options.scheme == "euler" else 5,
            layers=[
                limit / layer.size if layer.size else float("inf")
                for limit, layer in zip(limits, self.paper, strict=True)
                if limit is not None
            ]
            or None,
            measured=[layer.state_error for layer in self.paper],
        )


def described(tensors: Sequence[Tensor]) -> str:
    """Shapes and dtypes."""
    return " and ".join(f"{list(t.shape)} {t.dtype}".replace("torch.", "") for t in tensors)
