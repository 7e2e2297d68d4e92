"""Running blocks again in the backward pass changes nothing that anyone can see, and computes with
everything as it was in the forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PRECISE, name, steps
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import resode_kernels as rk

ADJOINT = [
    PRECISE,
    {"reverse": "predicted", "step": 0.05},
    {"reverse": "paper", "step": 0.05},
    {"backward": "checkpoint", "step": 0.05},
]
EXACT = [PRECISE, {"backward": "checkpoint", "step": 0.05}]  # to round-off
SCHEMES = ["euler", "heun"]


def plain(stage: rk.ResidualStage, x: Tensor, *args: Any) -> Tensor:
    """Standard training of the same network: the loop that anyone would write."""
    return steps(stage, lambda n, x: stage.blocks[0 if stage.tied else n](x, *args), x)


class Outcome:
    """What a training step computed, and what it left behind."""

    def __init__(self, stage: rk.ResidualStage, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
        torch.manual_seed(1)
        x = x.detach().requires_grad_()
        y = run(x)
        self.after_forward = copy.deepcopy(stage.state_dict())
        self.random_after_forward = torch.get_rng_state()
        # An uneven cotangent: sums of normalised outputs have no gradient.
        inputs = [x, *stage.parameters()]
        grads = torch.autograd.grad(y, inputs, y.sin(), allow_unused=True)
        nothing = torch.tensor(torch.nan)
        self.numbers = [y.detach(), *(nothing if g is None else g for g in grads)]
        self.state = copy.deepcopy(stage.state_dict())
        self.modes = [m.training for m in stage.modules()]
        self.random = torch.get_rng_state()


def compare(
    make: Callable[[], nn.Module],
    x: Tensor,
    options: dict[str, Any],
    scheme: str,
    *,
    steps: int = 2,
    count: int = 4,
    exact: bool = True,
    train: bool = True,
) -> None:
    """Some training steps leave the same numbers and the same state as standard training."""
    stage = rk.ResidualStage([make() for _ in range(count)], scheme=scheme, **options)
    stage = stage.to(x.dtype).train(train)
    twin = copy.deepcopy(stage)
    for _ in range(steps):
        got = Outcome(stage, stage, x)
        expected = Outcome(twin, lambda x: plain(twin, x), x)
        if exact:
            torch.testing.assert_close(
                got.numbers, expected.numbers, rtol=1e-8, atol=1e-10, equal_nan=True
            )
        torch.testing.assert_close(got.state, expected.state, rtol=1e-12, atol=1e-12)
        assert str(got.state) == str(got.after_forward)
        assert torch.equal(got.random, expected.random)
        assert torch.equal(got.random, got.random_after_forward)
        assert got.modes == expected.modes


# -------------------------------------------------------------------------------------- buffers


def conv_bn() -> nn.Module:
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1)
    )


@pytest.mark.parametrize("options", ADJOINT, ids=name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_running_statistics_move_once_per_forward_evaluation(
    options: dict[str, Any], scheme: str
) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    compare(conv_bn, x, options, scheme, exact=options in EXACT)


def test_running_statistics_without_a_counter_move_once() -> None:
    class Statistics(nn.Module):
        """F.batch_norm moves these, and their version counters do not tell."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.batch_norm(x, self.mean, self.var, training=True)

    stage = rk.ResidualStage([Statistics() for _ in range(3)])
    x = torch.randn(5, 3, requires_grad=True)
    y = stage(x)
    after_forward = copy.deepcopy(stage.state_dict())
    y.sin().sum().backward()
    torch.testing.assert_close(stage.state_dict(), after_forward, rtol=0, atol=0)
    assert (stage.blocks[0].mean != 0).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_modes_are_kept_block_by_block(scheme: str) -> None:
    stage = rk.ResidualStage([conv_bn() for _ in range(4)], scheme=scheme)
    stage.blocks[1].eval()
    stage.blocks[2][2].eval()
    modes = [m.training for m in stage.modules()]
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    stage(x).sum().backward()
    assert [m.training for m in stage.modules()] == modes


@pytest.mark.parametrize("options", EXACT, ids=name)
def test_the_backward_pass_uses_the_mode_of_the_forward_pass(options: dict[str, Any]) -> None:
    stage = rk.ResidualStage([conv_bn() for _ in range(4)], **options).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    with_training = torch.autograd.grad(stage(x).sin().sum(), x)
    y = stage(x)
    stage.eval()
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), x), with_training)
    assert not any(m.training for m in stage.modules())
    with_evaluation = torch.autograd.grad(stage(x).sin().sum(), x)
    assert (with_evaluation[0] - with_training[0]).abs().max() > 1e-3


