"""Modules as blocks whose evaluations can be repeated exactly.

An evaluation of a module depends on more than its input and its parameters: on random numbers,
buffers, train/eval mode and autocast. The backward pass *replays* evaluations of the forward pass,
to reconstruct states and to differentiate at them. A replay runs with all of these as they were,
and afterwards buffers, generators and modes are as before the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .. import reference
from ..states import State, parts, state_like
from ..undifferentiable import undifferentiable
from . import verification
from .calls import Call, RepeatedCall, described
from .kinks import Recording, Replaying, Seen
from .parameters import Held, Slot, frozen, is_sharded, replaced, standing_in
from .surroundings import Surroundings
from .turns import turns


def as_states(x: State, y: Sequence[Tensor]) -> Any:
    """A module's output y in the dtypes of the state x."""
    return state_like(x, [new.to(state.dtype) for new, state in zip(y, parts(x), strict=True)])


class PlainBlock(reference.Block):
    """A module that is not replayed. Its output is checked."""

    def __init__(self, index: int, module: nn.Module, call: Call) -> None:
        self.index, self.module, self.call = index, module, call

    def __str__(self) -> str:
        return f"block {self.index} ({type(self.module).__name__})"

    def evaluate(self, given: Any) -> Any:
        """The module's output. Its errors name the block."""
        try:
            with turns.shared():
                return self.call(self.module, given)
        except Exception as error:
            shapes = ", ".join(str(list(t.shape)) for t in parts(given))
            note = f"raised by {self} of a stage, for a state of the shape {shapes}"
            if hasattr(error, "add_note"):
                error.add_note(note)
            elif error.args and isinstance(error.args[0], str):  # Python 3.10
                error.args = (f"{error.args[0]} ({note})", *error.args[1:])
            raise

    def f(self, x: State, k: int) -> Any:
        given = self.call.given(x)
        versions = [t._version for t in parts(given)]
        y = self.evaluate(given)
        if versions != [t._version for t in parts(given)]:
            raise RuntimeError(
                f"{self} works in place on its input, which the stage still needs: use an "
                "operation that is not in place, say nn.ReLU(inplace=False), or clone the input"
            )
        return as_states(x, self.checked(x, y))

    def checked(self, x: State, y: Any) -> Sequence[Tensor]:
        takes = "a block must return f(x) with the shape of its input x"
        if isinstance(x, tuple):
            if not isinstance(y, tuple) or len(y) != len(x):
                raise TypeError(
                    f"{self} returned {described(y)} for a state of {len(x)} tensors; {takes}"
                )
        else:
            y = (y,)
        for new, state in zip(y, parts(x), strict=True):
            if not isinstance(new, Tensor) or not new.is_floating_point():
                raise TypeError(
                    f"{self} returned {described(new)}, not a floating-point tensor; {takes}"
                )
            if new.shape != state.shape:
                raise ValueError(
                    f"{self} returned the shape {list(new.shape)} for a state of the shape "
                    f"{list(state.shape)}; {takes}"
                )
        result: tuple[Tensor, ...] = y
        return result


INSIDE = (
    "resode_kernels: this loss depends on a tensor that a forward hook of {block} saw inside a "
    "stage. It has no gradient, because the stage keeps no graph of its blocks. Take the loss from "
    "the stage's output, split the stage where the tensor is needed, or use backward='stored'"
)


class Evaluation(NamedTuple):
    """What an evaluation depends on besides its input and parameters, as it was before."""

    generators: dict[torch.device, Tensor]
    """States of the random number generators that it used."""
    buffers: dict[tuple[nn.Module, str], Tensor]
    """Values of the buffers that it changed. Running statistics of batch norms in training mode are
    left out: a layer that updates them does not read them."""
    held: dict[tuple[nn.Module, str], Held]
    """The buffers that it did not change."""
    kinked: list[Seen]
    """The calls whose arguments' sides are kept."""

    @property
    def repeats_any(self) -> bool:
        """Whether it depends on nothing that other evaluations change."""
        return not self.generators and not self.buffers and not self.kinked


