"""Blocks as people have them: those of PyTorch itself, and the architectures of torchvision and
timm in the way they are written there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from torch import Tensor, nn

import resode_kernels as rk


class ConvNeXtBlock(nn.Module):
    """As torchvision's and timm's: depthwise 7×7, LayerNorm, an MLP with GELU, a layer scale and
    stochastic depth; computes x + f(x)."""

    def __init__(self, dim: int, layer_scale: float = 0.1, drop_path: float = 0.0) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = (self.gamma * self.mlp(self.norm(y))).permute(0, 3, 1, 2)
        if self.training and self.drop_path:
            keep = 1 - self.drop_path
            y = y * y.new_empty(len(y), 1, 1, 1).bernoulli_(keep) / keep
        return x + y


class BasicBlock(nn.Module):
    """torchvision's ResNet block: relu after the sum, in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class GPTBlock(nn.Module):
    """A causal pre-norm block that computes x + attention + MLP, with its mask as a buffer."""

    def __init__(self, dim: int, heads: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, self.mask[:length, :length])
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, dim)))
        return x + self.dropout(self.mlp(self.ln2(x)))


def encoder_layer(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer encoder": (encoder_layer, (2, 5, 8)),
    "transformer encoder with dropout": (lambda: encoder_layer(0.2), (2, 5, 8)),
    "gpt": (lambda: GPTBlock(8, 2, 6, 0.1), (2, 5, 8)),
    "convnext": (lambda: ConvNeXtBlock(4), (2, 4, 6, 6)),
    "convnext with stochastic depth": (lambda: ConvNeXtBlock(4, 0.5, 0.3), (2, 4, 6, 6)),
    "resnet": (lambda: BasicBlock(4), (3, 4, 6, 6)),
}


def step(network: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Output, gradients and buffers of a training step from a fixed seed."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = network(x, *args, **kwargs)
    parameters = dict(network.named_parameters())
    grads = torch.autograd.grad(y, [x, *parameters.values()], torch.cos(y))
    named = dict(zip(["grad of x", *parameters], grads, strict=True))
    return {"output": y.detach(), **named, **{f"buffer {k}": b for k, b in network.named_buffers()}}


class Stack(nn.Module):
    """The network before: one block after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def twins(
    make: Callable[[], nn.Module], depth: int, **options: Any
) -> tuple[rk.ResidualStage, Stack]:
    layers = [make().double() for _ in range(depth)]
    branches = [rk.residual_branch(copy.deepcopy(layer)) for layer in layers]
    return rk.ResidualStage(branches, step=1.0, **options), Stack(layers)


def same(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    for (key, left), (_, right) in zip(a.items(), b.items(), strict=True):
        torch.testing.assert_close(left, right, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_a_stage_of_branches_is_the_network(case: str) -> None:
    """``residual_branch`` with step 1 changes nothing: not the output, not what is trained."""
    make, shape = CASES[case]
    stage, stack = twins(make, 3, backward="checkpoint")
    x = torch.randn(shape, dtype=torch.float64)
    same(step(stage, x), step(stack, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case != "resnet"])
def test_blocks_that_change_the_state_little_can_be_inverted(case: str) -> None:
    """Even with step 1: fixed-point steps of a high order find the input of a block where f
    contracts. (A relu after the sum cannot be inverted: see below.)"""
    make, shape = CASES[case]
    stage, stack = twins(small(make), 3, order=40)
    x = torch.randn(shape, dtype=torch.float64)
    same(step(stage, x), step(stack, x), rtol=1e-9, atol=1e-9)


def small(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Blocks whose f is small, as the reconstruction needs: output layers scaled down."""

    def made() -> nn.Module:
        block = make()
        with torch.no_grad():
            for key, parameter in block.named_parameters():
                if key.split(".")[0] in ("out", "mlp", "linear2", "self_attn", "gamma"):
                    parameter.mul_(0.3)
        return block

    return made


def test_masks_reach_every_layer_of_a_transformer() -> None:
    stage, stack = twins(encoder_layer, 4, backward="checkpoint")
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.float64).mul(-1e9)
    arguments = {"src_mask": causal, "src_key_padding_mask": padding}
    same(step(stage, x, **arguments), step(stack, x, **arguments), rtol=1e-9, atol=1e-9)
    bias = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)  # a learned attention bias
    got, expected = (
        torch.autograd.grad(network(x, src_mask=bias).cos().sum(), bias)[0]
        for network in (stage, stack)
    )
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case != "resnet"])
def test_deep_networks_train_with_small_gradient_errors(case: str) -> None:
    """With the step 1/N, as the package means it, in float32 and with default options."""
    make, shape = CASES[case]
    stage = rk.ResidualStage([rk.residual_branch(make()) for _ in range(24)])
    x = torch.randn(shape)
    adjoint = step(stage, x)
    exact = step(stage.configure(backward="stored"), x)
    for key, gradient in exact.items():
        if gradient.is_floating_point():
            assert relative_error(adjoint[key], gradient) < 0.03, key


def test_relu_after_the_sum_needs_an_exact_mode_or_anchors() -> None:
    """A post-activation ResNet is not x + f(x) with a smooth f: reconstruction fails, exact modes
    and their one flag do not."""
    stage, stack = twins(CASES["resnet"][0], 4)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    expected = step(stack, x)
    weight = "layers.0.conv1.weight"

    def error() -> float:
        return relative_error(step(stage, x)["blocks.0.block.conv1.weight"], expected[weight])

    for m in (*stage.modules(), *stack.modules()):
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.0  # so that steps can be compared
    assert error() > 0.05
    stage.configure(backward="checkpoint")
    assert error() < 1e-9
