"""Parameter gradients of the reverse pass: partial sums of a launch's programs, then totals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...problem import Problem
from .launch import launch
from .plan import Plan
from .stage import reduce_kernel

ELEMENTS = 1024  # elements per program of reduce_kernel


class Sums:
    """The partial sums and totals of the parameter gradients that are needed, all float32. For the
    blocks of one launch every program has a partial sum, [blocks · programs, …]. After the launch
    the partial sums are added to the totals. With atomics every program adds to the totals."""

    def __init__(self, problem: Problem, plan: Plan, gradients: Sequence[Tensor | None]) -> None:
        self.gradients, self.programs, self.atomic = gradients, plan.programs, plan.spec.atomic
        self.tied, self.heun = problem.tied, problem.method.scheme == "heun"
        self.totals = [None if g is None else _total(g) for g in gradients]
        self.partial: list[Tensor | None] = [None] * len(gradients)
        if not self.atomic:
            slots = self._blocks(plan.steps) * plan.programs
            self.partial = [
                None if t is None else t.new_empty((slots, *t.shape[1:])) for t in self.totals
            ]

    def _blocks(self, steps: int) -> int:
        """The number of blocks that ``steps`` steps use."""
        return 1 if self.tied else steps + self.heun

    def prepare(self, begin: int, end: int) -> tuple[tuple[Tensor | None, ...], int]:
        """The sums to which a launch of the steps begin … end − 1 adds, and their first block."""
        if self.atomic:
            return tuple(self.totals), 0
        return tuple(self.partial), 0 if self.tied else begin

    def collect(self, begin: int, end: int) -> None:
        """Adds what the launch has summed to the totals."""
        for partial, total in zip(self.partial, self.totals, strict=True):
            if partial is not None and total is not None:
                size = total[0].numel()
                places = total[0 if self.tied else begin :]
                grid = (-(-size // ELEMENTS), self._blocks(end - begin))
                launch(reduce_kernel, grid, partial, places, self.programs, size, ELEMENTS)

    def finish(self) -> None:
        for gradient, total in zip(self.gradients, self.totals, strict=True):
            if gradient is not None and total is not None and total is not gradient:
                gradient.copy_(total)


def _total(gradient: Tensor) -> Tensor:
    """A total set to zero: the gradient itself if it is float32 and contiguous."""
    if gradient.dtype == torch.float32 and gradient.is_contiguous():
        return gradient.zero_()
    return torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
