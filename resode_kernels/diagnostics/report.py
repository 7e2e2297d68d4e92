"""The result of a diagnosis, as text, numbers and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .constants import Constants
from .gradients import GradientError
from .settings import CHECKPOINT, MARGIN, STORED, Measurement, Setting
from .trajectory import Layer

WORST = 5
"""The number of parameters that the text names."""


@dataclass(frozen=True)
class Bound:
    """The paper's bound on ‖x̃[n] − x[n]‖ for the rule ``paper`` without anchors, and the measured
    error with that rule. Both are divided by ‖x[n]‖, as in ``Layer``."""

    proposition: int
    layers: list[float] | None
    """The bound for every n; None if it needs Δ and the blocks differ in shape."""
    measured: list[float]

    @property
    def largest(self) -> float | None:
        return None if self.layers is None else max(self.layers)


@dataclass(frozen=True)
class Report:
    """The result of ``diagnose``: ``print`` it, ``plot`` it, or log ``to_dict()``."""

    stage: str
    input: str
    depth: int
    step: float
    setting: Setting
    """The stage's own setting. The errors up to ``blocks`` are those with this setting."""
    layers: list[Layer]
    gradient: GradientError
    """The error of all parameter gradients together."""
    input_gradient: GradientError
    parameters: dict[str, GradientError]
    blocks: list[GradientError]
    """The errors of all parameters of block n together; tied: of the one block."""
    constants: Constants
    bound: Bound
    settings: list[Measurement]
    max_gradient_error: float
    recommended: Measurement

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
            return (
                "Recommended: checkpoint, which is exact. No reverse rule keeps the gradient error "
                f"below {limit} with a margin of {MARGIN:g} in less memory than checkpointing"
                f"{reach}. Set it by stage.configure(backward='checkpoint', anchor_every=None)."
            )
        other = self.of(CHECKPOINT)
        options = ", ".join(f"{key}={value!r}" for key, value in best.setting._asdict().items())
        return (
            f"Recommended: {best.setting}. Its gradient error is {best.error:.1e}, below {limit} "
            f"with a margin of {MARGIN:g}. It takes {best.seconds / other.seconds:.2f} × the time "
            f"and {best.memory / other.memory:.2f} × the memory of checkpointing. "
            f"Set it by stage.configure({options})."
        )

    def of(self, setting: Setting) -> Measurement:
        """The measurement of a setting."""
        return next(m for m in self.settings if m.setting == setting)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts only."""
        result = asdict(self)
        result["setting"] = str(self.setting)
        result["layers"] = [layer._asdict() for layer in self.layers]
        for name in ("gradient", "input_gradient"):
            result[name] = getattr(self, name)._asdict()
        result["parameters"] = {name: e._asdict() for name, e in self.parameters.items()}
        result["blocks"] = [e._asdict() for e in self.blocks]
        result["settings"] = [_plain(m) for m in self.settings]
        result["recommended"] = _plain(self.recommended)
        result["recommendation"] = self.recommendation
        return result

    def plot(self, path: str | Path) -> None:
        """Saves a picture of the report, as PNG or in the format of the path's suffix."""
        try:
            from .drawing import draw
        except ImportError as error:
            raise ImportError("Report.plot needs matplotlib: pip install matplotlib") from error
        draw(self, path)

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
                self.recommendation,
            ]
        )

    def _findings(self) -> list[str]:
        state = max(self.layers, key=lambda layer: layer.state_error)
        point = max(self.layers, key=lambda layer: layer.point_error)
        c = self.constants
        lines = [
            f"Relative errors with {self.setting}, N = {self.depth}",
            f"  states                largest {state.state_error:.1e} (at x[{state.n}])",
            f"  linearization points  largest {point.point_error:.1e} (at x[{point.n}])",
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
        if c.smoothness is None:
            change = "undefined, because the blocks differ in shape"
        elif c.smoothness == 0:
            change = "none, all blocks have the same weights"
        else:
            share = (
                "" if c.relative_smoothness is None else f" ({c.relative_smoothness:.0%} of ‖θ‖)"
            )
            change = f"at most {c.smoothness:.2g}{share}"
        contraction = abs(self.step) * c.l_f
        limit, prop = self.bound.largest, self.bound.proposition
        text = "undefined, because the blocks differ in shape" if limit is None else f"{limit:.1e}"
        lines += [
            "Conditions of the paper's theory",
            f"  change of the weights from block to block   {change}",
            f"  estimates of the constants                  L_f ≈ {c.l_f:.3g}, C_f ≈ {c.c_f:.3g}",
            f"  h L_f (should be well below 1)              {contraction:.2g}",
            f"  bound on the states' error, rule paper      {text} (Prop. {prop})",
            f"  measured error of the states, rule paper    {max(self.bound.measured):.1e}",
        ]
        return lines

    def _table(self) -> list[str]:
        """One line per rule and order: gradient error and memory for every distance of anchors."""
        unit = self.of(CHECKPOINT).seconds
        spacings = [
            None,
            *sorted({k for m in self.settings if (k := m.setting.anchor_every)})[::-1],
        ]
        lines: dict[Setting, dict[int | None, str]] = {}
        times = {}
        for m in self.settings:
            error = "exact" if m.setting in (CHECKPOINT, STORED) else f"{m.error:.1e}"
            mark = "*" if m is self.recommended else " "
            cells = lines.setdefault(m.setting.work, {})
            cells[m.setting.anchor_every] = f"{error:>8}{mark}{megabytes(m.memory):>9}"
            times[m.setting.work] = m.seconds
        width = max(len(str(work)) for work in lines)
        heads = ["no anchors", *(f"anchors every {k}" for k in spacings[1:])]
        columns = "  ".join([f"{'error':>8} {'memory':>9}"] * len(heads))
        return [
            f"{'':<{width}}  {'  '.join(f'{head:>18}' for head in heads)}",
            f"{'setting':<{width}}  {columns}  {'time/step':>11}  vs checkpoint",
            *(
                f"{work!s:<{width}}  {'  '.join(cells.get(k, ' ' * 18) for k in spacings)}"
                f"  {1e3 * times[work]:>8,.1f} ms  {times[work] / unit:>11.2f} ×"
                for work, cells in lines.items()
            ),
            "error: relative error of all parameter gradients together or of the input gradient, "
            "whichever is larger",
            "memory: peak of states and activations in a training step",
            "*: the recommended setting; its error covers nearby inputs as well",
        ]


def _plain(m: Measurement) -> dict[str, Any]:
    return {
        "setting": str(m.setting),
        "options": m.setting._asdict(),
        "gradient_error": m.gradient.error,
        "gradient_cosine": m.gradient.cosine,
        "input_error": m.input.error,
        "nearby_error": m.nearby,
        "memory": m.memory,
        "seconds": m.seconds,
    }


def megabytes(count: float) -> str:
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.2f} MiB"
