"""How a stage is run: the options that every stage takes, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

SCHEMES = ("euler", "heun")
BACKWARDS = ("adjoint", "stored", "checkpoint")
RULES = ("refined", "paper", "predicted")
NONFINITE = ("raise", "warn", "ignore")
BACKENDS = ("auto", "cpp", "triton", "cuda", "reference")

DEFAULT_ORDER = {"paper": 1, "refined": 1, "predicted": 2}
MAX_ORDER = {"paper": 1, "refined": math.inf, "predicted": 3}


class Method(NamedTuple):
    """Options with every default filled in, as the kernels take them."""

    scheme: str
    steps: int
    """N."""
    step: float
    """h."""
    reverse_rule: str
    """``"paper"``, ``"refined"``, ``"predicted"``; or ``"exact"``: nothing is reconstructed."""
    order: int
    anchor_every: int
    """k: the forward pass keeps the states x[k], x[2k], … as anchors; 0: it keeps none."""
    nonfinite: str
    """What happens when a reconstruction is not finite; ``"ignore"``: nobody looks."""


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class How:
    """The options that every stage takes.

    scheme        ``"euler"`` (ResNet) or ``"heun"`` (HeunNet)
    step          h; None: 1/depth
    backward      ``"adjoint"`` reconstructs the states on the way back and stores none of them;
                  ``"stored"`` keeps every state (exact); ``"checkpoint"`` keeps every
                  ``anchor_every``-th and recomputes the others (exact)
    reverse       the rule of the reconstruction: ``"refined"``, ``"paper"`` or ``"predicted"``
    order         of ``refined`` (1, 2, …; default 1) and ``predicted`` (1, 2, 3; default 2)
    anchor_every  k: keep the true states x[k], x[2k], … and restart the reconstruction at each.
                  None: keep none; with ``"checkpoint"``: k = √depth
    nonfinite     when a reconstructed state is not finite: ``"raise"``, ``"warn"`` or ``"ignore"``
    backend       ``"auto"``, or ``"cpp"``, ``"triton"``, ``"cuda"``, ``"reference"``
    """

    scheme: str = "euler"
    step: float | None = None
    backward: str = "adjoint"
    reverse: str = "refined"
    order: int | None = None
    anchor_every: int | None = None
    nonfinite: str = "raise"
    backend: str = "auto"

    def __post_init__(self) -> None:
        choice("scheme", self.scheme, SCHEMES)
        choice("backward", self.backward, BACKWARDS)
        choice("reverse", self.reverse, RULES)
        choice("nonfinite", self.nonfinite, NONFINITE)
        choice("backend", self.backend, BACKENDS)
        if self.step is not None and not (
            isinstance(self.step, (int, float)) and math.isfinite(self.step)
        ):
            raise ValueError(f"step must be a finite number or None, not {self.step!r}")
        if self.order is not None:
            positive_int("order", self.order)
            if self.order > MAX_ORDER[self.reverse]:
                raise ValueError(
                    f"order must be at most {MAX_ORDER[self.reverse]} "
                    f"for reverse={self.reverse!r}, not {self.order}"
                )
        if self.anchor_every is not None:
            positive_int("anchor_every", self.anchor_every)

    @staticmethod
    def from_options(options: dict[str, Any]) -> How:
        unknown = sorted(set(options) - set(How.__dataclass_fields__))
        if unknown:
            raise TypeError(
                f"unknown option {unknown[0]!r}; a stage takes "
                f"{', '.join(How.__dataclass_fields__)}"
            )
        return How(**options)

    def blocks(self, depth: int) -> int:
        """The number of blocks that ``depth`` steps use."""
        return depth + 1 if self.scheme == "heun" else depth

    def method(self, depth: int) -> Method:
        rule, keep = self.reverse, self.anchor_every or 0
        if self.backward == "stored":
            rule, keep = "exact", 1
        elif self.backward == "checkpoint":
            rule, keep = "exact", min(keep or round(math.sqrt(depth)), depth)
        return Method(
            scheme=self.scheme,
            steps=depth,
            step=1 / depth if self.step is None else float(self.step),
            reverse_rule=rule,
            order=self.order or DEFAULT_ORDER[self.reverse],
            anchor_every=keep,
            nonfinite="ignore" if rule == "exact" else self.nonfinite,
        )
