"""Errors of gradients, relative to exact ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


def relative(distance: float, size: float) -> float:
    """distance / size; infinite if distance is not finite, or if size is 0 and distance is not."""
    if distance == 0:
        return 0.0
    return distance / size if math.isfinite(distance) and size > 0 else math.inf


class GradientError(NamedTuple):
    error: float
    """‖g − exact‖ / ‖exact‖."""
    cosine: float
    """The cosine of the angle between g and exact; 1 if both are zero."""


def compare(gradients: Iterable[Tensor], exact: Iterable[Tensor]) -> GradientError:
    """The error of several tensors, taken as one vector."""
    far = mine = true = product = 0.0
    for a, b in zip(gradients, exact, strict=True):
        a, b = a.double().flatten(), b.double().flatten()
        far += float((a - b).square().sum())
        mine += float(a.square().sum())
        true += float(b.square().sum())
        product += float(a @ b)
    error = relative(math.sqrt(far), math.sqrt(true))
    if mine == true == 0:
        return GradientError(error, 1.0)
    size = math.sqrt(mine) * math.sqrt(true)
    cosine = product / size if math.isfinite(size) and size > 0 else 0.0
    return GradientError(error, cosine)
