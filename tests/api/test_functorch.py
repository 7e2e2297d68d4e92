"""Fused stages under the transforms of ``torch.func`` are what plain PyTorch is under them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import BACKENDS, KINDS, Plain, loss, pair
from helpers import PRECISE, RULES, make_conv_stage, name, problem_of
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    replace_all_batch_norm_modules_,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

import resode_kernels as rk
from resode_kernels.fused import ops

REFUSED = r"resode_kernels.*second time.*double backward"
close = torch.testing.assert_close


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def value_of(module: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """(parameters, x) → a number. Those of ``Plain`` have its stage's names."""
    prefix = "stage." if isinstance(module, Plain) else ""

    def value(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        named = {prefix + name: p for name, p in theta.items()}
        return loss(functional_call(module, named, (x,)))

    return value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"scheme": "heun"}, {"tied": True}], ids=name)
def test_grad_and_vjp(kind: str, options: dict[str, Any], backend: str) -> None:
    stage, plain, x = pair(kind, backend, **options)
    theta = parameters(stage)
    close(*(grad(value_of(m), argnums=(0, 1))(theta, x) for m in (stage, plain)))
    cotangent = torch.randn_like(x)
    (y, back), (expected, expected_back) = (vjp(m, x) for m in (stage, plain))
    close(y, expected)
    close(back(cotangent), expected_back(cotangent))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_inputs(kind: str, backend: str) -> None:
    stage, plain, x = pair(kind, backend)
    batch = torch.stack([x, 2 * x, x.square()], 1)
    each = torch.stack([plain(entry) for entry in batch.unbind(1)])
    close(vmap(stage, in_dims=1)(batch), each)
    close(vmap(stage, in_dims=1, out_dims=2)(batch).movedim(2, 0), each)
    nested = torch.stack([batch, batch + 1])
    close(vmap(vmap(stage, in_dims=1))(nested), torch.stack([each, vmap(plain, 1)(batch + 1)]))
    with torch.no_grad():
        close(vmap(stage, in_dims=1)(batch), each)
    assert vmap(stage)(batch[:0].movedim(1, 0)[:, :0]).shape[1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_gradients(kind: str, backend: str) -> None:
    stage, plain, x = pair(kind, backend)
    theta, batch = parameters(stage), torch.stack([x, 2 * x, x.square()])
    got, expected = (
        vmap(grad(value_of(m), argnums=(0, 1)), in_dims=(None, 0))(theta, batch)
        for m in (stage, plain)
    )
    close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=name)
