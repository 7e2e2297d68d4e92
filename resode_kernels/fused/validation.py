"""Checks of the ops' arguments against the problem, before a backend takes an address of them.

Every pass comes here: of stages, whose checks in ``resode_kernels.functional`` only name better
what is refused, of ``torch.ops.resode_kernels``, and of what autograd saved, which hooks may have
changed since.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor

from .. import backends
from ..options import BITS, LARGEST, ORDERS, Method, NonFinite, Scheme, choice
from ..problem import PER_LAYER, STACKED, ConvLayer, Problem
from ..reference import ACTIVATIONS

OPTIONAL = ("b1", "b2", *ConvLayer._fields[1:])
DTYPES = {
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float64: (torch.float64,),
}
"""The dtypes of a stream, and those of the parameters that it can have."""

Shape = tuple[int, ...]


def forward(x: Tensor, problem: Problem, backend: str) -> None:
    block, activation, parameters, method, layers, epsilon = problem
    _fields(block, activation, method, layers, epsilon, backend)
    if x.dtype not in DTYPES:
        raise TypeError(
            "the state must be of the stream's dtype, float64 if the parameters are float64 and "
            f"float32 otherwise, not {x.dtype}"
        )
    device = x.device
    if not x.is_meta and (reason := backends.why_not(backend, device, x.dtype)) is not None:
        raise backends.BackendUnavailableError(f"backend={backend!r} is not available: {reason}")
    shapes = _of_images(x, problem) if block == "conv" else _of_rows(x, problem)
    first = parameters[0]
    assert first is not None  # both have looked at its shape
    dtype = first.dtype
    if dtype not in DTYPES[x.dtype]:
        _refuse_dtype(first, 0, problem, x)
    for i, (p, shape) in enumerate(zip(parameters, shapes, strict=True)):
        if p is None:
            if (name := problem.name_of(i)).split()[0] not in OPTIONAL:
                raise TypeError(f"{name} must be a tensor of the shape {list(shape)}, not None")
        elif p.shape != shape:
            _refuse_shape(problem.name_of(i), p, shape)
        elif p.dtype is not dtype:
            _refuse_dtype(p, i, problem, x)
        elif p.device != device:
            raise ValueError(
                f"{problem.name_of(i)} is on {p.device}, but the state is on {device}; move both "
                "to one device"
            )


def reverse(
    start: Tensor,
    cotangent: Tensor,
    kept: Sequence[Tensor],
    needs: Sequence[bool],
    problem: Problem,
    backend: str,
) -> None:
    forward(start, problem, backend)
    if problem.method.reverse_rule == "exact" and not problem.method.anchor_every:
        raise ValueError("anchor_every must be at least 1 for the reverse_rule 'exact', not 0")
    shape, dtype, device = start.shape, start.dtype, start.device
    _state("cotangent", cotangent, shape, dtype, device)
    expected = problem.kept(shape)
    if len(kept) != len(expected):
        raise ValueError(f"kept must be the tensors {', '.join(expected)}, not {len(kept)} tensors")
    for (name, (own_shape, own_dtype)), tensor in zip(expected.items(), kept, strict=True):
        _state(name, tensor, own_shape, own_dtype or dtype, device)
    count = 1 + len(problem.parameters)
    if len(needs) != count:
        raise ValueError(
            f"needs must have {count} entries, for x and for every parameter, not {len(needs)}"
        )


def _state(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.shape != shape:
        _refuse_shape(name, tensor, shape)
    if tensor.dtype is not dtype or tensor.device != device:
        raise TypeError(
            f"{name} must be {dtype} on {device}, to fit the state from which the reverse pass "
            f"starts, not {tensor.dtype} on {tensor.device}"
        )


def _refuse_dtype(tensor: Tensor, i: int, problem: Problem, x: Tensor) -> None:
    raise TypeError(
        f"{problem.name_of(i)} is {tensor.dtype}; all parameters must share one floating-point "
        f"dtype, and for a state of {x.dtype} it must be one of "
        f"{', '.join(map(str, DTYPES[x.dtype]))}"
    )


def _refuse_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    raise ValueError(f"{name} must have the shape {list(shape)}, not {list(tensor.shape)}")


def _of_rows(x: Tensor, problem: Problem) -> Iterable[Shape]:
    """The shapes of the parameters that follow from the state and from the first parameter."""
    block, _, parameters, *_ = problem
    names = STACKED[block]
    if len(parameters) != len(names):
        raise ValueError(f"parameters must be {', '.join(names)}, not {len(parameters)} tensors")
    first = parameters[0]
    if len(x.shape) != 2 or first is None or len(first.shape) != 3 or 0 in first.shape:
        raise ValueError(
            f"the state must have the shape [rows, dim] and {names[0]} the shape [blocks, …, dim], "
            f"not {list(x.shape)} and {first if first is None else list(first.shape)}"
        )
    dim, (blocks, hidden, _) = x.shape[1], first.shape
    if blocks not in (1, problem.blocks):
        raise ValueError(
            f"{names[0]} must have the parameters of {problem.blocks} blocks (or of 1, tied), not "
            f"of {blocks}"
        )
    if block == "linear":
        return ((blocks, dim, dim),)
    return (blocks, hidden, dim), (blocks, hidden), (blocks, dim, hidden), (blocks, dim)


def _of_images(x: Tensor, problem: Problem) -> Iterable[Shape]:
    layers, count = problem.layers, len(problem.parameters)
    if count not in (PER_LAYER * layers, PER_LAYER * layers * problem.blocks):
        raise ValueError(
            f"parameters must be {PER_LAYER} for each of {layers} layers of {problem.blocks} "
            f"blocks (or of 1, tied), not {count} in all"
        )
    if len(x.shape) != 4:
        raise ValueError(
            f"the state must have the shape [images, channels, height, width], not {list(x.shape)}"
        )
    channels = x.shape[1]
    shapes: list[Shape] = []
    for i, (weight, *_) in enumerate(problem.layers_of(0)):
        if weight is None or len(weight.shape) != 4 or weight.shape[3] not in (1, 3):
            raise ValueError(
                f"{problem.name_of(PER_LAYER * i)} must have the shape [out, in, size, size], size "
                f"1 or 3, not {weight if weight is None else list(weight.shape)}"
            )
        out, _, _, size = weight.shape
        shapes += [(out, channels, size, size), *[(out,)] * (PER_LAYER - 1)]
        channels = out
    if channels != x.shape[1] or channels == 0:
        raise ValueError(
            f"the last layer must return the {x.shape[1]} channels of the state, not {channels}"
        )
    for i in range(3, count, PER_LAYER):
        if (problem.parameters[i] is None) != (problem.parameters[i + 1] is None):
            raise ValueError(f"{problem.name_of(i)} and the variance: give both, or none")
    return shapes * (count // len(shapes))


@functools.lru_cache
def _fields(
    block: str, activation: str, method: Method, layers: int, epsilon: float, backend: str
) -> None:
    """Checks what is no tensor."""
    choice("block", block, (*STACKED, "conv"))
    choice("activation", activation, ("identity",) if block == "linear" else tuple(ACTIVATIONS))
    choice("scheme", method.scheme, get_args(Scheme))
    choice("reverse_rule", method.reverse_rule, (*ORDERS, "exact"))
    choice("nonfinite", method.nonfinite, get_args(NonFinite))
    choice("backend", backend, tuple(backends.REGISTRY))
    exact = method.reverse_rule == "exact"
    most = LARGEST if exact else min(LARGEST, ORDERS[method.reverse_rule].largest)
    for name, value, least, largest in (
        ("steps", method.steps, 1, LARGEST),
        ("order", method.order, 1, most),
        ("anchor_every", method.anchor_every, 0, LARGEST),
        ("layers", layers, *((2, 3) if block == "conv" else (0, 0))),
    ):
        if not least <= value <= largest:
            raise ValueError(f"{name} must be from {least} to {largest}, not {value}")
    if (method.reverse_rule == "recorded") != bool(method.bits):
        raise ValueError("bits must be given with the reverse rule 'recorded', and only then")
    for bits in method.bits:
        if bits not in (0, *BITS):
            raise ValueError(f"bits must be among 0, {', '.join(map(str, BITS))}, not {bits}")
    if len(method.bits) not in (0, 1, method.steps):
        raise ValueError(
            f"bits must have 1 entry or one for each of {method.steps} steps, not "
            f"{len(method.bits)}"
        )
    if method.kinks and exact:
        raise ValueError("kinks must be False with the reverse rule 'exact'")
    if not math.isfinite(method.step):
        raise ValueError(f"step must be a finite number, not {method.step}")
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a finite number of at least 0, not {epsilon}")
