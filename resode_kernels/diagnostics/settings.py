"""The settings that a stage could be trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..options import ORDERS, Bits, Method, Options
from ..stages import Stage
from .gradients import GradientError

HIGHEST_ORDER = 3
"""The highest order that is compared."""
RECORDED = (4, 6, 8)
"""The numbers of bits of ``recorded`` that are compared."""


class Setting(NamedTuple):
    """The options of a stage that change only how its gradients are computed."""

    backward: str = "adjoint"
    reverse: str = "refined"
    order: int | None = None
    anchor_every: int | None = None
    bits: Bits = Options.bits
    """Of ``recorded``; other rules ignore it."""

    @staticmethod
    def of(options: Options) -> Setting:
        """The reconstruction that the options describe, even if ``backward`` is exact."""
        anchors = options.anchor_every if options.backward == "adjoint" else None
        if options.reverse == "recorded":
            return Setting("adjoint", "recorded", None, anchors, options.bits)
        return Setting("adjoint", options.reverse, options.resolved_order, anchors)

    @staticmethod
    def in_force(options: Options) -> Setting:
        """The setting that a stage with these options has."""
        if options.backward == "adjoint":
            return Setting.of(options)
        exact = Setting(options.backward)
        return exact._replace(anchor_every=options.anchor_every) if exact == CHECKPOINT else exact

    @property
    def records(self) -> bool:
        """Whether increments are recorded."""
        return self.backward == "adjoint" and self.reverse == "recorded"

    @property
    def line(self) -> Setting:
        """The setting without anchors: its line in a table."""
        return self._replace(anchor_every=None) if self.backward == "adjoint" else self

    @property
    def work(self) -> Setting:
        """The setting without anchors and bits: they do not change the time of a step."""
        return self.line._replace(bits=Options.bits)

    @property
    def options(self) -> dict[str, Any]:
        """The options that set it, without those that do not apply to it."""
        return {
            key: value for key, value in self._asdict().items() if key != "bits" or self.records
        }

    def method(self, stage: Stage) -> Method:
        """How the stage runs with this setting."""
        options = replace(stage.options, **self._asdict())
        return options.method(stage.depth, of_modules=stage.runs_modules)

    @property
    def rank(self) -> tuple[int, float]:
        """The place among reverse rules, from the simplest to the most accurate of each kind."""
        accuracy = mean_bits(self.bits) if self.records else self.order or self._default_order
        return list(ORDERS).index(self.reverse), accuracy

    @property
    def products(self) -> int:
        """The matrix products per MLP block and step of an adjoint setting: the order of the times,
        if these are not known."""
        known = {"recorded": 7, "predicted": 8, "paper": 9}
        return known.get(self.reverse, 8 + 2 * (self.order or self._default_order))

    @property
    def _default_order(self) -> int:
        return ORDERS[self.reverse].default

    def __str__(self) -> str:
        if self.backward == "stored":
            return "stored"
        if self.backward == "checkpoint":
            every = f" every {self.anchor_every}" if self.anchor_every else ""
            return f"checkpoint{every}"
        if self.records:
            mean = f", {mean_bits(self.bits):.1f} bits on average"
            rule = f"recorded {self.bits} bits" if isinstance(self.bits, int) else f"recorded{mean}"
        elif self.reverse == "paper":
            rule = "paper"
        else:
            rule = f"{self.reverse} {self.order or self._default_order}"
        return f"{rule}, anchors every {self.anchor_every}" if self.anchor_every else rule


CHECKPOINT, STORED = Setting("checkpoint"), Setting("stored")
PAPER = Setting("adjoint", "paper", 1)


def mean_bits(bits: Bits) -> float:
    """The mean over the steps whose increments are recorded. The last step's is not: its state is
    kept, because the reverse pass starts there."""
    if isinstance(bits, int):
        return bits
    recorded = [each for each in bits[:-1] if each]
    return sum(recorded) / len(recorded) if recorded else 0.0


def candidates(depth: int) -> list[Setting]:
    """Every reverse rule and order, without anchors and with anchors at several distances around
    √depth, which is the distance of checkpoints; and increments that are recorded in some numbers
    of bits, which need no anchors."""
    rules = [
        (rule, order)
        for rule, orders in ORDERS.items()
        for order in range(1, int(min(orders.largest, HIGHEST_ORDER)) + 1)
        if rule != "recorded"
    ]
    root = max(2, round(math.sqrt(depth)))
    spacings = [k for k in (2 * root, root, root // 2) if 1 < k < depth]
    return [
        *(Setting("adjoint", rule, order) for rule, order in rules),
        *(Setting("adjoint", "recorded", bits=bits) for bits in RECORDED),
        *(Setting("adjoint", rule, order, k) for k in spacings for rule, order in rules),
    ]


FIRST = (
    *("refined 1", "recorded 8 bits", "refined 3", "predicted 1", "refined 2", "paper"),
    *("recorded 4 bits", "recorded 6 bits"),
)


def most_promising_first(settings: Sequence[Setting]) -> list[Setting]:
    """The order in which settings are measured if time is short: the default, the one that suits
    any weights, the most accurate and the fastest one, then the others; then the same with
    anchors."""

    def rank(setting: Setting) -> tuple[bool, int]:
        name = str(setting.line)
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
    """The time of a training step, forward and backward. Anchors and bits do not change it, so it
    is the median of all measurements of the rule and order."""
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