class Counter(nn.Module):
    """Its function depends on a buffer that it changes: in place, or by putting another there."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.linear = in_place, nn.Linear(6, 6)
        self.register_buffer("calls", torch.ones(1))
        self.register_buffer("mask", torch.ones(6), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return torch.tanh(self.linear(x) / self.calls.clone()) * self.mask


@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_buffers_that_a_block_reads_and_changes_are_replayed(
    options: dict[str, Any], scheme: str, in_place: bool, tied: bool
) -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    shared = Counter(in_place)
    compare(lambda: shared if tied else Counter(in_place), x, options, scheme)


# --------------------------------------------------------------------------------- random numbers


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 6))


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.3:  # stochastic depth
            return torch.zeros_like(x)
        return torch.tanh(self.linear(x)) * torch.randn_like(x)


@pytest.mark.parametrize("options", ADJOINT, ids=name)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [dropout, Noise])
@pytest.mark.parametrize("tied", [True, False])
def test_randomness_replays_and_leaves_the_stream_as_standard_training(
    make: Callable[[], nn.Module], options: dict[str, Any], scheme: str, tied: bool
) -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    shared = make()
    compare(lambda: shared if tied else make(), x, options, scheme, exact=options in EXACT)


def test_generator_states_are_kept_only_where_randomness_was_used() -> None:
    stage = rk.ResidualStage([dropout(), nn.Tanh(), dropout()])
    y = stage(torch.randn(3, 6, requires_grad=True))
    used = [[bool(e.generators) for e in b.evaluations.values()] for b in y.grad_fn.run.blocks]
    assert used == [[True], [False], [True]]
    y = stage.eval()(torch.randn(3, 6, requires_grad=True))
    assert not any(e.generators for b in y.grad_fn.run.blocks for e in b.evaluations.values())


# --------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_captured_and_replayed(low: torch.dtype) -> None:
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            seen.append((x.dtype, y.dtype))
            return torch.tanh(y)

    stage = rk.ResidualStage([Watched() for _ in range(4)], backward="checkpoint", anchor_every=1)
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", low):
        y = stage(x)
        expected = torch.autograd.grad(
            plain(stage.configure(step=0.25), x).sum(), [*stage.parameters()]
        )
    assert y.dtype == torch.float32
    got = torch.autograd.grad(y.sum(), [*stage.parameters()])  # outside the region
    assert seen == [(torch.float32, low)] * len(seen)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert all(g.abs().max() > 0 for g in got)

    seen.clear()
    y = stage(x)
    with torch.autocast("cpu", low):  # a region around the backward pass alone is not its business
        y.sum().backward()
    assert seen == [(torch.float32, torch.float32)] * 8


@pytest.mark.parametrize("reverse", ["refined", "predicted"])
def test_weights_cast_by_autocast_get_gradients(reverse: str) -> None:
    """Tied weights are cast in evaluations with and without grad, in one region."""
    stage = rk.ResidualStage(nn.Linear(6, 6), depth=5, reverse=reverse)
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        stage(x).sum().backward()
        once = stage.blocks[0].weight.grad.clone()
        stage(x).sum().backward()
        # and standard training afterwards, in the same region
        (weight,) = torch.autograd.grad(stage.blocks[0](x).sum(), stage.blocks[0].weight)
    assert once.abs().max() > 0
    torch.testing.assert_close(stage.blocks[0].weight.grad, 2 * once)
    assert weight.abs().max() > 0


# ------------------------------------------------------------------------------- as other modules


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def small_stage(**options: Any) -> rk.ResidualStage:
    return rk.ResidualStage([mlp() for _ in range(5)], **{**PRECISE, **options})


def exact_gradients(stage: rk.ResidualStage, x: Tensor, wanted: list[Tensor]) -> Any:
    return torch.autograd.grad(plain(stage, x).sin().sum(), wanted, allow_unused=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("trained", [{0}, {2}, {4}, {1, 3}, set()], ids=str)
@pytest.mark.parametrize("x_too", [True, False])
def test_frozen_parameters_and_inputs_cost_nothing(
    options: dict[str, Any], scheme: str, trained: set[int], x_too: bool
) -> None:
    stage = rk.ResidualStage([mlp() for _ in range(5)], scheme=scheme, **options)
    for n, block in enumerate(stage.blocks):
        block.requires_grad_(n in trained)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=x_too)
    wanted = [t for t in (x, *stage.parameters()) if t.requires_grad]
    y = stage(x)
    assert y.requires_grad == bool(wanted)
    if not wanted:
        return
    expected = exact_gradients(stage, x, wanted)
    calls: list[tuple[int, bool]] = []
    for n, block in enumerate(stage.blocks):
        block.register_forward_pre_hook(
            lambda m, inputs, n=n: calls.append((n, inputs[0].requires_grad))
        )
    got = torch.autograd.grad(y.sin().sum(), wanted)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    if not x_too and options is PRECISE:  # no further back than the first block that is trained
        end = max(0, min(trained) - (scheme == "heun"))
        assert min(n for n, _ in calls) == end
        assert not any(wrt_x for n, wrt_x in calls if n == end)


def test_unused_parameters_get_no_gradient() -> None:
    stage = small_stage()
    stage.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    stage(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    assert stage.blocks[1].unused.grad is None
    assert stage.blocks[1][0].weight.grad is not None


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", EXACT, ids=name)
def test_parameters_shared_between_blocks_sum(options: dict[str, Any], scheme: str) -> None:
    shared = nn.Linear(6, 6).double()
    blocks = [nn.Sequential(mlp(), shared, nn.Tanh()) for _ in range(3)]
    blocks.append(blocks[0])  # and a whole block twice
    blocks[1][0][2].weight = blocks[1][0][2].weight  # same name again: nothing new
    blocks[2][0][2].bias = shared.bias  # one parameter in two places of one block
    stage = rk.ResidualStage(blocks, scheme=scheme, **options)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *stage.parameters()]
    got = torch.autograd.grad(stage(x).sin().sum(), wanted)
    torch.testing.assert_close(got, exact_gradients(stage, x, wanted), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tied", [True, False])
def test_hooks_fire_once_with_the_whole_gradient(tied: bool) -> None:
    stage = rk.ResidualStage([mlp()] * 5 if tied else [mlp() for _ in range(5)], **PRECISE)
    weight, seen = stage.blocks[0][0].weight, []
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = exact_gradients(stage, x, [weight])
    weight.register_hook(lambda g: seen.append(("weight", g)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad)))
    y = stage(x)
    y.register_hook(lambda g: seen.append(("y", g)))
    y.sin().sum().backward()
    assert [label for label, _ in seen] == ["y", "weight", "accumulated"]
    torch.testing.assert_close(seen[1][1], expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(seen[2][1], expected, rtol=1e-9, atol=1e-11)
    assert all(m._parameters[key].is_leaf for m in stage.modules() for key in m._parameters)
    assert stage.blocks[0][0].weight is weight


def test_parameters_are_back_in_place_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()
            self.norm = nn.BatchNorm1d(6).double()

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise KeyError("no gradient today")
            return self.norm(self.linear(x)) + torch.rand(())

    stage = rk.ResidualStage([mlp(), Fails(), mlp()])
    before = [*stage.parameters(), *stage.buffers()]
    y = stage(torch.randn(4, 6, dtype=torch.float64))
    random = torch.get_rng_state()
    with pytest.raises(KeyError, match="no gradient today"):
        y.sum().backward()
    assert all(a is b for a, b in zip(before, [*stage.parameters(), *stage.buffers()], strict=True))
    assert all(p.grad is None for p in stage.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_changing_a_parameter_before_the_backward_pass_is_noticed() -> None:
    stage = small_stage()
    y = stage(torch.randn(4, 6, dtype=torch.float64))
    with torch.no_grad():
        stage.blocks[3][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_overwriting_the_output_is_noticed() -> None:
    y = small_stage()(torch.randn(4, 6, dtype=torch.float64))
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("options", [{}, {"backward": "checkpoint"}], ids=name)
def test_double_backward_is_refused(options: dict[str, Any]) -> None:
    stage = small_stage(**options)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = stage.blocks[0][0].weight
    for gradient in torch.autograd.grad(stage(x).sum(), [x, weight], create_graph=True):
        with pytest.raises(RuntimeError, match=r"resode_kernels.*second time.*double backward"):
            gradient.sum().backward(retain_graph=True)


def test_without_grad_nothing_is_saved() -> None:
    stage = small_stage(anchor_every=1)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = stage(x).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = stage(x)
            again = stage(x * 1)  # an inference tensor in the second case
        assert not y.requires_grad
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
    stage.requires_grad_(False)
    assert not stage(x).requires_grad


@pytest.mark.parametrize("options", [*EXACT, {"backward": "stored"}], ids=name)
def test_a_tensor_that_is_not_an_argument_does_not_lose_its_gradient(
    options: dict[str, Any],
) -> None:
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)

    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    stage = rk.ResidualStage([Closure() for _ in range(3)], **options)
    x = torch.randn(4, 6, dtype=torch.float64)
    for block in stage.blocks:
        block.scale = scale * 2
    loss = stage(x).sum()
    if options == {"backward": "stored"}:
        loss.backward()
        assert scale.grad.abs().min() > 0
        return
    with pytest.raises(RuntimeError, match=r"block 2 \(Closure\).*\[6\].*stage\(x, tensor\)"):
        loss.backward()
    for block in stage.blocks:
        block.scale = scale.detach()
    stage(x).sum().backward()
    # Where nothing else needs a gradient the stage is a plain loop, and the tensor gets its own.
    stage.requires_grad_(False)
    for block in stage.blocks:
        block.scale = scale * 2
    stage(x).sum().backward()
    assert scale.grad.abs().min() > 0


# --------------------------------------------------------------------------- modules of all kinds


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(6, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(0))[0].squeeze(0)


class Mirrored(nn.Module):
    """Keeps a list of its weights by a ``__setattr__`` of its own, as nn.RNNBase once did."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "weight":
            self.weights[:] = [value]
        super().__setattr__(key, value)

    def _apply(self, function: Any, recurse: bool = True) -> nn.Module:
        super()._apply(function, recurse)
        self.weight = self._parameters["weight"]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0])


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh())


