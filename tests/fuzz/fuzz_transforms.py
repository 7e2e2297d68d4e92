"""Ways to call a network through ``torch.func`` and forward-mode derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fuzz_wrappers import Inputs, Results, numbers, outputs
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from resode_kernels.states import parts, state_like


def detached(inputs: Inputs) -> Any:
    x = inputs.x()
    return state_like(x, [t.detach() for t in parts(x)])


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def functionally(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    def call(parameters: dict[str, Tensor], x: Any) -> Any:
        return inputs.call(lambda *a, **k: functional_call(module, parameters, a, k), x)

    return call


def flat(grads: Any, x_grads: Any = ()) -> Results:
    return {**grads, **{f"x{i}": t for i, t in enumerate(parts(x_grads))}}


def func_grad(module: nn.Module, inputs: Inputs) -> Results:
    call = functionally(module, inputs)
    loss = torch.func.grad(lambda p, x: inputs.loss(call(p, x)), argnums=(0, 1))
    return flat(*loss(parameters_of(module), detached(inputs)))


def func_vjp(module: nn.Module, inputs: Inputs) -> Results:
    y, pull = torch.func.vjp(functionally(module, inputs), parameters_of(module), detached(inputs))
    cotangents = inputs.cotangents(y)
    return {**outputs(y), **flat(*pull(tuple(cotangents) if inputs.is_tuple else cotangents[0]))}


def func_jvp(module: nn.Module, inputs: Inputs) -> Results:
    x = detached(inputs)
    parameters = {name: p.clone() for name, p in parameters_of(module).items()}
    x = state_like(x, [t.clone() for t in parts(x)])  # torch takes no overlapping memory here
    moved = {name: numbers(p.shape, 3).to(p.dtype) for name, p in parameters.items()}
    dx = state_like(x, [numbers(t.shape, i).to(t.dtype) for i, t in enumerate(parts(x))])
    y, dy = torch.func.jvp(functionally(module, inputs), (parameters, x), (moved, dx))
    return {**outputs(y), **flat({}, dy)}


def dual(module: nn.Module, inputs: Inputs) -> Results:
    x = detached(inputs)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t.clone(), numbers(t.shape, i).to(t.dtype))
            for i, t in enumerate(parts(x))
        ]
        y = inputs.call(module, state_like(x, duals))
        pairs = [forward_ad.unpack_dual(t) for t in parts(y)]
    return {f"d{i}": None if t is None else t.detach() for i, (_, t) in enumerate(pairs)}


def batch(x: Any) -> Any:
    return state_like(x, [torch.stack([t, 0.5 * t], -1) for t in parts(x)])


def func_vmap(module: nn.Module, inputs: Inputs) -> Results:
    run = torch.vmap(lambda x: inputs.call(module, x), in_dims=-1)
    return outputs(run(batch(detached(inputs))))


def per_sample(module: nn.Module, inputs: Inputs) -> Results:
    call = functionally(module, inputs)
    grad = torch.func.grad(lambda p, x: inputs.loss(call(p, x)))
    return torch.vmap(grad, in_dims=(None, -1))(parameters_of(module), batch(detached(inputs)))


def ensemble(module: nn.Module, inputs: Inputs) -> Results:
    stacked = {name: torch.stack([p, 0.5 * p]) for name, p in parameters_of(module).items()}
    if not stacked:
        return func_vmap(module, inputs)
    run = torch.vmap(functionally(module, inputs), in_dims=(0, None))
    return outputs(run(stacked, detached(inputs)))


TRANSFORMS: dict[str, Callable[[nn.Module, Inputs], Results]] = {
    "func.grad": func_grad,
    "func.vjp": func_vjp,
    "func.jvp": func_jvp,
    "dual": dual,
    "vmap": func_vmap,
    "per sample": per_sample,
    "ensemble": ensemble,
}
