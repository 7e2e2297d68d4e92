"""The options that every stage takes, and the method that follows from them."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from typing_extensions import TypedDict

Scheme = Literal["euler", "heun"]
Backward = Literal["adjoint", "stored", "checkpoint"]
ReverseRule = Literal["paper", "refined", "predicted", "recorded"]
Stream = Literal["float32", "input"]
NonFinite = Literal["raise", "warn", "ignore"]
BackendName = Literal["auto", "cpp", "cuda", "triton", "reference"]


class Orders(NamedTuple):
    """The orders of a reverse rule: the default and the largest."""

    default: int
    largest: float


ORDERS: dict[str, Orders] = {
    "paper": Orders(1, 1),
    "refined": Orders(1, math.inf),
    "predicted": Orders(2, 3),
    "recorded": Orders(1, 1),
}
BITS = (2, 3, 4, 5, 6, 8, 12, 16)
"""The numbers of bits in which ``recorded`` can write down an element of an increment."""
Bits = int | Sequence[int | None]


class Measured(NamedTuple):
    """What was measured with ``refined`` of an order in stages with random initial weights: the
    relative error of the gradients is about ``factor`` · h^``power``, whatever the depth."""

    order: int
    factor: float
    power: float


class StageOptions(TypedDict, total=False):
    """The options that every stage takes as keywords:

    scheme        "euler" (ResNet) or "heun" (HeunNet)
    step          the step h; None: 1/depth
    backward      "adjoint": reconstruct the states in the backward pass, store none;
                  "stored": store every state (exact); "checkpoint": store every
                  ``anchor_every``-th state and recompute the others (exact)
    reverse       the reverse rule, which reconstructs the states: "paper", "refined", "predicted",
                  or "recorded", for which the forward pass writes down each increment
                  x[n+1] − x[n] in a few bits
    order         of "refined" (1, 2, …; default 1, of stages with batch norm 2) or "predicted"
                  (1 to 3; default 2)
    bits          of "recorded": the bits per element of an increment, one of 2, 3, 4, 5, 6, 8
                  (default), 12 and 16; or a sequence with an entry for each step, where None
                  stores the step's state as it is
    kinks         True: keep the sign of every argument of a relu in the forward pass, one bit each
                  (of other functions with kinks: on which side it is), and take these pieces in the
                  backward pass. Exact modes and functions without kinks do without. None: with
                  "recorded", whose memory grows with depth anyway
    anchor_every  k: store the states x[k], x[2k], … and restart the reconstruction at each.
                  None: store none; with backward="checkpoint": k = √depth, of modules k = 1
    stream        "float32": states are float32, or float64 like x; "input": they are of x's dtype,
                  also float16 and bfloat16 (stages of modules)
    nonfinite     what to do when a reconstructed state is not finite: "raise", "warn", "ignore"
    backend       "auto", "cpp", "cuda", "triton" or "reference"
    """

    scheme: Scheme
    step: float | None
    backward: Backward
    reverse: ReverseRule
    order: int | None
    bits: Bits
    kinks: bool | None
    anchor_every: int | None
    stream: Stream
    nonfinite: NonFinite
    backend: BackendName


@dataclass(frozen=True)
class Options:
    """``StageOptions`` with every default filled in, checked. Kinds of stages that have other
    defaults derive from it (``defaults.py``)."""

    measured = Measured(order=1, factor=0.12, power=1)  # any blocks; no annotation: not an option

    scheme: Scheme = "euler"
    step: float | None = None
    backward: Backward = "adjoint"
    reverse: ReverseRule = "refined"
    order: int | None = None
    bits: Bits = 8
    kinks: bool | None = None
    anchor_every: int | None = None
    stream: Stream = "float32"
    nonfinite: NonFinite = "raise"
    backend: BackendName = "auto"

    def __post_init__(self) -> None:
        choice("scheme", self.scheme, get_args(Scheme))
        choice("backward", self.backward, get_args(Backward))
        choice("reverse", self.reverse, get_args(ReverseRule))
        choice("stream", self.stream, get_args(Stream))
        choice("nonfinite", self.nonfinite, get_args(NonFinite))
        choice("backend", self.backend, get_args(BackendName))
        if self.step is not None:
            object.__setattr__(self, "step", number("step", self.step))
        for name in ("order", "anchor_every"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive_int(name, value))
        object.__setattr__(self, "bits", checked_bits(self.bits))
        if self.kinks is not None:
            flag("kinks", self.kinks)
        if self.order is not None and self.reverse == "recorded":
            raise ValueError(
                "order does not apply to reverse='recorded', whose accuracy is set by bits: leave "
                f"it out or set order=None, not {self.order}"
            )
        largest = ORDERS[self.reverse].largest
        if self.order is not None and self.order > largest:
            raise ValueError(
                f"order must be at most {largest} for reverse={self.reverse!r}, not {self.order}"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """The options from a user's keywords. Raises TypeError for an unknown name."""
        unknown = sorted(set(keywords) - set(cls.names()))
        if unknown:
            raise TypeError(
                f"unknown option {unknown[0]!r}; a stage takes {', '.join(cls.names())}"
            )
        return cls(**keywords)

    @property
    def resolved_order(self) -> int:
        """``order``, or the default of the reverse rule if it is None."""
        refined = self.reverse == "refined"
        return self.order or (self.measured.order if refined else ORDERS[self.reverse].default)

    @property
    def resolved_kinks(self) -> bool:
        """``kinks``, or whether the rule is ``recorded`` if it is None."""
        return self.reverse == "recorded" if self.kinks is None else self.kinks

    def resolved_step(self, depth: int) -> float:
        """``step``, or 1/depth if it is None."""
        return 1 / depth if self.step is None else float(self.step)

    def expected_error(self, depth: int) -> float:
        """The relative error of the gradients with the default reverse rule, see ``Measured``."""
        _, factor, power = self.measured
        return min(1.0, factor * math.pow(abs(self.resolved_step(depth)), power))

    def blocks(self, depth: int) -> int:
        """The number of blocks that ``depth`` steps use."""
        return depth + 1 if self.scheme == "heun" else depth

    def bits_of(self, depth: int) -> tuple[int, ...]:
        """``bits`` as ``Method`` has them."""
        if isinstance(self.bits, int):
            return (self.bits,)
        if len(self.bits) != depth:
            raise ValueError(
                f"bits must have an entry for each of the {depth} steps, not {len(self.bits)} "
                "(a single number serves all steps)"
            )
        return tuple(bits or 0 for bits in self.bits)

    def method(self, depth: int, *, of_modules: bool = False) -> Method:
        """``of_modules``: the blocks run as modules. One's activations take many times the memory
        of a state, so checkpointing keeps every state by default, which saves an evaluation."""
        reverse_rule: str = self.reverse
        anchor_every = self.anchor_every or 0
        bits: tuple[int, ...] = ()
        if self.backward == "stored":
            reverse_rule, anchor_every = "exact", 1
        elif self.backward == "checkpoint":
            reverse_rule = "exact"
            default = 1 if of_modules else round(math.sqrt(depth))
            anchor_every = min(anchor_every or default, depth)
        elif self.reverse == "recorded":
            bits = self.bits_of(depth)
        return Method(
            scheme=self.scheme,
            steps=depth,
            step=self.resolved_step(depth),
            reverse_rule=reverse_rule,
            order=self.resolved_order,
            anchor_every=anchor_every,
            bits=bits,
            kinks=self.resolved_kinks and reverse_rule != "exact",
            nonfinite="ignore" if reverse_rule == "exact" else self.nonfinite,
        )


