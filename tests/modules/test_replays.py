"""A replay is the evaluation that it repeats, or an error says why it cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from helpers import peak_allocation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk

GENERATOR = torch.Generator()
REPLAYED: list[dict[str, Any]] = [{"reverse": "paper"}, {"backward": "checkpoint"}]


class Cache:
    """Keys that blocks add to, as in the caches of language models."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


@dataclass
class Settings:
    masks: list[Tensor] = field(default_factory=list)
    scale: float = 0.5


class Using(nn.Module):
    """A block that calls ``use(x, argument)`` and computes with the result."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tanh(self.linear(x)) * self.use(x, *args, **kwargs)


def attend(x: Tensor, past: Any = None) -> Tensor:
    """A factor that depends on all states so far."""
    past.layers.append({"key": x})
    return torch.stack([layer["key"] for layer in past.layers]).mean().exp()


def stage_of(use: Callable[..., Any], **options: Any) -> rk.ResidualStage:
    return rk.ResidualStage([Using(use) for _ in range(3)], **options)


@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_cache_is_refused_by_name(options: dict[str, Any]) -> None:
    stage, x = stage_of(attend, **options), torch.randn(2, 4)
    message = "'past' is a Cache that holds tensors.*use_cache=False"
    with pytest.raises(TypeError, match=message):
        stage(x, past=Cache())
    full = Cache()
    full.layers.append({"key": x})
    with pytest.raises(TypeError, match=message):
        stage(x, past=full)
    with pytest.raises(TypeError, match=r"argument 1 after the state is a Cache"):
        stage(x, full)


def test_a_cache_works_where_every_block_runs_once() -> None:
    stage, x = stage_of(attend, backward="stored"), torch.randn(2, 4)
    cache, again = Cache(), Cache()
    y = stage(x, past=cache)
    expected = x
    for block in stage.blocks:
        expected = expected + block(expected, past=again) / 3
    torch.testing.assert_close(y, expected)
    assert len(cache.layers) == 3
    with torch.no_grad():
        torch.testing.assert_close(stage.configure(backward="adjoint")(x, past=Cache()), y)


@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_objects_that_hold_tensors_are_refused(options: dict[str, Any]) -> None:
    stage = stage_of(lambda x, settings: settings.scale, **options)
    x = torch.randn(2, 4)
    stage(x, Settings()).sum().backward()
    with pytest.raises(TypeError, match=r"argument 1 .* is a Settings that holds tensors"):
        stage(x, Settings([torch.ones(4)]))


@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_block_that_changes_an_argument_is_refused(options: dict[str, Any]) -> None:
    x, seen = torch.randn(2, 4), [torch.ones(4)]

    def append(x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return seen[0]

    with pytest.raises(RuntimeError, match=r"argument 1 .* is a list that a block changes"):
        stage_of(append, **options)(x, seen)

    def add(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach().abs().mean())
        return total.detach().clone()

    with pytest.raises(RuntimeError, match=r"'total' is a tensor .* that a block changes"):
        stage_of(add, **options)(x, total=torch.ones(4))


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> float:
        self.calls += 1
        return 1.0 + 0.1 * self.calls


@pytest.mark.parametrize(
    "use",
    [
        Counter(),
        lambda x: random.random(),
        lambda x: torch.rand((), generator=GENERATOR),
    ],
    ids=["counter", "python's random numbers", "own generator"],
)
@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_block_that_computes_something_else_is_refused(use: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"block 0 \(Using\) computes something else"):
        stage_of(use, **options)(torch.randn(2, 4))
    assert stage_of(use, backward="stored")(torch.randn(2, 4)).requires_grad


def test_a_change_of_mode_or_arguments_is_looked_at_again() -> None:
    counter = Counter()

    def use(x: Tensor, count: bool = False) -> float:
        return counter(x) if count or not stage.training else 1.0

    stage, x = stage_of(use), torch.randn(2, 4)
    stage(x)
    with pytest.raises(RuntimeError, match="computes something else"):
        stage(x, count=True)
    with pytest.raises(RuntimeError, match="computes something else"):
        stage.eval()(x)


def test_rounding_errors_are_no_other_result() -> None:
    """Sums on GPUs may differ in the last digits from run to run."""
    stage = stage_of(lambda x: 1 + 1e-6 * random.random())
    stage(torch.randn(2, 4)).sum().backward()
    stage = stage_of(lambda x: torch.full((), torch.nan))
    assert stage(torch.randn(2, 4)).isnan().all()


def test_a_block_is_compared_once() -> None:
    stage, calls = stage_of(lambda x: calls.append(1) or 1.0), []
    with torch.no_grad():
        stage(torch.randn(2, 4))
    assert len(calls) == 3
    stage(torch.randn(2, 4))
    assert len(calls) == 3 + 6
    stage(torch.randn(2, 4))
    assert len(calls) == 3 + 6 + 3


@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_what_hooks_see_inside_has_no_gradient(options: dict[str, Any]) -> None:
    """Models collect hidden states with hooks. A loss on them would lose its gradient."""
    branches = [rk.residual_branch(nn.Linear(4, 4)) for _ in range(3)]
    stage, x = rk.ResidualStage(branches, **options), torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(stage(x).sin().sum(), [x, *stage.parameters()])
    hidden: list[Tensor] = []
    handle = branches[1].block.register_forward_hook(lambda m, a, y: hidden.append(y))
    y = stage(x)
    assert len(hidden) == 1
    for got, true in zip(
        torch.autograd.grad(y.sin().sum(), [x, *stage.parameters()]), expected, strict=True
    ):
        assert torch.equal(got, true)
    with pytest.raises(RuntimeError, match=r"hook of block 1 \(ResidualBranch\) saw inside"):
        (stage(x).sum() + hidden[0].sum()).backward()
    handle.remove()
    stage.configure(backward="stored")
    branches[1].block.register_forward_hook(lambda m, a, y: hidden.append(y))
    stage(x)
    assert torch.autograd.grad(hidden[-1].sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("options", [*REPLAYED, {"backward": "stored"}], ids=str)
def test_threads_share_a_stage(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]
    stage = rk.ResidualStage(block, **options)
    parameters = dict(stage.named_parameters())
    inputs = [torch.randn(8, 6) for _ in range(4)]

    def step(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(stage(x).square().sum(), [x, *parameters.values()]))

    expected = [step(x) for x in inputs]
    barrier = Barrier(len(inputs))

    def train(i: int) -> list[list[Tensor]]:
        barrier.wait()
        with torch.no_grad():
            stage(inputs[i])
        return [step(inputs[i]) for _ in range(20)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for results, true in zip(pool.map(train, range(len(inputs))), expected, strict=True):
            for result in results:
                for got, wanted in zip(result, true, strict=True):
                    assert torch.equal(got, wanted)
    for name, parameter in stage.named_parameters():
        assert parameter is parameters[name]


def test_threads_replay_their_own_random_numbers() -> None:
    """y = x + dropout(x) w, so that ∂y/∂w shows the mask that the backward pass used."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) * self.w

    stage, x = rk.ResidualStage([Noisy()], backward="checkpoint"), torch.randn(64)
    stage(x)

    def train(i: int) -> None:
        for _ in range(50):
            y, g = stage(x), torch.randn(64, generator=torch.Generator().manual_seed(i))
            (grad,) = torch.autograd.grad(y, stage.parameters(), g)
            torch.testing.assert_close(grad, g @ (y.detach() - x))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))


