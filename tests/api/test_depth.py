"""Tied, deeper, untied: ``untie`` does not change the function at all, ``deepen`` as little as the
order of the scheme says, and both return a stage that is new in memory and the same in all else."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import RULES, name, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import resode_kernels as rk
from resode_kernels.options import Options

SCHEMES = ["euler", "heun"]
DIM, CHANNELS = 6, 4


def transformer(*, depth: int, tied: bool, **options: Any) -> rk.ResidualStage:
    count = 1 if tied else Options(scheme=options.get("scheme", "euler")).blocks(depth)
    layers = [
        nn.TransformerEncoderLayer(DIM, 2, 8, 0.0, nn.functional.gelu, norm_first=True)
        for _ in range(count)
    ]
    return rk.ResidualStage(
        [rk.residual_branch(layer) for layer in layers], depth=depth if tied else None, **options
    )


class Branch(nn.Module):
    """Has a bit of everything: normalization, a counter, a mask and what is not in state_dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = (
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
        )
        self.register_buffer("scale", torch.rand(()) + 0.5, persistent=False)
        self.register_buffer("mask", torch.rand(CHANNELS, 1, 1) > 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(torch.tanh(x))) * self.scale * self.mask


def modules(*, depth: int, tied: bool, **options: Any) -> rk.ResidualStage:
    count = 1 if tied else Options(scheme=options.get("scheme", "euler")).blocks(depth)
    return rk.ResidualStage(
        [Branch() for _ in range(count)], depth=depth if tied else None, **options
    )


MAKE: dict[str, Callable[..., rk.Stage]] = {
    "mlp": lambda **options: rk.MLPStage(DIM, 9, **options),
    "mlp-without-bias": lambda **options: rk.MLPStage(
        DIM, 9, activation="silu", bias=False, **options
    ),
    "linear": lambda **options: rk.LinearStage(DIM, **options),
    "conv": lambda **options: rk.ConvStage(CHANNELS, activation="tanh", **options),
    "bottleneck": lambda **options: rk.ConvStage(
        8, block="bottleneck", activation="gelu", **options
    ),
    "transformer": transformer,
    "modules": modules,
}
SHAPES = {"conv": (3, CHANNELS, 4, 4), "bottleneck": (3, 8, 4, 4), "modules": (3, CHANNELS, 4, 4)}


def make(
    kind: str, depth: int, scheme: str = "euler", tied: bool = False, **options: Any
) -> rk.Stage:
    """In float64, with normalizations that have statistics of their own."""
    stage = MAKE[kind](depth=depth, scheme=scheme, tied=tied, **options).double()
    with torch.no_grad():
        for module in stage.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean):
                    nn.init.normal_(tensor, float(tensor is module.weight), 0.2)
                module.running_var.uniform_(0.5, 2)
    return stage


def batch(kind: str) -> Tensor:
    return torch.randn(SHAPES.get(kind, (5, 3, DIM)), dtype=torch.float64)


def blocks(stage: rk.Stage) -> list[dict[str, Tensor]]:
    """Parameters and buffers, block by block."""
    if isinstance(stage, rk.ResidualStage):
        return [dict([*b.named_parameters(), *b.named_buffers()]) for b in stage.blocks]
    return [{k: p[n] for k, p in stage.named_parameters()} for n in range(stage.num_blocks)]


