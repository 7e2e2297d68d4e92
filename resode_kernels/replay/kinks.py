"""Remembered kinks of modules.

While a block runs, a ``TorchFunctionMode`` sees the calls of functions with kinks: relu, relu6,
leaky_relu, prelu, hardtanh, hardswish, hardsigmoid, abs, and clamp with numbers as bounds, in every
form that PyTorch has of them. ``Recording`` keeps on which side of each kink every argument lies,
one bit per argument and kink. ``Replaying`` computes the pieces on these sides, wherever the
arguments lie now.

The mode sees what PyTorch lets it see: not what compiled extensions and ``torch.jit.script`` run.
Tensors of subclasses and of ``torch.func``'s transforms keep their own sides.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kinks import byte_count, pack, select, unpack

Test = Callable[[Tensor], Tensor]


class Kinked(NamedTuple):
    """A call of a function with kinks."""

    u: Tensor
    """The argument."""
    sides: tuple[Test, ...]
    """For every kink: u → where it lies on that side. NaN lies on none."""
    value: Callable[..., Tensor]
    """(u, flags of every side) → the function's value, if u were on these sides."""
    inplace: bool = False
    name: str = ""


# ------------------------------------------------------------------- the functions, by their calls


def relu(input: Tensor, inplace: bool = False) -> Kinked:
    return Kinked(input, (lambda u: u <= 0,), lambda u, low: select(~low, u), inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Kinked:
    def value(u: Tensor, low: Tensor) -> Tensor:
        return select(~low, u) + negative_slope * select(low, u)

    return Kinked(input, (lambda u: u <= 0,), value, inplace)


def prelu(input: Tensor, weight: Tensor) -> Kinked:
    def value(u: Tensor, low: Tensor) -> Tensor:
        by_channel = weight.view(-1, *[1] * (u.dim() - 2)) if weight.numel() > 1 else weight
        return select(~low, u) + by_channel * select(low, u)

    return Kinked(input, (lambda u: u <= 0,), value)


def absolute(input: Tensor) -> Kinked:
    return Kinked(input, (lambda u: u < 0,), lambda u, low: u * (1 - 2 * low.to(u.dtype)))


def clamp(input: Tensor, min: Any = None, max: Any = None) -> Kinked | None:
    low, high = (None if bound is None else float(bound) for bound in (min, max))
    if low is not None and high is not None and low > high:
        return None  # a constant

    def value(u: Tensor, *sides: Tensor) -> Tensor:
        beyond = sides[0] | sides[-1]
        result = select(~beyond, u)
        for side, bound in zip(sides, (b for b in (low, high) if b is not None), strict=True):
            result = result + select(side, torch.full_like(u, bound))
        return result

    below = () if low is None else (lambda u: u < low,)
    above = () if high is None else (lambda u: u > high,)
    return Kinked(input, (*below, *above), value)


def clamp_min(input: Tensor, min: Any) -> Kinked | None:
    return clamp(input, min)


def clamp_max(input: Tensor, max: Any) -> Kinked | None:
    return clamp(input, None, max)


def hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Kinked | None:
    clamped = clamp(input, min_val, max_val)
    if clamped is None:
        return None
    sides = (lambda u: u <= min_val, lambda u: u >= max_val)
    return clamped._replace(sides=sides, inplace=inplace)


def relu6(input: Tensor, inplace: bool = False) -> Kinked | None:
    return hardtanh(input, 0.0, 6.0, inplace)


BEYOND_THREE: tuple[Test, Test] = (lambda u: u <= -3, lambda u: u >= 3)


def hardswish(input: Tensor, inplace: bool = False) -> Kinked:
    def value(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        middle = select(~(low | high), u)
        return middle * (middle + 3) / 6 + select(high, u)

    return Kinked(input, BEYOND_THREE, value, inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Kinked:
    def value(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        middle = select(~low, select(~high, u) + 3 + 3 * high.to(u.dtype))
        return middle / 6

    return Kinked(input, BEYOND_THREE, value, inplace)


NAMES: dict[str, Callable[..., Kinked | None]] = {
    "relu": relu,
    "relu6": relu6,
    "leaky_relu": leaky_relu,
    "prelu": prelu,
    "hardtanh": hardtanh,
    "hardswish": hardswish,
    "hardsigmoid": hardsigmoid,
    **{"abs": absolute, "absolute": absolute},
    **{"clamp": clamp, "clip": clamp, "clamp_min": clamp_min, "clamp_max": clamp_max},
}
FUNCTIONS = {
    getattr(owner, name + ending): (name, read, bool(ending))
    for name, read in NAMES.items()
    for owner in (F, torch, torch.Tensor, torch._C._nn)
    for ending in ("", "_")
    if hasattr(owner, name + ending)
}
"""The name of each of PyTorch's functions, how to read its calls, and whether it works in place."""
PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def kinked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Kinked | None:
    """A call as one of a function with kinks; None if it is none, or keeps its own sides."""
    if func not in FUNCTIONS:
        return None
    name, read, inplace = FUNCTIONS[func]
    if any(isinstance(t, Tensor) for t in (*args[1:], *kwargs.values())) and read is not prelu:
        return None  # bounds or results that are tensors
    call = read(*args, **kwargs)
    if call is None or not call.sides:
        return None
    u = call.u
    if type(u) not in PLAIN or not u.is_floating_point():
        return None
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(u):
        return None
    return call._replace(inplace=inplace or call.inplace, name=name)


# ------------------------------------------------------------------------------------------ modes


class Seen(NamedTuple):
    """What a replay must repeat of a call."""

    name: str
    shape: tuple[int, ...]
    kinks: int

    @classmethod
    def of(cls, call: Kinked) -> Seen:
        return cls(call.name, tuple(call.u.shape), len(call.sides))

    def __str__(self) -> str:
        return f"{self.name} with an argument of the shape {list(self.shape)}"

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


_local = threading.local()


class Watching(TorchFunctionMode):
    """Sees the calls of functions with kinks in one evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False

    def __enter__(self) -> Any:
        self.outer = getattr(_local, "mode", None)
        _local.mode = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.mode = self.outer
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = None if self.paused else kinked(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        return self.run(call, func, args, kwargs)

    def run(self, call: Kinked, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Recording(Watching):
    """Keeps the sides of every argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.kept: list[Tensor] = []

    def run(self, call: Kinked, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for side in call.sides:  # before func changes u in place
            self.kept.append(pack(side(call.u.detach()).flatten()))
        self.seen.append(Seen.of(call))
        return func(*args, **kwargs)

    def sides(self) -> Tensor:
        """uint8: the sides of one call after the other's, if there was one."""
        return torch.cat(self.kept)


class Replaying(Watching):
    """Computes the pieces on the sides that ``Recording`` has kept.

    block  what errors call the block
    """

    def __init__(self, seen: Sequence[Seen], sides: Tensor | None, block: object) -> None:
        super().__init__()
        self.seen, self.sides, self.block = seen, sides, block
        self.calls, self.begin = 0, 0

    def run(self, call: Kinked, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        now = Seen.of(call)
        before = self.seen[self.calls] if self.calls < len(self.seen) else None
        if before != now:
            self.refuse(str(now), str(before or "no function with kinks"))
        if in_checkpoint():
            raise RuntimeError(
                f"kinks=True does not work with a checkpoint inside of {self.block}, which would "
                f"run {now} once more: take the checkpoint out of the block (its activations are "
                "freed after each step anyway), or set kinks=False"
            )
        assert self.sides is not None  # something was seen
        u, flags = call.u, []
        size = byte_count(now.entries)
        for _ in range(now.kinks):
            packed = self.sides[self.begin : self.begin + size]
            flags.append(unpack(packed, now.entries).view(u.shape))
            self.begin += size
        self.calls += 1
        value = call.value(u, *flags)
        return u.copy_(value) if call.inplace else value

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.calls < len(self.seen):
            self.refuse("no function with kinks", str(self.seen[self.calls]))

    def refuse(self, now: str, before: str) -> None:
        raise RuntimeError(
            f"{self.block} calls other functions when it runs again in the backward pass, so the "
            f"kinks that the forward pass has kept do not fit: call {self.calls + 1} is of {now}, "
            f"and it was of {before}. Set kinks=False, which keeps none"
        )


def in_checkpoint() -> bool:
    """Whether a checkpoint is under way that will run the same calls again in the backward pass."""
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


@contextmanager
def unseen() -> Iterator[None]:
    """Context in which no evaluation that is under way sees what is called: for a stage inside of a
    block, which has its own option ``kinks``."""
    mode = getattr(_local, "mode", None)
    if mode is None or mode.paused:
        yield
        return
    mode.paused = True
    try:
        yield
    finally:
        mode.paused = False
