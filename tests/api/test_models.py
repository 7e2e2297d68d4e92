"""The paper's networks are what the paper says, and ordinary modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import name, steps
from torch import Tensor, nn

import resode_kernels as rk
from resode_kernels.models import ResNet, SimpleResNet

SMALL: dict[str, Any] = {"classes": 7, "width": 8, "small_images": True}
EXACT: dict[str, Any] = {"backward": "stored"}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def plain(stage: rk.ConvStage, x: Tensor) -> Tensor:
    return steps(stage, lambda n, x: stage.blocks[0 if stage.tied else n](x), x)


def models() -> dict[str, nn.Module]:
    return {
        "simple": SimpleResNet(3),
        "simple, tied": SimpleResNet(3, tied=True, scheme="heun"),
        "bottleneck": ResNet([2, 3], **SMALL),
        "basic, tied": ResNet([3, 2, 4], block="basic", tied=True, **SMALL),
    }


MODELS = list(models())


# --------------------------------------------------------------------------------- the architecture


def test_the_stem_of_the_simple_network_brings_cifar_down_to_10_by_10() -> None:
    assert SimpleResNet(1).stem(torch.randn(2, 3, 32, 32)).shape == (2, 16, 10, 10)


def test_the_simple_network_has_the_papers_parameters() -> None:
    block = 2 * (16 * 16 * 9) + 2 * 2 * 16
    rest = 16 * 3 * 25 + 2 * 16 + 16 * 10 + 10
    assert count(SimpleResNet(8)) == rest + 8 * block
    assert count(SimpleResNet(8, scheme="heun")) == rest + 9 * block
    assert count(SimpleResNet(8, tied=True)) == rest + block


def test_residuals_of_the_simple_network_start_at_zero() -> None:
    model, x = SimpleResNet(3), torch.randn(4, 16, 10, 10)
    assert torch.equal(model.stage(x), x)
    assert not torch.equal(SimpleResNet(3, zero_init=False).stage(x), x)


PROJECTION = 64 * 64 + 2 * 64  # of the first layer; torchvision's has none with basic blocks


@pytest.mark.parametrize(
    ("make", "parameters", "depths", "channels"),
    [
        (rk.models.resnet34, 21_797_672 + PROJECTION, [2, 3, 5, 2], [64, 128, 256, 512]),
        (rk.models.resnet50, 25_557_032, [2, 3, 5, 2], [256, 512, 1024, 2048]),
        (rk.models.resnet101, 44_549_160, [2, 3, 22, 2], [256, 512, 1024, 2048]),
        (rk.models.resnet152, 60_192_808, [2, 7, 35, 2], [256, 512, 1024, 2048]),
    ],
    ids=["resnet34", "resnet50", "resnet101", "resnet152"],
)
def test_resnets_have_as_many_parameters_as_torchvisions(
    make: Callable[..., ResNet], parameters: int, depths: list[int], channels: list[int]
) -> None:
    with torch.device("meta"):
        model = make(backward="checkpoint")
    assert count(model) == parameters
    assert [layer.stage.depth for layer in model.layers] == depths
    assert [layer.stage.channels for layer in model.layers] == channels
    assert {layer.stage.options.backward for layer in model.layers} == {"checkpoint"}


@pytest.mark.parametrize(
    ("small_images", "sizes"), [(False, [16, 8, 4, 2]), (True, [64, 32, 16, 8])]
)
def test_layers_halve_the_image_and_double_the_channels(
    small_images: bool, sizes: list[int]
) -> None:
    model = ResNet([2, 2, 2, 2], width=4, small_images=small_images)
    x = model.stem(torch.randn(1, 3, 64, 64))
    for i, (layer, size) in enumerate(zip(model.layers, sizes, strict=True)):
        x = layer(x)
        assert x.shape == (1, 16 << i, size, size)


@pytest.mark.parametrize("which", MODELS)
def test_images_of_any_size_become_logits(which: str) -> None:
    model = models()[which]
    classes = model.linear.out_features
    for size in (32, 17):
        assert model(torch.randn(2, 3, size, size)).shape == (2, classes)


# --------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("options", [{}, {"step": 1.0}, {"scheme": "heun"}], ids=name)
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_is_a_projection_and_steps_of_one_nth(
    options: dict[str, Any], block: str, tied: bool
) -> None:
    model = ResNet([4, 3], block=block, tied=tied, **SMALL, **options).double()
    x = model.stem(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    for layer, blocks in zip(model.layers, (4, 3), strict=True):
        y = layer(x)
        x = layer.shortcut(x) + layer.first(x)
        f, h = layer.stage.blocks, options.get("step", 1 / (blocks - 1))
        for n in range(blocks - 1):
            i, j = (0, 0) if tied else (n, n + 1)
            a = f[i](x)
            if "scheme" in options:
                a = (a + f[j](x + h * a)) / 2
            x = x + h * a
        torch.testing.assert_close(y, x)


def test_options_reach_every_stage_and_can_be_changed_for_one() -> None:
    model = ResNet([2, 2, 2], reverse="paper", **SMALL)
    assert [layer.stage.options.reverse for layer in model.layers] == ["paper"] * 3
    model.layer3.stage.configure(reverse="predicted")
    assert [layer.stage.options.reverse for layer in model.layers] == [
        "paper",
        "paper",
        "predicted",
    ]
    assert SimpleResNet(2, scheme="heun").stage.options.scheme == "heun"


# ------------------------------------------------------------------------------- ordinary modules


@pytest.mark.parametrize("which", MODELS)
def test_gradients_are_those_of_the_network_without_stages(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models()[which].double()
    for module in model.modules():
        if isinstance(module, rk.ConvStage):
            module.configure(**EXACT)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.1)
    x = torch.randn(4, 3, 11, 11, dtype=torch.float64)
    y = torch.randint(7, (4,))
    parameters = list(model.parameters())
    got = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    monkeypatch.setattr(rk.ConvStage, "forward", plain)
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("which", MODELS)
def test_a_state_dict_makes_an_equal_model(which: str) -> None:
    model, twin = models()[which], models()[which]
    x = torch.randn(4, 3, 16, 16)
    model(x)  # moves running statistics
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), twin.eval()(x))
    assert torch.equal(copy.deepcopy(model)(x), twin(x))


@pytest.mark.parametrize("which", MODELS)
def test_a_few_steps_of_training_lower_the_loss(which: str) -> None:
    model = models()[which]
    y = torch.arange(32) % 7
    x = torch.randn(7, 3, 16, 16)[y] + 0.1 * torch.randn(32, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3, 1],), {}, "blocks of a layer must be at least 2"),
        (([3, 0],), {}, "blocks of a layer must be at least 1"),
        (([3],), {"block": "wide"}, "block must be one of 'basic', 'bottleneck', not 'wide'"),
        (([3],), {"rule": "paper"}, "unknown option 'rule'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ResNet(*arguments, **options)
