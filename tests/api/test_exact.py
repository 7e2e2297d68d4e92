"""``backward="stored"`` and ``"checkpoint"`` are exact backprop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BLOCKS, gradients, make_stage, name, plain

import resode_kernels as rk
from resode_kernels import reference

EXACT: list[dict[str, Any]] = [
    {"backward": "stored"},
    {"backward": "checkpoint"},
    {"backward": "checkpoint", "anchor_every": 2},
    {"backward": "checkpoint", "anchor_every": 100},
]
BACKENDS = [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tied", [True, False])
def test_equal_to_autograd_of_the_plain_network(
    block: str, scheme: str, options: dict[str, Any], backend: str, tied: bool
) -> None:
    stage = make_stage(
        block, 7, 5, 6, dtype=torch.float64, tied=tied, scheme=scheme, backend=backend, **options
    )
    x, g = torch.randn(2, 11, 7, dtype=torch.float64)
    x.requires_grad_()
    y = plain(stage, x)
    expected = [y.detach(), *torch.autograd.grad(y, [x, *stage.parameters()], g)]
    torch.testing.assert_close(gradients(stage, x, g), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", EXACT[:3], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("block", ["tanh", "gelu", "silu", "linear"])
def test_gradcheck(block: str, scheme: str, options: dict[str, Any], backend: str) -> None:
    """Against finite differences. (relu has none at its kink.)"""
    stage = make_stage(
        block, 3, 4, 4, dtype=torch.float64, scheme=scheme, backend=backend, **options
    )
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    parameters = list(stage.parameters())

    def f(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        if block == "linear":
            return rk.functional.linear_stage(x, *parameters, **vars(stage.options))
        return rk.functional.mlp_stage(x, *parameters, activation=block, **vars(stage.options))

    assert torch.autograd.gradcheck(f, (x, *parameters))


@pytest.mark.parametrize("block", BLOCKS)
def test_the_reference_blocks_state_their_derivatives_correctly(block: str) -> None:
    """Their written-out VJPs equal autograd's."""
    shapes = [(4, 4)] if block == "linear" else [(5, 4), (5,), (4, 5), (4,)]
    parameters = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    stated = (
        reference.Linear(*parameters) if block == "linear" else reference.MLP(block, *parameters)
    )

    def f(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return (
            reference.Linear(*parameters)
            if block == "linear"
            else reference.MLP(block, *parameters)
        ).f(x, 0)

    x, g = torch.randn(2, 6, 4, dtype=torch.float64)
    automatic = reference.Function(f, *parameters)
    torch.testing.assert_close(stated.f(x, 0).detach(), automatic.f(x, 0))
    y, pullback = stated.linearize(x, 0)
    torch.testing.assert_close(y, stated.f(x, 0), rtol=0, atol=0)
    gx, grads = pullback(g)
    expected_gx, expected = automatic.linearize(x, 0)[1](g)
    torch.testing.assert_close(gx, expected_gx)
    torch.testing.assert_close(list(grads), list(expected))


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_the_reference_takes_any_function(scheme: str) -> None:
    """A block that no kernel knows, through every rule."""

    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * a) + b

    steps = 200
    parameters = [
        (torch.full((3,), 1 + n / steps), torch.full((3,), n / steps))
        for n in range(steps + (scheme == "heun"))
    ]
    blocks = [
        reference.Function(f, *(p.double().requires_grad_() for p in theta)) for theta in parameters
    ]
    solver = reference.SCHEMES[scheme](blocks, 1 / steps)
    x, g = torch.randn(2, 4, 3, dtype=torch.float64)
    y, kept = reference.forward(solver, x, anchor_every=7)
    exact_sums = reference.Sums()
    exact = reference.reverse(reference.exact(solver, x, kept), g, exact_sums.add)

    leaf = x.clone().requires_grad_()
    state = leaf
    for n in range(steps):
        a = f(state, *blocks[n].parameters)
        if scheme == "heun":
            a = (a + f(state + a / steps, *blocks[n + 1].parameters)) / 2
        state = state + a / steps
    expected = torch.autograd.grad(state, [leaf, *blocks[0].parameters], g)
    torch.testing.assert_close(exact, expected[0])
    torch.testing.assert_close(list(exact_sums[blocks[0]]), list(expected[1:]))

    for rule, order in (("paper", 1), ("refined", 1), ("predicted", 3)):
        sums = reference.Sums()
        adjoint = reference.reverse(reference.adjoint(rule, order, solver, y, {}), g, sums.add)
        torch.testing.assert_close(adjoint, exact, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(sums[blocks[0]], exact_sums[blocks[0]], rtol=2e-2, atol=1e-4)
