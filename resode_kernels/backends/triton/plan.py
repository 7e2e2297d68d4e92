"""How a problem is laid out on a GPU: the tiles of the kernels, the number of programs, and the
number of steps in a launch of the reverse pass."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Problem
from ..precision import tf32_allowed
from . import interpreted
from .device import Device
from .launch import all_registers
from .spec import KernelSpec, Tile


class Plan(NamedTuple):
    spec: KernelSpec
    options: dict[str, Any]
    """The options of a launch."""
    programs: int
    """The number of programs of the reverse kernel."""
    steps: int
    """The largest number of steps in one launch of the reverse kernel."""


def weight_of(problem: Problem) -> Tensor:
    weight = problem.parameters[0]
    assert weight is not None
    return weight


def precision() -> str:
    """The precision of products of float32 numbers."""
    return "tf32" if tf32_allowed() else "ieee"


def atomic() -> bool:
    """Whether gradients may be added by float atomics (RESODE_ATOMICS=1)."""
    asked = os.environ.get("RESODE_ATOMICS") == "1"
    return asked and not torch.are_deterministic_algorithms_enabled()


def spec_of(problem: Problem) -> KernelSpec:
    """The spec of the problem's kernels, still without a tile."""
    method = problem.method
    _, hidden, dim = weight_of(problem).shape
    return KernelSpec(
        block=problem.block,
        activation=problem.activation,
        scheme=method.scheme,
        tied=problem.tied,
        dim=dim,
        hidden=hidden,
        width=max(16, 1 << (dim - 1).bit_length()),
        rows=0,
        chunk=0,
        precision=precision(),
        widen=interpreted(),
        atomic=atomic(),
        exact=method.reverse_rule == "exact",
        moves=method.reverse_rule in ("refined", "predicted"),
        shares=method.reverse_rule == "paper" and (problem.tied or method.scheme == "heun"),
        corrections=method.order - 1 if method.reverse_rule == "refined" else 0,
    )


def plan_of(problem: Problem, device: Device, rows: int, spec: KernelSpec, tile: Tile) -> Plan:
    """The plan of a problem with this tile. A launch of the reverse kernel makes as many steps as
    half the cache has room for partial sums, because a program updates them with every tile."""
    spec = spec._replace(rows=tile.rows, chunk=tile.chunk)
    programs = min(-(-rows // tile.rows), device.processors)
    of_block = 4 * sum(p[0].numel() for p in problem.parameters if p is not None)
    steps = problem.method.steps
    if not (spec.tied or spec.atomic):
        steps = max(1, min(steps, device.cache // 2 // (programs * of_block)))
    return Plan(spec, all_registers(device, tile.threads), programs, steps)
