"""Stages as functions of their input and parameters. See ``resode_kernels.options.How`` for the
options that all of them take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import autograd, backends
from .options import How, choice, positive_int
from .problem import Problem

ACTIVATIONS = ("relu", "tanh", "gelu", "silu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPTIONAL = ("b1", "b2")

# Names, tensors and the shapes they must have; the first parameter's last dimension is x's.
Parameters = dict[str, tuple[Tensor | None, tuple[int, ...]]]


def mlp_stage(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "tanh",
    depth: int | None = None,
    **how: Any,
) -> Tensor:
    """Residual steps with f(x) = W2 σ(W1 x + b1) + b2.

    x           [..., dim]
    w1, b1      [blocks, hidden, dim], [blocks, hidden] or None
    w2, b2      [blocks, dim, hidden], [blocks, dim] or None
    activation  σ: ``"relu"``, ``"tanh"``, ``"gelu"`` (exact) or ``"silu"``
    depth       the number of steps N. None: from the number of blocks. Given with one block, the
                block is tied: it serves every step
    returns     [..., dim], in x's dtype
    """
    choice("activation", activation, ACTIVATIONS)
    return run_mlp(x, w1, b1, w2, b2, activation, depth, How.from_options(how))


def linear_stage(x: Tensor, weight: Tensor, *, depth: int | None = None, **how: Any) -> Tensor:
    """Residual steps with f(x) = θ x.

    x        [..., dim]
    weight   [blocks, dim, dim]
    depth    as in ``mlp_stage``
    returns  [..., dim], in x's dtype
    """
    return run_linear(x, weight, depth, How.from_options(how))


def run_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str,
    depth: int | None,
    how: How,
) -> Tensor:
    blocks, hidden, dim = _three_dimensions("w1", w1, "[blocks, hidden, dim]")
    parameters = {
        "w1": (w1, (blocks, hidden, dim)),
        "b1": (b1, (blocks, hidden)),
        "w2": (w2, (blocks, dim, hidden)),
        "b2": (b2, (blocks, dim)),
    }
    return _run("mlp", activation, x, parameters, depth, how)


def run_linear(x: Tensor, weight: Tensor, depth: int | None, how: How) -> Tensor:
    blocks, _, dim = _three_dimensions("weight", weight, "[blocks, dim, dim]")
    return _run("linear", "identity", x, {"weight": (weight, (blocks, dim, dim))}, depth, how)


def _run(
    block: str,
    activation: str,
    x: Tensor,
    parameters: Parameters,
    depth: int | None,
    how: How,
) -> Tensor:
    tensors, shapes = zip(*parameters.values(), strict=True)
    blocks, dim = shapes[0][0], shapes[0][-1]
    _check(x, dim, parameters)
    method = how.method(_depth(depth, blocks, how))
    backend = backends.choose(how.backend, x.device)
    problem = Problem(block, activation, tuple(tensors), method)
    y, _ = autograd.run(x.reshape(-1, dim), problem, backend)
    return y.reshape(x.shape)


def _depth(depth: int | None, blocks: int, how: How) -> int:
    if depth is None:
        depth = blocks - (how.blocks(1) - 1)
        if depth < 1:
            raise ValueError(
                f"depth: {blocks} block(s) are too few for a step of scheme={how.scheme!r}; "
                "to tie one block over several steps, give depth"
            )
    positive_int("depth", depth)
    if blocks not in (1, how.blocks(depth)):
        raise ValueError(
            f"depth={depth} with scheme={how.scheme!r} takes {how.blocks(depth)} blocks "
            f"(or 1, tied), but the parameters hold {blocks}"
        )
    return depth


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {value if value is None else type(value)}")
    return value


def _three_dimensions(name: str, weight: Tensor, expected: str) -> torch.Size:
    if _tensor(name, weight).dim() != 3:
        raise ValueError(f"{name} must have the shape {expected}, not {list(weight.shape)}")
    return weight.shape


def _check(x: Tensor, dim: int, parameters: Parameters) -> None:
    if _tensor("x", x).dtype not in DTYPES:
        raise TypeError(f"x must be of a floating-point dtype, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != dim:
        raise ValueError(
            f"x must have {dim} as its last dimension, as the parameters have, "
            f"but has the shape {list(x.shape)}"
        )
    dtype = None
    for name, (value, shape) in parameters.items():
        if value is None and name in OPTIONAL:
            continue
        tensor = _tensor(name, value)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, not {list(tensor.shape)}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty, but has the shape {list(shape)}")
        dtype = dtype or tensor.dtype
        if tensor.dtype not in DTYPES or tensor.dtype != dtype:
            raise TypeError(
                f"{name} is {tensor.dtype}; the parameters must share one floating-point dtype"
            )
        if (tensor.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(
                f"{name} is {tensor.dtype} and x is {x.dtype}: float64 does not mix with others"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
