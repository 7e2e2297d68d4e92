"""Functions whose arguments can be anything: one argument is replaced by something strange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_checks import DIGITS, assert_equal, assert_own, full_of_nans
from fuzz_tensors import DTYPES, LAYOUTS, STRANGE
from fuzz_wrappers import Results, numbers
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import resode_kernels as rk

H = 0.25

Tensors = dict[str, Any]


def mlp(t: Tensors, **options: Any) -> Tensor:
    return rk.functional.mlp_stage(t["x"], t["w1"], t["b1"], t["w2"], t["b2"], **options)


def plain_mlp(t: Tensors) -> Tensor:
    x = t["x"]
    for n in range(2):
        b1, b2 = (None if t[name] is None else t[name][n] for name in ("b1", "b2"))
        x = x + H * F.linear(torch.tanh(F.linear(x, t["w1"][n], b1)), t["w2"][n], b2)
    return x


def linear(t: Tensors, **options: Any) -> Tensor:
    return rk.functional.linear_stage(t["x"], t["weight"], **options)


def plain_linear(t: Tensors) -> Tensor:
    x = t["x"]
    for n in range(2):
        x = x + H * F.linear(x, t["weight"][n])
    return x


FIELDS = ("weight", "gamma", "beta", "mean", "variance")


def conv(t: Tensors, **options: Any) -> Tensor:
    layers = [tuple(t[f"{name}{i}"] for name in FIELDS) for i in range(2)]
    options = {"activation": "tanh", "eps": 0.1, **options}
    return rk.functional.conv_stage(t["x"], layers, **options)


def plain_conv(t: Tensors) -> Tensor:
    x = t["x"]
    for n in range(2):
        u = x
        for i in range(2):
            fields = [t[f"{name}{i}"] for name in FIELDS]
            weight, gamma, beta, mean, variance = (None if v is None else v[n] for v in fields)
            z = F.conv2d(torch.tanh(u), weight, padding=1)
            u = F.batch_norm(z, mean, variance, gamma, beta, mean is None, eps=0.1)
        x = x + H * u
    return x


CONV_SHAPES = {"weight": (2, 3, 3, 3, 3), **dict.fromkeys(FIELDS[1:], (2, 3))}
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensors], Tensor], dict[str, Any]]] = {
    "mlp": (
        mlp,
        plain_mlp,
        {"x": (2, 3), "w1": (2, 4, 3), "b1": (2, 4), "w2": (2, 3, 4), "b2": (2, 3)},
    ),
    "linear": (linear, plain_linear, {"x": (2, 3), "weight": (2, 3, 3)}),
    "conv": (
        conv,
        plain_conv,
        {
            "x": (2, 3, 2, 2),
            **{f"{name}{i}": shape for i in range(2) for name, shape in CONV_SHAPES.items()},
        },
    ),
}
WRONG_OPTIONS: list[tuple[str, Any]] = [
    *(("step", value) for value in (float("nan"), float("inf"), "0.1", True, 1j, [0.1], 10**400)),
    *(("order", value) for value in (0, -1, 2.0, "2", True, 2**40, float("nan"), [1])),
    *(("anchor_every", value) for value in (0, -3, 1.0, "all", False, 2**31, 2**80)),
    *(("bits", value) for value in (0, 1, 7, 17, -8, 2.0, 2**40, "8", True, None, {8}, [8, "4"],
                                    [1, 8], [8, 2.5], [None, 0], [[8, 8]], float("nan"))),
    *(("kinks", value) for value in (0, 1, None, "yes", 1.0)),
    *(("depth", value) for value in (0, -2, 3, 2.0, "2", True, 2**40)),
    *((name, value) for name in ("scheme", "backward", "reverse", "stream", "nonfinite", "backend")
      for value in (None, "", "other", 1, ["euler"], b"euler", str)),
    ("activation", "sigmoid"), ("activation", None), ("activation", F.relu), ("unknown", 1),
    *(("eps", value) for value in (0.0, -1.0, float("nan"), "1", None, float("inf"))),
]  # fmt: skip


@dataclass(frozen=True)
class StrangeCall:
    """A call with ``what`` as the argument ``slot``, or with an option that is wrong."""

    function: str
    slot: int
    what: str
    layout: str = "contiguous"
    dtype: str = "float64"
    option: tuple[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"backward": "checkpoint"})
    grad: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        names = list(FUNCTIONS[self.function][2])
        return names[self.slot % len(names)]

    def tensors(self) -> Tensors:
        """Leaves, the constants of batch norm aside."""
        result = {}
        for i, (name, shape) in enumerate(FUNCTIONS[self.function][2].items()):
            value = (numbers(shape, self.seed + i) / 2).to(DTYPES[self.dtype])
            if name.startswith(("variance", "gamma")):
                value = value.abs() + 0.5
            constant = name.startswith(("mean", "variance"))
            result[name] = LAYOUTS[self.layout](value).requires_grad_(self.grad and not constant)
        return result


def value_of(what: str, strange: Any) -> Any:
    """In double precision, as plain PyTorch takes it, if a stage may take it."""
    if what == "two tensors":
        return strange.a.detach().double()
    if what == "functional":
        return torch._from_functional_tensor(strange).double()
    if what == "zero":
        return torch.zeros(strange.shape, dtype=torch.float64)
    if isinstance(strange, Tensor) and what != "inference":
        return strange.detach().double()
    return strange.clone().double() if what == "inference" else strange


ACCEPTED = (
    *DTYPES, "two tensors", "functional", "zero", "inference", "None", "of no rows",
    "of a dimension more", "of a dimension less",
)  # fmt: skip
"""What a stage may take instead of refusing it."""


def unwrapped(t: Tensor | None) -> Tensor | None:
    if isinstance(t, TwoTensor):
        return t.a
    functional = t is not None and torch._is_functional_tensor(t)
    return torch._from_functional_tensor(t) if functional else t


def run(function: Callable[[Tensors], Tensor], tensors: Tensors, but: str) -> Results:
    y = function(tensors)
    g = torch.ones_like(y)
    leaves = {
        name: t
        for name, t in tensors.items()
        if name != but and isinstance(t, Tensor) and t.requires_grad
    }
    if not y.requires_grad or not leaves:
        return {"y": y.detach()}
    grads = torch.autograd.grad(y, list(leaves.values()), g, allow_unused=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def check_strange(call: StrangeCall) -> None:
    function, plain, _ = FUNCTIONS[call.function]
    tensors, options = call.tensors(), {"step": H, **call.options}
    if call.option is not None:
        name, value = call.option
        try:
            function(tensors, **{**options, name: value})
        except Exception as error:
            assert_own(error)
            return
        raise AssertionError(f"{name}={value!r} was taken")
    try:
        strange = STRANGE[call.what](tensors[call.name])
    except Exception:
        return  # torch has no such tensor of this dtype or shape
    versions = [t._version for t in tensors.values()]
    given = {**tensors, call.name: strange}
    try:
        with full_of_nans():
            got = run(lambda t: function(t, **options), given, call.name)
    except Exception as error:
        assert_own(error)
        return
    assert [t._version for t in tensors.values()] == versions, "an input was written to"
    images = (call.function, call.name) == ("conv", "x")  # whose last dimension may change
    assert call.what in ACCEPTED or images, f"{call.name}, {call.what}, was taken"
    values = {
        name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()
    }
    if call.what == "of no width":
        assert not got["y"].numel()
        return  # torch convolves no images of this size
    expected = run(plain, {**values, call.name: value_of(call.what, strange)}, call.name)
    dtypes = [t.dtype for t in given.values() if isinstance(t, Tensor)]
    if isinstance(got["y"], TwoTensor):
        got = {k: t.a if isinstance(t, TwoTensor) else t for k, t in got.items()}
    got = {
        k: torch._from_functional_tensor(t)
        if t is not None and torch._is_functional_tensor(t)
        else t
        for k, t in got.items()
    }
    assert_equal(got, expected, max(DIGITS[dtype] for dtype in dtypes))
