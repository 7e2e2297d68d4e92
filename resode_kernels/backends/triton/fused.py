"""The depth-fused stage: the launches of ``stage.py``'s kernels that make up a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...nonfinite import new_flag
from ...problem import Kept, Problem
from ..contract import ForwardIO, ReverseIO
from ..layerwise import can_be_depth_fused
from . import tuning
from .device import device_of
from .launch import launch
from .plan import Plan, plan_of, spec_of, weight_of
from .spec import KernelSpec, Tile
from .stage import forward_kernel, reverse_kernel
from .sums import Sums
from .tiles import tiles_of


def layout(problem: Problem, x: Tensor, *, reverse: bool) -> Plan | None:
    """The plan of a pass; None: the problem has no depth-fused kernel or is too wide for a tile."""
    if not can_be_depth_fused(problem):
        return None
    device, spec = device_of(x), spec_of(problem)
    weight = weight_of(problem)
    tiles = tiles_of(spec, device, weight.element_size(), reverse)
    if not tiles:
        return None
    tile = tiles[0]
    if len(tiles) > 1 and tuning.measures(x):
        about = len(x).bit_length()  # problems of up to twice the rows share a tile
        kind = (torch.cuda.get_device_name(x.device), *spec, weight.dtype, about, reverse)
        tile = tuning.best(kind, tiles, lambda tile: _seconds(problem, x, tile, reverse))
    return plan_of(problem, device, len(x), spec, tile)


def _seconds(problem: Problem, x: Tensor, tile: Tile, reverse_pass: bool) -> float:
    """The time of a few steps with that tile."""
    from triton.testing import do_bench

    method = problem.method
    few = min(method.steps, 4)
    anchor_every = few if method.reverse_rule == "exact" else 0
    problem = problem._replace(method=method._replace(steps=few, anchor_every=anchor_every))
    plan = plan_of(problem, device_of(x), len(x), spec_of(problem), tile)
    nothing, no_statistics = Kept(x.new_empty((0, *x.shape))), x.new_empty(0)
    flag = new_flag(x.device) if method.nonfinite != "ignore" else None
    scratch = [
        torch.empty_like(x),
        *(p if p is None else torch.empty_like(p) for p in problem.parameters),
    ]

    def run() -> None:
        if reverse_pass:
            reverse(problem, plan, ReverseIO(x, nothing, x, scratch, flag))
        else:
            forward(problem, plan, ForwardIO(x, torch.empty_like(x), nothing, no_statistics))

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


def forward(problem: Problem, plan: Plan, io: ForwardIO) -> None:
    method, result = problem.method, _buffer(io.y)
    anchor_every = method.anchor_every or method.steps
    _walk(problem, plan, io.x.contiguous(), result, io.kept.anchors, 0, method.steps, anchor_every)
    if result is not io.y:
        io.y.copy_(result)


def _buffer(result: Tensor) -> Tensor:
    """Memory for kernels to write to: the result itself if it is contiguous, else a buffer."""
    return result if result.is_contiguous() else result.new_empty(result.shape)


def _contiguous(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.contiguous() for t in tensors)


def _walk(
    problem: Problem,
    plan: Plan,
    x: Tensor,
    y: Tensor,
    anchors: Tensor,
    begin: int,
    end: int,
    anchor_every: int,
) -> None:
    launch(
        forward_kernel, (-(-len(x) // plan.spec.rows),),
        x, y, anchors, _contiguous(problem.parameters),
        len(x), begin, end, anchor_every, problem.method.step, plan.spec.of_forward_kernel(),
        **plan.options,
    )  # fmt: skip


class Steps(NamedTuple):
    """The steps begin … end − 1 of the reverse pass, which one launch makes."""

    begin: int
    end: int
    spec: KernelSpec
    start: Tensor | None
    """The first state: x̃[end], or x[states_begin] for the rule ``exact``. None: the state at which
    the previous launch ended."""
    states: Tensor | None = None
    states_begin: int = 0


def reconstructing(problem: Problem, plan: Plan, start: Tensor, anchors: Tensor) -> Iterator[Steps]:
    """The launches of a rule that reconstructs the states from x[N] and the anchors. A launch ends
    at an anchor, or when its partial sums fill the cache. While ``predicted`` gathers its first
    evaluations, every launch makes one step."""
    rule, order, anchor_every = (
        problem.method.reverse_rule,
        problem.method.order,
        problem.method.anchor_every,
    )
    spec = plan.spec
    end, have = problem.method.steps, 0
    state: Tensor | None = start
    while end > 0:
        anchor = (end - 1) // anchor_every * anchor_every if anchor_every else 0
        begin = max(anchor, end - plan.steps)
        if rule == "predicted":
            corrections = order - have if have else order
            spec = spec._replace(have=have, keep=min(have + 1, order), corrections=corrections)
            if have < order:
                begin, have = end - 1, have + 1
        yield Steps(begin, end, spec, state)
        end = begin
        at_anchor = anchor_every and end and end % anchor_every == 0
        state = anchors[end // anchor_every - 1] if at_anchor else None


def recomputing(problem: Problem, plan: Plan, start: Tensor, anchors: Tensor) -> Iterator[Steps]:
    """The launches of the rule ``exact``: the states between two anchors are computed again from
    the first of the two."""
    method = problem.method
    k, end = method.anchor_every, method.steps
    if k == 1:
        yield from _in_turn(plan, 0, end, start, anchors)
        return
    between = start.new_empty((k - 1, *start.shape))
    while end > 0:
        begin = (end - 1) // k * k
        state = anchors[begin // k - 1] if begin else start
        if end - begin > 1:
            last = between[end - begin - 2]
            _walk(problem, plan, state, last, between, begin, end - 1, 1)
        yield from _in_turn(plan, begin, end, state, between)
        end = begin


def _in_turn(plan: Plan, begin: int, end: int, state: Tensor, states: Tensor) -> Iterator[Steps]:
    while end > begin:
        first = max(begin, end - plan.steps)
        yield Steps(first, end, plan.spec, state, states, begin)
        end = first


def reverse(problem: Problem, plan: Plan, io: ReverseIO) -> None:
    method = problem.method
    launches = recomputing if method.reverse_rule == "exact" else reconstructing
    start, anchors, cotangent = (t.contiguous() for t in (io.start, io.kept.anchors, io.cotangent))
    parameters = _contiguous(problem.parameters)
    grad_x, *grads = io.gradients
    state, g = torch.empty_like(start), cotangent
    result = torch.empty_like(start) if grad_x is None else _buffer(grad_x)
    history = start.new_empty(
        (method.order if method.reverse_rule == "predicted" else 0, *start.shape)
    )
    sums = Sums(problem, plan, grads)
    for steps in launches(problem, plan, start, anchors):
        places, first_block = sums.prepare(steps.begin, steps.end)
        launch(
            reverse_kernel, (plan.programs,),
            state if steps.start is None else steps.start, state, g, result,
            history, steps.states, parameters, places, io.nonfinite,
            len(start), steps.begin, steps.end, first_block, steps.states_begin,
            method.step, steps.spec, **plan.options,
        )  # fmt: skip
        sums.collect(steps.begin, steps.end)
        g = result
    sums.finish()
    if grad_x is not None and result is not grad_x:
        grad_x.copy_(result)
