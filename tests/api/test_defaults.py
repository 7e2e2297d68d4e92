"""The default of every kind of stage is as accurate as it is said to be. A stage where it cannot be
accurate says so once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels import defaults
from resode_kernels.diagnostics.probe import Probe

ROWS, IMAGES = (64, 32), (8, 16, 8, 8)

Make = Callable[[int], rk.Stage]


def transformer(depth: int) -> rk.ResidualStage:
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        for _ in range(depth)
    ]
    return rk.ResidualStage([rk.residual_branch(layer) for layer in layers])


def convolutions(depth: int) -> rk.ResidualStage:
    def layer() -> list[nn.Module]:
        return [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]

    return rk.ResidualStage([nn.Sequential(*layer(), nn.ReLU(), *layer()) for _ in range(depth)])


KINDS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "mlp, tanh": (lambda depth: rk.MLPStage(32, 32, depth), ROWS),
    "mlp, gelu": (lambda depth: rk.MLPStage(32, 32, depth, "gelu"), ROWS),
    "mlp, relu": (lambda depth: rk.MLPStage(32, 32, depth, "relu"), ROWS),
    "linear": (lambda depth: rk.LinearStage(32, depth), ROWS),
    "conv, basic": (lambda depth: rk.ConvStage(16, depth), IMAGES),
    "conv, bottleneck": (lambda depth: rk.ConvStage(16, depth, "bottleneck"), IMAGES),
    "conv, gelu": (lambda depth: rk.ConvStage(16, depth, activation="gelu"), IMAGES),
    "transformer": (transformer, (4, 16, 32)),
    "modules with batch norm": (convolutions, IMAGES),
}


def measured(stage: rk.Stage, shape: tuple[int, ...]) -> float:
    probe = Probe(stage, torch.randn(shape))
    cotangent = probe.cotangent(None)
    errors = probe.gradients(cotangent).errors(probe.gradients(cotangent, backward="checkpoint"))
    return max(error.error for error in errors)


@pytest.mark.parametrize("depth", [4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_error_is_what_is_measured(kind: str, depth: int) -> None:
    """Within a factor of three, over kinds of blocks whose errors differ by 10,000."""
    make, shape = KINDS[kind]
    errors = [measured(stage := make(depth), shape) for _ in range(5)]
    expected, found = stage.options.expected_error(depth), sorted(errors)[2]
    assert expected / 3 < found < 3 * expected


@pytest.mark.parametrize("kind", ["mlp, tanh", "conv, basic", "transformer"])
def test_the_expected_error_depends_on_the_step_not_on_the_depth(kind: str) -> None:
    make, shape = KINDS[kind]
    errors = [measured(make(depth).configure(step=1 / 8), shape) for depth in (8, 32)]
    assert errors[0] / 2 < errors[1] < 2 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_without_a_warning_is_within_the_bound_of_monitor(kind: str) -> None:
    """The least depth that is not warned of, as a median over weights."""
    make, shape = KINDS[kind]
    depth = next(n for n in range(1, 99) if make(n).options.expected_error(n) <= 1e-2)
    errors = sorted(measured(make(depth), shape) for _ in range(5))
    assert errors[2] < 2e-2


def test_stages_with_batch_norm_refine_twice() -> None:
    for kind, (make, _) in KINDS.items():
        order = make(4).options.method(4).order
        assert order == (2 if "conv" in kind or "batch norm" in kind else 1), kind
    assert rk.ConvStage(8, 4, order=1).options.method(4).order == 1
    assert rk.ConvStage(8, 4, reverse="predicted").options.method(4).order == 2
    assert rk.ConvStage(8, 4).configure(step=0.1).options.method(4).order == 2
    assert rk.deepen(rk.ConvStage(8, 4, tied=True), 8).options.method(8).order == 2


def test_the_function_has_the_defaults_of_the_stage() -> None:
    """``conv_stage`` and ``ConvStage`` make the same gradients, bit by bit."""
    stage = rk.ConvStage(8, 4)
    layer = rk.functional.ConvLayer
    pairs = zip(*(block.layers for block in stage.blocks), strict=True)
    layers = [
        layer(*(torch.stack([getattr(m[i], name) for m in place]) for i, name in FIELDS))
        for place in pairs
    ]
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    got = torch.autograd.grad(rk.functional.conv_stage(x, layers).square().sum(), x)
    assert torch.equal(got[0], torch.autograd.grad(stage(x).square().sum(), x)[0])


FIELDS = [(0, "weight"), (1, "weight"), (1, "bias")]


# ------------------------------------------------------------------------------------- the warning


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_warned", set())


@pytest.fixture
def given() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


Given = list[warnings.WarningMessage]


def texts(given: Given) -> list[str]:
    return [str(w.message) for w in given if w.category is rk.GradientErrorWarning]


def test_a_stage_warns_at_its_first_training_call(given: Given) -> None:
    stage, x = rk.ConvStage(4, 8), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        stage(x)
    assert not texts(given)
    stage(x)
    (text,) = texts(given)
    for part in (
        "this ConvStage (depth=8, step h = 0.125)",
        "off by about 7.2%",
        "reverse='refined', order=2",
        "rk.tune(stage, x)",
        "backward='checkpoint'",
        "reverse=",
    ):
        assert part in text
    assert given[0].filename == __file__  # it points at the call


def test_a_kind_of_stage_warns_once(given: Given) -> None:
    x = torch.randn(2, 4)
    for _ in range(2):
        rk.MLPStage(4, 4, 2)(x)
    assert len(texts(given)) == 1
    rk.LinearStage(4, 2)(x)
    rk.LinearStage(4, 3)(x)
    assert ["MLPStage" in texts(given)[0], "LinearStage" in texts(given)[1]] == [True, True]
    assert len(texts(given)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_warns_of_the_classical_step(kind: str, given: Given) -> None:
    make, shape = KINDS[kind]
    stage, x = make(2), torch.randn(2, *shape[1:])
    stage.configure(step=1.0)(x)
    assert len(texts(given)) == 1
    assert type(stage).__name__ in texts(given)[0]


@pytest.mark.parametrize(
    "options",
    [{"backward": "checkpoint"}, {"reverse": "refined"}, {"order": 1}, {"anchor_every": 2}],
    ids=str,
)
def test_who_chooses_the_reverse_pass_is_not_warned(options: Any, given: Given) -> None:
    x = torch.randn(2, 4)
    rk.MLPStage(4, 4, 2, **options)(x)
    rk.MLPStage(4, 4, 2).configure(**options)(x)
    copy.deepcopy(rk.deepen(rk.MLPStage(4, 4, 4, **options), 2))(x)
    assert not texts(given)
    rk.MLPStage(4, 4, 2, nonfinite="warn").configure(scheme="euler")(x)
    assert len(texts(given)) == 1


def test_a_tuned_stage_does_not_warn(given: Given) -> None:
    stage, x = rk.MLPStage(4, 4, 2), torch.randn(8, 4)
    rk.tune(stage, x, seconds=0)
    stage(x)
    assert not texts(given)


def test_stages_that_are_deep_enough_do_not_warn(given: Given) -> None:
    x = torch.randn(2, 4)
    rk.MLPStage(4, 4, 4)(x)
    rk.MLPStage(4, 4, 12, "relu")(x)
    rk.LinearStage(4, 8)(x)
    rk.ResidualStage([nn.Linear(4, 4) for _ in range(12)])(x)
    rk.ConvStage(4, 32)(torch.randn(2, 4, 4, 4))
    assert not texts(given)


def test_a_compiled_stage_stays_one_graph(given: Given) -> None:
    stage = rk.MLPStage(4, 4, 2)
    compiled: Callable[[Tensor], Tensor] = torch.compile(stage, fullgraph=True, backend="eager")
    compiled(torch.randn(2, 4)).sum().backward()
    assert stage.w1.grad is not None
    assert not texts(given)
