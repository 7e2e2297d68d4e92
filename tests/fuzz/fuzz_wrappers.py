"""Ways to call a network. Each returns what it computes, by name: "y" and gradients. The same way
of calling plain PyTorch says what is right."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from fuzz_tensors import LAYOUTS, Leaf
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from resode_kernels.states import parts

Results = dict[str, Tensor | None]


class Inputs:
    """What a network is called with: states, arguments, and the cotangent of what it returns."""

    def __init__(
        self,
        state: list[Leaf],
        arguments: dict[str, Leaf],
        cotangent: str,
        is_tuple: bool,
    ) -> None:
        self.state, self.arguments, self.is_tuple = state, arguments, is_tuple
        self.cotangent = cotangent

    def x(self) -> Any:
        tensors = tuple(leaf.tensor() for leaf in self.state)
        return tensors if self.is_tuple else tensors[0]

    def call(self, module: Callable[..., Any], x: Any = None) -> Any:
        x = self.x() if x is None else x
        if not self.arguments:
            return module(x)
        scale, bias = (leaf.tensor() for leaf in self.arguments.values())
        return module(x, scale, more={"bias": bias})

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        own = {f"x{i}": leaf.leaf for i, leaf in enumerate(self.state)}
        own |= {name: leaf.leaf for name, leaf in self.arguments.items()}
        own |= dict(module.named_parameters())
        return {name: leaf for name, leaf in own.items() if leaf.requires_grad}

    def cotangents(self, y: Any) -> list[Tensor]:
        return [
            LAYOUTS[self.cotangent](numbers(t.shape, i + 7).to(t.dtype))
            for i, t in enumerate(parts(y))
        ]

    def loss(self, y: Any) -> Tensor:
        pairs = zip(parts(y), self.cotangents(y), strict=True)
        return sum((t * g).sum() for t, g in pairs)  # type: ignore[return-value]


def numbers(shape: Any, seed: int) -> Tensor:
    """Random numbers that every dtype holds exactly, and none is 0, where relu has a kink. torch's
    generator stays as it is."""
    drawn = np.random.default_rng(seed).standard_normal(tuple(shape))
    return torch.tensor(((32 * drawn).round().clip(-128, 127) * 2 + 1) / 128)


def outputs(y: Any) -> Results:
    return {f"y{i}": t.detach() for i, t in enumerate(parts(y))}


def differentiated(y: Any, inputs: Inputs, module: nn.Module, **options: Any) -> Results:
    leaves = inputs.leaves(module)
    wanted = [
        (t, g) for t, g in zip(parts(y), inputs.cotangents(y), strict=True) if t.requires_grad
    ]
    if not wanted:
        return outputs(y)
    ends, cotangents = zip(*wanted, strict=True)
    grads = torch.autograd.grad(
        ends, list(leaves.values()), cotangents, allow_unused=True, **options
    )
    return {**outputs(y), **dict(zip(leaves, grads, strict=True))}


def plainly(module: nn.Module, inputs: Inputs) -> Results:
    return differentiated(inputs.call(module), inputs, module)


def once_more(module: nn.Module, inputs: Inputs) -> Results:
    """``backward()`` twice through one graph, then through another, added to ``.grad``."""
    leaves = inputs.leaves(module)
    y = inputs.call(module)
    loss = inputs.loss(y)
    if loss.requires_grad:
        loss.backward(retain_graph=True)
        loss.backward()
        inputs.loss(inputs.call(module)).backward()
    return {**outputs(y), **{name: leaf.grad for name, leaf in leaves.items()}}


def in_two_calls(module: nn.Module, inputs: Inputs) -> Results:
    """The network follows itself in one graph."""
    return differentiated(inputs.call(module, inputs.call(module)), inputs, module)


def of_some(module: nn.Module, inputs: Inputs) -> Results:
    """The gradient of every second leaf only."""
    y = inputs.call(module)
    leaves = dict(list(inputs.leaves(module).items())[::2])
    loss = inputs.loss(y)
    if not loss.requires_grad:
        return outputs(y)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {**outputs(y), **dict(zip(leaves, grads, strict=True))}


def with_hooks(module: nn.Module, inputs: Inputs) -> Results:
    """Hooks that double every gradient once, and count. What is not used has None as gradient."""
    fired = torch.zeros(())

    def hook(g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        fired.add_(1)
        return 2 * g

    handles = [leaf.register_hook(hook) for leaf in inputs.leaves(module).values()]
    try:
        return {**plainly(module, inputs), "fired": fired}
    finally:
        for handle in handles:
            handle.remove()


def with_graph(module: nn.Module, inputs: Inputs) -> Results:
    y = inputs.call(module)
    results = differentiated(y, inputs, module, create_graph=True)
    return {name: None if t is None else t.detach() for name, t in results.items()}


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Inputs], Results]:
    def run(module: nn.Module, inputs: Inputs) -> Results:
        y = inputs.call(lambda *a, **k: checkpoint(module, *a, use_reentrant=reentrant, **k))
        return differentiated(y, inputs, module)

    def tensors_only(module: nn.Module, inputs: Inputs) -> Results:
        """Reentrant checkpoints take and differentiate positional tensors alone."""
        leaves = inputs.leaves(module)
        state = parts(inputs.x())

        def call(*tensors: Tensor) -> Any:
            return inputs.call(module, tensors if inputs.is_tuple else tensors[0])

        y = checkpoint(call, *state, use_reentrant=True)
        loss = inputs.loss(y)
        if loss.requires_grad:
            loss.backward()
        return {**outputs(y), **{name: leaf.grad for name, leaf in leaves.items()}}

    return tensors_only if reentrant else run


def saving(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
    def run(module: nn.Module, inputs: Inputs) -> Results:
        with saved_tensors_hooks(pack, unpack):
            y = inputs.call(module)
        return differentiated(y, inputs, module)

    return run


def strided_copy(t: Tensor) -> Tensor:
    return LAYOUTS["strided"](t.detach())


def as_array(t: Tensor) -> tuple[torch.dtype, Any]:
    return t.dtype, t.detach().clone().double().numpy()


def on_cpu(module: nn.Module, inputs: Inputs) -> Results:
    with save_on_cpu():
        y = inputs.call(module)
    return differentiated(y, inputs, module)


def under_autocast(module: nn.Module, inputs: Inputs) -> Results:
    with torch.autocast("cpu", torch.bfloat16):
        y = inputs.call(module)
    return differentiated(y, inputs, module)


def within(context: Callable[[], Any]) -> Callable[[nn.Module, Inputs], Results]:
    def run(module: nn.Module, inputs: Inputs) -> Results:
        with context():
            y = inputs.call(module)
            return {name: t.clone() for name, t in outputs(y).items()}  # type: ignore[union-attr]

    return run


def copied(module: nn.Module, inputs: Inputs) -> Results:
    return plainly(copy.deepcopy(module), inputs)


def pickled(module: nn.Module, inputs: Inputs) -> Results:
    return plainly(pickle.loads(pickle.dumps(module)), inputs)


def restored(module: nn.Module, inputs: Inputs) -> Results:
    """From its ``state_dict``, into a copy whose parameters are others."""
    other = copy.deepcopy(module)
    state = other.state_dict()
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.zero_()
    other.load_state_dict(module.state_dict())
    return plainly(other, inputs)


def with_other_parameters(module: nn.Module, inputs: Inputs) -> Results:
    given = {
        name: (0.5 * p.detach()).requires_grad_(p.requires_grad)
        for name, p in module.named_parameters()
    }
    y = inputs.call(lambda *a, **k: functional_call(module, given, a, k))
    loss = inputs.loss(y)
    leaves = {name: p for name, p in given.items() if p.requires_grad}
    if not loss.requires_grad or not leaves:
        return outputs(y)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {**outputs(y), **dict(zip(leaves, grads, strict=True))}


# --------------------------------------------------------------------------- other machinery


def in_threads(module: nn.Module, inputs: Inputs) -> Results:
    """Four passes in two threads at once. All results are the same."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(plainly, module, inputs) for _ in range(4)]
        first, *others = (run.result() for run in runs)
    for other in others:
        for name, t in first.items():
            if t is not None:
                torch.testing.assert_close(other[name], t, equal_nan=True)
    return first


