"""Measures the settings of a stage: gradient error, memory and time of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..states import State
from .budget import Budget
from .gradients import GradientError
from .memory import block_bytes, peak
from .probe import Gradients, Probe
from .settings import CHECKPOINT, Measurement, Setting

MAX_TURNS = 20
TIMING = 5.0
"""The seconds that go into repeating the measurements of times, at most."""


class Measurer:
    """Measures settings at one input, with one cotangent."""

    def __init__(self, probe: Probe, cotangent: State) -> None:
        self.probe, self.cotangent = probe, cotangent
        self.block = block_bytes(probe)
        self.found: dict[Setting, tuple[GradientError, GradientError, int]] = {}
        self.times: dict[Setting, list[float]] = {}
        self.exact = self._run(CHECKPOINT)
        self._note(CHECKPOINT, self.exact)

    @property
    def step(self) -> float:
        """The typical time of a training step so far."""
        return statistics.median(t for times in self.times.values() for t in times)

    def measure(self, setting: Setting, *, timed: bool = True) -> Gradients:
        """``timed``: its time counts, even if that of the rule and order is known."""
        gradients = self._run(setting, timed)
        self._note(setting, gradients)
        return gradients

    def measure_all(self, settings: Sequence[Setting], budget: Budget) -> None:
        """Measures the first of the settings, and then the others as long as time is left."""
        todo = [setting for setting in settings if setting not in self.found]
        for i, setting in enumerate(todo):
            if i and not budget.allows(self.step):
                return
            budget.show(f"measuring {setting}, {i + 1} of {len(todo)} settings")
            self.measure(setting)

    def repeat(self, budget: Budget) -> None:
        """Measures the times again, in turns."""
        works = {setting.work: setting for setting in (CHECKPOINT, *self.found)}
        budget = budget.part(min(1.0, TIMING / budget.left) if budget.left > 0 else 0.0)
        for turn in range(MAX_TURNS):
            for work, setting in works.items():
                if not budget.allows(self.step):
                    return
                budget.show(f"timing {work}, {turn + 1} of at most {MAX_TURNS} turns")
                run = self.probe.gradients(self.cotangent, **setting._asdict())
                self.times[work].append(run.seconds)

    def measurements(self, settings: Sequence[Setting]) -> list[Measurement]:
        """The results for those of the settings that were measured."""
        return [
            Measurement(
                setting,
                *self.found[setting],
                self._median(setting.work),
                len(self.times[setting.work]),
            )
            for setting in settings
            if setting in self.found
        ]

    def _run(self, setting: Setting, timed: bool = True) -> Gradients:
        gradients = self.probe.gradients(self.cotangent, count=True, **setting._asdict())
        if timed or setting.work not in self.times:
            self.times.setdefault(setting.work, []).append(gradients.seconds)
        return gradients

    def _note(self, setting: Setting, gradients: Gradients) -> None:
        memory = peak(self.probe, setting, gradients.held, self.block)
        self.found[setting] = (*gradients.errors(self.exact), memory)

    def _median(self, work: Setting) -> float:
        first, *later = self.times[work]  # the first run warms up
        return statistics.median(later if len(later) > 1 else [first, *later])
