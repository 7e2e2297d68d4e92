"""Bad input gets one clear exception that names the argument, what it was and what it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.functional import linear_stage, mlp_stage, residual_stage


def mlp_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "x": torch.randn(4, 6),
        "w1": torch.randn(5, 8, 6),
        "b1": torch.randn(5, 8),
        "w2": torch.randn(5, 6, 8),
        "b2": torch.randn(5, 6),
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.randn(4, 7)}, ValueError, r"x must have 6 as its last dimension.*\[4, 7\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have 6 as its last dimension.*\[\]"),
        ({"x": torch.ones(4, 6, dtype=torch.int64)}, TypeError, "x must be of a floating.*int64"),
        (
            {"x": torch.ones(4, 6, dtype=torch.complex64)},
            TypeError,
            "x must be of a floating.*complex",
        ),
        (
            {"x": torch.randn(4, 6).double()},
            TypeError,
            "w1 is torch.float32 and x is torch.float64",
        ),
        ({"x": torch.randn(4, 6, device="meta")}, ValueError, "w1 is on cpu, but x is on meta"),
        ({"w1": torch.randn(8, 6)}, ValueError, r"w1 must have the shape \[blocks, hidden, dim\]"),
        ({"b1": torch.randn(5, 9)}, ValueError, r"b1 must have the shape \[5, 8\], not \[5, 9\]"),
        ({"w2": torch.randn(5, 8, 6)}, ValueError, r"w2 must have the shape \[5, 6, 8\]"),
        ({"b2": torch.randn(4, 6)}, ValueError, r"b2 must have the shape \[5, 6\], not \[4, 6\]"),
        ({"w2": torch.randn(5, 6, 8).bfloat16()}, TypeError, "w2 is torch.bfloat16.*share one"),
        ({"w2": None}, TypeError, "w2 must be a tensor, not None"),
        ({"w1": None}, TypeError, "w1 must be a tensor, not None"),
        ({"x": [1.0] * 6}, TypeError, "x must be a tensor, not .*list"),
        ({"depth": 7}, ValueError, "depth=7 .*takes 7 blocks .*not 5"),
        ({"depth": 0}, ValueError, "depth must be at least 1, not 0"),
        ({"depth": 2.0}, TypeError, "depth must be an int, not 2.0"),
        ({"activation": "softmax"}, ValueError, "activation must be one of 'relu'.*'softmax'"),
        ({"scheme": "rk4"}, ValueError, "scheme must be one of 'euler', 'heun', not 'rk4'"),
        ({"backward": "fast"}, ValueError, "backward must be one of 'adjoint'.*not 'fast'"),
        ({"reverse": "exact"}, ValueError, "reverse must be one of 'paper'.*not 'exact'"),
        ({"order": 0}, ValueError, "order must be at least 1, not 0"),
        (
            {"reverse": "predicted", "order": 4},
            ValueError,
            "order must be at most 3.*predicted.*not 4",
        ),
        ({"reverse": "paper", "order": 2}, ValueError, "order must be at most 1.*paper.*not 2"),
        ({"anchor_every": 0}, ValueError, "anchor_every must be at least 1, not 0"),
        ({"anchor_every": True}, TypeError, "anchor_every must be an int, not True"),
        ({"step": float("inf")}, ValueError, "step must be a finite number, not inf"),
        ({"backend": "tpu"}, ValueError, "backend must be one of 'auto'.*not 'tpu'"),
        (
            {"backend": "cuda"},
            rk.BackendUnavailableError,
            "backend='cuda' is not available: .*info",
        ),
        ({"backend": "cuda"}, rk.BackendUnavailableError, "backend='cuda' is not available"),
        ({"speed": "high"}, TypeError, "unknown option 'speed'; a stage takes scheme, step"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, dict) else None,
)
def test_functions(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mlp_stage(**mlp_arguments(**changes))


def test_linear_and_heun() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"weight must have the shape \[blocks, dim, dim\]"):
        linear_stage(x, torch.randn(6, 6))
    with pytest.raises(
        ValueError, match=r"weight must have the shape \[3, 6, 6\], not \[3, 5, 6\]"
    ):
        linear_stage(x, torch.randn(3, 5, 6))
    with pytest.raises(ValueError, match=r"depth: 1 block\(s\) are too few.*heun.*give depth"):
        linear_stage(x, torch.randn(1, 6, 6), scheme="heun")
    with pytest.raises(ValueError, match="weight must not be empty"):
        linear_stage(x, torch.randn(0, 6, 6))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8, 5), ValueError, "dim must be at least 1, not 0"),
        ((6, -1, 5), ValueError, "hidden must be at least 1, not -1"),
        ((6, 8, 0), ValueError, "depth must be at least 1, not 0"),
        ((6, 8, 2.5), TypeError, "depth must be an int, not 2.5"),
        ((6, 8, 5, "sin"), ValueError, "activation must be one of"),
    ],
)
def test_modules(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rk.MLPStage(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": 0}, ValueError, "channels must be at least 1, not 0"),
        ({"depth": 0}, ValueError, "depth must be at least 1, not 0"),
        ({"hidden": -3}, ValueError, "hidden must be at least 1, not -3"),
        ({"block": "wide"}, ValueError, "block must be one of 'basic', 'bottleneck', not 'wide'"),
        (
            {"block": "bottleneck"},
            ValueError,
            "channels of a bottleneck must be a multiple of 4.* not 6; or give .*hidden=",
        ),
        (
            {"block": "bottleneck", "channels": 2},
            ValueError,
            "channels of a bottleneck must be a multiple of 4.* not 2; or give .*hidden=",
        ),
        ({"activation": "sin"}, ValueError, "activation must be one of"),
        ({"schema": "heun"}, TypeError, "unknown option 'schema'"),
    ],
    ids=str,
)
def test_convolutional_stages(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rk.ConvStage(**{"channels": 6, "depth": 3, **options})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, "x must be a tensor, not None"),
        (torch.randn(2, 6, 5), ValueError, r"x must have the shape \[images, channels.*2, 6, 5"),
        (torch.randn(2, 5, 4, 4), ValueError, r"weight of block 0, layer 1.*\[6, 5, 3, 3\]"),
        (torch.ones(2, 6, 4, 4).int(), TypeError, "x must be of a floating-point dtype"),
        (torch.randn(2, 6, 4, 4).double(), TypeError, "weight of block 0, layer 1.*float64"),
        (torch.randn(1, 6, 1, 1), ValueError, "more than one value per channel"),
        (torch.randn(0, 6, 4, 4), ValueError, "more than one value per channel"),
    ],
    ids=["none", "dimensions", "channels", "integers", "double", "one pixel", "no image"],
)
def test_inputs_of_convolutional_stages(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rk.ConvStage(6, 3)(x)


def test_layers_of_convolutional_stages() -> None:
    x = torch.randn(2, 6, 4, 4)
    layer, conv_stage = rk.functional.ConvLayer, rk.functional.conv_stage
    weight = torch.randn(3, 6, 6, 3, 3)
    with pytest.raises(ValueError, match="layers: a block has 2 or 3 layers, not 1"):
        conv_stage(x, [layer(weight)])
    with pytest.raises(ValueError, match=r"layers\[0\].weight must have the shape \[blocks, out"):
        conv_stage(x, [layer(weight[0]), layer(weight)])
    with pytest.raises(ValueError, match=r"layers\[1\].gamma must be stacked over 3 blocks"):
        conv_stage(x, [layer(weight), layer(weight, torch.ones(2, 6))])
    with pytest.raises(ValueError, match=r"size 1 or 3"):
        conv_stage(x, [layer(torch.randn(3, 6, 6, 5, 5)), layer(weight)])
    with pytest.raises(ValueError, match="block 0 returns 4 channels for 6 channels of x"):
        conv_stage(x, [layer(weight), layer(weight[:, :4])])
    with pytest.raises(ValueError, match="give both mean and variance, or none"):
        conv_stage(x, [layer(weight, mean=torch.zeros(3, 6)), layer(weight)])
    with pytest.raises(TypeError, match=r"gamma of block 0, layer 1 is torch\.float64"):
        conv_stage(x, [layer(weight, torch.ones(3, 6).double()), layer(weight)])


class Returns(nn.Module):
    """Returns what it is told to, or what a function makes of its input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.weight = value, nn.Parameter(torch.ones(6))

    def forward(self, x: Any) -> Any:
        return self.value(x) if callable(self.value) else self.value


