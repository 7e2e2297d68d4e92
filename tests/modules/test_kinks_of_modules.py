"""Remembered kinks of stages of modules: with ``kinks=True`` the pieces of functions with kinks are
those of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gradients, relative_error
from test_kinked_calls import CASES
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk
from resode_kernels.replay import blocks

DIM, HIDDEN = 8, 12
LINEAR = torch.linspace(0.1, 0.4, HIDDEN, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.first(x)))
        return y


def stage_of(function: Callable[..., Any], depth: int = 12, **options: Any) -> rk.ResidualStage:
    """Of blocks in float64, whose arguments spread over all pieces."""
    modules = [Block(function).double() for _ in range(depth)]
    for module in modules:
        nn.init.normal_(module.first.bias, 0, 2)
    return rk.ResidualStage(modules, **{"reverse": "recorded", "bits": 6, "step": 0.5, **options})


def state(*shape: int) -> Tensor:
    return 4 * torch.randn(*(shape or (64, DIM)), dtype=torch.float64)


def all_gradients(stage: rk.Stage, x: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    results = gradients(stage.configure(**options), x, torch.randn_like(x))
    return torch.cat([t.flatten() for t in results[1:]])


def gradient_error(stage: rk.Stage, x: Tensor, **options: Any) -> float:
    exact = all_gradients(stage, x, backward="stored")
    return relative_error(all_gradients(stage, x, backward="adjoint", **options), exact)


# -------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("name", CASES)
def test_every_function_in_a_stage(name: str) -> None:
    """In every form the gradients are the same, and better than without kinks."""
    x, errors = state(), []
    for form in CASES[name].forms:
        torch.manual_seed(0)
        stage = stage_of((lambda u: F.prelu(u, LINEAR)) if name == "prelu" else form)
        errors.append(gradient_error(stage, x, kinks=True))
    assert errors == pytest.approx([errors[0]] * len(errors), rel=1e-9)
    assert errors[0] < 0.6 * gradient_error(stage, x, kinks=False)


class PostActivation(nn.Module):
    """relu(x + f(x)), as torchvision has it. One relu serves three times."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        sizes = [(channels, hidden, 1), (hidden, hidden, 3), (hidden, channels, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, size, padding=size // 2, bias=False) for a, b, size in sizes
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(b, track_running_stats=False) for _, b, _ in sizes
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(conv(y))
            y = self.relu(y + x if i == 2 else y)
        return y


def test_a_network_as_torchvision_has_it() -> None:
    """23 bottlenecks, unchanged. The design's table has 4.3e-3 (without rotation), 0.22 without
    kinks."""
    modules = [rk.residual_branch(PostActivation(64, 16)) for _ in range(23)]
    stage = rk.ResidualStage(modules, step=1.0, reverse="recorded").double()
    x = torch.randn(16, 64, 8, 8, dtype=torch.float64).relu()
    assert 2e-3 < gradient_error(stage, x, kinks=True) <= 5e-3
    assert gradient_error(stage, x, kinks=False) > 0.1


def test_pre_activation_bottlenecks() -> None:
    modules = list(rk.ConvStage(64, 23, "bottleneck").blocks)
    stage = rk.ResidualStage(modules, step=1.0, reverse="recorded").double()
    x = torch.randn(16, 64, 8, 8, dtype=torch.float64)
    assert gradient_error(stage, x, kinks=True) <= 5e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("reverse", ["paper", "refined", "predicted", "recorded"])
