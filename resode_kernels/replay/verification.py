"""Whether a block can be replayed: that it computes the same again from the same input.

The first evaluation of a module that a stage records is repeated at once, and compared. A module
whose output depends on anything that a replay does not restore (a counter, a cache, random numbers
of Python's) is so found before a gradient is wrong. Later evaluations are taken to be alike, as
long as the train/eval mode and the kinds of arguments are the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..states import State, parts
from .calls import RepeatedCall

if TYPE_CHECKING:
    from .blocks import ReplayedBlock

_verified: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Of every verified module, the circumstances."""


def circumstances(module: nn.Module, call: RepeatedCall) -> Any:
    return module.training, call.tree


def is_verified(module: nn.Module, call: RepeatedCall) -> bool:
    return bool(_verified.get(module) == circumstances(module, call))


def verify(block: ReplayedBlock, x: State, k: int, y: Any) -> None:
    """Raises if a replay of evaluation k of the block, at x, is not y."""
    again = block.f(x, k)
    tolerance = half_of_the_digits(block)
    for first, second in zip(parts(y), parts(again), strict=True):
        if not close(first, second, tolerance):
            difference = float((second - first).norm() / first.norm())
            raise RuntimeError(
                f"{block} computes something else when it runs again with the same input: the "
                f"outputs differ by {difference:.1e}, relatively. A stage runs its blocks again in "
                "the backward pass, so its gradients would be wrong. A block may depend on its "
                "input, its parameters, its buffers and torch's global random numbers, but not on "
                "a cache, a counter or a random generator of its own. With backward='stored' every "
                "block runs only once"
            )
    _verified[block.module] = circumstances(block.module, block.call)


def half_of_the_digits(block: ReplayedBlock) -> float:
    """The relative difference that is let pass: sums whose order varies, as on GPUs, make one."""
    autocast = [dtype for enabled, dtype in block.around.autocast if enabled]
    return max(math.sqrt(torch.finfo(dtype).eps) for dtype in (*block.call.dtypes, *autocast))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if torch.equal(a, b):
        return True
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
