"""Functions that ``torch.compile`` leaves out of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: ``torch.compiler.disable``, applied when the function is first called. Applied
    earlier it would import ``torch._dynamo``, and with it ``import resode_kernels`` would take a
    second longer."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disable: Any = torch.compiler.disable
            disabled.append(disable(function))
        return disabled[0](*args, **kwargs)

    return call
