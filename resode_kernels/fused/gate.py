"""The entrance of the ops: which tensors they read, and which gradients they compute.

Kernels read the memory of tensors. torch's dispatcher knows by a key of its own for each kind which
tensors have another value than their memory, or another memory (``torch._neg_view``, sparse,
quantized, …). The ops have kernels for these keys, which resolve the tensors and call the op again,
or refuse them. Plain tensors do not come here, so this costs nothing.

The dispatcher does not know where a Python subclass with a ``__torch_dispatch__`` of its own
(``DTensor``, torchao's weights, …) keeps its value. The subclass is asked to run the op; if it
cannot, or if the kernel itself is given such a tensor, the tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..problem import FLAT, PER_LAYER, ConvLayer, Problem

RESOLVED = ("Negative", "Conjugate", "ZeroTensor")
REFUSED = (
    *("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU"),
    *("QuantizedCPU", "QuantizedCUDA", "AutogradNestedTensor"),
)
PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer, type(None)})
NOT_IMPLEMENTED = (NotImplementedError, RuntimeError, TypeError)
"""What subclasses raise if they do not know an op."""


def register(library: Any, name: str, op: Callable[..., Any], states: Sequence[str]) -> None:
    """Adds the kernels of ``op`` for these keys. ``states`` are its tensors before the
    problem."""

    def resolve(*arguments: Any) -> Any:
        return op(*map(_resolved, arguments))

    def refuse(*arguments: Any) -> Any:
        problem = Problem.from_flat(arguments[-1 - FLAT : -1])
        tensors = (*arguments[: len(states)], *problem.parameters)
        raise _refusal(tensors, states, problem, _has_no_strides)

    def refuse_batches(*arguments: Any) -> Any:
        raise RuntimeError(
            f"resode_kernels: the {name} pass of a stage cannot be batched by "
            "torch.autograd.grad(is_grads_batched=True) or by vectorize=True of "
            "torch.autograd.functional; use torch.func (torch.vmap of torch.func.vjp, jacrev)"
        )

    library.impl(name, refuse_batches, "Batched")  # the vmap before torch.func's
    for key in RESOLVED:
        library.impl(name, resolve, key)
    for key in REFUSED:
        library.impl(name, refuse, key)


def _resolved(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_resolved(entry) for entry in argument]
    if not isinstance(argument, Tensor):
        return argument
    if argument._is_zerotensor():  # has no memory at all
        return torch.zeros(argument.shape, dtype=argument.dtype, device=argument.device)
    return argument.resolve_conj().resolve_neg()


def check(tensors: Sequence[Tensor | None], states: Sequence[str], problem: Problem) -> None:
    """Refuses subclasses that keep their value elsewhere, if there are any."""
    if not PLAIN.issuperset(map(type, tensors)) and any(map(_runs_ops_itself, tensors)):
        raise _refusal(tensors, states, problem, _runs_ops_itself)


def blame_inputs(inputs: Sequence[Tensor | None], problem: Problem, error: Exception) -> None:
    """Refuses subclasses that cannot run the op, if ``error`` was raised by one, and tensors that
    autograd cannot save."""
    if any(map(_runs_ops_itself, inputs)):
        raise _refusal(inputs, ("x",), problem, _runs_ops_itself) from error
    if str(error).startswith("Inference tensors cannot be saved"):
        i = next(i for i, t in enumerate(inputs) if t is not None and t.is_inference())
        name = problem.name_of(i - 1) if i else "x"
        raise RuntimeError(
            f"{name} was made in torch.inference_mode(), so gradients cannot pass through it: give "
            f"{name}.clone(), or call the stage under torch.no_grad()"
        ) from error


def refuse_gradients_of_constants(problem: Problem, needs: Sequence[bool]) -> None:
    """conv: a given mean or variance is a constant, whose gradient no backend computes."""
    for field in ("mean", "variance"):
        first = ConvLayer._fields.index(field)
        if any(needs[first::PER_LAYER]):
            i = first + PER_LAYER * list(needs[first::PER_LAYER]).index(True)
            name = problem.name_of(i)
            raise ValueError(
                f"{name} requires a gradient, which a stage does not compute: it takes a given "
                f"mean and variance as constants. Give it {field}.detach(), or compute the block "
                "in a module (residual_stage)"
            )


def _runs_ops_itself(tensor: Any) -> bool:
    dispatch: object = getattr(type(tensor), "__torch_dispatch__", None)
    return isinstance(tensor, Tensor) and dispatch is not Tensor.__torch_dispatch__


def _has_no_strides(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (
        tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested
    )


def _refusal(
    tensors: Sequence[Any], states: Sequence[str], problem: Problem, culprit: Callable[[Any], bool]
) -> TypeError:
    i, tensor = next((i, tensor) for i, tensor in enumerate(tensors) if culprit(tensor))
    name = states[i] if i < len(states) else problem.name_of(i - len(states))
    if _runs_ops_itself(tensor):
        what = f"a {type(tensor).__name__}"
        way = "for a DTensor use .full_tensor() or .to_local(), for a quantized one .dequantize()"
    elif tensor.is_quantized:
        what, way = f"quantized ({tensor.dtype})", f"give {name}.dequantize()"
    else:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        what, way = f"a tensor of the layout {layout}", "convert it, for example by .to_dense()"
    return TypeError(
        f"{name} is {what}, but the kernels read plain memory: {name} must be a dense "
        f"torch.Tensor; {way}"
    )