class TakesStep(nn.Module):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("blocks", "options", "error", "message"),
    [
        ([], {}, ValueError, "blocks must hold at least one module, but is empty"),
        ("blocks", {}, TypeError, "blocks must be a list of modules or one module, not 'blocks'"),
        ([nn.Tanh(), torch.tanh], {}, TypeError, r"blocks\[1\] must be an nn.Module, not .*tanh"),
        ([nn.Tanh], {}, TypeError, r"blocks\[0\] must be an nn.Module, not .*Tanh"),
        (nn.Tanh(), {}, ValueError, "depth: blocks is one module; give the number of steps"),
        (nn.Tanh(), {"depth": 0}, ValueError, "depth must be at least 1, not 0"),
        (nn.Tanh(), {"depth": 1.5}, TypeError, "depth must be an int, not 1.5"),
        (
            nn.Sequential(nn.Tanh(), nn.Tanh()),
            {"depth": 2},
            ValueError,
            r"nn.Sequential of 2 modules .*could mean 2 blocks or one tied block: .*\[blocks\]",
        ),
        ([nn.Tanh(), nn.Tanh()], {"depth": 3}, ValueError, "depth=3 .*takes 3 blocks .*not 2"),
        ([nn.Tanh()], {"scheme": "heun"}, ValueError, r"1 block\(s\) are too few.*heun"),
        ([nn.Tanh()], {"sheme": "heun"}, TypeError, "unknown option 'sheme'; a stage takes scheme"),
        ([nn.Tanh()], {"order": 0}, ValueError, "order must be at least 1, not 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_residual_stages(
    blocks: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rk.ResidualStage(blocks, **options)


@pytest.mark.parametrize("backward", ["adjoint", "stored", "checkpoint"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            None,
            TypeError,
            r"block 1 \(Returns\) returned None, not a floating-point tensor; a block must",
        ),
        (3.0, TypeError, r"block 1 \(Returns\) returned a float"),
        (lambda x: (x, x), TypeError, r"block 1 \(Returns\) returned a tuple of 2"),
        (lambda x: x > 0, TypeError, r"block 1 \(Returns\) returned a tensor of torch.bool"),
        (
            lambda x: x[:, :5],
            ValueError,
            r"block 1 \(Returns\) returned the shape \[4, 5\] for a state of the shape \[4, 6\]",
        ),
        (lambda x: x[:1], ValueError, r"block 1 \(Returns\) returned the shape \[1, 6\]"),
        (
            lambda x: x.relu_(),
            RuntimeError,
            r"block 1 \(Returns\) works in place on its input.*ReLU",
        ),
        (lambda x: x.view(-1).mul_(2).view(4, 6), RuntimeError, r"block 1 .*works in place"),
    ],
    ids=range(8),
)
def test_what_blocks_return(
    value: Any, error: type[Exception], message: str, mode: Any, backward: str
) -> None:
    stage = rk.ResidualStage([nn.Linear(6, 6), Returns(value), nn.Tanh()], backward=backward)
    with mode(), pytest.raises(error, match=message):
        stage(torch.randn(4, 6))


class Refused(Exception):
    """An exception with arguments of its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)


def refuse(x: Tensor) -> Tensor:
    raise Refused(7)


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("backward", ["adjoint", "stored", "checkpoint"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_block_that_fails_is_named(mode: Any, backward: str) -> None:
    """Unlike blocks: the second takes another width, or raises."""
    x = torch.randn(4, 6)
    stage = rk.ResidualStage([nn.Linear(6, 6), nn.Linear(5, 5), nn.Tanh()], backward=backward)
    with mode(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as failed:
        stage(x)
    assert "block 1 (Linear) of a stage, for a state of the shape [4, 6]" in told(failed.value)
    with mode(), pytest.raises(Refused) as refused:
        rk.ResidualStage([nn.Linear(6, 6), Returns(refuse)], backward=backward)(x)
    assert refused.value.args == (7,)


def test_a_block_that_fails_in_the_backward_pass_is_named() -> None:
    block = Returns(lambda x: x.sin())
    y = rk.ResidualStage([nn.Linear(6, 6), block])(torch.randn(4, 6))
    block.value = refuse
    with pytest.raises(Refused) as refused:
        y.sum().backward()
    if sys.version_info >= (3, 11):
        assert "block 1 (Returns)" in told(refused.value)


def test_a_block_that_fails_is_named_without_notes() -> None:
    """Exceptions of Python 3.10 have no ``add_note``: the message names the block."""

    class Old(RuntimeError):
        @property
        def add_note(self) -> None:
            raise AttributeError

    def fail(x: Tensor) -> Tensor:
        raise Old("no luck", 3)

    with pytest.raises(Old) as failed:
        rk.ResidualStage([nn.Linear(6, 6), Returns(fail)])(torch.randn(4, 6))
    assert re.fullmatch(r"no luck \(raised by block 1 \(Returns\) .*\)", failed.value.args[0])
    assert failed.value.args[1] == 3


def test_what_blocks_return_for_a_tuple() -> None:
    x = torch.randn(4, 6), torch.randn(2)
    for value, error, message in [
        (lambda x: x[0], TypeError, "block 0 .* returned a tensor of .* for a state of 2 tensors"),
        (lambda x: (x[0],), TypeError, "block 0 .* returned a tuple of 1 for a state of 2 tensors"),
        (
            lambda x: (x[0], None),
            TypeError,
            "block 0 .* returned None, not a floating-point tensor",
        ),
        (lambda x: (x[0], x[0]), ValueError, r"returned the shape \[4, 6\] .* shape \[2\]"),
        (lambda x: (x[0], x[1].add_(1)), RuntimeError, "block 0 .*works in place on its input"),
    ]:
        with pytest.raises(error, match=message):
            rk.ResidualStage([Returns(value)])(x)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(4, 6, dtype=torch.int64), TypeError, "x must be of a floating.*int64"),
        (torch.ones(4, 6, dtype=torch.complex64), TypeError, "x must be of a floating.*complex"),
        ([torch.randn(4, 6)], TypeError, "x must be a tensor, not .*list"),
        (None, TypeError, "x must be a tensor, not None"),
        ((torch.randn(4, 6), 3), TypeError, r"x\[1\] must be a tensor, not 3"),
        ((torch.randn(4), torch.ones(4, dtype=torch.int32)), TypeError, r"x\[1\] .*int32"),
        ((), ValueError, "x must hold at least one tensor"),
    ],
    ids=range(7),
)
def test_inputs_of_residual_stages(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rk.ResidualStage([nn.Tanh()])(x)
    with pytest.raises(error, match=message):
        residual_stage([nn.Tanh()], x)


def test_modules_run_in_pytorch() -> None:
    x = torch.randn(4, 6)
    assert rk.ResidualStage([nn.Tanh()], backend="reference")(x).shape == x.shape
    stage = rk.ResidualStage([nn.Tanh()], backend="cpp")
    with pytest.raises(rk.BackendUnavailableError, match=r"'cpp'.*modules run in PyTorch"):
        stage(x)


def test_an_option_that_is_also_a_blocks_argument_is_ambiguous() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(TypeError, match=r"step is an option .* argument of block 0 .*TakesStep"):
        residual_stage([TakesStep()], x, step=3)
    assert rk.ResidualStage([TakesStep()])(x, step=3).shape == x.shape
    with pytest.raises(TypeError, match="unexpected keyword argument 'sheme'"):
        residual_stage([nn.Tanh()], x, sheme="heun")


def test_a_refused_call_leaves_nothing_behind() -> None:
    stage = rk.MLPStage(6, 8, 5)
    options = stage.options
    before = [p.clone() for p in stage.parameters()]
    with pytest.raises(ValueError, match="last dimension"):
        stage(torch.randn(4, 5))
    with pytest.raises(ValueError, match="order"):
        stage.configure(order=-1)
    assert all(torch.equal(a, b) for a, b in zip(before, stage.parameters(), strict=True))
    assert all(p.grad is None for p in stage.parameters())
    assert stage.options == options


@pytest.mark.needs_cpp
def test_an_unknown_instruction_set_is_refused(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import resode_kernels"],
        env={**os.environ, "RESODE_ISA": "sse9"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert (
        "instruction set 'sse9' cannot be used here; this build and processor have: auto, baseline"
        in run.stderr
    )