def compiled(backend: str) -> Callable[[nn.Module, Inputs], Results]:
    def run(module: nn.Module, inputs: Inputs) -> Results:
        torch._dynamo.reset()
        program: Any = torch.compile(module, backend=backend)
        return differentiated(inputs.call(program), inputs, module)

    return run


COMMON: dict[str, Callable[[nn.Module, Inputs], Results]] = {
    "plain": plainly,
    "once more": once_more,
    "in two calls": in_two_calls,
    "of some": of_some,
    "hooks": with_hooks,
    "create_graph": with_graph,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "saved copies": saving(lambda t: t.detach().clone(), lambda t: t),
    "saved strided": saving(strided_copy, lambda t: t),
    "saved arrays": saving(as_array, lambda packed: torch.tensor(packed[1]).to(packed[0])),
    "save_on_cpu": on_cpu,
    "autocast": under_autocast,
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "deepcopy": copied,
    "pickle": pickled,
    "state_dict": restored,
    "functional_call": with_other_parameters,
    "threads": in_threads,
}
COMPILED: dict[str, Callable[[nn.Module, Inputs], Results]] = {
    "compile, eager": compiled("eager"),
    "compile, aot_eager": compiled("aot_eager"),
}
SAME_AS_PLAIN = ("threads", *COMPILED)
"""Wrappers that compute what ``plainly`` does, which is what they are compared with."""
