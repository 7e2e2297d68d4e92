"""A replay computes with the parameters and buffers of the forward pass, also with those that have
no gradient, or an error names what has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PRECISE, steps
from torch import Tensor, nn
from torch.func import functional_call

import resode_kernels as rk

REPLAYED: list[dict[str, Any]] = [PRECISE, {"backward": "checkpoint"}]
KEPT = ("frozen weight", "buffer")


class Masked(nn.Module):
    """A block with a frozen weight and a buffer, both of which its gradients depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mask", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.frozen(x)) * self.mask)


def stage_of(options: dict[str, Any]) -> rk.ResidualStage:
    return rk.ResidualStage([Masked() for _ in range(3)], **options).double()


def plain(stage: rk.ResidualStage, x: Tensor) -> Tensor:
    return steps(stage, lambda n, x: stage.blocks[n](x), x)


def gradients(stage: rk.ResidualStage, y: Tensor) -> tuple[Tensor, ...]:
    wanted = [p for p in stage.parameters() if p.requires_grad]
    return torch.autograd.grad(y.sin().sum(), wanted)


@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_functional_call_differentiates_what_it_was_given(options: dict[str, Any]) -> None:
    stage = stage_of(options)
    x = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for run in (lambda x: nn.Module.__call__(stage, x), lambda x: plain(stage, x)):
        state = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
        given = {k: (0.5 * t.detach()).requires_grad_(t.requires_grad) for k, t in state.items()}
        wrapper = Calling(stage, run)
        y = functional_call(wrapper, {f"stage.{k}": t for k, t in given.items()}, (x,))
        leaves = [t for t in given.values() if t.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


class Calling(nn.Module):
    def __init__(self, stage: rk.ResidualStage, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stage, self.run = stage, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def tensor_of(block: nn.Module, kept: str) -> Tensor:
    return block.frozen.weight if kept == "frozen weight" else block.mask


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_tensor_put_in_its_place_comes_too_late(options: dict[str, Any], kept: str) -> None:
    stage = stage_of(options)
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = gradients(stage, plain(stage, x))
    y = stage(x)
    for block in stage.blocks:
        new = torch.zeros_like(tensor_of(block, kept))
        if kept == "buffer":
            block.mask = new
        else:
            block.frozen.weight = nn.Parameter(new, requires_grad=False)
    torch.testing.assert_close(gradients(stage, y), expected, rtol=1e-8, atol=1e-10)
    assert not any(tensor_of(block, kept).any() for block in stage.blocks)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("options", REPLAYED, ids=str)
def test_a_change_in_place_is_refused(options: dict[str, Any], kept: str) -> None:
    stage = stage_of(options)
    y = stage(torch.randn(5, 4, dtype=torch.float64))
    tensor_of(stage.blocks[1], kept).mul_(2)
    name = "buffer 'mask'" if kept == "buffer" else "parameter 'weight'"
    with pytest.raises(RuntimeError, match=f"{name} of block 1 .Masked. was changed in place"):
        gradients(stage, y)


def test_statistics_that_moved_after_an_evaluation_are_refused() -> None:
    """In eval mode a batch norm reads what another forward pass changes. (torch counts only the
    changes of its counter.)"""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    stage = rk.ResidualStage(blocks, backward="checkpoint")
    x = torch.randn(5, 4)
    y = stage.eval()(x)
    stage.train()(x)
    with pytest.raises(RuntimeError, match=r"batches_tracked' of block 1 .* was changed in place"):
        gradients(stage, y)


def test_lazy_modules_are_refused_until_they_are_initialized() -> None:
    stage = rk.ResidualStage([nn.Sequential(nn.LazyLinear(4)) for _ in range(2)])
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"'weight' of a LazyLinear .*under torch.no_grad"):
        stage(x)
    with torch.no_grad():
        stage(x)
    assert all(g.isfinite().all() for g in gradients(stage, stage(x)))


def test_tensors_of_inference_mode() -> None:
    """Arguments are copied, as x is. Parameters could never be trained."""
    block = nn.Bilinear(4, 4, 4)
    stage = rk.ResidualStage([block], backward="checkpoint")
    x = torch.randn(5, 4)
    with torch.inference_mode():
        inner, other = x.clone(), rk.ResidualStage([nn.Linear(4, 4)])
    torch.testing.assert_close(gradients(stage, stage(x, inner)), gradients(stage, stage(x, x)))
    with pytest.raises(RuntimeError, match=r"'weight' of a Linear .* made in torch.inference_mode"):
        other(x)
