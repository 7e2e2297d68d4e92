"""The settings that a stage could be trained with: gradient error, memory and time of each, and the
choice of one."""

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
"""The highest order that is compared."""
MARGIN = 2.0
"""A setting is chosen if its error is below the bound by this factor: other batches differ."""
NEARBY = 3
"""The number of nearby inputs at which a setting is tested before it is chosen."""
MAX_TURNS = 20
ALIKE = 1.05
"""Times whose ratio is below this count as equal."""


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
    nearby: float = 0.0
    """The largest of both errors at nearby inputs; 0 if they were not tested."""

    @property
    def error(self) -> float:
        """The largest of these errors."""
        return max(self.gradient.error, self.input.error, self.nearby)


def measure(
    probe: Probe,
    cotangent: State,
    exact: Gradients,
    settings: Sequence[Setting],
    seconds: float,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> list[Measurement]:
    """Errors, memory and times of all settings. Times are measured in turns until ``seconds`` have
    passed, at least one turn."""
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
    """The errors of a setting's gradients, see ``Gradients.errors``."""
    return probe.gradients(cotangent, **setting._asdict()).errors(exact)


def _times(
    probe: Probe, cotangent: State, settings: Sequence[Setting], seconds: float
) -> dict[Setting, float]:
    """The median time of a step for every ``Setting.work``."""
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
    """See ``Measurement.memory``. In addition to what autograd holds, the reverse pass needs the
    cotangent. Rules that reconstruct states need the state, p, the history and the activations of
    one step. Exact ones need a segment of states, or of activations if the blocks are modules.
    Stages with stacked parameters work on tiles of rows, whose activations and p do not count."""
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
    """The bytes that autograd saves for one evaluation of a block, without its parameters."""
    with probe.untouched() as named, torch.enable_grad():
        known = {t.untyped_storage().data_ptr() for t in named.values()}
        with saved_bytes(known) as held:
            probe.evaluate(0, in_stream(probe.x))
    return sum(held.values())


def stored_fits(probe: Probe, checkpointed: int) -> bool:
    """Whether standard backprop would take less than half of the free memory, by a generous
    estimate from the memory of checkpointing."""
    estimate = checkpointed * math.sqrt(probe.stage.depth)
    device = parts(probe.x)[0].device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return estimate < free / 2
    try:
        return estimate < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    except (ValueError, OSError, AttributeError):  # not every platform has these
        return False


# ---------------------------------------------------------------------------------------- choice


def choose(
    probe: Probe, loss: Loss | None, measurements: list[Measurement], max_gradient_error: float
) -> Measurement:
    """The cheapest setting whose error is below the bound also at nearby inputs. One input is not
    enough: a kink of f (of a relu, say) between a state and its reconstruction spoils a gradient,
    and whether one lies there is a matter of chance. Updates ``measurements`` by these errors."""
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
    """The fastest setting whose error is below the bound with a margin and whose memory is below
    that of checkpointing; of settings with equal times, the one with the least memory.
    Checkpointing if there is no such setting."""
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
