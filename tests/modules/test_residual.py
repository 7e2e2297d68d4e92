"""A stage of modules computes what the mathematics says, for any module, state and argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import PRECISE, RULES, gradients, name, relative_error
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.functional import residual_stage

EXACT = [
    {"backward": "stored"},
    {"backward": "checkpoint"},
    {"backward": "checkpoint", "anchor_every": 1},
]


def mlp(dim: int = 6, hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim)).double()


def blocks(count: int) -> list[nn.Module]:
    return [mlp() for _ in range(count)]


def mlp_twin(stage: rk.ResidualStage, **options: Any) -> rk.MLPStage:
    """An MLP stage with the weights of a stage of modules: where the kernels were built, another
    implementation of the same algorithm."""
    twin = rk.MLPStage(6, 8, stage.depth, tied=stage.tied, dtype=torch.float64, **options)
    with torch.no_grad():
        for n, (first, _, second) in enumerate(stage.blocks):
            twin.w1[n], twin.b1[n] = first.weight, first.bias
            twin.w2[n], twin.b2[n] = second.weight, second.bias
    return twin


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("tied", [False, True])
def test_equal_to_the_mlp_stage(scheme: str, tied: bool, options: dict[str, Any]) -> None:
    options = {"scheme": scheme, **options}
    if tied:
        stage = rk.ResidualStage(mlp(), depth=7, **options)
    else:
        stage = rk.ResidualStage(blocks(7 + (scheme == "heun")), **options)
    x, g = torch.randn(2, 4, 6, dtype=torch.float64)
    y, gx, *grads = gradients(stage, x, g)
    expected_y, expected_gx, *expected = gradients(mlp_twin(stage, **options), x, g)
    torch.testing.assert_close((y, gx), (expected_y, expected_gx), rtol=1e-12, atol=1e-13)
    for i, stacked in enumerate(expected):  # w1, b1, w2, b2
        torch.testing.assert_close(torch.stack(grads[i::4]), stacked, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_exact_modes_pass_gradcheck(scheme: str, options: dict[str, Any]) -> None:
    stage = rk.ResidualStage(blocks(5), scheme=scheme, **options)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: stage(x), (x, *stage.parameters()))


def test_stored_can_be_differentiated_twice() -> None:
    stage = rk.ResidualStage(blocks(3), backward="stored")
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *_: stage(x), (x, *stage.parameters()))


def test_step_one_is_the_classical_residual_network() -> None:
    stage = rk.ResidualStage(blocks(4), step=1.0)
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = x
    for block in stage.blocks:
        expected = expected + block(expected)
    torch.testing.assert_close(stage(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("scheme", "options", "order"),
    [
        ("euler", {"reverse": "paper"}, 1),
        ("euler", {"reverse": "refined"}, 2),
        ("euler", {"reverse": "predicted", "order": 2}, 3),
        ("heun", {"reverse": "paper"}, 3),
    ],
    ids=str,
)
def test_gradient_error_falls_at_the_promised_rate(
    scheme: str, options: dict[str, Any], order: int
) -> None:
    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)).double()
    x, g = torch.randn(2, 16, 6, dtype=torch.float64)

    def error(depth: int) -> float:
        stage = rk.ResidualStage([block], depth=depth, scheme=scheme, **options)
        adjoint = torch.cat([t.flatten() for t in gradients(stage, x, g)[2:]])
        exact = gradients(stage.configure(backward="stored"), x, g)[2:]
        return relative_error(adjoint, torch.cat([t.flatten() for t in exact]))

    rate = torch.log2(torch.tensor(error(32) / error(64))).item()
    assert rate == pytest.approx(order, abs=0.15)


def test_reconstruction_evaluates_no_more_than_promised() -> None:
    """Evaluations per step, forward and backward, beyond the first steps of the way back."""

    class Counted(nn.Module):
        count = 0

        def __init__(self, noisy: bool) -> None:
            super().__init__()
            self.noisy, self.weight = noisy, nn.Parameter(torch.full((3,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            Counted.count += 1
            return self.weight * x * (torch.rand(()) if self.noisy else 1)

    def per_step(tied: bool, noisy: bool = False, **options: Any) -> float:
        counts = []
        for depth in (20, 30):
            extra = options.get("scheme") == "heun"
            stage = (
                rk.ResidualStage(Counted(noisy), depth=depth, **options)
                if tied
                else rk.ResidualStage([Counted(noisy) for _ in range(depth + extra)], **options)
            )
            stage(torch.ones(3)).sum()  # the first call runs every block again, to compare
            Counted.count = 0
            stage(torch.ones(3)).sum().backward()
            counts.append(Counted.count)
        return (counts[1] - counts[0]) / 10

    assert per_step(False, reverse="predicted") == 2
    assert per_step(False, reverse="paper") == 3
    assert per_step(False, reverse="refined") == 3
    assert per_step(False, backward="checkpoint") == 2
    assert per_step(False, backward="checkpoint", anchor_every=5) == 2 + 4 / 5
    assert per_step(True, reverse="paper") == 2  # f_n(p) serves the next reconstruction too
    assert per_step(False, reverse="paper", scheme="heun") == 2 + 3
    # … unless each evaluation draws its own random numbers
    assert per_step(True, noisy=True, reverse="paper") == 3
    assert per_step(False, noisy=True, reverse="paper", scheme="heun") == 2 + 4
    assert per_step(False, reverse="refined", scheme="heun") == 2 + 4


# -------------------------------------------------------------------------- arguments and states


class Conditioned(nn.Module):
    """Uses a mask, a scale deep in a structure and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(
        self, x: Tensor, mask: Tensor, style: dict[str, Any], *, shift: Tensor, twice: bool
    ) -> Tensor:
        y = torch.tanh(self.linear(x) * style["scale"][0]) + shift
        return (2 if twice else 1) * y.masked_fill(mask, 0)


