"""How far a gradient is from the exact one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


def relative(distance: float, size: float) -> float:
    """distance / size; not finite, or not zero where size is: infinitely far."""
    if distance == 0:
        return 0.0
    return distance / size if math.isfinite(distance) and size > 0 else math.inf


class GradientError(NamedTuple):
    error: float
    """‖g − exact‖ / ‖exact‖."""
    cosine: float
    """Of the angle between them; 1 where both are zero."""


def compare(gradients: Iterable[Tensor], exact: Iterable[Tensor]) -> GradientError:
    """Of several tensors, as one vector."""
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
