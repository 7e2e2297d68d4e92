"""``torch.func`` and forward-mode derivatives."""

from __future__ import annotations

import torch
from compatibility import Case, Cell, Section, loss, refused, works
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vjp, vmap

section = Section(__file__)
FUNCTORCH = "api/test_functorch.py::test"
MODULES = "modules/test_replays.py::test_forward_mode_and_transforms"
KEPT = works("activations are kept")
"""A ``ResidualStage`` under a transform is plain autograd."""


@section.row("`torch.func.grad`, `vjp`, `jacrev`, `jacfwd`", modules=KEPT)
def test_gradients_and_jacobians(case: Case) -> None:
    case.stage.eval(), case.twin.eval()

    def run(module: nn.Module, x: Tensor) -> object:
        x = x.detach()
        y, back = vjp(module, x)
        return [
            grad(lambda x: loss(module(x)))(x),
            y,
            *back(torch.ones_like(y)),
            jacrev(module)(x),
            jacfwd(module)(x),
        ]

    case.agree(run)


@section.row("`torch.vmap` over inputs", works("one call"), KEPT)
def test_vmap(case: Case) -> None:
    case.stage.eval(), case.twin.eval()
    case.agree(lambda module, x: vmap(module)(torch.stack([x, -x])))


@section.row("Per-sample gradients (`vmap(grad(…))`)", works("one call for each sample"), KEPT)
def test_per_sample_gradients(case: Case) -> None:
    case.stage.eval(), case.twin.eval()

    def run(module: nn.Module, x: Tensor) -> object:
        theta = {name: p.detach() for name, p in module.named_parameters()}

        def value(theta: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss(functional_call(module, theta, (x[None],)))

        return list(vmap(grad(value), in_dims=(None, 0))(theta, x.detach()).values())

    case.agree(run)


@section.row(
    "Ensembles (`functional_call`, `stack_module_state`)", works("one call for each member"), KEPT
)
def test_ensembles(case: Case) -> None:
    others = [case.make().configure(**vars(case.stage.options)) for _ in range(2)]
    modules = [module.eval() for module in (case.stage, *others)]
    theta, buffers = stack_module_state(modules)

    def call(theta: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(case.stage, (theta, buffers), (case.x,))

    got = vmap(call)(theta, buffers)
    torch.testing.assert_close(got, torch.stack([module(case.x) for module in modules]))
    loss(got).backward()
    loss(torch.stack([module(case.x) for module in modules])).backward()
    for name, stacked in theta.items():
        each = [module.get_parameter(name).grad for module in modules]
        torch.testing.assert_close(stacked.grad, torch.stack(each))


section.proved(
    "Forward-mode derivatives (`torch.func.jvp`, `torch.autograd.forward_ad`)",
    "api/test_forward_mode.py::test_tangents_are_those_of_finite_differences",
    MODULES,
    fused=works("PyTorch's operations"),
    modules=KEPT,
)


@section.row("Second derivatives by forward over reverse mode (`torch.func.hessian`)", modules=KEPT)
def test_hessian(case: Case) -> None:
    case.stage.eval(), case.twin.eval()
    case.agree(lambda module, x: hessian(lambda x: loss(module(x)))(x.detach()))


@section.row(
    "Second derivatives by reverse over reverse mode (`grad(grad(…))`)",
    refused("second time"),
    works("activations are kept"),
)
def test_grad_of_grad(case: Case) -> None:
    case.stage.eval(), case.twin.eval()

    def run(module: nn.Module, x: Tensor) -> object:
        slope = grad(lambda x: loss(module(x)))
        return grad(lambda x: slope(x).square().sum())(x.detach())

    case.agree(run)


section.proved(
    "Batch norm in training mode under a transform",
    f"{FUNCTORCH}_batch_norm_that_keeps_statistics_is_refused",
    fused=Cell("refused; call `stage.eval()`"),
    modules=Cell("torch's error"),
)


@section.row(
    "The older vmap (`is_grads_batched=True`, `vectorize=True`)",
    refused(r"is_grads_batched|vectorize"),
)
def test_older_vmap(case: Case) -> None:
    case.stage.eval(), case.twin.eval()

    def run(module: nn.Module, x: Tensor) -> object:
        y = module(x)
        batch = torch.stack([y, -2 * y]).detach()
        jacobian = torch.autograd.functional.jacobian(module, x, vectorize=True)
        return [jacobian, torch.autograd.grad(y, x, batch, is_grads_batched=True)]

    case.agree(run)