class ReplayedBlock(PlainBlock):
    """A module whose evaluations are recorded the first time and replayed from then on. ``sides``
    is where the run keeps those of every evaluation (``replay/kinks.py``), None without kinks."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        call: RepeatedCall,
        around: Surroundings,
        run: object,
        sides: dict[int, Tensor] | None = None,
    ) -> None:
        super().__init__(index, module, call)
        self.call: RepeatedCall = call
        self.around, self.run, self.sides = around, run, sides
        self.evaluations: dict[int, Evaluation] = {}
        modules = list(module.modules())
        self.sharded = any(map(is_sharded, modules))
        self.hooked = any(m._forward_hooks for m in modules) and not self.sharded
        self.modes = [(m, m.training) for m in modules]
        self.keys = [(m, key) for m in modules for key, b in m._buffers.items() if b is not None]
        self.frozen = frozen(module, self.sharded)
        self.stand_ins: list[tuple[Slot, nn.Parameter]] = []
        """What a backward pass puts into the module, and where."""
        self.inputs: list[Tensor] = []
        """The tensors, besides the state, for which a backward pass computes gradients."""
        self.leaves: list[Tensor] = []
        """All arguments and parameters in the backward pass."""

    def repeats(self, k: int, j: int) -> bool:
        return k == j or all(self.evaluations[i].repeats_any for i in (k, j))

    def f(self, x: State, k: int) -> Any:
        if k not in self.evaluations:
            return self.record(x, k)
        with torch.no_grad(), self.as_at(k):
            return as_states(x, parts(self.evaluate(self.call.given(x))))

    def record(self, x: State, k: int) -> Any:
        with turns.alone(self.run):
            generators = self.around.generators()
            buffers = {
                (m, key): (buffer, buffer._version, buffer.clone())
                for m, key, buffer in self.buffers()
                if not (isinstance(m, _NormBase) and m.training)
            }
            recording = None if self.sides is None else Recording()
            with recording or nullcontext():
                y = super().f(x, k)
            after = self.around.generators()
            changed = {
                (m, key): before
                for (m, key), (buffer, version, before) in buffers.items()
                if m._buffers[key] is not buffer or buffer._version != version
            }
            self.evaluations[k] = Evaluation(
                {d: state for d, state in generators.items() if not torch.equal(state, after[d])},
                changed,
                {at: Held.of(buffer) for at, (buffer, *_) in buffers.items() if at not in changed},
                [] if recording is None else recording.seen,
            )
            if self.sides is not None and recording is not None and recording.seen:
                self.sides[k] = recording.sides()
            if not self.hooked and not verification.is_verified(self.module, self.call):
                self.call.refuse_changes()
                verification.verify(self, x, k, y)
        return y

    def evaluate(self, given: Any) -> Any:
        """With forward hooks in the forward pass: hooks may keep what they see, but it has no
        gradient, because no graph leads to it. So they see tensors that refuse to have one."""
        if not self.hooked or torch.is_grad_enabled():
            return super().evaluate(given)
        with torch.enable_grad():
            guarded = undifferentiable(
                parts(given), [torch.zeros((), requires_grad=True)], INSIDE.format(block=self)
            )
            y = super().evaluate(state_like(given, guarded))
        return state_like(y, [t.detach() if isinstance(t, Tensor) else t for t in parts(y)])

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        return [(m, key, m._buffers[key]) for m, key in self.keys]  # type: ignore[misc]

    def linearize(
        self, x: State, k: int, wrt_x: bool = True, value: bool = True
    ) -> tuple[Any, reference.Pullback]:
        wrt_x = wrt_x or self.sharded  # FSDP reduces gradients when the input's is computed
        given = state_like(x, [t.detach().requires_grad_(wrt_x) for t in parts(self.call.given(x))])
        states = parts(given) if wrt_x else ()
        inputs = (*states, *self.inputs)
        if not inputs:
            return self.f(x, k), lambda g: (None, ())
        with torch.enable_grad(), self.as_at(k):
            y = parts(self.evaluate(given))
        self.refuse_foreign_leaves(y, (*states, *self.leaves))

        def pullback(g: State) -> tuple[Any, tuple[Tensor | None, ...]]:
            outputs = [
                (t, cotangent.to(t.dtype))
                for t, cotangent in zip(y, parts(g), strict=True)
                if t.requires_grad
            ]
            if not outputs:
                return None, (None,) * len(self.inputs)
            with self.placed(k):  # a checkpoint inside the module reruns it now
                grads = self.vjp([t for t, _ in outputs], [g for _, g in outputs], inputs)
            return state_like(x, grads[: len(states)]) if wrt_x else None, grads[len(states) :]

        return as_states(x, [t.detach() for t in y]), pullback

    def vjp(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        if not self.sharded:
            return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        # FSDP's hooks assign the gradients of the parameters, and only backward() calls them.
        torch.autograd.backward(outputs, cotangents)
        grads = tuple(t.grad for t in inputs)
        for t in inputs:
            t.grad = None
        return grads

    @contextmanager
    def as_at(self, k: int) -> Iterator[None]:
        evaluation = self.evaluations[k]
        with self.placed(k), self.around.restored(evaluation.generators), self.replaying(k):
            yield

    def replaying(self, k: int) -> AbstractContextManager[Any]:
        """Context in which functions compute the pieces on the sides that evaluation k has kept."""
        kinked = self.evaluations[k].kinked
        if self.sides is None or not kinked:
            return nullcontext()
        return Replaying(kinked, self.sides.get(k), self)

    @contextmanager
    def placed(self, k: int) -> Iterator[None]:
        """Context with the module as it was before evaluation k, with stand-ins, for this run
        alone."""
        with turns.alone(self.run):
            stand_ins = self.stand_ins + replaced(self.frozen, self)
            with standing_in(stand_ins, self.modes), self.buffers_at(k):
                yield

    @contextmanager
    def buffers_at(self, k: int) -> Iterator[None]:
        """Context with copies of the buffers as they were before evaluation k."""
        _, values, held, _ = self.evaluations[k]
        before = {at: h.as_it_was(f"the buffer {at[1]!r} of {self}") for at, h in held.items()}
        before |= values
        now = self.buffers()
        try:
            for m, key, buffer in now:
                m._buffers[key] = before.get((m, key), buffer).clone()
            yield
        finally:
            for m, key, buffer in now:
                m._buffers[key] = buffer

    def refuse_foreign_leaves(self, y: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Raises if y depends on any other leaf, whose gradient would be lost."""
        if self.sharded:  # ``backward()`` reaches every leaf
            return
        known = {id(t) for t in leaves}
        for leaf in leaves_of(y):
            if id(leaf) not in known:
                raise RuntimeError(
                    f"{self} uses a tensor of the shape {list(leaf.shape)} that requires grad and "
                    "is neither its parameter nor an argument, so its gradient would be lost: pass "
                    "it, or a tensor computed from it, as stage(x, tensor), or detach it"
                )


def leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that require grad in the graph of some tensors."""
    yield from (t for t in outputs if t.is_leaf and t.requires_grad)
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
