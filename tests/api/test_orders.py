"""The gap between adjoint and exact gradients is truncation error, and shrinks with depth at the
rate that the reverse rule promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import gradients, plain

import resode_kernels as rk

DIM, BATCH = 32, 64

# Powers of 1/N by which the relative error of all parameter gradients falls.
SMOOTH = {
    ("euler", "paper", 1): 1,
    ("euler", "refined", 1): 2,
    ("euler", "refined", 2): 3,
    ("euler", "refined", 3): 4,
    ("euler", "predicted", 1): 2,
    ("euler", "predicted", 2): 3,
    ("euler", "predicted", 3): 4,
    ("heun", "paper", 1): 3,
    ("heun", "refined", 1): 4,
    ("heun", "refined", 2): 5,
    ("heun", "predicted", 1): 2,
    ("heun", "predicted", 2): 3,
    ("heun", "predicted", 3): 4,
}
# Without smoothness in depth only `refined` keeps its order; `predicted` falls back to 1/N.
INDEPENDENT = {
    ("euler", "refined", 1): 2,
    ("euler", "refined", 2): 3,
    ("euler", "predicted", 1): 1,
    ("euler", "predicted", 2): 1,
    ("heun", "refined", 1): 2,
    ("heun", "refined", 2): 3,
    ("heun", "predicted", 2): 1,
}


def weights(kind: str, blocks: int, *shape: int, scale: float) -> torch.Tensor:
    """[blocks, *shape]: independent, or linear in depth between two draws."""
    torch.manual_seed(math.prod(shape))
    if kind == "independent":
        return scale * torch.randn(blocks, *shape, dtype=torch.float64)
    first, last = scale * torch.randn(2, *shape, dtype=torch.float64)
    t = torch.linspace(0, 1, blocks, dtype=torch.float64).view(-1, *[1] * len(shape))
    return (1 - t) * first + t * last


def network(kind: str, depth: int, scheme: str, **options: object) -> rk.MLPStage:
    stage = rk.MLPStage(
        DIM, DIM, depth, tied=kind == "tied", scheme=scheme, dtype=torch.float64, **options
    )
    with torch.no_grad():
        stage.w1.copy_(weights(kind, stage.num_blocks, DIM, DIM, scale=DIM**-0.5))
        stage.w2.copy_(weights(kind, stage.num_blocks, DIM, DIM, scale=DIM**-0.5).mT.flip(-1))
        stage.b1.copy_(weights(kind, stage.num_blocks, DIM, scale=0.1))
        stage.b2.copy_(weights(kind, stage.num_blocks, DIM, scale=0.1).flip(-1))
    return stage


def gradient_error(kind: str, scheme: str, rule: str, order: int, depth: int) -> float:
    """‖∇ adjoint − ∇ exact‖/‖∇ exact‖ over all parameters."""
    stage = network(kind, depth, scheme, reverse=rule, order=order)
    torch.manual_seed(1)
    x, g = torch.randn(2, BATCH, DIM, dtype=torch.float64)
    adjoint = gradients(stage, x, g)[2:]
    exact = torch.autograd.grad(plain(stage, x), list(stage.parameters()), g)
    a, e = (torch.cat([t.flatten() for t in ts]) for ts in (adjoint, exact))
    return float((a - e).norm() / e.norm())


def slope(errors: dict[int, float]) -> float:
    depths, values = zip(*errors.items(), strict=True)
    return -float(np.polyfit(np.log(depths), np.log(values), 1)[0])


@pytest.mark.parametrize("kind", ["tied", "linear"])
@pytest.mark.parametrize(("case", "order"), SMOOTH.items(), ids=str)
def test_gradient_error_falls_at_the_promised_rate(
    kind: str, case: tuple[str, str, int], order: int
) -> None:
    # Deep enough to be asymptotic, not so deep that round-off shows.
    depths = {
        1: (128, 256, 512),
        2: (64, 128, 256, 512),
        3: (64, 128, 256),
        4: (64, 96, 128),
        5: (48, 64, 96),
    }
    errors = {depth: gradient_error(kind, *case, depth) for depth in depths[order]}
    assert slope(errors) == pytest.approx(order, abs=0.1), errors


@pytest.mark.parametrize(("case", "order"), INDEPENDENT.items(), ids=str)
def test_rate_with_independent_weights(case: tuple[str, str, int], order: int) -> None:
    errors = {depth: gradient_error("independent", *case, depth) for depth in (32, 64, 128, 256)}
    assert slope(errors) == pytest.approx(order, abs=0.25), errors


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_paper_needs_no_smoothness(scheme: str) -> None:
    """Its error falls at least as 1/N with independent weights (Prop. 4)."""
    errors = {
        depth: gradient_error("independent", scheme, "paper", 1, depth) for depth in (32, 128, 512)
    }
    assert slope(errors) > 1


def test_anchors_bound_the_error() -> None:
    """With independent weights at small depth the method is at its worst; anchors help."""

    def error(anchor_every: int | None) -> float:
        stage = network("independent", 24, "euler", reverse="paper", anchor_every=anchor_every)
        x, g = torch.randn(2, BATCH, DIM, dtype=torch.float64)
        exact = gradients(stage.configure(backward="stored"), x, g)[2]
        adjoint = gradients(stage.configure(backward="adjoint"), x, g)[2]
        return float((adjoint - exact).norm() / exact.norm())

    none, some, many = error(None), error(6), error(1)
    assert many < 0.5 * some < 0.5 * none
