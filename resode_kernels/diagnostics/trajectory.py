"""The states of a stage, and the errors of their reconstructions in the reverse pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..options import Method
from ..recording import Recorder, recorder_for
from ..stages import ConvStage, Stage
from ..states import parts, state_like
from .gradients import relative
from .probe import Probe


def norm(x: Any) -> float:
    """The Euclidean norm of all tensors of a state together."""
    squares = [t.detach().double().square().sum() for t in parts(x)]
    return math.sqrt(float(sum(squares)))


def minus(x: Any, y: Any) -> Any:
    return reference.combine(x, (-1, y))


class ProbedBlock(reference.Block):
    """Block n of a stage, as ``Stage.residual`` computes it. Evaluation k draws the same random
    numbers whenever it is repeated."""

    def __init__(self, probe: Probe, n: int) -> None:
        self.probe, self.n = probe, n
        self.largest = 0.0
        """The largest ‖f(x)‖ of all evaluations so far."""

    def f(self, x: Any, k: int) -> Any:
        with torch.no_grad(), self.seeded(k):
            y = self.probe.evaluate(self.n, x)
        self.largest = max(self.largest, norm(y))
        return y

    def linearize(
        self, x: Any, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, reference.Pullback]:
        """The pullback gives ∂_x f(x)ᵀ g alone and may be called more than once."""
        with torch.enable_grad(), self.seeded(k):
            x = state_like(x, [t.detach().requires_grad_() for t in parts(x)])
            y = self.probe.evaluate(self.n, x)

        def pullback(g: Any) -> tuple[Any, tuple[Tensor, ...]]:
            outputs = [(t, c) for t, c in zip(parts(y), parts(g), strict=True) if t.requires_grad]
            if not outputs:
                return None, ()
            grads = torch.autograd.grad(
                [t for t, _ in outputs],
                parts(x),
                [c for _, c in outputs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return state_like(x, grads), ()

        return state_like(y, [t.detach() for t in parts(y)]), pullback

    def repeats(self, k: int, j: int) -> bool:
        return False  # unknown, so evaluations are never shared

    @contextmanager
    def seeded(self, k: int) -> Iterator[None]:
        devices = [d for d in self.probe.generators if d.type == "cuda"]
        with torch.random.fork_rng(devices):
            torch.manual_seed(k)
            yield


def scheme_of(probe: Probe) -> reference.Scheme:
    """The stage's steps, made of ``ProbedBlock``s."""
    stage = probe.stage
    blocks = [ProbedBlock(probe, n) for n in range(stage.num_blocks)]
    if stage.tied:
        blocks *= stage.options.blocks(stage.depth)
    method = stage.options.method(stage.depth)
    return reference.SCHEMES[method.scheme](blocks, method.step)


class Trajectory:
    """The states x[0] … x[N]. Every √N-th is stored; the others are computed again, a segment at a
    time. To be made and used inside ``probe.untouched()``."""

    def __init__(self, probe: Probe) -> None:
        self.scheme, self.recorder = scheme_of(probe), recorder_of(probe.stage)
        self.every = max(1, round(math.sqrt(self.scheme.steps)))
        start = probe.in_stream(probe.x)
        self.end, kept = reference.forward(self.scheme, start, self.every)
        self.kept = {0: start, **kept}
        self.segment: dict[int, Any] = {}

    def __getitem__(self, n: int) -> Any:
        if n == self.scheme.steps:
            return self.end
        if n not in self.segment:
            begin = n - n % self.every
            x = self.kept[begin]
            self.segment = {begin: x}
            for m in range(begin, min(begin + self.every, self.scheme.steps) - 1):
                x = reference.combine(x, (self.scheme.h, self.scheme.slope(m, x)))
                self.segment[m + 1] = x
        return self.segment[n]

    @property
    def largest_slope(self) -> float:
        """max ‖f_n(x)‖ over every evaluation so far."""
        largest: float = max(b.largest for b in self.scheme.f)  # type: ignore[attr-defined]
        return largest


class Layer(NamedTuple):
    """The errors of a state's reconstruction, relative to the state: ‖error‖ / ‖x[n]‖."""

    n: int
    state_error: float
    """The error of x̃[n]."""
    point_error: float
    """The error of p, the step's linearization point."""
    size: float
    """‖x[n]‖."""


def reconstructed(trajectory: Trajectory, method: Method) -> list[Layer]:
    """The reverse pass without gradients: the errors for n = 0 … N − 1."""
    layers: list[Layer] = []

    def watch(n: int, p: Any, x: Any) -> None:
        true = trajectory[n]
        size = norm(true)
        state, point = (relative(norm(minus(y, true)), size) for y in (x, p))
        layers.append(Layer(n, state, point, size))

    scheme, every = trajectory.scheme, method.anchor_every
    if method.bits:
        _, record = reference.record(
            scheme, trajectory.kept[0], method.increments(), trajectory.recorder
        )
        pullbacks = reference.recorded(scheme, record, trajectory.recorder, watch=watch)
    else:
        pullbacks = reference.adjoint(
            method.reverse_rule,
            method.order,
            scheme,
            trajectory.end,
            Anchors(trajectory, every) if every else {},
            watch=watch,
        )
    for _ in pullbacks:
        pass
    return layers[::-1]


def recorder_of(stage: Stage) -> Recorder:
    """One whose rows are those that the stage records."""
    if stage.runs_modules:
        return Recorder()
    return recorder_for("conv" if isinstance(stage, ConvStage) else "rows")


def rounding_errors(probe: Probe, bits: int) -> list[float]:
    """What recording every increment in ``bits`` does to the states: ‖x̂[n] − x[n]‖ / ‖x[n]‖ for
    n = 1 … N − 1, where x̂[n] has the rounding error of the increment of step n − 1. To be called
    inside ``probe.untouched()``."""
    scheme, recorder = scheme_of(probe), recorder_of(probe.stage)
    x = probe.in_stream(probe.x)
    estimate, errors = recorder.estimate(x), []
    for n in range(scheme.steps - 1):
        x = reference.combine(x, (scheme.h, scheme.slope(n, x)))
        estimate, _ = recorder.record(estimate, x, bits)
        errors.append(relative(norm(minus(estimate, x)), norm(x)))
    return errors


class Anchors(dict[int, Any]):
    """The states x[k], x[2k], … of a trajectory, looked up when they are needed."""

    def __init__(self, trajectory: Trajectory, every: int) -> None:
        super().__init__()
        self.trajectory, self.every = trajectory, every

    def __contains__(self, n: object) -> bool:
        return isinstance(n, int) and n % self.every == 0 and n < self.trajectory.scheme.steps

    def __getitem__(self, n: int) -> Any:
        return self.trajectory[n]
