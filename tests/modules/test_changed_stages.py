"""Stages and blocks that were changed after they were made compute what their modules compute now,
or are refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize, prune

import resode_kernels as rk

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 4, 5, 5, dtype=torch.float64, generator=GENERATOR)
ROWS = torch.randn(3, 6, dtype=torch.float64, generator=GENERATOR)


def conv_stage(**options: Any) -> rk.ConvStage:
    torch.manual_seed(0)
    return rk.ConvStage(
        4, 3, **{"activation": "silu", "backward": "checkpoint", "dtype": torch.float64, **options}
    )


def plain(stage: rk.Stage) -> Callable[[Tensor], Tensor]:
    """The stage's blocks in a loop, with Euler's scheme."""

    def run(x: Tensor) -> Tensor:
        for n in range(stage.depth):
            x = x + stage.options.resolved_step(stage.depth) * stage.residual(n, x)
        return x

    return run


def results(stage: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, the gradients and the buffers afterwards. The stage is as before."""
    before = {name: b.clone() for name, b in stage.named_buffers()}
    x = x.clone().requires_grad_()
    inputs = [x, *(p for p in stage.parameters() if p.requires_grad)]
    y = run(x)
    grads = torch.autograd.grad((y * y).sum(), inputs, allow_unused=True)
    after = [b.clone() for b in stage.buffers()]
    for name, b in stage.named_buffers():
        b.copy_(before[name])
    return [y, *(torch.zeros(1) if g is None else g for g in grads), *after]


def assert_computes_what_its_blocks_compute(stage: rk.Stage, x: Tensor) -> None:
    expected = results(stage, plain(stage), x)
    for mine, theirs in zip(results(stage, stage, x), expected, strict=True):
        size = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11 * max(1.0, size))


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replace_forward(module: nn.Module, name: str = "forward") -> None:
    """As accelerate, peft and bitsandbytes do it."""
    before = getattr(module, name)
    setattr(module, name, lambda *args: 2 * before(*args))


def subclass(block: nn.Module) -> None:
    block.conv2.__class__ = Doubled


def swap(block: nn.Module, **options: Any) -> None:
    block.conv1 = nn.Conv2d(4, 4, 3, **{"padding": 1, "bias": False, **options}).double()


def wide(block: nn.Module) -> None:
    block.conv1 = nn.Conv2d(4, 7, 3, padding=1, bias=False).double()
    block.bn1 = nn.BatchNorm2d(7).double()
    block.conv2 = nn.Conv2d(7, 4, 3, padding=1, bias=False).double()


def plain_weight(block: nn.Module) -> None:
    theta = block.conv1.weight.detach().clone()
    del block.conv1.weight
    block.conv1.weight = theta


def put(module: nn.Module, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)


MODULES: dict[str, Callable[[Any], object]] = {
    "activation": lambda b: put(b, activation="tanh"),
    "forward of the block": replace_forward,
    "forward of a convolution": lambda b: replace_forward(b.conv1),
    "forward of a batch norm": lambda b: replace_forward(b.bn2),
    "_conv_forward": lambda b: replace_forward(b.conv2, "_conv_forward"),
    "forward hook": lambda b: b.bn1.register_forward_hook(lambda m, i, y: 2 * y),
    "forward hook with keywords": lambda b: b.register_forward_hook(
        lambda m, i, k, y: 2 * y, with_kwargs=True
    ),
    "forward pre-hook": lambda b: b.conv2.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
    "full backward hook": lambda b: b.conv1.register_full_backward_hook(
        lambda m, x, y: (2 * x[0],)
    ),
    "full backward pre-hook": lambda b: b.conv1.register_full_backward_pre_hook(
        lambda m, y: (2 * y[0],)
    ),
    "subclass": subclass,
    "groups": lambda b: swap(b, groups=2),
    "bias": lambda b: swap(b, bias=True),
    "padding mode": lambda b: swap(b, padding_mode="reflect"),
    "dilation": lambda b: swap(b, dilation=2, padding=2),
    "window": lambda b: put(b, conv1=nn.Conv2d(4, 4, 5, padding=2, bias=False).double()),
    "padding": lambda b: swap(b, padding="same"),
    "width": wide,
    "normalization": lambda b: put(b, bn1=nn.InstanceNorm2d(4, affine=True).double()),
    "eps": lambda b: put(b.bn1, eps=0.1),
    "names": lambda b: put(b, names=b.names[:1]),
    "weight norm": lambda b: parametrizations.weight_norm(b.conv1),
    "spectral norm": lambda b: nn.utils.spectral_norm(b.conv1.eval()),
    "orthogonal": lambda b: parametrizations.orthogonal(b.conv2),
    "parametrized batch norm": lambda b: parametrize.register_parametrization(
        b.bn1, "weight", nn.Softplus()
    ),
    "pruning": lambda b: prune.random_unstructured(b.conv1, "weight", 0.5),
}
"""Changes that the kernels do not know: the blocks run as modules."""

