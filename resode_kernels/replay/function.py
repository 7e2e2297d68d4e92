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
from typing import Any

import torch
from torch import Tensor, nn

from .. import nonfinite, reference, transforms
from ..options import Method
from ..states import State, in_stream, parts, state_like
from ..uncompiled import uncompiled
from ..undifferentiable import undifferentiable
from .blocks import PlainBlock, ReplayedBlock
from .calls import Call, RepeatedCall, out_of_inference
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
        stream: str,
    ) -> None:
        self.method, self.call, self.stream = method, call, stream
        self.kind = state_like(x, [None for _ in parts(x)])
        around = Surroundings(x)
        outermost = turns.run() or self  # if a block of another stage runs this one, that stage's
        distinct: dict[nn.Module, ReplayedBlock] = {}
        for n, module in enumerate(modules):
            if module not in distinct:
                distinct[module] = ReplayedBlock(n, module, call, around, outermost)
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
    ) -> tuple[Any, dict[int, Any]]:
        """x[N] and the anchors."""
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # see Surroundings.autocast_as_it_was
        try:
            with self.call.filled(arguments), uncached_parametrizations():
                x = in_stream(state_like(self.kind, states), self.stream)
                return reference.forward(self.scheme, x, self.method.anchor_every)
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
        anchors: dict[int, Any],
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
        if self.method.reverse_rule == "exact":
            pullbacks = reference.exact(self.scheme, start, anchors, *end)
        else:
            pullbacks = reference.adjoint(
                self.method.reverse_rule,
                self.method.order,
                self.scheme,
                start,
                anchors,
                *end,
                watch,
            )
        try:
            with self.call.filled(aliases):
                g = reference.reverse(pullbacks, cotangent, add)
        finally:
            for block in self.slots:
                block.inputs, block.leaves, block.stand_ins = [], [], []
        if extremes is not None:
            nonfinite.report(self.method, extremes.last(), start)
        for i, need in enumerate(states_need):
            gradients[i] = parts(g)[i] if need else None
        return gradients


class ResidualFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Any:
        states, arguments, parameters = run.split(tensors)
        y, anchors = run.forward(states, arguments)
        # The rule "exact" recomputes states from x[0]; the others reconstruct them from x[N].
        start = states if run.method.reverse_rule == "exact" else parts(y)
        ctx.run, ctx.anchor_steps = run, list(anchors)
        kept = [part for state in anchors.values() for part in parts(state)]
        ctx.save_for_backward(*start, *kept, *arguments, *parameters)
        ctx.dtypes = [t.dtype for t in tensors]
        return state_like(
            y, [part.to(dtype) for part, dtype in zip(parts(y), ctx.dtypes, strict=False)]
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        saved, width = ctx.saved_tensors, len(cotangents)
        transforms.refuse_tangents((*cotangents, *saved))
        end = width * (1 + len(ctx.anchor_steps))
        _, arguments, parameters = run.split((*cotangents, *saved[end:]))
        with torch.no_grad():
            states = [t.detach() for t in saved[:end]]
            start, *anchors = (
                in_stream(state_like(run.kind, states[i : i + width]), run.stream)
                for i in range(0, end, width)
            )
            gradients: list[Tensor | None] = run.backward(
                start,
                dict(zip(ctx.anchor_steps, anchors, strict=True)),
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
    stream: str = "float32",
) -> Any:
    """Runs a stage whose blocks are ``modules``. ``stored``: plain autograd, nothing is replayed;
    so it is under transforms of ``torch.func`` and where operations are traced. ``combine`` updates
    the states, and ``stream`` says in which dtype they are kept."""
    grad = torch.is_grad_enabled()
    # Inference mode is left, because in-place changes of tensors cannot be detected in it.
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
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
                run = Run(modules, method, x, call, slots, combine, stream) if needed else None
            if run is not None:
                call.tensors = []
                return ResidualFunction.apply(run, *tensors)
        plain = Call(x, args, kwargs)
        blocks = [PlainBlock(n, module, plain) for n, module in enumerate(modules)]
        scheme = reference.SCHEMES[method.scheme](blocks, method.step, combine)
        return plain.given(reference.forward(scheme, in_stream(x, stream))[0])
