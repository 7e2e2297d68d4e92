"""The settings that a stage could be trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..options import ORDERS, Options
from .gradients import GradientError

HIGHEST_ORDER = 3
"""The highest order that is compared."""


class Setting(NamedTuple):
    """The options of a stage that change only how its gradients are computed."""

    backward: str = "adjoint"
    reverse: str = "refined"
    order: int | None = None
    anchor_every: int | None = None

    @staticmethod
    def of(options: Options) -> Setting:
        """The reconstruction that the options describe, even if ``backward`` is exact."""
        anchors = options.anchor_every if options.backward == "adjoint" else None
        return Setting("adjoint", options.reverse, options.resolved_order, anchors)

    @staticmethod
    def in_force(options: Options) -> Setting:
        """The setting that a stage with these options has."""
        if options.backward == "adjoint":
            return Setting.of(options)
        exact = Setting(options.backward)
        return exact._replace(anchor_every=options.anchor_every) if exact == CHECKPOINT else exact

    @property
    def work(self) -> Setting:
        """The setting without anchors: they do not change the time of a step."""
        return self._replace(anchor_every=None) if self.backward == "adjoint" else self

    def __str__(self) -> str:
        if self.backward == "stored":
            return "stored"
        if self.backward == "checkpoint":
            every = f" every {self.anchor_every}" if self.anchor_every else ""
            return f"checkpoint{every}"
        order = self.order or ORDERS[self.reverse].default
        rule = self.reverse if self.reverse == "paper" else f"{self.reverse} {order}"
        return f"{rule}, anchors every {self.anchor_every}" if self.anchor_every else rule


CHECKPOINT, STORED = Setting("checkpoint"), Setting("stored")


def candidates(depth: int) -> list[Setting]:
    """Every reverse rule and order, without anchors and with anchors at several distances around
    √depth, which is the distance of checkpoints."""
    rules = [
        (rule, order)
        for rule, orders in ORDERS.items()
        for order in range(1, int(min(orders.largest, HIGHEST_ORDER)) + 1)
    ]
    root = max(2, round(math.sqrt(depth)))
    spacings = [k for k in (2 * root, root, root // 2) if 1 < k < depth]
    return [Setting("adjoint", rule, order, k) for k in (None, *spacings) for rule, order in rules]


FIRST = ("refined 1", "refined 3", "predicted 1", "refined 2", "paper")


def most_promising_first(settings: Sequence[Setting]) -> list[Setting]:
    """The order in which settings are measured if time is short: the default, the most accurate and
    the fastest one, then the others; then the same with anchors."""

    def rank(setting: Setting) -> tuple[bool, int]:
        name = str(setting.work)
        return setting.anchor_every is not None, (*FIRST, name).index(name)

    return sorted(settings, key=rank)


@dataclass(frozen=True)
class Measurement:
    """Errors, memory and time of one setting."""

    setting: Setting
    gradient: GradientError
    """The error of all parameter gradients together."""
    input: GradientError
    """The error of the gradient of the stage's input."""
    memory: int
    """The peak of states and activations in a training step, in bytes, without parameters and their
    gradients. What autograd holds between the passes is measured, the rest is calculated. Scratch
    memory of kernels and temporaries inside a block are not included."""
    seconds: float
    """The time of a training step, forward and backward. Anchors do not change it, so it is the
    median of all measurements of the rule and order."""
    runs: int = 1
    """The number of these measurements. The time of a first run alone may be too long."""
    nearby: float = 0.0
    """The largest of both errors at nearby inputs; 0 if they were not tested."""
    nearby_inputs: int = 0
    """The number of nearby inputs that were tested."""

    @property
    def error(self) -> float:
        """The largest of these errors."""
        return max(self.gradient.error, self.input.error, self.nearby)