KERNELS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda b: None,
    "momentum": lambda b: put(b.bn1, momentum=0.5),
    "mean of all batches": lambda b: put(b.bn1, momentum=None),
    "no counter": lambda b: put(b.bn1, num_batches_tracked=None),
    "neither": lambda b: put(b.bn1, num_batches_tracked=None, momentum=None),
    "statistics rest": lambda b: put(b.bn2, track_running_stats=False),
    "no statistics": lambda b: put(b.bn2, running_mean=None, running_var=None),
    "no weights": lambda b: put(b.bn2, weight=None, bias=None),
    "eval": lambda b: b.eval(),
    "eval of one layer": lambda b: b.bn2.eval(),
    "frozen": lambda b: b.conv1.requires_grad_(False),
    "a tensor as weight": plain_weight,
    "another weight": lambda b: put(b.conv2, weight=nn.Parameter(torch.ones_like(b.conv2.weight))),
    "assigned weights": lambda b: b.load_state_dict(
        {name: t + 1 for name, t in b.state_dict().items()}, assign=True
    ),
    "another convolution of the kind": swap,
    "an attribute that nothing reads": lambda b: put(b.conv1, note="mine"),
}
"""Changes that the kernels follow."""


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("change", [*MODULES, *KERNELS])
def test_changed_blocks_compute_what_they_are(change: str, n: int) -> None:
    stage = conv_stage()
    (MODULES | KERNELS)[change](stage.blocks[n])
    assert stage.runs_modules == (change in MODULES)
    assert_computes_what_its_blocks_compute(stage, X)
    stage.eval()
    if change not in ("statistics rest", "mean of all batches"):
        assert_computes_what_its_blocks_compute(stage, X)


@pytest.mark.parametrize("change", ["activation", "forward of a convolution", "eps"])
def test_undone_changes_are_forgotten(change: str) -> None:
    stage = conv_stage()
    block, before = stage.blocks[1], stage(X)
    MODULES[change](block)
    assert not torch.equal(stage(X), before)
    block.activation, block.bn1.eps = "silu", 1e-5
    vars(block.conv1).pop("forward", None)
    assert not stage.runs_modules
    assert torch.equal(stage(X), before)


def test_a_replaced_method_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, forward = conv_stage(), nn.BatchNorm2d.forward
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda self, x: 2 * forward(self, x))
    assert_computes_what_its_blocks_compute(stage, X)


@pytest.mark.parametrize(
    "register",
    [
        torch_module.register_module_forward_hook,
        torch_module.register_module_forward_pre_hook,
        torch_module.register_module_full_backward_hook,
        torch_module.register_module_full_backward_pre_hook,
    ],
)
def test_hooks_of_all_modules_see_every_block(register: Callable[..., Any]) -> None:
    stage = conv_stage(backward="stored")
    stage(X)
    seen = []
    handle = register(lambda module, *_: seen.append(module))
    try:
        stage(X.clone().requires_grad_()).sum().backward()
    finally:
        handle.remove()
    assert set(stage.blocks) | set(stage.blocks[0].children()) <= set(seen)
    assert not stage.runs_modules


