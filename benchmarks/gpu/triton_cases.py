"""The cases that the Triton kernels are compiled for: passes of stages, as the package runs them,
in the default tiles and in every other tile that tuning may choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from resode_kernels import nonfinite
from resode_kernels.backends import triton
from resode_kernels.backends.triton import tiles
from resode_kernels.backends.triton.spec import Tile
from resode_kernels.fused import ops
from resode_kernels.options import Options
from resode_kernels.problem import Problem

ROWS, DEPTH = 1024, 8
WIDTHS = (16, 32, 64, 128)
# How the products are computed: the dtype of the parameters and torch's setting for float32.
PRECISIONS = {
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}
# Every activation, scheme, rule and kind of weights is in one of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "relu, heun, refined 2": {"activation": "relu", "scheme": "heun", "order": 2},
    "silu, heun, predicted 3": {
        "activation": "silu", "scheme": "heun", "reverse": "predicted", "order": 3, "dim": 32,
    },
    "gelu, predicted 2": {"activation": "gelu", "reverse": "predicted"},
    "tied, heun, paper": {"tied": True, "scheme": "heun", "reverse": "paper", "dim": 32},
    "tied, paper, odd": {"tied": True, "reverse": "paper", "dim": 37, "hidden": 51, "bias": False},
    "stored": {"backward": "stored"},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Host code that launches kernels. It goes to another process: ``run`` must be picklable."""

    name: str
    dtype: str
    run: Callable[[], None]
    default: bool = True
    """Whether users get these kernels without tuning: then they must not spill."""


# Cases that meet every kernel, width, precision and scheme once.
QUICK = {
    *((f"mlp {width}", "bfloat16") for width in WIDTHS),
    *((f"mlp {width}", "tf32") for width in WIDTHS[1:]),
    ("mlp 16", "float32"),
    ("mlp 32", "float32"),
    ("mlp 64", "float16"),
    ("linear 64", "tf32"),
    ("mlp 64, relu, heun, refined 2", "tf32"),
    ("mlp 64, gelu, predicted 2", "bfloat16"),
    ("mlp 37, tied, paper, odd", "bfloat16"),
    ("mlp 64, stored", "bfloat16"),
    ("mlp 64, atomics", "bfloat16"),
    ("mlp 512, layer-wise", "float32"),
    ("conv, channels_last", "bfloat16"),
    ("conv, contiguous_format", "float32"),
}


def cases(quick: bool = False) -> list[Case]:
    every = [*_stages(), *_variants(), *_other_tiles(), *_layerwise()]
    return [case for case in every if not quick or (case.name, case.dtype) in QUICK]


def _stages() -> Iterator[Case]:
    for dtype in PRECISIONS:
        for width in WIDTHS if dtype != "float16" else (64,):  # same code as bfloat16
            yield Case(f"mlp {width}", dtype, partial(train, dtype, dim=width))
        yield Case("linear 64", dtype, partial(train, dtype, block="linear"))


def _variants() -> Iterator[Case]:
    for name, options in VARIANTS.items():
        dtype = "tf32" if "heun" in name else "bfloat16"  # the one that needs more registers
        width = options.get("dim", 64)
        yield Case(f"mlp {width}, {name}", dtype, partial(train, dtype, **options))
    yield Case("linear 64, heun", "tf32", partial(train, "tf32", block="linear", scheme="heun"))
    yield Case("mlp 16, heun", "float32", partial(train, "float32", dim=16, scheme="heun"))
    yield Case("mlp 64, atomics", "bfloat16", partial(train_by_atomics, "bfloat16"))


def _other_tiles() -> Iterator[Case]:
    for width in WIDTHS:
        for reverse, table in ((False, tiles.FORWARD), (True, tiles.REVERSE)):
            for tile in table[width][1:]:
                name = f"mlp {width}, {'reverse' if reverse else 'forward'} {tuple(tile)}"
                run = partial(train_in_tile, tile, reverse, "bfloat16", width)
                yield Case(name, "bfloat16", run, default=False)


def _layerwise() -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        yield Case("mlp 512, layer-wise", dtype, partial(train, dtype, dim=512))
        for order in (torch.contiguous_format, torch.channels_last):
            name = f"conv, {str(order).removeprefix('torch.')}"
            yield Case(name, dtype, partial(train_conv, dtype, order))


def train(
    dtype: str,
    *,
    block: str = "mlp",
    dim: int = 64,
    hidden: int | None = None,
    activation: str = "tanh",
    bias: bool = True,
    tied: bool = False,
    **options: Any,
) -> None:
    """Forward pass and reverse pass of a stage with all its gradients."""
    hidden = hidden or 2 * dim
    storage, precision = PRECISIONS[dtype]
    torch.set_float32_matmul_precision(precision)
    checked = Options(**options)
    blocks = 1 if tied else checked.blocks(DEPTH)

    def parameter(*shape: int, wanted: bool = True) -> torch.Tensor | None:
        return torch.zeros(blocks, *shape, dtype=storage) if wanted else None

    if block == "mlp":
        b1, b2 = parameter(hidden, wanted=bias), parameter(dim, wanted=bias)
        parameters = (parameter(hidden, dim), b1, parameter(dim, hidden), b2)
    else:
        parameters, activation = (parameter(dim, dim),), "identity"
    problem = Problem(block, activation, parameters, checked.method(DEPTH))
    train_problem(problem, torch.zeros(ROWS, dim))


def train_in_tile(tile: Tile, reverse: bool, dtype: str, dim: int) -> None:
    table = tiles.REVERSE if reverse else tiles.FORWARD
    before = dict(table)
    table.update({width: (tile,) for width in table})
    try:
        train(dtype, dim=dim)
    finally:
        table.update(before)


def train_by_atomics(dtype: str) -> None:
    with patch.dict(os.environ, {"RESODE_ATOMICS": "1"}):
        train(dtype)


def train_conv(dtype: str, order: torch.memory_format) -> None:
    """By ``predicted``, whose history takes updates of every kind."""
    storage, _ = PRECISIONS[dtype]
    layer = [torch.zeros(16, 16, 3, 3), torch.zeros(16), torch.zeros(16)]
    parameters = [None if t is None else t.to(storage) for t in (*layer, None, None)]
    method = Options(reverse="predicted", order=3).method(DEPTH)
    problem = Problem("conv", "relu", tuple(2 * DEPTH * parameters), method, 2, 1e-5)
    train_problem(problem, torch.zeros(4, 16, 8, 8).to(memory_format=order))


def train_problem(problem: Problem, x: torch.Tensor) -> None:
    needs = [True, *(p is not None for p in problem.parameters)]
    with (
        patch.object(triton, "refuses", lambda *_: None),  # tensors in main memory, as on a GPU
        patch.object(nonfinite, "report"),  # no kernel runs: states are whatever memory holds
    ):
        y, _, kept = ops.forward(x, problem, "triton")
        ops.reverse(y, torch.zeros_like(y), kept, needs, problem, "triton")
