"""The choice of a setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ..states import State
from .allocation import Allocator
from .budget import Budget
from .probe import Gradients, Loss, Probe
from .settings import CHECKPOINT, Measurement, Setting

MARGIN = 2.0
"""A setting is chosen if its error is below the bound by this factor: other batches differ."""
NEARBY = 3
"""The number of nearby inputs at which a setting is tested before it is chosen."""
SAFETY = 0.8
"""Bits are allocated for an error below that by this factor, because they leave no more of it."""
ALIKE = 1.05
"""Times whose ratio is below this count as equal."""


class Choice:
    """Chooses among the settings that were measured, and those that ``allocator`` finds."""

    def __init__(
        self,
        probe: Probe,
        loss: Loss | None,
        measurements: list[Measurement],
        allocator: Allocator | None = None,
    ) -> None:
        self.probe, self.loss = probe, loss
        self.measurements, self.allocator = measurements, allocator
        self.allocated: Measurement | None = None
        """The measurement that the allocator has added."""
        self.inputs: dict[int, tuple[Probe, State, Gradients]] = {}
        """The nearby inputs so far by their numbers, with their cotangents and exact gradients."""

    def best(self, max_gradient_error: float, budget: Budget) -> Measurement:
        """The cheapest setting whose error is below the bound also at nearby inputs. One input is
        not enough: a kink of f (of a relu, say) between a state and its reconstruction spoils a
        gradient, and whether one lies there is a matter of chance. Tests nearby inputs as long as
        time is left and updates ``measurements`` by the errors."""
        tested: set[Setting] = set()
        limit = max_gradient_error / MARGIN
        self.allocate(SAFETY * limit, budget)
        while True:
            best = cheapest(self.measurements, max_gradient_error)
            done = best.nearby_inputs == NEARBY or best.setting in tested
            if best.setting == CHECKPOINT or done:
                return best
            tested.add(best.setting)
            found = self.replace(best, self.test(best, budget))
            if found is self.allocated and limit < found.error < math.inf:
                self.allocate(SAFETY * limit * min(SAFETY, limit / found.error), budget)

    def allocate(self, max_error: float, budget: Budget) -> None:
        """Puts an allocation for this error in the place of the one before."""
        found = None if self.allocator is None else self.allocator.best(max_error, budget)
        if self.allocated is not None:
            self.measurements.remove(self.allocated)
            self.allocated = None
        if found is not None and all(m.setting != found.setting for m in self.measurements):
            self.measurements.append(found)
            self.allocated = found

    def replace(self, old: Measurement, new: Measurement) -> Measurement:
        self.measurements[self.measurements.index(old)] = new
        if old is self.allocated:
            self.allocated = new
        return new

    def test(self, m: Measurement, budget: Budget) -> Measurement:
        """The measurement with the errors at further nearby inputs, while there is time."""
        for i in range(m.nearby_inputs, NEARBY):
            known = i in self.inputs
            step = statistics.median(each.seconds for each in self.measurements)
            if not budget.allows(step if known else 2.5 * step):
                break
            budget.show(f"testing {m.setting} at nearby inputs")
            if not known:
                self.inputs[i] = self._nearby(i)
            probe, cotangent, exact = self.inputs[i]
            found = probe.gradients(cotangent, **m.setting._asdict()).errors(exact)
            worst = max(m.nearby, *(e.error for e in found))
            m = replace(m, nearby=worst, nearby_inputs=i + 1)
        return m

    def _nearby(self, seed: int) -> tuple[Probe, State, Gradients]:
        probe = self.probe.nearby(seed)
        cotangent = probe.cotangent(self.loss)
        return probe, cotangent, probe.gradients(cotangent, **CHECKPOINT._asdict())


def cheapest(measurements: Sequence[Measurement], max_gradient_error: float) -> Measurement:
    """The fastest setting whose error is below the bound with a margin and whose memory is below
    that of checkpointing; of settings with equal times, the one with the least memory. Times of
    first runs do not count: then the one with the fewest products is the fastest. Checkpointing if
    there is no such setting."""
    fallback = next(m for m in measurements if m.setting == CHECKPOINT)
    kept = [
        m
        for m in measurements
        if m.setting.backward == "adjoint"
        and m.error * MARGIN <= max_gradient_error
        and m.memory < fallback.memory
    ]
    if not kept:
        return fallback
    measured = all(m.runs > 1 for m in kept)
    times = [m.seconds if measured else m.setting.products for m in kept]
    alike = [m for m, time in zip(kept, times, strict=True) if time <= ALIKE * min(times)]
    return min(alike, key=lambda m: (m.memory, m.error))
