"""Transforms of ``torch.func``, and forward-mode derivatives (``torch.func.jvp``,
``torch.autograd.forward_ad``), whose tangents a ``Function`` and the kernels would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

are_active = torch._C._are_functorch_transforms_active
jit_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
TRACING = torch._C._TorchDispatchModeKey.__members__.values()


def carry_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors carries a tangent. While forward-mode derivatives are taken, every
    tensor counts as such inside of ``torch.compile`` and of transforms, which hide tangents."""
    if forward_ad._current_level < 0:
        return False
    if are_active() or torch.compiler.is_compiling():
        return True
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def may_apply() -> bool:
    """Whether a transform is active or forward-mode derivatives are taken, of whatever tensors."""
    active: bool = are_active()
    return active or forward_ad._current_level >= 0


def are_traced(tensors: Iterable[Tensor]) -> bool:
    """Whether operations are recorded (``torch.export``, ``make_fx``, AOTAutograd,
    ``torch.jit.trace``) or the tensors have no values (on the meta device, ``FakeTensor``)."""
    return (
        jit_is_tracing()
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING)
        or any(t.is_meta or hasattr(t, "fake_mode") for t in tensors)
    )


def are_functionalizing() -> bool:
    """Whether ``torch.func.functionalize`` is active, which cannot transform a ``Function``."""
    return any(
        interpreter.key() == torch._C._functorch.TransformType.Functionalize
        for interpreter in torch._C._functorch.get_interpreter_stack() or ()
    )


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """For backward passes, which have no forward-mode derivative."""
    if carry_tangents(tensors):
        raise RuntimeError(
            "resode_kernels: the gradients of a stage have no forward-mode derivative once its "
            "forward pass is over. Take the forward-mode derivative around both passes, as in "
            "torch.func.jvp(torch.func.grad(f), …)"
        )


def refuse_captured(statistics: Tensor, running: Tensor) -> None:
    """A transform of a stage cannot change running statistics that it was not given."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if wrapped(statistics) and not wrapped(running):
        raise RuntimeError(
            "batch norm in training mode changes its running statistics, which is not possible "
            "inside of torch.vmap, torch.func.grad and the like: call stage.eval(), or let it keep "
            "none (torch.func.replace_all_batch_norm_modules_(stage))"
        )