def test_as_the_fused_stage(reverse: str, scheme: str, tied: bool) -> None:
    """The same MLP, as modules and in the reference, with every rule."""
    options: dict[str, Any] = {"reverse": reverse, "scheme": scheme, "kinks": True, "step": 0.05}
    fused = rk.MLPStage(
        32, HIDDEN, 6, "relu", tied=tied, dtype=torch.float64, backend="reference", **options
    )
    modules = []
    for n in range(fused.num_blocks):
        module = nn.Sequential(nn.Linear(32, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 32)).double()
        with torch.no_grad():
            for own, stacked in zip(module.parameters(), fused.parameters(), strict=True):
                own.copy_(stacked[n])
        modules.append(module)
    stage = rk.ResidualStage(modules, depth=6 if tied else None, **options)
    x, g = state(64, 32), torch.randn(64, 32, dtype=torch.float64)
    y, gx, *each = gradients(stage, x, g)
    expected_y, expected_gx, *stacked = gradients(fused, x, g)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(gx, expected_gx)
    for i, own in enumerate(each):
        torch.testing.assert_close(own, stacked[i % 4][i // 4])


class Pair(nn.Module):
    """A state of two tensors, of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(F.relu), Block(lambda u: u.clamp_(-1, 1))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = x
        return self.one(a) + b.mean((0, 1)), self.other(b) * a.mean()


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_tuples(scheme: str) -> None:
    modules = [Pair().double() for _ in range(8)]
    stage = rk.ResidualStage(modules, reverse="recorded", bits=6, step=0.2, scheme=scheme)

    def run(**options: Any) -> Tensor:
        a, b = state(20, DIM).requires_grad_(), state(3, 5, DIM).requires_grad_()
        ya, yb = stage.configure(**options)((a, b))
        found = torch.autograd.grad((ya**2).sum() + (yb**3).sum(), [a, b, *stage.parameters()])
        return torch.cat([t.flatten() for t in found])

    torch.manual_seed(0)
    exact = run(backward="stored")
    errors = []
    for kinks in (True, False):
        torch.manual_seed(0)
        errors.append(relative_error(run(backward="adjoint", kinks=kinks), exact))
    assert errors[0] < 0.5 * errors[1], errors


# ------------------------------------------------------------------------- what else a block may do


def test_random_numbers_and_buffers_are_replayed_too() -> None:
    function = nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.3), nn.ReLU6())
    stage, x = stage_of(function, bits=12), state()
    assert gradient_error(stage, x, kinks=True) < 0.5 * gradient_error(stage, x, kinks=False)


def test_an_infinite_argument() -> None:
    """relu(−∞) = 0 in the first run and in the second."""

    def function(u: Tensor) -> Tensor:
        return u.masked_fill(u < -1, -torch.inf).relu()

    stage, x = stage_of(function), state()
    assert gradient_error(stage, x, kinks=True) < 0.1


def test_results_that_are_not_numbers_stay_so() -> None:
    stage = stage_of(F.relu, kinks=True)
    x = state()
    x[3, 4] = torch.nan
    y, gx, *_ = gradients(stage, x, torch.ones_like(x))
    assert y[3].isnan().all()
    assert y[:3].isfinite().all()
    assert gx[:3].isfinite().all()


def test_autocast() -> None:
    stage, x = stage_of(F.relu, step=0.1).float(), state().float()

    def run(**options: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return all_gradients(stage, x, **options)

    exact = run(backward="stored")
    with_kinks, without = (
        relative_error(run(backward="adjoint", kinks=kinks, bits=4), exact)
        for kinks in (True, False)
    )
    assert with_kinks < 0.7 * without


class Inner(nn.Module):
    """A block with a stage of modules and a fused stage inside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.modules_ = rk.ResidualStage([Block(F.relu) for _ in range(3)], **options)
        self.fused = rk.MLPStage(DIM, HIDDEN, 3, "relu", backend="reference", **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.fused(self.modules_(x)))
        return y


@pytest.mark.parametrize(
    "inner",
    [
        {"kinks": True, "reverse": "recorded"},
        {"kinks": False, "reverse": "refined", "order": 5},
        {"kinks": True, "reverse": "paper"},
        {"backward": "stored"},
        {"backward": "checkpoint"},
    ],
    ids=str,
)
def test_stages_inside_of_blocks_have_their_own_option(inner: dict[str, Any]) -> None:
    """What a stage inside calls in its own passes is none of the outer stage's calls."""
    stage = rk.ResidualStage([Inner(**inner).double() for _ in range(4)], step=0.1)
    options: dict[str, Any] = {"reverse": "recorded", "kinks": True}
    x = state()
    exact = all_gradients(stage, x, backward="stored")
    found = all_gradients(stage, x, backward="adjoint", **options)
    # ``paper`` with three steps is far off by itself.
    assert relative_error(found, exact) < (0.5 if inner.get("reverse") == "paper" else 0.05)


def test_a_block_that_calls_other_functions_is_refused() -> None:
    """As one whose calls depend on the state, which is a little different in the backward pass."""
    function = torch.relu
    stage = stage_of(lambda u: function(u), kinks=True)
    y = stage(state().requires_grad_())
    function = torch.abs
    with pytest.raises(RuntimeError, match=r"block 11 \(Block\) calls other functions") as error:
        y.sum().backward()
    assert "call 1 is of abs" in str(error.value)
    assert "kinks=False" in str(error.value)


def test_a_checkpoint_inside_of_a_block_is_refused() -> None:
    def function(u: Tensor) -> Any:
        return checkpoint(torch.relu, u, use_reentrant=False)

    x = state()
    assert gradient_error(stage_of(function), x, kinks=False) < 0.1
    with pytest.raises(RuntimeError, match="kinks=True does not work with a checkpoint inside of "):
        gradient_error(stage_of(function), x, kinks=True)


def test_transforms_inside_of_a_block() -> None:
    """vmap's tensors are left alone."""
    stage, x = stage_of(torch.vmap(torch.relu)), state()
    with_kinks, without = (gradient_error(stage, x, kinks=kinks) for kinks in (True, False))
    assert with_kinks == without


def test_compiled_blocks() -> None:
    """The functions that see the calls are compiled with the block, without a graph break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stage, x = stage_of(lambda u: F.relu(u, inplace=True).clamp(max=2.0)), state()
    expected = all_gradients(stage, x, kinks=True)
    for n, module in enumerate(stage.blocks):
        stage.blocks[n] = torch.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(all_gradients(stage, x, kinks=True), expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert gradient_error(stage, x, kinks=True) < 0.6 * gradient_error(stage, x, kinks=False)


# ------------------------------------------------------------------------------------------- cost


def saved(stage: rk.Stage, x: Tensor) -> Sequence[Tensor]:
    """What autograd keeps between the passes."""
    found: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        found.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        stage(x)
    return found


@pytest.mark.parametrize(("name", "bits"), [("relu", 1), ("abs", 1), ("hardswish", 2)])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_memory_is_a_bit_per_argument_and_kink(name: str, bits: int, scheme: str) -> None:
    stage = stage_of(CASES[name].forms[0], scheme=scheme, reverse="refined")
    x = state().requires_grad_()
    more, plain = saved(stage.configure(kinks=True), x), saved(stage.configure(kinks=False), x)
    packed = [t for t in more if t.dtype == torch.uint8]
    assert len(more) - len(packed) == len(plain)
    assert len(packed) == stage.depth * (2 if scheme == "heun" else 1)
    assert {t.nbytes for t in packed} == {bits * 64 * HIDDEN // 8}


def test_hooks_of_saved_tensors_see_them() -> None:
    stage, x = stage_of(F.relu, kinks=True), state()
    expected = all_gradients(stage, x)
    leaf, kinds = x.clone().requires_grad_(), []

    def pack(t: Tensor) -> Tensor:
        kinds.append(t.dtype)
        return t.detach().clone()

    with saved_tensors_hooks(pack, lambda t: t):
        y = stage(leaf)
    assert kinds.count(torch.uint8) == 2 * 12 - 1  # signs of 12 steps, codes of 11
    torch.manual_seed(1)
    found = torch.autograd.grad(y, [leaf, *stage.parameters()], torch.randn_like(x))
    assert torch.equal(torch.cat([t.flatten() for t in found]), expected)


def test_backward_twice() -> None:
    stage, x = stage_of(F.relu, kinks=True), state().requires_grad_()
    y = stage(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_only_autograd_holds_the_sides() -> None:
    """So hooks that move what is saved to another place free the memory."""
    stage = stage_of(F.relu, kinks=True)
    y = stage(state())
    run = y.grad_fn.run
    assert not run.sides
    y.sum().backward()
    assert not run.sides


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (F.relu, {"kinks": False}),
        (F.relu, {"kinks": True, "backward": "stored"}),
        (F.relu, {"kinks": True, "backward": "checkpoint"}),
    ],
)
def test_nothing_is_watched_without_need(
    function: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    for name in ("Recording", "Replaying"):
        monkeypatch.setattr(blocks, name, refuse)
    assert all_gradients(stage_of(function), state(), **options).isfinite().all()
    with pytest.raises(AssertionError):
        all_gradients(stage_of(function), state(), kinks=True)


def test_functions_without_kinks_keep_nothing() -> None:
    stage, x = stage_of(F.gelu), state()
    with_kinks, without = (all_gradients(stage, x, kinks=kinks) for kinks in (True, False))
    assert torch.equal(with_kinks, without)
    with_kinks, without = (saved(stage.configure(kinks=kinks), x) for kinks in (True, False))
    assert len(with_kinks) == len(without)
