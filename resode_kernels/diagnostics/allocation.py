"""Bits where they matter: how many bits each step of ``recorded`` needs for a bound on the gradient
error, at the least memory.

The increment of step n, rounded to levels whose distance is c[b] of its size, puts an error of
r[n] = s[n] c[b[n]] into the next state, relative to that state. Errors of different steps are
independent, so their squares add up to that of the gradients:

    error² ≈ K² Σ r[n]^(2p)

p is 1 for smooth blocks, and less where kinks of relu lie between states and estimates. The s[n]
are measured in one forward pass, K and p are taken from measured gradient errors. The bits are then
given one after the other to the step that profits most (water-filling).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..options import BITS
from ..recording import levels
from .budget import Budget
from .measuring import Measurer
from .settings import Measurement, Setting
from .trajectory import rounding_errors

ROUNDS = 4
"""The number of allocations that are measured for a bound, at most."""
CLOSE = 0.7
"""An allocation is close to the bound if its error is above this share of it."""
FINE = 8
"""The bits with which the s[n] are measured."""
FORWARD = 3
"""The time of this pass in evaluations of every block: one of them, and the rounding."""
POWERS = 0.25, 1.0
"""The least and the largest p."""


class Forecast(NamedTuple):
    """The error of the gradients as a function of the bits of the steps 0 … N − 2."""

    sizes: Sequence[float]
    """s[n]"""
    power: float
    factor: float

    def part(self, n: int, bits: int) -> float:
        """What step n adds to the square of the error."""
        return self.factor**2 * math.pow(self.sizes[n] * levels(bits).c, 2 * self.power)

    def error(self, bits: Sequence[int]) -> float:
        return math.sqrt(sum(self.part(n, b) for n, b in enumerate(bits)))

    def fitted(self, bits: Sequence[int], measured: float) -> Forecast:
        """With the factor that gives the measured error."""
        error = self.error(bits)
        return self._replace(factor=self.factor * measured / error if error else 0.0)


def forecast(sizes: Sequence[float], measured: Mapping[int, float]) -> Forecast:
    """From the s[n] and the errors of the gradients that were ``measured`` with equal bits for all
    steps."""
    few, many = min(measured), max(measured)
    power = POWERS[1]
    if few < many and measured[many] > 0:
        ratio = math.log(measured[few] / measured[many])
        power = min(max(ratio / math.log(levels(few).c / levels(many).c), POWERS[0]), POWERS[1])
    return Forecast(sizes, power, 1.0).fitted([many] * len(sizes), measured[many])


def fewest_bits(forecast: Forecast, max_error: float) -> tuple[int, ...]:
    """The bits of the steps with the least sum whose error is at most ``max_error``. If there are
    none, every step gets the most."""
    bits = [BITS[0]] * len(forecast.sizes)
    square, limit = forecast.error(bits) ** 2, max_error**2
    gains = [best_gain(forecast, n, BITS[0]) for n in range(len(bits))]
    heapq.heapify(gains)
    while square > limit and gains:
        rate, n, more = heapq.heappop(gains)
        square += rate * (more - bits[n])
        bits[n] = more
        if more < BITS[-1]:
            heapq.heappush(gains, best_gain(forecast, n, more))
    return tuple(bits)


def best_gain(forecast: Forecast, n: int, bits: int) -> tuple[float, int, int]:
    """The most that more bits for step n can take from the square of the error, per bit and
    negative; the step; the number of bits that do."""
    now = forecast.part(n, bits)
    rates = [((forecast.part(n, b) - now) / (b - bits), b) for b in BITS if b > bits]
    rate, more = min(rates)
    return rate, n, more


class Allocator:
    """Finds the bits of the steps of a stage. Its settings are measured by ``measurer``."""

    def __init__(self, measurer: Measurer) -> None:
        self.measurer = measurer
        self.sizes: list[float] | None = None

    def best(self, max_error: float, budget: Budget) -> Measurement | None:
        """The allocation with the fewest bits whose measured error is at most ``max_error``. None
        if there is none, or no time to find one."""
        found = self._forecast(max_error, budget)
        best: Measurement | None = None
        known: dict[tuple[int, ...], Measurement | None] = {}
        while found is not None and len(known) < ROUNDS:
            bits = fewest_bits(found, max_error)
            if bits in known:
                break
            known[bits] = measured = self._measure(bits, budget)
            if measured is None:
                break
            if measured.error <= max_error and (best is None or measured.memory < best.memory):
                best = measured
            if CLOSE * max_error <= measured.error <= max_error:
                break
            found = found.fitted(bits, measured.error)
        return best

    def _forecast(self, max_error: float, budget: Budget) -> Forecast | None:
        """By the two numbers of bits for all steps whose errors are nearest to ``max_error``."""
        uniform = [
            (error, setting.bits)
            for setting, (gradient, x, _) in self.measurer.found.items()
            if setting.records and isinstance(setting.bits, int) and not setting.anchor_every
            if 0 < (error := max(gradient.error, x.error)) < math.inf
        ]
        if not uniform or self._sizes(budget) is None:
            return None
        nearest = sorted(uniform, key=lambda each: abs(math.log(each[0] / max_error)))[:2]
        return forecast(self.sizes or [], {bits: error for error, bits in nearest})

    def _sizes(self, budget: Budget) -> list[float] | None:
        """The s[n], if there is time to measure them, and if they are finite."""
        probe = self.measurer.probe
        stage = probe.stage
        if self.sizes is None and stage.depth > 1:
            blocks = stage.options.blocks(stage.depth)
            if not budget.allows(FORWARD * blocks * probe.evaluation_time()):
                return None
            budget.show("measuring what each step contributes to the error")
            with probe.untouched():
                self.sizes = [r / levels(FINE).c for r in rounding_errors(probe, FINE)]
        return self.sizes if self.sizes and all(map(math.isfinite, self.sizes)) else None

    def _measure(self, bits: tuple[int, ...], budget: Budget) -> Measurement | None:
        setting = recorded(bits)
        if setting not in self.measurer.found:
            if not budget.allows(self.measurer.step):
                return None
            budget.show(f"measuring {setting}")
            # Its time would change that of the measurements that there are of other bits.
            self.measurer.measure(setting, timed=False)
        return self.measurer.measurements([setting])[0]


def recorded(bits: Sequence[int]) -> Setting:
    """The setting with these bits for the steps 0 … N − 2. The last increment is not recorded; its
    entry is that of the step before, which ``deepen`` may give to a step that is."""
    same = len(set(bits)) == 1
    return Setting("adjoint", "recorded", bits=bits[0] if same else (*bits, bits[-1]))