def old_weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh())


KINDS = {
    "spectral norm": spectral,
    "weight norm": weight_normed,
    "weight norm of old": old_weight_normed,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "identity": nn.Identity,
    "its own __setattr__": Mirrored,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", EXACT, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_all_kinds(kind: str, options: dict[str, Any], scheme: str) -> None:
    stages = [
        rk.ResidualStage([KINDS[kind]() for _ in range(4)], scheme=scheme, **options).double()
    ]
    stages.append(
        rk.ResidualStage([KINDS[kind]() for _ in range(4)], scheme=scheme, **options).double()
    )
    stage, twin = stages
    twin.load_state_dict(stage.state_dict())
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        got = Outcome(stage, stage, x)
        expected = Outcome(twin, lambda x: plain(twin, x), x)
        torch.testing.assert_close(
            got.numbers, expected.numbers, rtol=1e-8, atol=1e-10, equal_nan=True
        )
        torch.testing.assert_close(got.state, expected.state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", EXACT, ids=name)
def test_checkpoints_inside_blocks(options: dict[str, Any], scheme: str) -> None:
    stage = rk.ResidualStage([Checkpointed() for _ in range(4)], scheme=scheme, **options).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    got = Outcome(stage, stage, x)
    twin = rk.ResidualStage([b.inner for b in stage.blocks], scheme=scheme, **options)
    expected = Outcome(twin, lambda x: plain(twin, x), x)
    torch.testing.assert_close(got.numbers, expected.numbers, rtol=1e-8, atol=1e-10, equal_nan=True)
    assert str(got.state) == str(got.after_forward)
    assert torch.equal(got.random, expected.random)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_blocks(scheme: str) -> None:
    torch._dynamo.reset()
    stage = rk.ResidualStage([mlp() for _ in range(3)], scheme=scheme, **PRECISE)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *stage.parameters()]
    expected = exact_gradients(stage, x, wanted)
    for block in stage.blocks:
        block.compile(backend="aot_eager")
    whole = [torch.compile(block, backend="aot_eager") for block in stage.blocks]
    for compiled in (stage, rk.ResidualStage(whole, scheme=scheme, **PRECISE)):
        for _ in range(2):
            got = torch.autograd.grad(compiled(x).sin().sum(), wanted)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_compiling_the_model_around_a_stage() -> None:
    torch._dynamo.reset()
    stage = small_stage()
    model = nn.Sequential(nn.Linear(6, 6).double(), stage, nn.Linear(6, 2).double())
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), [*model.parameters()]), expected
    )


def test_configure_changes_options_in_place() -> None:
    stage = small_stage()
    assert stage.configure(reverse="predicted", order=3) is stage
    assert "reverse='predicted'" in repr(stage)
    with pytest.raises(ValueError, match=r"heun.*takes 6 blocks.*has 5"):
        stage.configure(scheme="heun")
    assert stage.options.scheme == "euler"
