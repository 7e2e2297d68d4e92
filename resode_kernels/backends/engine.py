"""The reference's passes as a backend: plain PyTorch, for every device. ``layerwise.py`` makes
other backends of it, with other blocks and another ``combine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import recording, reference
from ..kinks import Signs
from ..nonfinite import Extremes
from ..problem import PER_LAYER, Kept, Problem
from ..recording import Increment, recorder_for
from ..states import stream_dtype
from .contract import ForwardIO, ReverseIO


class EngineBackend:
    """Runs problems by the passes of ``reference.py``.

    mlp, linear, conv  the classes of blocks, with the same arguments as the reference's classes
    combine            updates states
    widens             whether parameters are converted to the dtype of the states
    """

    automatic_on: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        *,
        mlp: Callable[..., reference.Block] = reference.MLP,
        linear: Callable[..., reference.Block] = reference.Linear,
        conv: Callable[..., reference.Block] = reference.Conv,
        combine: reference.Combine = reference.combine,
        widens: bool = True,
    ) -> None:
        self.name, self.widens = name, widens
        self.mlp, self.linear, self.conv, self.combine = mlp, linear, conv, combine

    def unavailable(self) -> str | None:
        return None

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def scheme(
        self,
        problem: Problem,
        dtype: torch.dtype,
        statistics: Tensor | None = None,
        signs: Signs | None = None,
    ) -> reference.Scheme:
        """The problem's scheme and its blocks, for states of ``dtype``."""

        def given(p: Tensor | None) -> Any:
            return p.to(dtype) if p is not None and self.widens else p

        kinks = {} if signs is None else {"signs": signs}

        def block(n: int) -> reference.Block:
            if problem.block == "conv":
                layers = [[given(p) for p in layer] for layer in problem.layers_of(n)]
                return self.conv(problem.activation, problem.epsilon, layers, statistics, **kinks)
            theta = [given(None if p is None else p[n]) for p in problem.parameters]
            if problem.block == "linear":
                return self.linear(*theta)
            return self.mlp(problem.activation, *theta, **kinks)

        count = 1 if problem.tied else problem.blocks
        blocks = [block(n) for n in range(count)] * (problem.blocks // count)
        method = problem.method
        return reference.SCHEMES[method.scheme](blocks, method.step, self.combine)

    def forward(self, problem: Problem, io: ForwardIO) -> None:
        with torch.autocast(io.x.device.type, enabled=False):
            signs = signs_of(io.kept, known=False)
            scheme = self.scheme(problem, io.x.dtype, io.statistics, signs)
            if problem.is_recorded:
                bits = problem.method.increments()
                result, record = reference.record(scheme, io.x, bits, recorder_for(problem.block))
                anchors = record.kept
                for place, (increment,) in zip(
                    increments_of(problem, io.kept), record.increments.values(), strict=True
                ):
                    place.codes.copy_(increment.codes)
                    place.scales.copy_(increment.scales)
            else:
                result, anchors = reference.forward(scheme, io.x, problem.method.anchor_every)
        io.y.copy_(result)
        for place, state in zip(io.kept.anchors, anchors.values(), strict=True):
            place.copy_(state)

    def differentiable(self, problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
        """x[N] in x's dtype and the batch statistics, by operations that autograd and forward-mode
        differentiation see."""
        state = x.to(stream_dtype(x.dtype))
        if problem.block == "conv":
            problem = problem._replace(parameters=_with_constants_as_scales(problem))
        statistics = state.new_zeros(problem.statistics)
        with torch.autocast(x.device.type, enabled=False):
            scheme = self.scheme(problem, state.dtype, statistics)
            result, _ = reference.forward(scheme, state)
        return result.to(x.dtype), statistics

    def reverse(self, problem: Problem, io: ReverseIO) -> None:
        method, start = problem.method, io.start
        scheme = self.scheme(problem, start.dtype, signs=signs_of(io.kept, known=True))
        extremes = None if io.nonfinite is None else Extremes(method.steps, start)
        watch = None if extremes is None else extremes.watch
        if problem.is_recorded:
            record = record_of(problem, io.kept)
            pullbacks = reference.recorded(scheme, record, recorder_for(problem.block), watch=watch)
        else:
            every = method.anchor_every
            anchors = {(i + 1) * every: state for i, state in enumerate(io.kept.anchors)}
            if method.reverse_rule == "exact":
                pullbacks = reference.exact(scheme, start, anchors)
            else:
                pullbacks = reference.adjoint(
                    method.reverse_rule, method.order, scheme, start, anchors, watch=watch
                )
        sums = reference.Sums()
        with torch.autocast(start.device.type, enabled=False):
            grad_x = reference.reverse(pullbacks, io.cotangent, sums.add)
        if io.nonfinite is not None and extremes is not None:
            io.nonfinite.fill_(extremes.last())
        to_x, *to_parameters = io.gradients
        if to_x is not None:
            to_x.copy_(grad_x)
        for i, gradient in enumerate(to_parameters):
            if gradient is None:
                continue
            if problem.block == "conv":
                n, k = divmod(i, PER_LAYER * problem.layers)
                gradient.copy_(sums[scheme.f[n]][k])
            else:
                for n in range(gradient.shape[0]):
                    gradient[n].copy_(sums[scheme.f[n]][i])


def increments_of(problem: Problem, kept: Kept) -> Iterator[Increment]:
    """The recorded increments, in the order of their steps: views of ``kept``."""
    assert kept.codes is not None
    assert kept.scales is not None
    row = kept.anchors.shape[2]
    recorded = [bits for bits in problem.method.increments() if bits]
    rows, end = kept.scales.shape[1], 0
    for bits, scales in zip(recorded, kept.scales, strict=True):
        begin, end = end, end + rows * recording.code_bytes(row, bits)
        yield Increment(kept.codes[begin:end].view(rows, -1), scales)


def signs_of(kept: Kept, known: bool) -> Signs | None:
    return None if kept.signs is None else Signs(kept.signs, known)


def record_of(problem: Problem, kept: Kept) -> reference.Record:
    bits = problem.method.increments()
    steps = range(len(bits))
    states = dict(zip((n for n in steps if not bits[n]), kept.anchors, strict=True))
    increments = zip((n for n in steps if bits[n]), increments_of(problem, kept), strict=True)
    return reference.Record(bits, states, {n: (increment,) for n, increment in increments})


def _with_constants_as_scales(problem: Problem) -> tuple[Tensor | None, ...]:
    """conv: the parameters with γ/√(variance + ε) as γ, and β accordingly, where mean and variance
    are given: PyTorch's batch norm does not differentiate these."""
    parameters: list[Tensor | None] = []
    for i in range(0, len(problem.parameters), PER_LAYER):
        weight, gamma, beta, mean, variance = problem.parameters[i : i + PER_LAYER]
        if mean is not None and variance is not None:
            mean, variance = (t.to(stream_dtype(t.dtype)) for t in (mean, variance))
            scale = (variance + problem.epsilon).rsqrt()
            gamma = scale if gamma is None else gamma * scale
            beta = -mean * gamma if beta is None else beta - mean * gamma
            mean, variance = torch.zeros_like(mean), torch.ones_like(mean) - problem.epsilon
        parameters += [weight, gamma, beta, mean, variance]
    return tuple(parameters)


REFERENCE = EngineBackend("reference")