@pytest.mark.parametrize("options", [PRECISE, {"backward": "checkpoint", "step": 0.05}], ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_arguments_reach_every_block_and_get_gradients(
    scheme: str, options: dict[str, Any]
) -> None:
    stage = rk.ResidualStage([Conditioned() for _ in range(5)], scheme=scheme, **options)
    x = torch.randn(4, 6, dtype=torch.float64)
    scale, shift = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(4, 6) < 0.3

    def grads() -> list[Tensor]:
        base = 2 * shift  # not a leaf
        y = stage(x, mask, {"scale": [scale, "ignored"]}, shift=base, twice=True)
        return [y, *torch.autograd.grad(y.sum(), [scale, shift, *stage.parameters()])]

    got = grads()
    stage.configure(backward="stored")
    torch.testing.assert_close(got, grads(), rtol=1e-9, atol=1e-11)


def test_an_argument_changed_in_place_before_the_backward_pass_is_noticed() -> None:
    stage = rk.ResidualStage([Conditioned() for _ in range(2)])
    shift, mask = torch.zeros(6).double(), torch.zeros(4, 6, dtype=torch.bool)
    y = stage(torch.randn(4, 6).double(), mask, {"scale": [1.0]}, shift=shift, twice=False)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Split(nn.Module):
    """A block on the two halves of a state."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, halves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return self.block(torch.cat(halves, -1)).split((2, 4), -1)


@pytest.mark.parametrize("options", RULES, ids=name)
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_states_may_be_tuples(scheme: str, options: dict[str, Any]) -> None:
    stage = rk.ResidualStage(blocks(7), scheme=scheme, **options)
    split = rk.ResidualStage([Split(block) for block in stage.blocks], scheme=scheme, **options)
    x, g = torch.randn(2, 4, 6, dtype=torch.float64)
    y, gx, *expected = gradients(stage, x, g)
    halves = tuple(half.clone().requires_grad_() for half in x.split((2, 4), -1))
    outputs = split(halves)
    got = torch.autograd.grad(outputs, [*halves, *split.parameters()], g.split((2, 4), -1))
    torch.testing.assert_close(torch.cat(outputs, -1), y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat(got[:2], -1), gx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(list(got[2:]), expected, rtol=1e-12, atol=1e-13)


class Coupled(nn.Module):
    """A state of two tensors of different shapes and dtypes; f's second entry ignores the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(3, 3).double()

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        p, q = state
        assert (p.dtype, q.dtype) == (torch.float32, torch.float64)
        return torch.tanh(self.a(p)) + q.mean().float(), torch.sin(self.b(q))


@pytest.mark.parametrize("options", [PRECISE, {"backward": "checkpoint", "step": 0.05}], ids=name)
def test_tuples_may_mix_shapes_and_dtypes(options: dict[str, Any]) -> None:
    stage = rk.ResidualStage([Coupled() for _ in range(4)], **options)
    p = torch.randn(2, 4, requires_grad=True)
    q = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def grads() -> list[Tensor]:
        a, b = stage((p, q))
        assert (a.dtype, b.dtype) == (p.dtype, q.dtype)
        return [a, b, *torch.autograd.grad((a, b), [p, q, *stage.parameters()], (a, b))]

    got = grads()
    stage.configure(backward="stored")
    torch.testing.assert_close(got, grads())


def test_outputs_may_go_unused() -> None:
    stage = rk.ResidualStage([Coupled() for _ in range(4)])
    p = torch.randn(2, 4, requires_grad=True)
    q = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    stage((p, q))[1].sum().backward()
    assert p.grad is None or p.grad.abs().max() == 0
    assert q.grad.abs().min() > 0


# --------------------------------------------------------------------------------- how it is called


def test_ways_to_give_blocks() -> None:
    modules = blocks(4)
    x = torch.randn(2, 6, dtype=torch.float64)
    expected = rk.ResidualStage(modules)(x)
    for given in (tuple(modules), nn.ModuleList(modules), nn.Sequential(*modules)):
        stage = rk.ResidualStage(given)
        assert (stage.depth, stage.tied, stage.num_blocks) == (4, False, 4)
        torch.testing.assert_close(stage(x), expected, rtol=0, atol=0)
    assert list(stage.state_dict())[:2] == ["blocks.0.0.weight", "blocks.0.0.bias"]
    assert rk.ResidualStage(modules, scheme="heun").depth == 3

    tied = rk.ResidualStage(modules[0], depth=5)  # an nn.Sequential, but not of 5
    for other in (
        rk.ResidualStage([modules[0]], depth=5),
        rk.ResidualStage([modules[0]] * 5),
        rk.ResidualStage([modules[0]] * 6, scheme="heun").configure(scheme="euler"),
    ):
        assert (other.depth, other.tied, other.num_blocks) == (5, True, 1)
        assert list(other.state_dict()) == list(tied.state_dict())
        torch.testing.assert_close(other(x), tied(x), rtol=0, atol=0)
    single = rk.ResidualStage([modules[0]])
    assert (single.depth, single.num_blocks) == (1, 1)


def test_the_function_is_the_module() -> None:
    modules = blocks(4)
    x = torch.randn(2, 6, dtype=torch.float64)
    for options in ({}, {"scheme": "heun", "step": 0.5}, {"backward": "stored"}):
        torch.testing.assert_close(
            residual_stage(modules, x, **options),
            rk.ResidualStage(modules, **options)(x),
            rtol=0,
            atol=0,
        )
    torch.testing.assert_close(
        residual_stage(modules[0], x, depth=9), rk.ResidualStage(modules[0], depth=9)(x)
    )
    shift = torch.ones(6, dtype=torch.float64)
    mask, conditioned = torch.zeros(2, 6, dtype=torch.bool), [Conditioned(), Conditioned()]
    arguments = {"shift": shift, "twice": False}
    torch.testing.assert_close(
        residual_stage(conditioned, x, mask, {"scale": [1]}, step=0.1, **arguments),
        rk.ResidualStage(conditioned, step=0.1)(x, mask, {"scale": [1]}, **arguments),
    )


def test_a_stage_may_be_a_block() -> None:
    inner = [rk.ResidualStage(blocks(3), step=0.3, reverse="refined", order=8) for _ in range(3)]
    stage = rk.ResidualStage([nn.Sequential(s, mlp()) for s in inner], **PRECISE)
    x, g = torch.randn(2, 4, 6, dtype=torch.float64)
    got = gradients(stage, x, g)
    for s in (stage, *inner):
        s.configure(backward="stored")
    torch.testing.assert_close(got, gradients(stage, x, g), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_residual_stream_is_float32_at_least(dtype: torch.dtype) -> None:
    """A thousand updates that half precision would each lose add up."""

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == dtype
            return torch.ones_like(x)

    for backward in ("adjoint", "stored", "checkpoint"):
        stage = rk.ResidualStage(Constant(), depth=1024, backward=backward)
        x = torch.full((3,), 1.0, dtype=dtype, requires_grad=True)
        y = stage(x)
        assert y.dtype == dtype
        assert (y == 2).all()
        y.sum().backward()
        assert x.grad.dtype == dtype
        assert (x.grad == 1).all()


def test_gradients_of_tied_half_precision_weights_are_summed_in_float32() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.shift.expand_as(x)

    stage = rk.ResidualStage(Shift(), depth=1000, step=1.0)
    stage(torch.zeros(3, dtype=torch.bfloat16)).sum().backward()
    assert stage.blocks[0].shift.grad.dtype == torch.bfloat16
    assert (stage.blocks[0].shift.grad == 1000).all()


def test_residual_branch_turns_a_residual_network_into_a_stage() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = mlp()

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x + scale * self.f(x)

    network = [Residual() for _ in range(4)]
    stage = rk.ResidualStage([rk.residual_branch(b) for b in network], step=1.0)
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = x
    for block in network:
        expected = block(expected, 0.1)
    torch.testing.assert_close(stage(x, 0.1), expected)

    class Swap(nn.Module):
        def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return state[1], state[0]

    a, b = torch.randn(2, 3)
    swapped = rk.ResidualStage([rk.residual_branch(Swap())], step=1.0)((a, b))
    torch.testing.assert_close(swapped, (b, a))
