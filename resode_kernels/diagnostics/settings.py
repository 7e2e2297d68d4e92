"""The settings that a stage could be trained with: what each costs, and what it does to the
gradients."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..options import ORDERS, Method, Options
from ..stages import StackedStage
from ..states import State, in_stream, parts
from .gradients import GradientError
from .probe import Gradients, Loss, Probe, saved_bytes

HIGHEST_ORDER = 3
"""Of those that are compared."""
MARGIN = 2.0
"""A setting is trusted with a bound if it stays below it by this factor: other batches differ."""
NEARBY = 3
"""How many inputs nearby a setting has to prove itself at."""
MAX_TURNS = 20
ALIKE = 1.05
"""Times whose ratio is below this are the same."""


class Setting(NamedTuple):
    """Options of a stage that change how its gradients are computed, and nothing else."""

    backward: str = "adjoint"
    reverse: str = "refined"
    order: int | None = None
    anchor_every: int | None = None

    @staticmethod
    def of(options: Options) -> Setting:
        """The reconstruction that the options ask for, also if they ask for an exact mode."""
        anchors = options.anchor_every if options.backward == "adjoint" else None
        return Setting("adjoint", options.reverse, options.resolved_order, anchors)

    @property
    def work(self) -> Setting:
        """The setting without anchors, which change nothing in what is computed."""
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
    """Every reverse rule and order, without anchors and with some around √depth apart, which is
    where checkpoints would be."""
    rules = [
        (rule, order)
        for rule, orders in ORDERS.items()
        for order in range(1, int(min(orders.largest, HIGHEST_ORDER)) + 1)
    ]
    root = max(2, round(math.sqrt(depth)))
    spacings = [k for k in (2 * root, root, root // 2) if 1 < k < depth]
    return [Setting("adjoint", rule, order, k) for k in (None, *spacings) for rule, order in rules]


@dataclass(frozen=True)
class Measurement:
    """Of one setting."""

    setting: Setting
    gradient: GradientError
    """Of all parameter gradients together."""
    input: GradientError
    """Of the gradient that goes on to what is before the stage."""
    memory: int
    """Bytes of states and activations in use at the worst moment of a step, parameters and their
    gradients aside. What autograd holds between the passes is measured, the rest counted; the
    scratch of kernels and temporaries inside of a block are not."""
    seconds: float
    """Of a training step, forward and backward. Anchors do not change it: the median of all
    measurements of the rule and order."""
    nearby: float = 0.0
    """The largest error of either at inputs nearby, if they were looked at."""

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.gradient.error, self.input.error, self.nearby)


def measure(
    probe: Probe,
    cotangent: State,
    exact: Gradients,
    settings: Sequence[Setting],
    seconds: float,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> list[Measurement]:
    """Errors and memory of every setting, then times of all in turns, until ``seconds`` have passed
    in them: at least one turn."""
    found = [
        (*errors(probe, cotangent, exact, setting), memory(probe, setting))
        for setting in progress(settings)
    ]
    times = _times(probe, cotangent, settings, seconds)
    return [
        Measurement(setting, *numbers, times[setting.work])
        for setting, numbers in zip(settings, found, strict=True)
    ]


def errors(
    probe: Probe, cotangent: State, exact: Gradients, setting: Setting
) -> tuple[GradientError, GradientError]:
    """Of a setting's gradients: see ``Gradients.errors``."""
    return probe.gradients(cotangent, **setting._asdict()).errors(exact)


def _times(
    probe: Probe, cotangent: State, settings: Sequence[Setting], seconds: float
) -> dict[Setting, float]:
    """Medians, by what the setting computes."""
    taken: dict[Setting, list[float]] = {setting.work: [] for setting in settings}
    begin = time.perf_counter()
    for _ in range(MAX_TURNS):
        for setting in settings:
            _wait(probe)
            start = time.perf_counter()
            probe.gradients(cotangent, **setting._asdict())
            _wait(probe)
            taken[setting.work].append(time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            break
    return {work: statistics.median(each) for work, each in taken.items()}


def _wait(probe: Probe) -> None:
    for device in {t.device for t in parts(probe.x)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------- memory


def memory(probe: Probe, setting: Setting) -> int:
    """See ``Measurement.memory``. Beside what is held, the way back has the cotangent and
    reconstructing rules the state, p, their history and one evaluation's activations; exact ones
    have a segment of states, or of activations if the blocks are modules. Stacked blocks work on
    tiles of rows, of which neither activations nor p count."""
    stage, options = probe.stage, setting._asdict()
    held = probe.held_bytes(**options)
    state: int = sum(t.nbytes for t in parts(in_stream(probe.x)))
    method: Method = replace(stage.options, **options).method(stage.depth)
    if setting.backward == "stored" and stage.runs_modules:
        return held + state  # autograd keeps everything
    evaluations = 2 if method.scheme == "heun" else 1
    in_tiles = isinstance(stage, StackedStage)
    activations = 0 if in_tiles else evaluations * block_bytes(probe)
    if method.reverse_rule == "exact":
        segment = (activations if stage.runs_modules else state) * method.anchor_every
        return held + state + max(segment, activations)
    history = method.order if method.reverse_rule == "predicted" else 0
    return held + (2 + (not in_tiles) + history) * state + activations


def block_bytes(probe: Probe) -> int:
    """What autograd keeps of one evaluation of a block, its parameters aside."""
    with probe.untouched() as named, torch.enable_grad():
        known = {t.untyped_storage().data_ptr() for t in named.values()}
        with saved_bytes(known) as held:
            probe.evaluate(0, in_stream(probe.x))
    return sum(held.values())


def stored_fits(probe: Probe, checkpointed: int) -> bool:
    """Whether standard backprop, by a generous estimate from what checkpointing takes, would use
    less than half of the memory that is free."""
    estimate = checkpointed * math.sqrt(probe.stage.depth)
    device = parts(probe.x)[0].device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return estimate < free / 2
    try:
        return estimate < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    except (ValueError, OSError, AttributeError):  # not everywhere
        return False


# ---------------------------------------------------------------------------------------- choice


def choose(
    probe: Probe, loss: Loss | None, measurements: list[Measurement], max_gradient_error: float
) -> Measurement:
    """The cheapest setting that also keeps to the bound at inputs nearby: a kink of f (relu's, say)
    that lies between a state and its reconstruction spoils a gradient, and whether one does is a
    matter of luck. Notes in ``measurements`` what it found."""
    nearby = [probe.nearby(seed) for seed in range(NEARBY)]
    confirmed: set[Setting] = set()
    while True:
        best = cheapest(measurements, max_gradient_error)
        if best.setting == CHECKPOINT or best.setting in confirmed:
            return best
        confirmed.add(best.setting)
        worst = 0.0
        for other in nearby:
            cotangent = other.cotangent(loss)
            exact = other.gradients(cotangent, **CHECKPOINT._asdict())
            found = errors(other, cotangent, exact, best.setting)
            worst = max(worst, *(e.error for e in found))
        measurements[measurements.index(best)] = replace(best, nearby=worst)


def cheapest(measurements: Sequence[Measurement], max_gradient_error: float) -> Measurement:
    """The fastest setting that keeps to the bound with a margin and takes less memory than
    checkpointing; of those that are alike in time, the one with the least memory. Checkpointing if
    there is none."""
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
    fastest = min(m.seconds for m in kept)
    alike = [m for m in kept if m.seconds <= ALIKE * fastest]
    return min(alike, key=lambda m: (m.memory, m.error))
