"""The result of a stage's diagnosis, as text, numbers and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .choice import MARGIN, NEARBY
from .constants import Constants
from .gradients import GradientError
from .settings import CHECKPOINT, STORED, Measurement, Setting
from .trajectory import Layer
from .yardsticks import Yardsticks

WORST = 5
"""The number of parameters that the text names."""


@dataclass(frozen=True)
class Bound:
    """The paper's bound on ‖x̃[n] − x[n]‖ for the rule ``paper`` without anchors, and the measured
    error with that rule. Both are divided by ‖x[n]‖, as in ``Layer``."""

    proposition: int
    layers: list[float] | None
    """The bound for every n; None if it needs Δ and the blocks differ in shape, or if there was no
    time to estimate the constants."""
    measured: list[float]

    @property
    def largest(self) -> float | None:
        return None if self.layers is None else max(self.layers)


@dataclass(frozen=True)
class Report:
    """The result of ``diagnose`` for a stage: ``print`` it, ``plot`` it, or log ``to_dict()``. What
    there was no time for is None, or in ``not_measured``."""

    stage: str
    input: str
    depth: int
    step: float
    setting: Setting
    """The stage's own setting. The errors up to ``blocks`` are those with this setting."""
    layers: list[Layer] | None
    gradient: GradientError
    """The error of all parameter gradients together."""
    input_gradient: GradientError
    parameters: dict[str, GradientError]
    blocks: list[GradientError]
    """The errors of all parameters of block n together; tied: of the one block."""
    constants: Constants | None
    bound: Bound | None
    yardsticks: Yardsticks
    """Errors that training has anyway, to compare those of the settings with."""
    settings: list[Measurement]
    not_measured: list[Setting]
    max_gradient_error: float
    recommended: Measurement
    seconds: float
    """The time that the diagnosis was given."""
    name: str = "stage"
    """How the stage is written in Python."""

    @property
    def recommendation(self) -> str:
        """The recommended setting, the reason, and the call that sets it."""
        best, limit = self.recommended, f"{self.max_gradient_error:.1e}"
        if best.setting == CHECKPOINT:
            closest = min(
                (m for m in self.settings if m.setting.backward == "adjoint"),
                key=lambda m: m.error,
                default=None,
            )
            reach = (
                ""
                if closest is None
                else f" (smallest error: {closest.error:.1e} with {closest.setting})"
            )
            measured = "measured " if self.not_measured else ""
            return (
                f"Recommended: checkpoint, which is exact. No {measured}reverse rule keeps the "
                f"gradient error below {limit} with a margin of {MARGIN:g} in less memory than "
                f"checkpointing{reach}. "
                f"Set it by {self.name}.configure(backward='checkpoint', anchor_every=None)."
            )
        other = self.of(CHECKPOINT)
        options = ", ".join(f"{key}={value!r}" for key, value in best.setting.options.items())
        return (
            f"Recommended: {best.setting}. Its gradient error is {best.error:.1e}, below {limit} "
            f"with a margin of {MARGIN:g}. It takes {best.seconds / other.seconds:.2f} × the time "
            f"and {best.memory / other.memory:.2f} × the memory of checkpointing. "
            f"Set it by {self.name}.configure({options})."
        )

    def of(self, setting: Setting) -> Measurement:
        """The measurement of a setting."""
        for m in self.settings:
            if m.setting == setting:
                return m
        raise KeyError(
            f"{setting} was not measured; give it in settings=[...], or more than "
            f"seconds={self.seconds:g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts only."""
        result = asdict(self)
        result["setting"] = str(self.setting)
        if self.layers is not None:
            result["layers"] = [layer._asdict() for layer in self.layers]
        for name in ("gradient", "input_gradient"):
            result[name] = getattr(self, name)._asdict()
        result["parameters"] = {name: e._asdict() for name, e in self.parameters.items()}
        result["blocks"] = [e._asdict() for e in self.blocks]
        result["settings"] = [_plain(m) for m in self.settings]
        result["not_measured"] = [str(setting) for setting in self.not_measured]
        result["recommended"] = _plain(self.recommended)
        result["recommendation"] = self.recommendation
        return result

    def plot(self, path: str | Path) -> None:
        """Saves a picture of the report, as PNG or in the format of the path's suffix."""
        drawing().draw(self, path)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"Stage: {self.stage}",
                f"Input: {self.input}",
                f"Setting: {self.setting}",
                "",
                *self._findings(),
                "",
                *self._table(),
                "",
                *self.yardsticks.lines(),
                *self.missing(),
                "",
                self.recommendation,
            ]
        )

    def _findings(self) -> list[str]:
        states = points = "not measured"
        if self.layers is not None:
            state = max(self.layers, key=lambda layer: layer.state_error)
            point = max(self.layers, key=lambda layer: layer.point_error)
            states = f"largest {state.state_error:.1e} (at x[{state.n}])"
            points = f"largest {point.point_error:.1e} (at x[{point.n}])"
        lines = [
            f"Relative errors with {self.setting}, N = {self.depth}",
            f"  states                {states}",
            f"  linearization points  {points}",
            f"  parameter gradients   {self.gradient.error:.1e} (all parameters together), "
            f"cosine similarity {self.gradient.cosine:.6f}",
            f"  input gradient        {self.input_gradient.error:.1e}",
        ]
        worst = sorted(self.parameters.items(), key=lambda item: -item[1].error)
        width = max((len(name) for name, _ in worst[:WORST]), default=0)
        lines += [
            f"Largest relative errors of single parameter gradients ({len(worst[:WORST])} of "
            f"{len(worst)} parameters)",
            *(
                f"  {name:<{width}}  {e.error:.1e}, cosine similarity {e.cosine:.6f}"
                for name, e in worst[:WORST]
            ),
        ]
        return [*lines, "Conditions of the paper's theory", *self._theory()]

    def _theory(self) -> list[str]:
        c, bound = self.constants, self.bound
        measured = "not measured" if bound is None else f"{max(bound.measured):.1e}"
        lines = [f"  measured error of the states, rule paper    {measured}"]
        if c is None or bound is None:
            return ["  estimates of the constants                  not measured", *lines]
        if c.smoothness is None:
            change = "undefined, because the blocks differ in shape"
        elif c.smoothness == 0:
            change = "none, all blocks have the same weights"
        else:
            share = (
                "" if c.relative_smoothness is None else f" ({c.relative_smoothness:.0%} of ‖θ‖)"
            )
            change = f"at most {c.smoothness:.2g}{share}"
        few = f" (at {c.blocks} of {c.blocks_wanted} blocks)" if c.blocks < c.blocks_wanted else ""
        contraction = abs(self.step) * c.l_f
        limit = bound.largest
        text = "undefined, because the blocks differ in shape" if limit is None else f"{limit:.1e}"
        return [
            f"  change of the weights from block to block   {change}",
            f"  estimates of the constants                  L_f ≈ {c.l_f:.3g}, C_f ≈ {c.c_f:.3g}"
            f"{few}",
            f"  h L_f (should be well below 1)              {contraction:.2g}",
            f"  bound on the states' error, rule paper      {text} (Prop. {bound.proposition})",
            *lines,
        ]

    def _table(self) -> list[str]:
        """One line per rule and order or bits: gradient error and memory for every distance of
        anchors."""
        unit = self.of(CHECKPOINT).seconds
        settings = self._in_order()
        spacings = [
            None,
            *sorted({k for setting in settings if (k := setting.anchor_every)})[::-1],
        ]
        lines: dict[Setting, dict[int | None, str]] = {}
        for setting in settings:
            lines.setdefault(setting.line, {})[setting.anchor_every] = f"{'–':>8}{'–':>10}"
        times: dict[Setting, float] = {}
        for m in self.settings:
            error = "exact" if m.setting in (CHECKPOINT, STORED) else f"{m.error:.1e}"
            mark = "*" if m is self.recommended else " "
            cell = f"{error:>8}{mark}{megabytes(m.memory):>9}"
            lines[m.setting.line][m.setting.anchor_every] = cell
            times[m.setting.work] = m.seconds
        width = max(len(str(line)) for line in lines)
        heads = ["no anchors", *(f"anchors every {k}" for k in spacings[1:])]
        columns = "  ".join([f"{'error':>8} {'memory':>9}"] * len(heads))
        nearby = "its error covers nearby inputs as well"
        if not self._covers_nearby:
            tested = self.recommended.nearby_inputs
            nearby = f"its error covers {tested} of {NEARBY} nearby inputs"
        return [
            f"{'':<{width}}  {'  '.join(f'{head:>18}' for head in heads)}",
            f"{'setting':<{width}}  {columns}  {'time/step':>11}  vs checkpoint",
            *(
                f"{line!s:<{width}}  {'  '.join(cells.get(k, ' ' * 18) for k in spacings)}"
                + (
                    f"  {1e3 * times[line.work]:>8,.1f} ms  {times[line.work] / unit:>11.2f} ×"
                    if line.work in times
                    else f"  {'–':>11}  {'–':>13}"
                )
                for line, cells in lines.items()
            ),
            "error: relative error of all parameter gradients together or of the input gradient, "
            "whichever is larger",
            "memory: peak of states and activations in a training step",
            f"*: the recommended setting; {nearby}",
        ]

    def _in_order(self) -> list[Setting]:
        """All settings that were to be measured: lines of the table by rule and order."""
        every = [*(m.setting for m in self.settings), *self.not_measured]
        exact = [setting for setting in every if setting.backward != "adjoint"]
        return [
            *sorted(
                (setting for setting in every if setting.backward == "adjoint"),
                key=lambda setting: setting.rank,
            ),
            *exact,
        ]

    @property
    def _covers_nearby(self) -> bool:
        best = self.recommended
        return best.setting == CHECKPOINT or best.nearby_inputs == NEARBY

    def missing(self) -> list[str]:
        """What the report lacks because there was no time for it."""
        parts = [
            *([f"{len(self.not_measured)} settings (–)"] if self.not_measured else []),
            *self.yardsticks.missing(),
            *(["times after a first run"] if self.of(CHECKPOINT).runs == 1 else []),
            *(["errors of the states"] if self.layers is None else []),
            *(["constants of the paper's theory"] if self.constants is None else []),
            *(["the recommended setting at nearby inputs"] if not self._covers_nearby else []),
        ]
        if not parts:
            return []
        return [f"Not measured for lack of time, seconds={self.seconds:g}: {', '.join(parts)}"]


def _plain(m: Measurement) -> dict[str, Any]:
    return {
        "setting": str(m.setting),
        "options": m.setting.options,
        "gradient_error": m.gradient.error,
        "gradient_cosine": m.gradient.cosine,
        "input_error": m.input.error,
        "nearby_error": m.nearby,
        "nearby_inputs": m.nearby_inputs,
        "memory": m.memory,
        "seconds": m.seconds,
        "runs": m.runs,
    }


def drawing() -> Any:
    """The module that plots, which needs matplotlib."""
    try:
        from . import drawing as module
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    return module


def megabytes(count: float) -> str:
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.2f} MiB"
