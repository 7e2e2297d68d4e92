"""Forward-mode derivatives of fused stages: right, or refused, and never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import BACKENDS, KINDS, pair
from helpers import make_conv_stage, name, peak_allocation
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, jvp

import resode_kernels as rk

close = torch.testing.assert_close


def through_duals(f: Callable[..., Tensor], inputs: Any, directions: Any) -> tuple[Tensor, Tensor]:
    """What ``jvp`` returns, by ``torch.autograd.forward_ad``."""
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, directions)
        y = forward_ad.unpack_dual(f(*duals))
        assert y.tangent is not None
        return y.primal, y.tangent


@pytest.mark.parametrize("take", [jvp, through_duals])
@pytest.mark.parametrize("of", ["x", "parameters", "both"])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_are_those_of_finite_differences(
    kind: str, backend: str, trainable: bool, of: str, take: Any
) -> None:
    stage, plain, x = pair(kind, backend)
    stage.requires_grad_(trainable)
    theta = {name: p.detach() for name, p in stage.named_parameters()}
    moved = {"x": x} if of == "x" else theta if of == "parameters" else {**theta, "x": x}

    def call(module: Any, *values: Tensor) -> Tensor:
        prefix = "" if module is stage else "stage."
        given = {**theta, "x": x, **dict(zip(moved, values, strict=True))}
        at = given.pop("x")
        if of == "x":
            return module(at)
        return functional_call(module, {prefix + k: p for k, p in given.items()}, (at,))

    inputs = tuple(moved.values())
    directions = tuple(torch.randn_like(t) for t in inputs)
    y, tangent = take(lambda *t: call(stage, *t), inputs, directions)
    close(y, stage(x))
    close(tangent, jvp(lambda *t: call(plain, *t), inputs, directions)[1])
    if kind == "relu":  # a difference may cross a kink
        return
    eps = 1e-6
    ahead, behind = (
        call(stage, *(t + sign * eps * d for t, d in zip(inputs, directions, strict=True)))
        for sign in (1, -1)
    )
    close(tangent, (ahead - behind) / (2 * eps), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"scheme": "heun"}, {"tied": True}, {"step": 0.7}], ids=name)
def test_schemes_and_tied_blocks(options: dict[str, Any], backend: str) -> None:
    stage, plain, x = pair("gelu", backend, **options)
    close(jvp(stage, (x,), (x + 1,)), jvp(plain, (x,), (x + 1,)))


def test_a_given_variance_has_a_forward_mode_derivative() -> None:
    """Only its gradient is refused."""
    weight = torch.randn(2, 3, 3, 3, 3, dtype=torch.float64)
    mean, variance = torch.rand(2, 2, 3, dtype=torch.float64)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def f(variance: Tensor) -> Tensor:
        layer = rk.functional.ConvLayer(weight, mean=mean, variance=variance)
        return rk.functional.conv_stage(x, [layer, layer])

    eps = 1e-6
    close(
        jvp(f, (variance,), (mean,))[1],
        (f(variance + eps * mean) - f(variance - eps * mean)) / (2 * eps),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_moves_its_statistics_without_tangents(backend: str) -> None:
    stage = make_conv_stage("basic", "tanh", 4, 2, backend=backend)
    other, x = copy.deepcopy(stage), torch.randn(2, 4, 3, 3)
    other(x)
    through_duals(stage, (x,), (x,))
    for (key, moved), expected in zip(stage.named_buffers(), other.buffers(), strict=True):
        close(moved, expected, msg=key)
        assert not moved.requires_grad
        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(moved).tangent is None


def test_tensors_without_tangents_run_in_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, x = pair("tanh", "reference")
    from resode_kernels.fused import ops

    run, calls = ops.forward, []
    monkeypatch.setattr(ops, "forward", lambda *a: calls.append(1) or run(*a))
    with forward_ad.dual_level():
        stage(x)
    assert calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_finished_forward_pass_are_refused(backend: str) -> None:
    stage, _, x = pair("tanh", backend)
    y = stage(x.requires_grad_())
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="no forward-mode derivative once its forward pass"),
    ):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_stage_keeps_tangents(backend: str, trainable: bool) -> None:
    """Also if it was compiled without any."""
    torch._dynamo.reset()
    stage, plain, x = pair("tanh", backend)
    stage.requires_grad_(trainable)
    compiled = torch.compile(stage, backend="eager", fullgraph=True)
    compiled(x)
    close(through_duals(compiled, (x,), (x + 1,)), through_duals(plain, (x,), (x + 1,)))


def test_memory_does_not_grow_with_depth() -> None:
    def peak(depth: int) -> int:
        stage = rk.LinearStage(64, depth, tied=True).requires_grad_(False)
        x = torch.randn(256, 64)
        return peak_allocation(lambda: jvp(stage, (x,), (x,)))

    peak(2)
    assert peak(40) <= peak(4)