def assert_same_block(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@torch.no_grad()
def smooth(stage: rk.Stage) -> rk.Stage:
    """With weights sin and cos of depth, at the places where blocks are."""
    heun = stage.options.scheme == "heun"
    for n, block in enumerate(blocks(stage)):
        s = n / stage.depth if heun else (n + 0.5) / stage.depth
        generator = torch.Generator().manual_seed(0)
        for tensor in block.values():
            if tensor.is_floating_point():
                size = (*tensor.shape, 2)
                a, b = torch.randn(size, generator=generator, dtype=torch.float64).unbind(-1)
                centre, scale = (0, tensor[0].numel() ** -0.5) if tensor.dim() > 1 else (1, 0.1)
                tensor.copy_(centre + scale * (a * np.sin(2 * s) + b * np.cos(3 * s)))
    return stage


# ------------------------------------------------------------------------------------------ untie


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_untying_changes_no_bit_of_the_function(
    kind: str, scheme: str, train: bool, backend: str
) -> None:
    tied = make(kind, 5, scheme, tied=True, backend=backend).train(train)
    untied = rk.untie(tied)
    x = batch(kind)
    assert not untied.tied
    assert untied.num_blocks == len(blocks(untied)) == (6 if scheme == "heun" else 5)
    assert torch.equal(untied(x), tied(x))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", RULES, ids=name)
def test_gradients_of_the_copies_add_up_to_the_tied_one(
    kind: str, scheme: str, options: dict[str, Any]
) -> None:
    tied = make(kind, 5, scheme, tied=True, **options)
    untied = rk.untie(tied)
    x, g = batch(kind), batch(kind)
    for stage in (tied, untied):
        stage(x).backward(g)
    if isinstance(tied, rk.ResidualStage):
        for key, parameter in tied.blocks[0].named_parameters():
            copies = [block.get_parameter(key) for block in untied.blocks]
            torch.testing.assert_close(sum(p.grad for p in copies), parameter.grad)
    else:
        for key, parameter in tied.named_parameters():
            total = untied.get_parameter(key).grad.sum(0, keepdim=True)
            torch.testing.assert_close(total, parameter.grad)


@pytest.mark.parametrize("kind", ["mlp", "conv", "modules"])
def test_untying_an_untied_stage_copies_it(kind: str) -> None:
    stage = make(kind, 4)
    untied = rk.untie(stage)
    assert repr(untied) == repr(stage)
    torch.testing.assert_close(untied.state_dict(), stage.state_dict(), rtol=0, atol=0)


def test_untying_ends_what_blocks_share() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    stage = rk.ResidualStage([first, second, first, second])
    assert len(list(stage.parameters())) == 4
    untied = rk.untie(stage)
    assert len(list(untied.parameters())) == 8
    assert torch.equal(untied(torch.eye(3)), stage(torch.eye(3)))


# ------------------------------------------------------------------------------------ deepen, tied


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("scheme", "order"), [("euler", 1), ("heun", 2)])
def test_depth_changes_a_tied_stage_as_little_as_the_scheme_says(
    kind: str, scheme: str, order: int
) -> None:
    """The outputs at depths N and 2N come closer as 1/N, with Heun as 1/N²."""
    stage = make(kind, 4, scheme, tied=True).eval()
    x = batch(kind)
    with torch.no_grad():
        outputs = [rk.deepen(stage, depth)(x) for depth in (32, 64, 128, 256)]
    gaps = [float((a - b).norm()) for a, b in itertools.pairwise(outputs)]
    orders = [np.log2(a / b) for a, b in itertools.pairwise(gaps)]
    assert orders == pytest.approx([order] * 2, abs=0.1), gaps


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_a_tied_stage_keeps_its_weights(kind: str, scheme: str, depth: int) -> None:
    stage = make(kind, 4, scheme, tied=True)
    deeper = rk.deepen(stage, depth)
    assert (deeper.depth, deeper.tied, deeper.num_blocks) == (depth, True, 1)
    torch.testing.assert_close(deeper.state_dict(), stage.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["mlp", "conv", "modules"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_deepening_and_untying_commute(kind: str, scheme: str) -> None:
    stage = make(kind, 3, scheme, tied=True)
    one, other = rk.untie(rk.deepen(stage, 7)), rk.deepen(rk.untie(stage), 7)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


# ---------------------------------------------------------------------------------- deepen, untied


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("interpolation", ["nearest", "linear"])
def test_to_the_same_depth_nothing_changes(kind: str, scheme: str, interpolation: str) -> None:
    stage = make(kind, 5, scheme)
    same = rk.deepen(stage, 5, interpolation=interpolation)
    assert repr(same) == repr(stage)
    torch.testing.assert_close(same.state_dict(), stage.state_dict(), rtol=0, atol=0)
    x = batch(kind)
    assert torch.equal(same(x), stage(x))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("times", [2, 3])
def test_euler_repeats_every_block_when_the_depth_is_multiplied(kind: str, times: int) -> None:
    stage = make(kind, 4)
    deeper = rk.deepen(stage, 4 * times)
    assert deeper.num_blocks == 4 * times
    for n, block in enumerate(blocks(deeper)):
        assert_same_block(block, blocks(stage)[n // times])


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("interpolation", ["nearest", "linear"])
@pytest.mark.parametrize("times", [2, 3])
def test_heun_keeps_the_blocks_at_the_borders_of_steps(
    kind: str, interpolation: str, times: int
) -> None:
    stage = make(kind, 4, "heun")
    deeper = rk.deepen(stage, 4 * times, interpolation=interpolation)
    assert deeper.num_blocks == 4 * times + 1
    for n, block in enumerate(blocks(stage)):
        assert_same_block(blocks(deeper)[n * times], block)
    assert_same_block(blocks(rk.deepen(deeper, 4))[2], blocks(stage)[2])


def test_linear_interpolates_parameters_and_statistics_and_takes_the_nearest_of_all_else() -> None:
    stage = make("modules", 2)
    for n, block in enumerate(stage.blocks):
        block.bn.num_batches_tracked.fill_(10 * n)
    first, last = blocks(stage)
    for n, block in enumerate(blocks(rk.deepen(stage, 4, interpolation="linear"))):
        # Block n is at (n + ½)/4, the old ones are at ¼ and ¾: beyond those weights are constant.
        t = (0, 0.25, 0.75, 1)[n]
        for key, tensor in block.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, (1 - t) * first[key] + t * last[key])
            else:
                assert torch.equal(tensor, (first, last)[n // 2][key])


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_smooth_in_depth_are_met_by_linear_interpolation(
    kind: str, scheme: str
) -> None:
    """At depth 4N they come as close to the smooth function as 1/N², nearest ones as 1/N."""

    def error(depth: int, interpolation: str) -> float:
        stage = smooth(make(kind, depth, scheme))
        deeper = blocks(rk.deepen(stage, 4 * depth, interpolation=interpolation))
        expected = blocks(smooth(make(kind, 4 * depth, scheme)))
        inner = slice(4, -4)  # Euler's outer blocks have a neighbour on one side only
        return max(
            relative_error(a[key].detach(), b[key].detach())
            for a, b in zip(deeper[inner], expected[inner], strict=True)
            for key in a
            if a[key].is_floating_point()
        )

    for interpolation, order in (("nearest", 1), ("linear", 2)):
        rate = np.log2(error(8, interpolation) / error(16, interpolation))
        assert rate == pytest.approx(order, abs=0.3)


@pytest.mark.parametrize("kind", ["mlp", "linear", "conv", "transformer"])
@pytest.mark.parametrize(
    ("scheme", "interpolation", "order"),
    # Repeated blocks are, step by step, too early as often as too late, and Euler does not notice.
    [
        ("euler", "nearest", 2),
        ("euler", "linear", 2),
        ("heun", "nearest", 1),
        ("heun", "linear", 2),
    ],
)
def test_smooth_weights_make_the_function_that_they_would_make_at_the_new_depth(
    kind: str, scheme: str, interpolation: str, order: int
) -> None:
    x = batch(kind)

    @torch.no_grad()
    def error(depth: int) -> float:
        stage = smooth(make(kind, depth, scheme)).eval()
        expected = smooth(make(kind, 4 * depth, scheme)).eval()
        return relative_error(
            rk.deepen(stage, 4 * depth, interpolation=interpolation)(x), expected(x)
        )

    assert np.log2(error(16) / error(32)) == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_interpolation_makes_weights_smoother_and_repetition_does_not(
    kind: str, scheme: str
) -> None:
    @torch.no_grad()
    def largest_step(stage: rk.Stage) -> float:
        return max(
            float((b[key] - a[key]).norm())
            for a, b in itertools.pairwise(blocks(stage))
            for key in a
            if a[key].is_floating_point()
        )

    stage = make(kind, 4, scheme)
    before = largest_step(stage)
    assert largest_step(rk.deepen(stage, 12)) == before
    after = largest_step(rk.deepen(stage, 12, interpolation="linear"))
    assert after == pytest.approx(before / 3)


@settings(deadline=None, max_examples=60)
@given(depth=st.integers(1, 12), times=st.integers(1, 6))
def test_euler_keeps_the_mean_of_the_weights_when_the_depth_is_multiplied(
    depth: int, times: int
) -> None:
    stage = rk.LinearStage(2, depth, dtype=torch.float64)
    for interpolation in ("nearest", "linear"):
        deeper = rk.deepen(stage, depth * times, interpolation=interpolation)
        torch.testing.assert_close(deeper.weight.mean(0), stage.weight.mean(0))


@settings(deadline=None, max_examples=100)
@given(
    old=st.integers(1, 40),
    new=st.integers(1, 40),
    scheme=st.sampled_from(SCHEMES),
    interpolation=st.sampled_from(["nearest", "linear"]),
)
def test_blocks_keep_their_order_and_their_places(
    old: int, new: int, scheme: str, interpolation: str
) -> None:
    stage = rk.LinearStage(1, old, scheme=scheme, dtype=torch.float64)
    offset = 0.5 if scheme == "euler" else 0
    with torch.no_grad():  # each block holds its own place
        stage.weight.copy_((torch.arange(stage.num_blocks) + offset).double().view(-1, 1, 1) / old)
    deeper = rk.deepen(stage, new, interpolation=interpolation)
    got = deeper.weight.detach().flatten()
    places = (torch.arange(deeper.num_blocks) + offset).double() / new
    assert (got.diff() >= 0).all()
    if interpolation == "nearest":
        assert ((got - places).abs() <= 0.5 / old + 1e-12).all()
    else:
        torch.testing.assert_close(got, places.clamp(stage.weight.min(), stage.weight.max()))


def test_linear_needs_blocks_of_one_structure() -> None:
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 3)) for n in (4, 5))
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    for other in (wide, relu, nn.Linear(3, 3)):
        stage = rk.ResidualStage([narrow, other])
        with pytest.raises(ValueError, match=r"blocks 0 \(Sequential\) and 1 .*'nearest'"):
            rk.deepen(stage, 4, interpolation="linear")
        rk.deepen(stage, 4)(torch.randn(2, 3))  # takes them as they are


# ------------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("kind", ["mlp", "conv", "modules"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_integration_time_stays(kind: str, tied: bool) -> None:
    stage = make(kind, 4, tied=tied, step=0.5)
    assert rk.deepen(stage, 16).options.step == 0.125
    assert rk.deepen(stage, 2).options.step == 1.0
    assert rk.deepen(make(kind, 4, tied=tied), 16).options.step is None
    assert rk.untie(stage).options == stage.options


CHANGES: dict[str, Callable[[rk.Stage], rk.Stage]] = {
    "untie": rk.untie,
    "deepen": lambda stage: rk.deepen(stage, 6),
    "deepen linear": lambda stage: rk.deepen(stage, 6, interpolation="linear"),
    "both": lambda stage: rk.untie(rk.deepen(stage, 6)),
}
change_each_kind = [
    pytest.mark.parametrize("kind", MAKE),
    pytest.mark.parametrize("tied", [True, False]),
    pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES),
]


def each_change(test: Callable[..., None]) -> Callable[..., None]:
    for mark in change_each_kind:
        test = mark(test)
    return test


@each_change
def test_options_and_class_are_kept(
    kind: str, tied: bool, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    options = {"scheme": "heun", "reverse": "predicted", "order": 3, "anchor_every": 2}
    stage = make(kind, 4, tied=tied, **options)
    new = change(stage)
    assert type(new) is type(stage)
    assert new.options == stage.options


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_of_a_step_follow_it_to_another_depth(tied: bool, scheme: str) -> None:
    bits = (16, 8, None, 4)
    stage = make("mlp", 4, scheme, tied, reverse="recorded", bits=bits)
    deep, shallow = rk.deepen(stage, 8), rk.deepen(stage, 2)
    assert deep.options.bits == (16, 16, 8, 8, None, None, 4, 4)
    assert shallow.options.bits == (8, 4)
    assert rk.deepen(stage, 4).options.bits == rk.untie(stage).options.bits == bits
    assert stage.options.bits == bits
    x = torch.randn(3, DIM, dtype=torch.float64)
    for new in (deep, shallow, rk.untie(stage)):
        new(x).sum().backward()  # a sequence of another length would be refused
    same = make("mlp", 4, scheme, tied, reverse="recorded", bits=6)
    assert rk.deepen(same, 8).options.bits == 6


@each_change
def test_a_state_dict_loads_into_a_stage_made_like_it(
    kind: str, tied: bool, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    new = change(make(kind, 4, "heun", tied=tied))
    fresh = make(kind, new.depth, "heun", tied=new.tied)
    assert repr(fresh) == repr(new)
    fresh.load_state_dict(new.state_dict())
    for a, b in zip(blocks(fresh), blocks(new), strict=True):
        for key in a:
            if key != "scale":  # is not persistent
                assert torch.equal(a[key], b[key])
    for twin in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        x = batch(kind)
        assert torch.equal(twin(x), new(x))


@each_change
def test_an_optimizer_moves_the_new_stage_only(
    kind: str, tied: bool, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    stage = make(kind, 4, tied=tied)
    x = batch(kind)
    stage(x).square().sum().backward()
    before, gradients = copy.deepcopy(stage.state_dict()), [p.grad for p in stage.parameters()]
    new = change(stage)
    assert all(p.is_leaf and p.grad is None and p.requires_grad for p in new.parameters())
    start = copy.deepcopy(list(new.parameters()))
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    new(x).sin().sum().backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(start, new.parameters(), strict=True)]
    assert all(moved)
    torch.testing.assert_close(stage.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is g for p, g in zip(stage.parameters(), gradients, strict=True))


@each_change
def test_the_stages_share_no_memory(
    kind: str, tied: bool, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    stage = make(kind, 4, tied=tied)
    new = change(stage)
    tensors = [
        *itertools.chain(stage.parameters(), stage.buffers()),
        *itertools.chain(new.parameters(), new.buffers()),
    ]
    addresses = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(addresses)) == len(addresses)


@each_change
def test_frozen_parameters_stay_frozen(
    kind: str, tied: bool, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    stage = make(kind, 4, tied=tied)
    key = {"linear": "weight", "conv": "conv2.weight", "bottleneck": "bn3.bias"}.get(kind)
    for parameter_name, parameter in stage.named_parameters():
        if key is None or parameter_name.endswith(key):
            parameter.requires_grad_(key is None and "weight" in parameter_name)
    expected = {n.split(".", 2)[-1]: p.requires_grad for n, p in stage.named_parameters()}
    new = change(stage)
    got = {n.split(".", 2)[-1]: p.requires_grad for n, p in new.named_parameters()}
    assert got == expected
    assert not all(got.values())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modes_stay(change: Callable[[rk.Stage], rk.Stage]) -> None:
    for kind in ("mlp", "conv", "modules"):
        for tied in (True, False):
            new = change(make(kind, 3, tied=tied).eval())
            assert not any(module.training for module in new.modules())
    stage = make("conv", 3, tied=True)
    stage.blocks[0].bn2.eval()  # of one layer, frozen statistics
    assert all(block.training and not block.bn2.training for block in change(stage).blocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mlp", "conv", "modules"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_dtype_and_device_stay(
    dtype: torch.dtype, kind: str, change: Callable[[rk.Stage], rk.Stage]
) -> None:
    stage = make(kind, 4).to(dtype)
    assert all(t.dtype == dtype for t in change(stage).parameters())
    new = change(stage.to("meta"))
    assert all(t.is_meta for t in itertools.chain(new.parameters(), new.buffers()))


def test_statistics_of_the_copies_go_their_own_ways() -> None:
    """In a tied stage one average serves all steps; in eval mode untying does not change that."""
    tied = make("conv", 3, tied=True)
    untied = rk.untie(tied)
    for block in untied.blocks:
        assert_same_block(dict(block.named_buffers()), dict(tied.blocks[0].named_buffers()))
    x = batch("conv")
    untied(x)
    assert [int(block.bn1.num_batches_tracked) for block in untied.blocks] == [1, 1, 1]
    means = [block.bn1.running_mean for block in untied.blocks]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(means, 2))


def test_module_hooks_are_copied() -> None:
    calls = []
    stage = rk.MLPStage(DIM, 9, 3, tied=True)
    stage.register_forward_hook(lambda *_: calls.append("stage"))
    rk.untie(rk.deepen(stage, 5))(torch.randn(2, DIM))
    assert calls == ["stage"]


def test_parametrized_blocks_are_copied_with_their_parametrizations() -> None:
    block = parametrizations.weight_norm(nn.Linear(DIM, DIM))
    stage = rk.ResidualStage(block, depth=4)
    x = torch.randn(2, DIM)
    untied = rk.untie(stage)
    assert torch.equal(untied(x), stage(x))
    assert len(list(untied.parameters())) == 4 * len(list(stage.parameters()))


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: rk.deepen(s, 0), ValueError, "depth must be at least 1, not 0"),
        (lambda s: rk.deepen(s, 2.0), TypeError, "depth must be an int, not 2.0"),
        (
            lambda s: rk.deepen(s, 2, interpolation="cubic"),
            ValueError,
            "interpolation must be one of 'nearest', 'linear', not 'cubic'",
        ),
        (lambda _: rk.deepen(nn.Linear(2, 2), 2), TypeError, "stage must be a stage.*a Linear"),
        (lambda _: rk.untie(nn.Sequential()), TypeError, "stage must be a stage.*a Sequential"),
        (
            lambda s: rk.untie(parametrizations.weight_norm(s, "w1")),
            ValueError,
            "w1 is computed by a parametrization.*remove",
        ),
    ],
)
def test_errors_name_the_argument(
    call: Callable[[rk.Stage], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(rk.MLPStage(DIM, 9, 4))
