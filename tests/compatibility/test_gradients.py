"""Gradients."""

from __future__ import annotations

import numpy as np
import torch
from compatibility import NOT_APPLICABLE, Case, Section, Twin, backward, loss, refused, works
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

section = Section(__file__)
MOVED = works('`reverse="recorded"`: increments as well')


@section.row("`torch.autograd.grad`, also of some inputs only")
def test_autograd_grad(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        some = [x, *list(module.parameters())[::2]]
        y = loss(module(x))
        return [torch.autograd.grad(y, t, retain_graph=True) for t in some]

    case.agree(run)


@section.row("Gradient accumulation, `retain_graph=True`")
def test_accumulation_and_retained_graphs(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        backward(module, x)
        y = module(x)
        y.sum().backward(retain_graph=True)
        loss(y).backward()
        return x.grad

    case.agree(run)


section.proved(
    "Double backward (`create_graph=True`)",
    "api/test_autograd.py::test_double_backward_is_refused",
    "modules/test_residual_state.py::test_double_backward_is_refused",
    "modules/test_residual.py::test_stored_can_be_differentiated_twice",
    fused=refused("", "use forward mode around a gradient"),
    modules=refused("", 'works with `backward="stored"`'),
)
section.proved(
    "Frozen parameters and inputs",
    "api/test_autograd.py::test_only_what_needs_a_gradient_gets_one",
    "kernels/test_conv.py::test_frozen_parameters",
    "modules/test_residual_state.py::test_frozen_parameters_and_inputs_cost_nothing",
    fused=works("they cost nothing"),
    modules=works("they cost nothing"),
)
section.proved(
    "`torch.no_grad`, `torch.inference_mode`",
    "api/test_autograd.py::test_without_grad_nothing_is_saved",
    "modules/test_residual_state.py::test_without_grad_nothing_is_saved",
)


@section.row("One parameter in two stages")
def test_shared_between_stages(case: Case) -> None:
    other = case.make().configure(**vars(case.stage.options))
    name = next(name for name, _ in case.stage.named_parameters())
    owner, _, last = name.rpartition(".")
    other.get_submodule(owner)._parameters[last] = case.stage.get_parameter(name)
    both = nn.Sequential(case.stage, other)
    plain = nn.Sequential(case.twin, Twin(other))
    plain[1].stage.get_submodule(owner)._parameters[last] = case.twin.stage.get_parameter(name)
    assert len(list(both.parameters())) == len(list(plain.parameters()))
    case.stage, case.twin = both, plain  # type: ignore[assignment]
    case.agree(backward)


@section.row("`torch.utils.checkpoint` around a stage, reentrant or not")
def test_checkpoint_around(case: Case) -> None:
    case.stage.eval(), case.twin.eval()  # a checkpoint moves running statistics twice

    def run(module: nn.Module, x: Tensor) -> object:
        for reentrant in (False, True):
            loss(checkpoint(module, x, use_reentrant=reentrant)).backward()
        return x.grad

    case.agree(run)


section.proved(
    "`torch.utils.checkpoint` inside of a block",
    "modules/test_residual_state.py::test_checkpoints_inside_blocks",
    fused=NOT_APPLICABLE,
)


@section.row("Hooks of tensors, and of several (`register_multi_grad_hook`)")
def test_tensor_hooks(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        seen: list[object] = []
        first = next(module.parameters())
        handles = [
            x.register_hook(lambda g: 2 * g),
            first.register_hook(lambda g: seen.append(g.clone()) or 3 * g),
            register_multi_grad_hook(list(module.parameters()), lambda grads: seen.extend(grads)),
        ]
        y = module(x)
        y.register_hook(lambda g: seen.append(g.clone()) or g + 1)
        loss(y).backward()
        for handle in handles:
            handle.remove()
        return [x.grad, seen]

    case.agree(run)


@section.row("Optimizer in the backward pass (`register_post_accumulate_grad_hook`)")
def test_optimizer_in_backward(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        calls = []

        def step(p: Tensor) -> None:
            calls.append(p.shape)
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in module.parameters()]
        for _ in range(2):
            backward(module, x)
        for handle in handles:
            handle.remove()
        assert len(calls) == 2 * len(list(module.parameters()))
        return x.grad

    case.agree(run)


@section.row("`torch.autograd.graph.saved_tensors_hooks`", MOVED, MOVED)
def test_saved_tensors_hooks(case: Case) -> None:
    """Tensors that come back are others, in other memory."""

    def pack(t: Tensor) -> tuple[np.ndarray, torch.dtype]:
        known = t.float() if t.dtype == torch.bfloat16 else t  # which numpy does not know
        return known.detach().numpy().copy(), t.dtype

    def unpack(packed: tuple[np.ndarray, torch.dtype]) -> Tensor:
        array, dtype = packed
        return torch.from_numpy(array).to(dtype)

    def run(module: nn.Module, x: Tensor) -> object:
        with saved_tensors_hooks(pack, unpack):
            return backward(module, x)

    case.agree(run)


@section.row("Offload of saved tensors (`save_on_cpu`)", MOVED, MOVED)
def test_save_on_cpu(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        with save_on_cpu():
            y = module(x)
        loss(y).backward()
        return x.grad

    case.agree(run)


@section.row("Anomaly mode (`torch.autograd.detect_anomaly`)")
def test_anomaly_mode(case: Case) -> None:
    def run(module: nn.Module, x: Tensor) -> object:
        with torch.autograd.set_detect_anomaly(True):
            return backward(module, x)

    case.agree(run)
