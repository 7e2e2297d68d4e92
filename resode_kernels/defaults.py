"""The defaults of the kinds of stages, and a warning where no default is right.

How far the gradients are off depends on the step h and on the blocks: little on the depth or the
width. Kinks (relu) and batch norm make it worse. ``tests/api/test_defaults.py`` measures the errors
that are expected here. Heun's scheme has about half of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from .options import Measured, Options

REVERSE_OPTIONS = ("backward", "reverse", "order", "kinks", "anchor_every")
"""The options that decide how gradients are computed."""
MAX_EXPECTED_ERROR = 1e-2
"""Defaults that are expected to exceed this relative gradient error are warned of."""
KINKED = ("relu",)
"""The activations whose slope jumps."""


class LinearOptions(Options):
    measured = Measured(order=1, factor=0.33, power=2)


class SmoothOptions(Options):
    """Smooth activations."""

    measured = Measured(order=1, factor=0.08, power=2)


class BatchNormOptions(Options):
    """Convolutions, batch norm and relu."""

    measured = Measured(order=2, factor=2.0, power=1.6)


class SmoothBatchNormOptions(Options):
    """Convolutions, batch norm and smooth activations."""

    measured = Measured(order=2, factor=3.0, power=3)


class GradientErrorWarning(UserWarning):
    """The error of a stage's gradients exceeds its bound, or is expected to."""


def chooses_reverse(options: Collection[str]) -> bool:
    """Whether a user who gives these options chooses how gradients are computed."""
    return any(name in options for name in REVERSE_OPTIONS)


_warned: set[str] = set()


def warn_once(kind: str, options: Options, depth: int) -> None:
    """Warns if the gradients of a stage with default options are expected to be wrong: once per
    kind of stage."""
    error = options.expected_error(depth)
    if error <= MAX_EXPECTED_ERROR or kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"the gradients of this {kind} (depth={depth}, step h = "
        f"{options.resolved_step(depth):.3g}) are expected to be off by about {error:.1%} with the "
        f"default reverse={options.reverse!r}, order={options.resolved_order}: each step changes "
        "the state too much. Call rk.tune(stage, x), which sets options that keep the error below "
        "a bound; or set backward='checkpoint', which is exact; or give reverse= explicitly, which "
        "accepts the error. (This warning is given once for every kind of stage.)",
        GradientErrorWarning,
        stacklevel=6,
    )
