"""The result of a model's diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .choice import MARGIN
from .gradients import GradientError
from .report import Report, drawing
from .settings import CHECKPOINT, Setting


@dataclass(frozen=True)
class ModelReport:
    """The result of ``diagnose`` for a model: ``print`` it, ``plot`` it, or log ``to_dict()``."""

    model: str
    input: str
    gradient: GradientError
    """The error of the gradients of all parameters of the model, with the options that its stages
    have."""
    recommended_gradient: GradientError
    """The same with the recommended settings of all stages."""
    stages: dict[str, Report]
    """The reports of the stages by name, each with the true cotangent of its output. The limits on
    their errors are below ``max_gradient_error`` where errors add up."""
    in_force: dict[str, Setting]
    """The settings that the stages have."""
    calls: dict[str, int]
    """How often the model's forward pass calls each stage. A report is of the last call."""
    left_out: list[str]
    """The stages that the forward pass does not call, or not with gradients."""
    max_gradient_error: float
    seconds: float
    """The time that the diagnosis was given."""

    @property
    def recommendation(self) -> str:
        """The recommended settings, the error with them, and the call that sets them."""
        chosen = ", ".join(f"{name}: {r.recommended.setting}" for name, r in self.stages.items())
        error = f"{self.recommended_gradient.error:.1e}, below {self.max_gradient_error:.1e}"
        exact = all(r.recommended.setting == CHECKPOINT for r in self.stages.values())
        then = (
            "The gradients of the model are then exact."
            if exact
            else f"The gradient error of the model is then {error} with a margin of {MARGIN:g}."
        )
        return (
            f"Recommended: {chosen}. {then} Set it by rk.tune(model, batch, loss, "
            f"max_gradient_error={self.max_gradient_error:g})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts only."""
        return {
            **vars(self),
            "gradient": self.gradient._asdict(),
            "recommended_gradient": self.recommended_gradient._asdict(),
            "stages": {name: report.to_dict() for name, report in self.stages.items()},
            "in_force": {name: str(setting) for name, setting in self.in_force.items()},
            "recommendation": self.recommendation,
        }

    def plot(self, path: str | Path) -> None:
        """Saves a picture, one row per stage, as PNG or in the format of the path's suffix."""
        drawing().draw_model(self, path)

    def __str__(self) -> str:
        first, *names = self.stages
        e = self.gradient
        return "\n".join(
            [
                f"Model: {self.model} with {len(self.stages)} stages"
                if names
                else f"Model: {self.model} with one stage",
                f"Input: {self.input}",
                "",
                f"Relative error of the gradients of all parameters: {e.error:.1e}, cosine "
                f"similarity {e.cosine:.6f}",
                "",
                *self._table(),
                *self._notes(),
                f"report.stages[{first!r}] is the report of a stage.",
                "",
                self.recommendation,
            ]
        )

    def _table(self) -> list[str]:
        """One line per stage: the setting that it has and the one that is recommended."""
        head = ("stage", "N", "setting", "error", "recommended", "error", "memory", "time")
        rows = [(*head, "autocast", "noise")]
        for name, r in self.stages.items():
            now, best, unit = self.in_force[name], r.recommended, r.of(CHECKPOINT)
            error = max(r.gradient.error, r.input_gradient.error)
            rows.append(
                (
                    name,
                    str(r.depth),
                    str(now),
                    f"{error:.1e}" if now.backward == "adjoint" else "exact",
                    str(best.setting),
                    "exact" if best.setting == CHECKPOINT else f"{best.error:.1e}",
                    f"{best.memory / unit.memory:.2f} ×",
                    f"{best.seconds / unit.seconds:.2f} ×",
                    r.yardsticks.cell("autocast"),
                    r.yardsticks.cell("noise"),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = (0, 2, 4)
        return [
            "  ".join(
                cell.ljust(width) if i in text else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ] + [
            "error: relative error of the gradients of the stage's parameters or of its input, "
            "whichever is larger",
            "memory, time: of a training step of the stage with the recommended setting, relative "
            "to checkpointing",
            "autocast: the error of exact backprop under bfloat16 autocast, which training in "
            "mixed precision accepts",
            "noise: half the distance between the gradients of the batch's halves; errors far "
            "below it change little",
        ]

    def _notes(self) -> list[str]:
        return [
            *(
                f"{name} is called {count} times in a forward pass; its errors are those of the "
                "last call"
                for name, count in self.calls.items()
                if count > 1
            ),
            *(f"{name} is left out: no gradient passes through it" for name in self.left_out),
            *(
                f"{name}: {line[0].lower()}{line[1:]}"
                for name, report in self.stages.items()
                for line in report.missing()
            ),
        ]