def test_the_activation_of_a_stage_is_that_of_its_blocks() -> None:
    stage = conv_stage()
    stage.activation = "tanh"
    assert [block.activation for block in stage.blocks] == ["tanh"] * 3
    assert not stage.runs_modules
    assert_computes_what_its_blocks_compute(stage, X)
    for block in stage.blocks:
        block.activation = "gelu"
    assert stage.activation == "gelu"
    assert_computes_what_its_blocks_compute(stage, X)
    with pytest.raises(ValueError, match=r"activation must be one of .*not 'sin'"):
        stage.activation = "sin"
    stage.blocks[1].activation = "sin"
    with pytest.raises(ValueError, match=r"activation must be one of .*not 'sin'"):
        stage(X)


def test_compiled_stages_follow_changes() -> None:
    """Except for hooks: torch.compile does not look for new ones, in any module."""
    torch.compiler.reset()
    stage = conv_stage()
    compiled = torch.compile(stage, backend="aot_eager")
    assert torch.equal(compiled(X), stage(X))
    MODULES["forward of a convolution"](stage.blocks[1])
    torch.testing.assert_close(compiled(X), plain(stage)(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_keep_changes(copied: Callable[[rk.ConvStage], rk.ConvStage]) -> None:
    stage = conv_stage()
    unchanged = copied(stage)
    assert not unchanged.runs_modules
    assert torch.equal(unchanged(X), stage(X))
    stage.blocks[2].activation = "tanh"
    changed = copied(stage)
    assert changed.runs_modules
    assert torch.equal(changed(X), stage(X))


# --------------------------------------------------------------------------- the number of blocks

STAGES: dict[str, Callable[[], rk.Stage]] = {
    "conv": conv_stage,
    "conv, tied": lambda: conv_stage(tied=True),
    "conv, Heun": lambda: conv_stage(scheme="heun"),
    "modules": lambda: rk.ResidualStage([nn.Linear(6, 6).double() for _ in range(3)]),
    "modules, tied": lambda: rk.ResidualStage(nn.Linear(6, 6).double(), depth=3),
    "modules, Heun": lambda: rk.ResidualStage([nn.Tanh() for _ in range(4)], scheme="heun"),
}


@pytest.mark.parametrize("kind", STAGES)
def test_another_number_of_blocks_is_refused(kind: str) -> None:
    stage = STAGES[kind]()
    x = X if kind.startswith("conv") else ROWS
    stage(x)
    count, block = stage.num_blocks, stage.blocks[0]
    stage.blocks.append(block)
    with pytest.raises(ValueError, match=rf"has {count + 1} blocks now, but .* take {count}: set"):
        stage(x)
    del stage.blocks[0]
    stage(x)
    del stage.blocks[0]
    with pytest.raises(ValueError, match=rf"has {count - 1} blocks now, but .* take {count}: set"):
        stage(x)
    with pytest.raises(ValueError, match=f"has {count - 1} blocks now"):
        rk.deepen(stage, 6)
    if count > 2:
        stage.depth -= 1
        assert stage(x).shape == x.shape


@pytest.mark.parametrize(
    ("attribute", "value", "error", "message"),
    [
        ("depth", 7, ValueError, "depth=7 .* take 7"),
        ("depth", 3.0, TypeError, "stage.depth must be an int, not 3.0"),
        ("depth", -1, ValueError, "stage.depth must be at least 1, not -1"),
        ("tied", True, ValueError, "has 3 blocks now, but tied=True, .* take 1"),
        ("tied", "no", TypeError, "stage.tied must be True or False, not 'no'"),
        (
            "options",
            {"step": 1.0},
            TypeError,
            "stage.options must be Options, not .*dict: .*configure",
        ),
        ("options", None, TypeError, "stage.options must be Options, not None"),
    ],
)
@pytest.mark.parametrize("kind", ["mlp", "linear", "conv", "modules"])
def test_attributes_that_no_longer_fit(
    kind: str, attribute: str, value: Any, error: type[Exception], message: str
) -> None:
    stage = fused(kind)
    setattr(stage, attribute, value)
    with pytest.raises(error, match=message):
        stage(X if kind == "conv" else ROWS)


def fused(kind: str) -> rk.Stage:
    if kind == "mlp":
        return rk.MLPStage(6, 5, 3, dtype=torch.float64, backward="checkpoint")
    if kind == "linear":
        return rk.LinearStage(6, 3, dtype=torch.float64, backward="checkpoint")
    return conv_stage() if kind == "conv" else STAGES["modules"]()


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [("mlp", "dim"), ("mlp", "hidden"), ("linear", "dim"), ("conv", "channels"), ("conv", "block")],
)
def test_attributes_that_only_describe_cannot_be_set(kind: str, attribute: str) -> None:
    stage = fused(kind)
    before = getattr(stage, attribute)
    with pytest.raises(AttributeError, match=f"{attribute} of a .* cannot be changed"):
        setattr(stage, attribute, before)
    assert getattr(copy.deepcopy(stage), attribute) == before


def test_another_activation_of_an_mlp() -> None:
    stage = fused("mlp")
    stage.activation = "gelu"
    assert_computes_what_its_blocks_compute(stage, ROWS)
    stage.activation = "sin"
    with pytest.raises(ValueError, match=r"activation must be one of .*not 'sin'"):
        stage(ROWS)


# ------------------------------------------------------------------------------- stacked parameters


@pytest.mark.parametrize("change", ["forward", "parametrization", "pruning", "parameter", "tensor"])
@pytest.mark.parametrize(("kind", "name"), [("mlp", "w1"), ("linear", "weight")])
def test_changed_stacked_stages(kind: str, name: str, change: str) -> None:
    stage = fused(kind)
    weight = getattr(stage, name)
    if change == "forward":
        forward = stage.forward
        stage.forward = lambda x: 2 * forward(x)
        assert torch.equal(stage(ROWS), 2 * forward(ROWS))
        return
    if change == "parametrization":
        parametrize.register_parametrization(stage, name, nn.Tanh())
    elif change == "pruning":
        prune.random_unstructured(stage, name, 0.5)
    elif change == "parameter":
        setattr(stage, name, nn.Parameter(weight.detach() + 1))
    else:
        delattr(stage, name)
        setattr(stage, name, weight.detach() + 1)
    assert_computes_what_its_blocks_compute(stage, ROWS)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("w1", (3, 5, 7), r"w2 must have the shape \[3, 7, 5\]|x must have 7"),
        ("w1", (2, 5, 6), r"has 2 blocks now, but .* take 3"),
        ("w1", (1, 5, 6), r"has 1 blocks now, but .* take 3"),
        ("w1", (5, 6), r"w1 must have the shape \[blocks, hidden, dim\], not \[5, 6\]"),
        ("b1", (3, 4), r"b1 must have the shape \[3, 5\], not \[3, 4\]"),
        ("w2", (3, 6, 4), r"w2 must have the shape \[3, 6, 5\], not \[3, 6, 4\]"),
    ],
)
def test_parameters_of_another_shape(name: str, shape: tuple[int, ...], message: str) -> None:
    stage = fused("mlp")
    setattr(stage, name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
    with pytest.raises(ValueError, match=message):
        stage(ROWS)
    setattr(stage, name, None)
    if name != "b1":
        with pytest.raises(TypeError, match=f"{name} must be a tensor, not None"):
            stage(ROWS)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: b.half(), TypeError, "block 1, layer 1 is torch.float16; all .* share one"),
        (lambda b: b.to("meta"), ValueError, "block 1, layer 1 is on meta, but x is on cpu"),
        (
            lambda b: put(b, bn1=nn.BatchNorm2d(5).double()),
            ValueError,
            r"gamma of block 1, layer 1 must have the shape \[4\].*not \[5\]",
        ),
        (
            lambda b: put(b, conv2=nn.Conv2d(5, 4, 3, padding=1, bias=False).double()),
            ValueError,
            r"weight of block 1, layer 2 must have the shape \[4, 4, 3, 3\].*not \[4, 5, 3, 3\]",
        ),
        (
            lambda b: put(b.bn2, running_mean=torch.zeros(3).double()),
            RuntimeError,
            "running_mean should contain 4 elements not 3",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_named(
    change: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    stage = conv_stage()
    change(stage.blocks[1])
    with pytest.raises(error, match=message):
        stage(X)
