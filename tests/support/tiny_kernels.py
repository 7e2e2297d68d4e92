"""A kernel to test the offline compilation with: C = A Bᵀ + b in one tile.

    python tests/support/tiny_kernels.py sm_80 gfx942

compiles it in several ways for every target named and prints what came out, as JSON. To be run
without TRITON_INTERPRET.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from targets import TARGETS
from triton.runtime.errors import OutOfResources
from triton_cases import Case
from triton_code import resources
from triton_offline import offline
from triton_resources import measure


class Tile(NamedTuple):
    rows: int
    columns: int
    precision: str = "ieee"


SQUARE = Tile(64, 64)


@triton.jit
def product(operands, c, length, T: tl.constexpr):
    a, b, bias = operands
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    k = tl.arange(0, 64)
    sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(0, length, 64):
        left = tl.load(a + i[:, None] * length + at + k[None, :])
        right = tl.load(b + j[:, None] * length + at + k[None, :])
        sum = tl.dot(left, tl.trans(right), sum, input_precision=T.precision)
    if bias is not None:
        sum += tl.load(bias + j)[None, :]
    tl.store(c + i[:, None] * COLUMNS + j[None, :], sum)


def multiply(
    dtype: torch.dtype = torch.float16,
    tile: Tile = SQUARE,
    length: int = 512,
    shift: int = 0,
    bias: bool = False,
    **options: Any,
) -> None:
    """``shift`` moves A away from the alignment that memory is allocated with."""
    a = torch.zeros(tile.rows * length + shift, dtype=dtype)[shift:]
    b = torch.zeros(tile.columns * length, dtype=dtype)
    operands = (a, b, torch.zeros(tile.columns) if bias else None)
    c = torch.zeros(tile.rows * tile.columns)
    product[(3, 2)](operands, c, length, tile, **options)


def ways(target: str) -> dict[str, Callable[[], None]]:
    plain: dict[str, Callable[[], None]] = {
        "float16": multiply,
        "tf32": partial(multiply, torch.float32, Tile(64, 64, "tf32")),
        "float32": partial(multiply, torch.float32, Tile(32, 32), num_warps=8),
        "six stages": partial(multiply, tile=Tile(128, 128), num_warps=8, num_stages=6),
        "few registers": (
            partial(multiply, torch.float32, Tile(32, 32), num_warps=1, maxnreg=32)
            if TARGETS[target].nvidia
            else partial(multiply, tile=Tile(128, 64), waves_per_eu=8)
        ),
    }
    special: dict[str, Callable[[], None]] = {
        "with a bias": partial(multiply, bias=True),
        "not aligned": partial(multiply, shift=1),
        "of length 1": partial(multiply, length=1),
    }
    return plain | (special if target == "sm_80" else {})


def describe(target: str, way: Callable[[], None]) -> dict[str, Any]:
    with offline(target) as launches:
        try:
            way()
            way()
        except OutOfResources as error:
            return {"required": error.required, "limit": error.limit, "name": error.name}
    first, second = launches
    taken = resources(first)
    text = first.compiled.asm["ptx" if first.target.nvidia else "amdgcn"]
    waves = re.search(r"; Occupancy: (\d+)", text)
    return asdict(taken) | {
        "tensor_core": sorted(taken.tensor_core),
        "kernel": first.kernel,
        "target": first.target.name,
        "grid": first.grid,
        "warps": first.num_warps,
        "stages": first.num_stages,
        "signature": first.signature,
        "constants": {name: repr(value) for name, value in first.constants.items()},
        "code": hashlib.sha256(text.encode()).hexdigest(),
        "waves": int(waves[1]) if waves else None,  # per SIMD unit, as LLVM has it
        "same_again": first.compiled is second.compiled,
    }


def failures(target: str) -> dict[str, list[str]]:
    """What triton_resources.py says of cases that should not be."""
    bad = {name: ways(target)[name] for name in ("few registers", "six stages")}
    bad["no launch"] = list
    return {name: measure(Case(name, "any", run), target).failures for name, run in bad.items()}


if __name__ == "__main__":
    found: dict[str, Any] = {
        target: {name: describe(target, way) for name, way in ways(target).items()}
        for target in sys.argv[1:]
    }
    if "sm_120" in found:
        found["failures"] = failures("sm_120")
    json.dump(found, sys.stdout)
