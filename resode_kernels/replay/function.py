"""The ``autograd.Function`` of a stage whose blocks are modules, run by the reference's passes.

Every state, argument and trainable parameter is an input of the Function and every gradient is
returned from it: no nested ``backward()``, no writes to ``.grad``. For the VJP of a block,
parameters that have hooks or that are no longer those of the forward pass are replaced by
*stand-ins*, detached aliases. Therefore hooks on the parameters see the finished gradient, once.
(Blocks that are FSDP units of their own are the exception: FSDP assigns the gradients of their
parameters.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import nonfinite, reference, transforms
from ..options import Method
from ..recording import Increment, Recorder
from ..states import State, in_stream, parts, state_like
from ..uncompiled import uncompiled
from ..undifferentiable import undifferentiable
from .blocks import PlainBlock, ReplayedBlock
from .calls import Call, RepeatedCall, out_of_inference
from .kinks import unseen
from .parameters import Slot, is_sharded, stand_ins_for, trainable
from .surroundings import Surroundings, uncached_parametrizations
from .turns import turns


class Gradients(list[Any]):
    """The summed gradients, one per input of the Function."""

    def add(self, number: int, gradient: Tensor | None) -> None:
        self[number] = reference.accumulate(self[number], gradient)


class Run:
    """A run of a stage: what its backward pass needs besides tensors. The inputs of the Function
    are always in this order: states, arguments, parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        method: Method,
        x: State,
        call: RepeatedCall,
        slots: dict[nn.Module, list[Slot]],
        combine: reference.Combine,
        recorder: Recorder,
        stream: str,
    ) -> None:
        self.method, self.call, self.stream, self.recorder = method, call, stream, recorder
        self.kind = state_like(x, [None for _ in parts(x)])
        around = Surroundings(x)
        outermost = turns.run() or self  # if a block of another stage runs this one, that stage's
        self.sides: dict[int, Tensor] | None = {} if method.kinks else None
        """What is kept of each evaluation's kinks, while a pass is under way."""
        distinct: dict[nn.Module, ReplayedBlock] = {}
        for n, module in enumerate(modules):
            if module not in distinct:
                distinct[module] = ReplayedBlock(n, module, call, around, outermost, self.sides)
        self.blocks = [distinct[module] for module in modules]
        self.slots = {distinct[module]: places for module, places in slots.items()}
        self.scheme = reference.SCHEMES[method.scheme](self.blocks, method.step, combine)
        self.refuse_sharing_sharded_blocks()

    def refuse_sharing_sharded_blocks(self) -> None:
        """FSDP reduces the gradients of a unit once per backward pass, unless it is the root."""
        if not any(block.sharded for block in self.blocks):
            return
        seen: set[nn.Module] = set()
        for n in range(self.scheme.steps):
            for block in self.blocks[n : n + 1 + len(self.blocks) - self.scheme.steps]:
                units = {m for m in block.module.modules() if is_sharded(m)}
                if units & seen:
                    raise RuntimeError(
                        f"{block} is an FSDP unit (fully_shard) and serves more than one "
                        "evaluation, so FSDP would lose gradients: shard the whole stage with "
                        "fully_shard(stage), or use backward='stored'"
                    )
                seen |= units

    def split(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The inputs of the Function as states, arguments and parameters."""
        a = len(parts(self.kind))
        b = a + len(self.call.places)
        return tensors[:a], tensors[a:b], tensors[b:]

    def forward(
        self, states: Sequence[Tensor], arguments: Sequence[Tensor]
    ) -> tuple[Any, reference.Record]:
        """x[N], and what is kept of the states before it. Anchors count as kept states."""
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # see Surroundings.autocast_as_it_was
        try:
            with self.call.filled(arguments), uncached_parametrizations():
                x = in_stream(state_like(self.kind, states), self.stream)
                if self.method.bits:
                    bits = self.method.increments()
                    return reference.record(self.scheme, x, bits, self.recorder)
                y, anchors = reference.forward(self.scheme, x, self.method.anchor_every)
                return y, reference.Record((), anchors, {})
        finally:
            torch.set_autocast_cache_enabled(cache)

    def last_step(self, needs: Sequence[bool]) -> int:
        """The step where the reverse pass may end: earlier steps affect no needed gradient."""
        states, arguments, parameters = self.split(needs)
        if any(states) or any(arguments):
            return 0
        first = next(
            n
            for n, block in enumerate(self.blocks)
            if block.sharded or any(parameters[slot.number] for slot in self.slots[block])
        )
        return max(0, first - (len(self.blocks) - self.scheme.steps))

    def backward(
        self,
        start: Any,
        record: reference.Record,
        sides: dict[int, Tensor],
        arguments: Sequence[Tensor],
        parameters: Sequence[Tensor],
        cotangent: Any,
        needs: Sequence[bool],
    ) -> Gradients:
        """The gradients of the Function's inputs, where they are needed."""
        states_need, arguments_need, parameters_need = self.split(needs)
        aliases = [
            t.detach().requires_grad_() if need else t.detach()
            for t, need in zip(arguments, arguments_need, strict=True)
        ]
        # The numbers of the inputs whose gradients a block contributes to.
        offset = len(states_need)
        numbers = [offset + i for i, need in enumerate(arguments_need) if need]
        offset += len(arguments)
        wanted: dict[reference.Block, list[int]] = {}
        for block, slots in self.slots.items():
            stand_ins = stand_ins_for(slots, parameters, parameters_need, all_of=block.sharded)
            block.stand_ins = [(s, stand_ins[s.number]) for s in slots if s.number in stand_ins]
            own = {s.number: stand_ins.get(s.number, parameters[s.number]) for s in slots}
            block.leaves = [*aliases, *own.values()]
            inputs = [(i, p) for i, p in own.items() if parameters_need[i]]
            wanted[block] = [*numbers, *(offset + i for i, _ in inputs)]
            block.inputs = [
                *(t for t, need in zip(aliases, arguments_need, strict=True) if need),
                *(p for _, p in inputs),
            ]
        gradients = Gradients([None] * len(needs))

        def add(block: reference.Block, contributions: tuple[Tensor | None, ...]) -> None:
            for number, contribution in zip(wanted[block], contributions, strict=True):
                gradients.add(number, contribution)

        end = self.last_step(needs), any(states_need)
        is_checked = nonfinite.is_checked(self.method, start)
        extremes = nonfinite.Extremes(self.method.steps, start) if is_checked else None
        watch = None if extremes is None else extremes.watch
        if self.method.bits:
            pullbacks = reference.recorded(self.scheme, record, self.recorder, *end, watch)
        elif self.method.reverse_rule == "exact":
            pullbacks = reference.exact(self.scheme, start, record.kept, *end)
        else:
            pullbacks = reference.adjoint(
                self.method.reverse_rule,
                self.method.order,
                self.scheme,
                start,
                record.kept,
                *end,
                watch,
            )
        if self.sides is not None:
            self.sides.update(sides)
        try:
            with self.call.filled(aliases):
                g = reference.reverse(pullbacks, cotangent, add)
        finally:
            if self.sides is not None:
                self.sides.clear()
            for block in self.slots:
                block.inputs, block.leaves, block.stand_ins = [], [], []
        if extremes is not None:
            nonfinite.report(self.method, extremes.last(), start)
        for i, need in enumerate(states_need):
            gradients[i] = parts(g)[i] if need else None
        return gradients


class Layout(NamedTuple):
    """The order of the tensors that the Function saves in front of arguments and parameters: where
    the reverse pass starts, kept states, increments, sides of kinks."""

    width: int
    """The number of tensors of a state."""
    start: int
    """The number of tensors that say where to start; 0: the last kept state does."""
    kept: list[int]
    """The steps whose states are kept."""
    recorded: list[int]
    """The steps whose increments are recorded."""
    kinked: list[int]
    """The evaluations that have kept sides of kinks."""

    @property
    def of_states(self) -> int:
        return self.start + self.width * len(self.kept)

    @property
    def of_increments(self) -> int:
        return self.of_states + len(Increment._fields) * self.width * len(self.recorded)

    @property
    def tensors(self) -> int:
        return self.of_increments + len(self.kinked)

    def states(self, saved: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        return [saved[i : i + self.width] for i in range(0, self.of_states, self.width)]

    def increments(self, saved: Sequence[Tensor]) -> list[tuple[Increment, ...]]:
        fields = saved[self.of_states : self.of_increments]
        each = [Increment(*fields[i : i + 2]) for i in range(0, len(fields), 2)]
        return [tuple(each[i : i + self.width]) for i in range(0, len(each), self.width)]

    def sides(self, saved: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self.kinked, saved[self.of_increments : self.tensors], strict=True))


def flat(record: reference.Record, sides: dict[int, Tensor]) -> list[Tensor]:
    """The tensors in the order of ``Layout``."""
    return [
        *(part for state in record.kept.values() for part in parts(state)),
        *(t for increments in record.increments.values() for i in increments for t in i),
        *sides.values(),
    ]


class ResidualFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Any:
        states, arguments, parameters = run.split(tensors)
        y, record = run.forward(states, arguments)
        # The rule "exact" recomputes states from x[0], "recorded" starts at the last state that is
        # kept, the others reconstruct from x[N].
        rule = run.method.reverse_rule
        start = {"exact": states, "recorded": ()}.get(rule, parts(y))
        sides = run.sides or {}
        layout = Layout(
            len(states), len(start), list(record.kept), list(record.increments), list(sides)
        )
        ctx.run, ctx.layout = run, layout
        ctx.save_for_backward(*start, *flat(record, sides), *arguments, *parameters)
        sides.clear()
        ctx.dtypes = [t.dtype for t in tensors]
        return state_like(
            y, [part.to(dtype) for part, dtype in zip(parts(y), ctx.dtypes, strict=False)]
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        layout: Layout = ctx.layout
        saved = ctx.saved_tensors
        transforms.refuse_tangents((*cotangents, *saved))
        _, arguments, parameters = run.split((*cotangents, *saved[layout.tensors :]))
        with torch.no_grad():
            states = [
                in_stream(state_like(run.kind, [t.detach() for t in state]), run.stream)
                for state in layout.states(saved)
            ]
            start, kept = (states[0], states[1:]) if layout.start else (states[-1], states)
            record = reference.Record(
                run.method.increments() if layout.recorded else (),
                dict(zip(layout.kept, kept, strict=True)),
                dict(zip(layout.recorded, layout.increments(saved), strict=True)),
            )
            gradients: list[Tensor | None] = run.backward(
                start,
                record,
                layout.sides(saved),
                arguments,
                parameters,
                in_stream(state_like(run.kind, cotangents), run.stream),
                ctx.needs_input_grad[1:],
            )
            gradients = [
                g if g is None else g.to(dtype)
                for g, dtype in zip(gradients, ctx.dtypes, strict=True)
            ]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = undifferentiable(gradients, (*cotangents, *saved))
        return None, *gradients


@uncompiled
def run(
    modules: Sequence[nn.Module],
    x: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: Method,
    stored: bool,
    combine: reference.Combine = reference.combine,
    recorder: Recorder | None = None,
    stream: str = "float32",
) -> Any:
    """Runs a stage whose blocks are ``modules``. ``stored``: plain autograd, nothing is replayed;
    so it is under transforms of ``torch.func`` and where operations are traced. ``combine`` updates
    the states, ``recorder`` records their increments, and ``stream`` says in which dtype they are
    kept."""
    grad = torch.is_grad_enabled()
    # Inference mode is left, because in-place changes of tensors cannot be detected in it.
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        nullcontext() if stored else unseen(),
    ):
        x = state_like(x, [out_of_inference(t) for t in parts(x)])
        transformed = transforms.may_apply() or transforms.are_traced(parts(x))
        plainly = transformed or (grad and stored)
        if plainly:
            combine = reference.combine  # torch differentiates its own additions, not a kernel
        if grad and not plainly:
            call = RepeatedCall(x, args, kwargs)
            with turns.shared():
                parameters, slots = trainable(modules)
                tensors = (*parts(x), *call.tensors, *parameters)
                needed = any(t.requires_grad for t in tensors)
                recorder = recorder or Recorder()
                run = (
                    Run(modules, method, x, call, slots, combine, recorder, stream)
                    if needed
                    else None
                )
            if run is not None:
                call.tensors = []
                return ResidualFunction.apply(run, *tensors)
        plain = Call(x, args, kwargs)
        blocks = [PlainBlock(n, module, plain) for n, module in enumerate(modules)]
        scheme = reference.SCHEMES[method.scheme](blocks, method.step, combine)
        return plain.given(reference.forward(scheme, in_stream(x, stream))[0])
