"""A stage behaves like any other differentiable module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RULES, gradients, make_stage, name, plain

import resode_kernels as rk


def small_stage(**options: Any) -> rk.MLPStage:
    return rk.MLPStage(6, 8, 5, **options)


@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"])
@pytest.mark.parametrize("options", [RULES[1], RULES[6], RULES[9]], ids=name)
def test_compiles_into_one_graph(options: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    stage = small_stage(backend=backend, **options)
    compiled = torch.compile(stage, fullgraph=True)
    for rows in (3, 4, 5):  # and stays so as the batch changes
        x, g = torch.randn(2, rows, 2, 6)
        for a, b in zip(
            gradients(compiled_like(stage, compiled), x, g), gradients(stage, x, g), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.no_grad():
        assert not compiled(x).requires_grad


def compiled_like(stage: rk.Stage, compiled: Any) -> Any:
    """``gradients`` wants the parameters of the stage itself."""

    class Both:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return compiled(x)

        parameters = staticmethod(stage.parameters)

    return Both()


@pytest.mark.parametrize("needs", ["x", "w1", "b1", "w2", "b2", "w1 b2", "x w2"])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_only_what_needs_a_gradient_gets_one(needs: str, scheme: str) -> None:
    stage = small_stage(scheme=scheme)
    x, g = torch.randn(2, 4, 6)
    everything = dict(zip(["y", "x", "w1", "b1", "w2", "b2"], gradients(stage, x, g), strict=True))
    x.requires_grad_("x" in needs.split())
    for label, p in stage.named_parameters():
        p.requires_grad_(label in needs.split())
    stage(x).backward(g)
    for label, p in {"x": x, **dict(stage.named_parameters())}.items():
        if label in needs.split():
            torch.testing.assert_close(p.grad, everything[label], rtol=0, atol=0)
        else:
            assert p.grad is None


def test_nothing_is_computed_for_frozen_parameters() -> None:
    """The backward pass of a frozen stage makes no parameter-sized tensor."""
    stage = rk.MLPStage(64, 64, 50).requires_grad_(False)
    x = torch.randn(2, 64, requires_grad=True)
    y = stage(x).sum()
    with torch.profiler.profile(profile_memory=True) as profile:
        y.backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < stage.w1.nbytes / 4


def test_without_grad_nothing_is_saved() -> None:
    stage = small_stage(anchor_every=1)
    x = torch.randn(4, 6)
    expected = stage(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = stage(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 0, 6), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=pytest.mark.needs_cpp), "reference"])
def test_any_leading_dimensions(shape: tuple[int, ...], backend: str) -> None:
    stage = small_stage(backend=backend)
    x = torch.randn(shape, requires_grad=True)
    y = stage(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, plain(stage, x))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad is not None) and p.grad.isfinite().all() for p in stage.parameters())
    if x.numel() == 0:
        assert all((p.grad == 0).all() for p in stage.parameters())


def test_strided_and_expanded_inputs_gradients_and_parameters() -> None:
    stage = small_stage()
    base = torch.randn(6, 10)
    g = torch.randn(6, 10).T
    for x in (base.T, torch.randn(6).expand(10, 6), torch.randn(10, 12)[:, ::2]):
        for a, b in zip(
            gradients(stage, x, g), gradients(stage, x.contiguous(), g.contiguous()), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    (expanded,) = torch.autograd.grad(stage(base.T).sum(), [stage.w1])  # sum's gradient is expanded
    (dense,) = torch.autograd.grad(stage(base.T), [stage.w1], torch.ones(10, 6))
    torch.testing.assert_close(expanded, dense, rtol=0, atol=0)
    w1 = stage.w1.detach().mT.contiguous().mT
    assert not w1.is_contiguous()
    torch.testing.assert_close(
        rk.functional.mlp_stage(base.T, w1, stage.b1, stage.w2, stage.b2),
        stage(base.T),
        rtol=0,
        atol=0,
    )


def test_double_backward_is_refused() -> None:
    stage = small_stage()
    x = torch.randn(4, 6, requires_grad=True)
    gx, gw = torch.autograd.grad(stage(x).sum(), [x, stage.w1], create_graph=True)
    for gradient in (gx, gw):
        with pytest.raises(RuntimeError, match=r"resode_kernels.*second time.*double backward"):
            gradient.sum().backward(retain_graph=True)


def test_overwriting_the_output_is_noticed() -> None:
    """The reverse pass starts at the output, so it must not have been changed."""
    stage = small_stage()
    y = stage(torch.randn(4, 6))
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", ["tanh", "linear"])
def test_autocast_leaves_the_stage_in_float32(block: str, low: torch.dtype) -> None:
    """Inside a region the result has x's dtype, and the numbers are those of outside."""
    for backend in ("auto", "reference"):
        stage = make_stage(block, 6, 8, 5, backend=backend)
        x, g = torch.randn(2, 4, 6)
        outside = gradients(stage, x, g)
        with torch.autocast("cpu", low):
            inside = gradients(stage, x, g)
            leaf = x.to(low).requires_grad_()
            y = stage(leaf)
        assert y.dtype == low
        for a, b in zip(inside, outside, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        y.sum().backward()  # outside the region
        assert leaf.grad.dtype == low
        assert all(p.grad.dtype == torch.float32 for p in stage.parameters())


def test_an_optimizer_trains_a_stage() -> None:
    """A deep stage learns a rotation, in the adjoint mode and by exact backprop alike."""
    angle = torch.tensor(0.7)
    rotation = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    x = torch.randn(256, 2)
    losses = {}
    for backward in ("adjoint", "stored"):
        torch.manual_seed(1)
        stage = rk.MLPStage(2, 16, 64, backward=backward)
        optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
        for _ in range(300):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(stage(x), x @ rotation.T)
            loss.backward()
            optimizer.step()
        losses[backward] = loss.item()
    assert losses["adjoint"] < 1e-3
    assert losses["adjoint"] == pytest.approx(losses["stored"], rel=0.5)


def test_configure_changes_options_in_place() -> None:
    stage = small_stage()
    assert stage.configure(reverse="predicted", order=3) is stage
    assert (stage.options.reverse, stage.options.order) == ("predicted", 3)
    assert "reverse='predicted'" in repr(stage)
    with pytest.raises(ValueError, match=r"heun.*takes 6 blocks.*has 5"):
        stage.configure(scheme="heun")
    assert stage.options.scheme == "euler"
    assert rk.MLPStage(6, 8, 5, tied=True).configure(scheme="heun")(torch.randn(2, 6)).shape == (
        2,
        6,
    )
