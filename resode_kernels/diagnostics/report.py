"""What a diagnosis found, as text, numbers and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .constants import Constants
from .gradients import GradientError
from .settings import CHECKPOINT, MARGIN, STORED, Measurement, Setting
from .trajectory import Layer

WORST = 5
"""How many parameters the text names."""


@dataclass(frozen=True)
class Bound:
    """The paper's bound on ‖x̃[n] − x[n]‖ for the rule ``paper`` without anchors, and what was
    measured with it: the largest over n of either, divided by ‖x[n]‖ as in ``Layer``."""

    proposition: int
    layers: list[float] | None
    """The bound for every n; None: it needs weights that can be compared."""
    measured: list[float]

    @property
    def largest(self) -> float | None:
        return None if self.layers is None else max(self.layers)


@dataclass(frozen=True)
class Report:
    """``print`` it, ``plot`` it, or take it apart with ``to_dict``."""

    stage: str
    input: str
    depth: int
    step: float
    setting: Setting
    """Of the stage when it was diagnosed; what follows up to ``blocks`` is about it."""
    layers: list[Layer]
    gradient: GradientError
    """Of all parameter gradients together."""
    input_gradient: GradientError
    parameters: dict[str, GradientError]
    blocks: list[GradientError]
    """Of all parameters of block n; tied: of the one block."""
    constants: Constants
    bound: Bound
    settings: list[Measurement]
    max_gradient_error: float
    recommended: Measurement

    @property
    def recommendation(self) -> str:
        """One sentence."""
        best, limit = self.recommended, f"{self.max_gradient_error:.1e}"
        if best.setting == CHECKPOINT:
            closest = min(
                (m for m in self.settings if m.setting.backward == "adjoint"),
                key=lambda m: m.error,
                default=None,
            )
            reach = "" if closest is None else f" ({closest.setting}: {closest.error:.1e})"
            return (
                f"No reconstruction keeps the gradients within {limit} with a margin of {MARGIN:g} "
                f"in less memory than checkpointing{reach}, so checkpoint, which is exact: "
                "stage.configure(backward='checkpoint', anchor_every=None)."
            )
        other = self.of(CHECKPOINT)
        options = ", ".join(f"{key}={value!r}" for key, value in best.setting._asdict().items())
        return (
            f"{str(best.setting).capitalize()} keeps the gradients within {limit} "
            f"(measured: {best.error:.1e}) in {best.seconds / other.seconds:.2f} × the time and "
            f"{best.memory / other.memory:.2f} × the memory of checkpointing: "
            f"stage.configure({options})."
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
        """A picture of it (PNG, or whatever the path's ending says). Needs matplotlib."""
        try:
            from .drawing import draw
        except ImportError as error:
            raise ImportError("Report.plot needs matplotlib: pip install matplotlib") from error
        draw(self, path)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.stage} on {self.input}, diagnosed with {self.setting}",
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
            f"states     off by {state.state_error:.1e} at worst (x[{state.n}] of {self.depth}), "
            f"where gradients are taken by {point.point_error:.1e} (x[{point.n}])",
            f"gradients  off by {self.gradient.error:.1e}, cosine {self.gradient.cosine:.6f}; "
            f"that of the input by {self.input_gradient.error:.1e}",
        ]
        worst = sorted(self.parameters.items(), key=lambda item: -item[1].error)
        width = max((len(name) for name, _ in worst[:WORST]), default=0)
        lines += [
            f"           {name:<{width}}  {e.error:.1e}, cosine {e.cosine:.6f}"
            for name, e in worst[:WORST]
        ]
        if len(worst) > WORST:
            lines.append(f"           and {len(worst) - WORST} parameters better than these")
        if c.smoothness is None:
            lines.append(
                "weights    the blocks differ in shape: smoothness in depth has no meaning"
            )
        elif c.smoothness == 0:
            lines.append("weights    the same in every layer: as smooth in depth as can be")
        else:
            share = "" if c.relative_smoothness is None else f" ({c.relative_smoothness:.0%} of θ)"
            lines.append(f"weights    change by up to {c.smoothness:.2g}{share} between layers")
        contraction = abs(self.step) * c.l_f
        lines.append(
            f"constants  L_f ≈ {c.l_f:.3g}, C_f ≈ {c.c_f:.3g}; h L_f ≈ {contraction:.2g}, which "
            "has to be well below 1"
        )
        limit = self.bound.largest
        text = "needs blocks of one shape" if limit is None else f"{limit:.1e}"
        lines.append(
            f"bound      on the states with the paper's rule, Prop. {self.bound.proposition}: "
            f"{text}; measured: {max(self.bound.measured):.1e}"
        )
        return lines

    def _table(self) -> list[str]:
        """A line for each rule and order: errors and memory, by the distance of the anchors."""
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
        return [
            f"{'error, memory':<{width}}  {'  '.join(f'{head:^18}' for head in heads)}"
            f"  {'time/step':>11}  vs checkpoint",
            *(
                f"{work!s:<{width}}  {'  '.join(cells.get(k, ' ' * 18) for k in spacings)}"
                f"  {1e3 * times[work]:>8,.1f} ms  {times[work] / unit:>11.2f} ×"
                for work, cells in lines.items()
            ),
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
