"""What the Triton backend is compiled for: training steps of stages, as the package runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from resode_kernels import ops
from resode_kernels.options import How
from resode_kernels.problem import Problem

ROWS, DEPTH = 1024, 8
# How the products are computed: the dtype of the parameters and torch's setting for float32.
PRECISIONS = {
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}


@dataclass(frozen=True)
class Case:
    """Host code that launches kernels. It goes to another process: ``run`` must be picklable."""

    name: str
    dtype: str
    run: Callable[[], None]


# name, block, dim, hidden, options of the stage
STAGES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("mlp 64", "mlp", 64, 64, {}),
    ("mlp 64, heun", "mlp", 64, 64, {"scheme": "heun", "reverse": "predicted"}),
    ("mlp 128", "mlp", 128, 128, {}),
    ("linear 64", "linear", 64, 64, {}),
]


def cases() -> list[Case]:
    return [
        Case(name, dtype, partial(train, block, dtype, dim, hidden, options))
        for dtype in PRECISIONS
        for name, block, dim, hidden, options in STAGES
    ]


def train(block: str, dtype: str, dim: int, hidden: int, options: dict[str, Any]) -> None:
    """Forward pass and reverse pass of a stage with all its gradients."""
    storage, precision = PRECISIONS[dtype]
    torch.set_float32_matmul_precision(precision)
    how = How(**options)
    blocks = how.blocks(DEPTH)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "mlp": [(hidden, dim), (hidden,), (dim, hidden), (dim,)],
        "linear": [(dim, dim)],
    }
    parameters = tuple(torch.zeros(blocks, *shape, dtype=storage) for shape in shapes[block])
    activation = "tanh" if block == "mlp" else "identity"
    problem = Problem(block, activation, parameters, how.method(DEPTH))
    y, anchors, _ = ops.forward(torch.zeros(ROWS, dim), problem, "triton")
    needs = [True] * (1 + len(parameters))
    ops.reverse(y, anchors, torch.zeros_like(y), needs, problem, "triton")
