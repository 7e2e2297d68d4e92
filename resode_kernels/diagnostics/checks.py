"""Checks of the arguments of ``diagnose``, ``tune`` and ``monitor``."""

from __future__ import annotations

import math


def kind(value: object) -> str:
    """A wrong argument as errors name it."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def positive(name: str, value: object, or_zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {kind(value)}")
    if math.isnan(value) or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{name} must be {'at least' if or_zero else 'above'} 0, not {value}")