def test_a_stage_inside_a_block_is_no_deadlock() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = rk.ResidualStage([nn.Linear(4, 4), nn.Linear(4, 4)], reverse="paper")

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.stage(x))

    stage = rk.ResidualStage([Nested(), Nested()], backward="checkpoint")
    x = torch.randn(3, 4)

    def train(_: int) -> None:
        for mode in ("checkpoint", "stored", "adjoint"):
            stage.configure(backward=mode)
            stage(x).sum().backward()
            with torch.no_grad():
                stage(x)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))


def test_checkpointing_takes_no_more_memory_than_per_layer() -> None:
    """The activations of a transformer's layer are some thirty states."""
    layers = [
        nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(24)
    ]
    for layer in layers:
        layer.requires_grad_(False)
    x = torch.randn(16, 32, 32, requires_grad=True)

    def per_layer(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    branches = [rk.residual_branch(layer) for layer in layers]
    stage = rk.ResidualStage(branches, step=1.0, backward="checkpoint")
    expected = torch.autograd.grad(per_layer(x).sin().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(stage(x).sin().sum(), x)[0], expected)
    ours, theirs = (
        peak_allocation(lambda run=run: run(x).sum().backward(), [x]) for run in (stage, per_layer)
    )
    assert ours <= 1.05 * theirs


def test_forward_mode_and_transforms() -> None:
    stage = rk.ResidualStage([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    stage = stage.double()
    x, v = torch.randn(2, 5, 4, dtype=torch.float64)
    moved = (stage(x + 1e-6 * v) - stage(x - 1e-6 * v)) / 2e-6
    for frozen in (False, True):
        stage.requires_grad_(not frozen)
        _, tangent = torch.func.jvp(stage, (x,), (v,))
        torch.testing.assert_close(tangent, moved, rtol=1e-6, atol=1e-8)
        with torch.autograd.forward_ad.dual_level():
            dual = stage(torch.autograd.forward_ad.make_dual(x, v))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        torch.testing.assert_close(tangent, moved, rtol=1e-6, atol=1e-8)
    parameters = dict(stage.requires_grad_().named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(stage, parameters, (x,)).sin().sum()

    samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    stage.configure(backward="stored")
    for i in range(len(x)):
        exact = torch.autograd.grad(stage(x[i]).sin().sum(), list(stage.parameters()))
        for got, true in zip(samples.values(), exact, strict=True):
            torch.testing.assert_close(got[i], true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_stream_may_have_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    """Then a stage adds what plain PyTorch adds, bit for bit."""
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype) for _ in range(12)]
    x, g = torch.randn(2, 16, 8).to(dtype)
    leaf = x.requires_grad_()
    stage = rk.ResidualStage(blocks, step=1.0, stream="input", backward="checkpoint")
    expected = leaf
    for block in blocks:
        expected = expected + block(expected)
    y = stage(leaf)
    assert torch.equal(y, expected)
    inputs = [leaf, *stage.parameters()]
    for got, true in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True
    ):
        assert torch.equal(got, true)
    wider = stage.configure(stream="float32")(leaf)
    assert torch.equal(wider, expected) == (dtype == torch.float32)

    def memory(stream: str) -> int:
        report = rk.diagnose(stage.configure(stream=stream), x.detach(), settings=[])
        return next(m.memory for m in report.settings if m.setting.backward == "checkpoint")

    assert (memory("input") < memory("float32")) == (dtype != torch.float32)


def test_kernels_keep_their_stream() -> None:
    stage = rk.MLPStage(8, 8, 3, stream="input")
    assert stage(torch.randn(2, 8)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"stream='input' asks for states in torch\.bfloat16"):
        stage.bfloat16()(torch.randn(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="stream must be one of 'float32', 'input'"):
        rk.MLPStage(8, 8, 3, stream="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_stage_of_branches_is_the_same_network(dtype: torch.dtype) -> None:
    """With h = 1 it returns what the stack of layers does, whose sums are rounded to 16 bits."""
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True).to(dtype)
        for _ in range(12)
    ]
    x = torch.randn(2, 8, 32).to(dtype)
    stage = rk.ResidualStage([rk.residual_branch(layer) for layer in layers], step=1.0)
    y = x
    for layer in layers:
        y = layer(y)
    assert torch.equal(stage(x), y)


def test_a_monitor_inside_a_block_is_no_deadlock() -> None:
    inner = rk.ResidualStage([nn.Linear(4, 4), nn.Linear(4, 4)])
    stage = rk.ResidualStage([nn.Sequential(inner, nn.Tanh()) for _ in range(2)])
    with rk.monitor(inner, every=1, max_gradient_error=1.0) as watching:
        stage(torch.randn(3, 4)).sin().sum().backward()
    assert watching.history