class Method(NamedTuple):
    """How a stage of a certain depth runs. Backends receive it as a part of the problem."""

    scheme: str
    steps: int
    """The number of steps N."""
    step: float
    """The number h."""
    reverse_rule: str
    """The option ``reverse``, or ``"exact"`` if no state is reconstructed."""
    order: int
    anchor_every: int
    """k: the forward pass stores the states x[k], x[2k], … as anchors; 0: it stores none."""
    bits: tuple[int, ...]
    """``recorded``: the bits of the increments, one number for all steps or one for each; 0: the
    step's state is kept instead. Empty with other rules."""
    kinks: bool
    """Whether the forward pass keeps the linear pieces of functions with kinks (``kinks.py``)."""
    nonfinite: str
    """What to do when a reconstructed state is not finite; ``"ignore"``: do not check."""

    def without_keeping(self) -> Method:
        """The method of a forward pass that no reverse pass follows."""
        rule = "paper" if self.bits else self.reverse_rule
        return self._replace(reverse_rule=rule, anchor_every=0, bits=(), kinks=False)

    def increments(self) -> list[int]:
        """``recorded``: for each step n the bits in which its increment is recorded; 0 if the state
        x̂[n] is kept instead and x̂[n+1] is x[n+1]. So it is at step N − 1, where the reverse pass
        starts, and at the steps k − 1, 2k − 1, … for k = ``anchor_every``."""
        bits = self.bits * self.steps if len(self.bits) == 1 else self.bits
        result = list(bits)
        every = self.anchor_every or self.steps
        for n in {*range(every - 1, self.steps, every), self.steps - 1}:
            result[n] = 0
        return result


StageClass = TypeVar("StageClass", bound=type)


def documents_options(stage: StageClass) -> StageClass:
    """Class decorator: appends the list of options to the docstring of a stage."""
    if stage.__doc__ and StageOptions.__doc__:  # python -OO removes docstrings
        stage.__doc__ = f"{stage.__doc__.rstrip()}\n\n    {StageOptions.__doc__}"
    return stage


def given(value: object) -> str:
    """A wrong argument as errors name it."""
    if value is None or isinstance(value, str | numbers.Number):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, not {given(value)}"
        )


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {given(value)}")


def checked_bits(value: object) -> int | tuple[int | None, ...]:
    """The option ``bits``, its numbers as Python's int."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return one_of_bits("bits", value)
    return tuple(
        None if entry is None else one_of_bits(f"bits[{n}]", entry) for n, entry in enumerate(value)
    )


def one_of_bits(name: str, value: object) -> int:
    bits = integer(name, value, 1)
    if bits not in BITS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, BITS))}, not {bits}")
    return bits


LARGEST = 2**31 - 1
"""The largest integer that the kernels take."""


def integer(name: str, value: object, at_least: int) -> int:
    """The value as Python's int. NumPy's integers are integers, booleans are not."""
    if type(value) is int:  # asked first: it is ten times as fast
        result = value
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, not {given(value)}")
    else:
        result = operator.index(value)
    if result < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {result}")
    if result > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, not {result}")
    return result


def positive_int(name: str, value: object) -> int:
    return integer(name, value, 1)


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    finite: bool = True,
) -> float:
    """The value as Python's float, not NaN. NumPy's numbers are numbers, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {given(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    # Comparisons, because torch.compile(dynamic=True) has no math.isnan of its numbers.
    if not (-math.inf < result < math.inf if finite else -math.inf <= result <= math.inf):
        raise ValueError(f"{name} must be a {'finite ' if finite else ''}number, not {value}")
    if above is not None and result <= above:
        raise ValueError(f"{name} must be above {above}, not {value}")
    if at_least is not None and result < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    return result