def test_per_sample_gradients_are_those_of_one_sample(rule: dict[str, Any], backend: str) -> None:
    """Also where gradients are approximate, and with anchors."""
    stage, _, x = pair("tanh", backend, depth=7, **{"backward": "adjoint", **rule})
    theta, batch = parameters(stage), torch.stack([x, 2 * x, x.square()])
    gradient = grad(value_of(stage), argnums=(0, 1))
    got = vmap(gradient, in_dims=(None, 0))(theta, batch)
    for i, sample in enumerate(batch):
        expected = [p.detach().requires_grad_() for p in (*theta.values(), sample)]
        y = loss(functional_call(stage, dict(zip(theta, expected, strict=False)), expected[-1]))
        *of_theta, of_x = torch.autograd.grad(y, expected)
        close([g[i] for g in got[0].values()], of_theta, rtol=1e-12, atol=1e-13)
        close(got[1][i], of_x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", [RULES[1], RULES[6], RULES[9]], ids=name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit_inputs(backend: str, rule: dict[str, Any], low: torch.dtype) -> None:
    """The reverse pass begins at x[N] in float32, also inside of a transform."""
    stage, _, x = pair("tanh", backend, **{"backward": "adjoint", **rule})
    stage, batch = stage.to(low), torch.stack([x, -x]).to(low)
    got = vmap(grad(lambda x: loss(stage(x).float())))(batch)
    assert got.dtype == low
    for sample, gradient in zip(batch, got, strict=True):
        leaf = sample.clone().requires_grad_()
        expected = torch.autograd.grad(loss(stage(leaf).float()), leaf)[0]
        close(gradient, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_ensembles(kind: str, backend: str) -> None:
    """vmap over stacked parameters, with one x for all and with one for each."""
    members = [pair(kind, backend) for _ in range(3)]
    x = members[0][2]
    theta, buffers = stack_module_state([stage for stage, _, _ in members])

    def call(theta: Any, buffers: Any, x: Tensor) -> Tensor:
        return functional_call(members[0][0], (theta, buffers), (x,))

    each = torch.stack([plain(x) for _, plain, _ in members])
    close(vmap(call, in_dims=(0, 0, None))(theta, buffers, x), each)
    inputs = torch.stack([x, -x, x + 1])
    got = vmap(call)(theta, buffers, inputs)
    close(got, torch.stack([m[1](i) for m, i in zip(members, inputs, strict=True)]))
    loss(got).backward()
    gradients = {name: p.grad for name, p in theta.items()}
    outputs = torch.stack([m[1](i) for m, i in zip(members, inputs, strict=True)])
    for n, (stage, _, _) in enumerate(members):
        expected = torch.autograd.grad(loss(outputs), list(stage.parameters()), retain_graph=True)
        close([g[n] for g in gradients.values()], list(expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_grad_of_vmap_is_one_call_in_each_direction(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, plain, x = pair(kind, backend, backward="adjoint", **PRECISE)
    theta, batch = parameters(stage), torch.stack([x, 2 * x, x.square()])

    def total(module: nn.Module) -> Callable[[Any], Tensor]:
        return lambda theta: vmap(value_of(module), in_dims=(None, 0))(theta, batch).sum()

    expected, calls = grad(total(plain))(theta), []
    for op in ("forward", "reverse"):
        run = getattr(ops, op)
        monkeypatch.setattr(ops, op, lambda *a, op=op, run=run: calls.append(op) or run(*a))
    close(grad(total(stage))(theta), expected)
    assert calls == ["forward", "reverse"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_jacobians(kind: str, backend: str) -> None:
    stage, plain, x = pair(kind, backend)
    theta = parameters(stage)
    for jacobian in (jacrev, jacfwd):
        close(jacobian(stage)(x), jacrev(plain)(x))
        close(*(jacobian(value_of(m))(theta, x) for m in (stage, plain)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "relu"])
def test_second_derivatives_with_forward_mode(kind: str, backend: str) -> None:
    stage, plain, x = pair(kind, backend, depth=2)
    theta, direction = parameters(stage), torch.randn_like(x)
    close(*(hessian(value_of(m), argnums=1)(theta, x) for m in (stage, plain)))
    for m in (stage, plain):
        along = jvp(lambda x, m=m: grad(value_of(m))(theta, x), (x,), (direction,))[1]
        of_slope = grad(
            lambda theta, m=m: jvp(lambda x: value_of(m)(theta, x), (x,), (direction,))[1]
        )(theta)
        close(along, of_slope)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["tanh", "basic"])
@pytest.mark.parametrize(
    "second",
    [
        lambda f: grad(lambda x: grad(f)(x).square().sum()),
        lambda f: grad(lambda x: vmap(grad(f))(x[None]).square().sum()),
        lambda f: jacrev(jacrev(f)),
        lambda f: lambda x: vmap(grad(lambda x: grad(f)(x).square().sum()))(x[None]),
    ],
    ids=["grad-grad", "grad-vmap-grad", "jacrev-jacrev", "vmap-grad-grad"],
)
def test_second_derivatives_in_reverse_mode_are_refused(
    second: Callable[..., Any], kind: str, backend: str
) -> None:
    stage, _, x = pair(kind, backend)
    with pytest.raises(RuntimeError, match=REFUSED):
        second(lambda x: loss(stage(x)))(x)


def test_a_cotangent_can_be_differentiated_neither() -> None:
    stage, _, x = pair("tanh", "reference")
    _, back = vjp(stage, x)
    with pytest.raises(RuntimeError, match=REFUSED):
        grad(lambda g: back(g)[0].square().sum())(x)
    with pytest.raises(RuntimeError, match="no forward-mode derivative once its forward pass"):
        jvp(lambda g: back(g)[0], (x,), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_no_transform_knows_get_gradients(backend: str) -> None:
    stage, plain, x = pair("gelu", backend)
    got, expected = (
        torch.autograd.grad(vmap(lambda x, m=m: m(x))(x[:, None]).pow(3).sum(), stage.w1)
        for m in (stage, plain)
    )
    close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_that_keeps_statistics_is_refused(backend: str) -> None:
    stage = make_conv_stage("basic", "tanh", 4, 2, backend=backend)
    x, before = torch.randn(3, 2, 4, 3, 3), copy.deepcopy(stage.state_dict())
    for call in (
        lambda: vmap(stage)(x),
        lambda: grad(lambda x: stage(x).sum())(x[0]),
        lambda: jvp(stage, (x[0],), (x[1],)),
    ):
        with pytest.raises(RuntimeError, match=r"running statistics.*stage\.eval\(\)"):
            call()
    close(stage.state_dict(), before, rtol=0, atol=0)
    replace_all_batch_norm_modules_(stage)
    close(vmap(stage)(x), torch.stack([Plain(stage)(entry) for entry in x]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_that_are_normalized_together_are_called_one_by_one(backend: str) -> None:
    layers = [rk.functional.ConvLayer(torch.randn(2, 3, 3, 3, 3)) for _ in range(2)]
    x = torch.randn(3, 2, 3, 4, 4)
    stage = lambda x: rk.functional.conv_stage(x, layers, activation="tanh", backend=backend)  # noqa: E731
    close(vmap(stage)(x), torch.stack([stage(entry) for entry in x]))
    got = vmap(grad(lambda x: loss(stage(x))))(x)
    close(got, torch.stack([grad(lambda x: loss(stage(x)))(entry) for entry in x]))


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["tanh", "basic"])
def test_functionalize(kind: str, backend: str, trainable: bool) -> None:
    stage, plain, x = pair(kind, backend)
    stage.requires_grad_(trainable)
    expected = grad(lambda x: loss(plain(x)))(x)
    close(functionalize(stage)(x), plain(x))
    close(functionalize(grad(lambda x: loss(stage(x))))(x), expected)
    close(grad(lambda x: loss(functionalize(stage)(x)))(x), expected)


def test_the_older_vmap_is_refused() -> None:
    stage, _, x = pair("tanh", "reference")
    y = stage(x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"resode_kernels.*is_grads_batched.*use torch\.func"):
        torch.autograd.grad(y, x, torch.stack([y, -y]), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"resode_kernels.*vectorize=True.*use torch\.func"):
        torch.autograd.functional.jacobian(stage, x, vectorize=True)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_traced_transforms(mode: str) -> None:
    """make_fx, which is what torch.compile and torch.export trace with."""
    stage, plain, x = pair("tanh", "reference")
    theta = parameters(stage)
    per_sample = vmap(grad(value_of(stage)), in_dims=(None, 0))
    batch = torch.stack([x, x + 1])
    traced = make_fx(per_sample, tracing_mode=mode)(theta, batch)
    close(
        traced(theta, batch + 1), vmap(grad(value_of(plain)), in_dims=(None, 0))(theta, batch + 1)
    )


def test_an_empty_ensemble_is_refused() -> None:
    stage, _, x = pair("tanh", "reference")
    theta = {name: p[None][:0] for name, p in parameters(stage).items()}
    with pytest.raises(ValueError, match="at least one entry, but the batch is empty"):
        vmap(value_of(stage), in_dims=(0, None))(theta, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ops_themselves(backend: str) -> None:
    stage, plain, x = pair("tanh", backend)
    problem = problem_of(stage.requires_grad_(False))
    batch = torch.stack([x, x + 1])

    def forward(x: Tensor) -> Tensor:
        return torch.ops.resode_kernels.forward.default(x, *problem.flat(), backend)[0]

    close(vmap(forward)(batch), torch.stack([plain(entry) for entry in batch]))


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_transforms(trainable: bool, backend: str) -> None:
    """torch.compile leaves a stage inside of a transform out of its graph. Traced, its gradient was
    zero."""
    torch._dynamo.reset()
    stage, plain, x = pair("tanh", backend)
    stage.requires_grad_(trainable)
    for transform in (
        lambda m: grad(lambda x: loss(m(x))),
        vmap,
        lambda m: lambda x: jvp(m, (x,), (x,))[1],
    ):
        compiled = torch.compile(transform(stage), backend="aot_eager")
        close(compiled(x), transform(plain)(x))
