"""The two passes under ``torch.vmap``. If only states have a batch dimension, and rows do not
depend on each other, the batch becomes more rows of one call. Otherwise, as for per-sample
gradients and for ensembles, there is one call for each entry of the batch.

``info``, ``in_dims`` and the results (outputs, out_dims) are those of torch's vmap rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import PER_LAYER, ConvLayer, Problem


def forward(
    run: Callable[..., Any],
    info: Any,
    in_dims: Sequence[Any],
    x: Tensor,
    problem: Problem,
    backend: str,
    *parameters: Tensor | None,
) -> Any:
    """``run`` takes these arguments and returns ``fused.autograd.Outputs``."""
    arguments = (x, problem, backend, *parameters)
    if not _is_by_row(problem._replace(parameters=parameters), in_dims[3:]):
        return one_by_one(run, info, in_dims, *arguments)
    fold = _Fold(info.batch_size, x, in_dims[0])
    y, statistics, end, anchors = run(fold.rows(x, in_dims[0]), *arguments[1:])
    no_anchors = anchors.new_empty((0, *fold.shape))  # _is_by_row has seen to that
    return (fold.batch(y), statistics, fold.batch(end), no_anchors), (0, None, 0, None)


def reverse(run: Callable[..., Any], info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """``run`` is the op ``reverse``."""
    start, cotangent, _, needs, *fields = arguments
    problem = Problem.from_flat(fields[:-1])
    parameter_dims = Problem.from_flat(in_dims[4:-1]).parameters
    if any(needs[1:]) or not _is_by_row(problem, parameter_dims):
        return one_by_one(run, info, in_dims, *arguments)
    fold = _Fold(info.batch_size, start, in_dims[0])
    start, cotangent = fold.rows(start, in_dims[0]), fold.rows(cotangent, in_dims[1])
    no_anchors = start.new_empty((0, *start.shape))
    grad_x, *others = run(start, cotangent, [no_anchors], needs, *fields)
    return [fold.batch(grad_x), *others], [0, *[None] * len(others)]


def one_by_one(run: Callable[..., Any], info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """One call for each entry of the batch."""
    if info.batch_size == 0:
        raise ValueError(
            "vmap: a stage with parameters of its own for each entry of a batch needs "
            "at least one entry, but the batch is empty"
        )
    results = [run(*_entry(arguments, in_dims, i)) for i in range(info.batch_size)]
    return _stacked(results), _all_first(results[0])


def _stacked(results: Sequence[Any]) -> Any:
    """Results of one kind as one with a batch dimension in front."""
    first = results[0]
    if isinstance(first, list | tuple):
        return type(first)(map(_stacked, zip(*results, strict=True)))
    return None if first is None else torch.stack(list(results))


def _all_first(result: Any) -> Any:
    """The dimension 0 for every tensor of a result."""
    return type(result)(map(_all_first, result)) if isinstance(result, list | tuple) else 0


class _Fold:
    """A batch of states as one state with more rows."""

    def __init__(self, size: int, state: Tensor, dim: int | None) -> None:
        self.size = size
        self.shape = state.shape if dim is None else state.select(dim, 0).shape

    def rows(self, state: Tensor, dim: int | None) -> Tensor:
        """The states in one, those without a batch dimension repeated."""
        if dim is None:
            return state.expand(self.size, *self.shape).flatten(0, 1)
        return state.movedim(dim, 0).flatten(0, 1)

    def batch(self, state: Tensor | None) -> Tensor | None:
        return None if state is None else state.unflatten(0, (self.size, self.shape[0]))


def _is_by_row(problem: Problem, parameter_dims: Sequence[Any]) -> bool:
    """Whether the states of a batch can be rows of one call. Not if parameters differ, rows are
    normalized together, or what is kept of the states would have to be divided."""
    if (
        problem.anchor_count
        or problem.keeps_signs
        or any(dim is not None for dim in parameter_dims)
    ):
        return False
    mean = ConvLayer._fields.index("mean")
    return problem.block != "conv" or None not in problem.parameters[mean::PER_LAYER]


def _entry(arguments: Sequence[Any], in_dims: Sequence[Any], i: int) -> list[Any]:
    """The arguments of entry i of the batch."""
    return [
        argument.select(dim, i)
        if isinstance(argument, Tensor) and dim is not None
        else _entry(argument, dim, i)
        if isinstance(argument, list)
        else argument
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
