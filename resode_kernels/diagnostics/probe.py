"""Runs a stage at one input any number of times without changing the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..replay.parameters import standing_in, trainable
from ..replay.surroundings import Surroundings
from ..stages import Stage
from ..states import State, in_stream, parts, state_like
from .budget import now
from .gradients import GradientError, compare

Loss = Callable[[Any], Tensor]
PROBING: ContextVar[bool] = ContextVar("PROBING", default=False)
"""Whether a stage runs only to be measured: a monitor does not count such calls."""


class Gradients(NamedTuple):
    parameters: dict[str, Tensor]
    """The gradients of the parameters that require grad, by name."""
    x: tuple[Tensor, ...]
    """The gradients of the tensors of the stage's input."""
    seconds: float
    """The time of both passes."""
    held: int
    """The bytes that autograd held between the passes, without parameters and input; 0 if they were
    not counted."""

    def errors(self, exact: Gradients) -> tuple[GradientError, GradientError]:
        """The errors of all parameter gradients together, and of the input's gradient."""
        return (
            compare(self.parameters.values(), exact.parameters.values()),
            compare(self.x, exact.x),
        )


class Probe:
    """Repeats ``stage(x, *args, **kwargs)``. Every run sees the same parameters, buffers and random
    numbers. Hooks of the stage do not fire; see ``untouched``."""

    def __init__(
        self, stage: Stage, x: State, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        self.stage = stage
        self.x = state_like(x, [t.detach() for t in parts(x)])
        self.args = tree_map_only(Tensor, Tensor.detach, args)
        self.kwargs = tree_map_only(Tensor, Tensor.detach, kwargs or {})
        self.around = Surroundings(self.x)
        self.generators = self.around.generators()

    def nearby(self, seed: int) -> Probe:
        """A probe at a nearby input: x with one per cent of noise."""
        generator = torch.Generator().manual_seed(seed)
        noisy = [
            t + 0.01 * t.std(correction=0) * torch.randn(t.shape, generator=generator).to(t)
            for t in parts(self.x)
        ]
        return Probe(self.stage, state_like(self.x, noisy), self.args, self.kwargs)

    @contextmanager
    def untouched(self, **options: Any) -> Iterator[Mapping[str, Tensor]]:
        """Context with ``options`` set; see the function ``untouched``."""
        changed = {self.stage: options}
        with untouched(self.stage, self.around, self.generators, changed) as named:
            yield named

    def cotangent(self, loss: Loss | None) -> Any:
        """∂L/∂x[N]. Without a loss, L = ⟨v, x[N]⟩ with a random v that is always the same."""
        with self.untouched(), torch.no_grad():
            y = self.stage.forward(self.x, *self.args, **self.kwargs)
            if loss is None:
                return state_like(y, random_like(parts(y)))
            with torch.enable_grad():
                leaf = state_like(y, [t.detach().requires_grad_() for t in parts(y)])
                grads = torch.autograd.grad(
                    number(loss(leaf)), parts(leaf), allow_unused=True, materialize_grads=True
                )
        return state_like(y, grads)

    def gradients(self, cotangent: State, *, count: bool = False, **options: Any) -> Gradients:
        """The gradients of a training step with these options. ``count``: count the bytes held."""
        with self.untouched(**options) as named, torch.enable_grad():
            x = state_like(self.x, [t.detach().requires_grad_() for t in parts(self.x)])
            inputs = (*parts(x), *named.values())
            begin = self.time()
            if count:
                with saved_bytes({t.untyped_storage().data_ptr() for t in inputs}) as held:
                    y = self.stage.forward(x, *self.args, **self.kwargs)
            else:
                held, y = {}, self.stage.forward(x, *self.args, **self.kwargs)
            grads = torch.autograd.grad(
                parts(y), inputs, parts(cotangent), allow_unused=True, materialize_grads=True
            )
            seconds = self.time() - begin
        width = len(parts(x))
        parameters = dict(zip(named, grads[width:], strict=True))
        return Gradients(parameters, tuple(grads[:width]), seconds, sum(held.values()))

    def time(self) -> float:
        """The time when the work so far is done."""
        for device in {t.device for t in parts(self.x)}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return now()

    def evaluate(self, n: int, x: Any) -> Any:
        """f_n(x), from a state to a state."""
        return self.in_stream(
            self.stage.residual(n, state_like(x, self.given(x)), *self.args, **self.kwargs)
        )

    def in_stream(self, x: Any) -> Any:
        """x in the dtype in which the stage keeps its states."""
        return in_stream(x, self.stage.options.stream)

    def evaluation_time(self) -> float:
        """The seconds that an evaluation of a block takes in PyTorch: the least of three, because
        the first warms up."""
        times = []
        with self.untouched(), torch.no_grad():
            for _ in range(3):
                begin = self.time()
                self.evaluate(0, self.in_stream(self.x))
                times.append(self.time() - begin)
        return min(times)

    def given(self, x: Any) -> list[Tensor]:
        """The tensors of a state in the dtypes of the input."""
        return [t.to(mine.dtype) for t, mine in zip(parts(x), parts(self.x), strict=True)]


@contextmanager
def untouched(
    module: nn.Module,
    around: Surroundings,
    generators: dict[torch.device, Tensor],
    options: Mapping[Stage, Mapping[str, Any]],
) -> Iterator[Mapping[str, Tensor]]:
    """Context in which stages have other options, generators have the given states, and
    reconstructions that are not finite raise no error. Afterwards the module is as before: aliases
    of the parameters are differentiated, so that ``.grad`` is not written and hooks of parameters
    do not fire; buffers are copies; generators, train/eval modes and options are restored. Yields
    the stand-ins for its trainable parameters, by name."""
    before = [(stage, stage.options) for stage in options]
    parameters, slots = trainable([module])
    aliases = [nn.Parameter(p.detach()) for p in parameters]
    stand_ins = [(slot, aliases[slot.number]) for slot in slots[module]]
    numbers = {p: i for i, p in enumerate(parameters)}
    named = {name: aliases[numbers[p]] for name, p in module.named_parameters() if p in numbers}
    buffers = [(m, key, b) for m in module.modules() for key, b in m._buffers.items()]
    modes = [(m, m.training) for m in module.modules()]
    token = PROBING.set(True)
    try:
        for stage, changed in options.items():
            stage.configure(**{**changed, "nonfinite": "ignore"})  # the gradient error shows it
        for m, key, buffer in buffers:
            m._buffers[key] = None if buffer is None else buffer.clone()
        with (
            torch.inference_mode(False),
            around.restored(generators),
            standing_in(stand_ins, modes),
        ):
            yield named
    finally:
        PROBING.reset(token)
        for stage, old in before:
            stage.options = old
        for m, key, buffer in buffers:
            m._buffers[key] = buffer


def number(value: Any) -> Tensor:
    """What a loss has returned, checked."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"loss must return one number as a tensor, not {got}")
    if not value.requires_grad:
        raise ValueError(
            "loss must depend on the output that it is given, but the number that it returned does "
            "not require grad"
        )
    return value


def random_like(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Random tensors of the same shapes, dtypes and devices, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in tensors]


@contextmanager
def saved_bytes(known: set[int]) -> Iterator[dict[int, int]]:
    """Context that collects the sizes of the storages that autograd saves, by address, except those
    in ``known``."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield held
