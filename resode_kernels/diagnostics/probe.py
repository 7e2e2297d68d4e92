"""A stage at one input, run as often as one likes without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..replay.parameters import is_sharded, standing_in, trainable
from ..replay.surroundings import Surroundings
from ..stages import Stage
from ..states import State, in_stream, parts, state_like
from .gradients import GradientError, compare

Loss = Callable[[Any], Tensor]


class StageInput(NamedTuple):
    """What a stage was called with."""

    x: State
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def input_of(stage: Stage, run: Callable[[], Any]) -> StageInput:
    """What ``stage`` is called with inside ``run()``, detached, for ``diagnose`` and ``tune``:

        seen = rk.input_of(model.layer3, lambda: model(images))
        rk.tune(model.layer3, seen.x)

    If it is called several times, the last counts.
    """
    calls: list[StageInput] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (x, *more), named = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        calls.append(StageInput(x, tuple(more), named))

    handle = stage.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    if not calls:
        raise RuntimeError(f"run() did not call the stage ({type(stage).__name__})")
    return calls[-1]


class Gradients(NamedTuple):
    parameters: dict[str, Tensor]
    """By name; only those that require grad."""
    x: tuple[Tensor, ...]
    """Of the stage's input, part by part."""

    def errors(self, exact: Gradients) -> tuple[GradientError, GradientError]:
        """Of all parameter gradients together, and of the input's."""
        return (
            compare(self.parameters.values(), exact.parameters.values()),
            compare(self.x, exact.x),
        )


class Probe:
    """``stage(x, *args, **kwargs)``, repeatable: every run sees the same parameters, buffers and
    random numbers. The parameters stay out of it (aliases of them are differentiated, so that
    neither ``.grad`` nor hooks notice), hooks of the stage do not fire, buffers are copies, and
    generators, train/eval modes and options are put back."""

    def __init__(
        self, stage: Stage, x: State, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        if not isinstance(stage, Stage):
            raise TypeError(
                f"stage must be a stage (rk.MLPStage, rk.ResidualStage, …), not {type(stage)}; of "
                "a model, give the stage inside it and that stage's input"
            )
        if any(map(is_sharded, stage.modules())):
            raise TypeError("stage: its parameters are sharded; diagnose it before fully_shard")
        self.stage = stage
        self.x = state_like(x, [t.detach() for t in parts(x)])
        self.args = tree_map_only(Tensor, Tensor.detach, args)
        self.kwargs = tree_map_only(Tensor, Tensor.detach, kwargs or {})
        self.around = Surroundings(self.x)
        self.generators = self.around.generators()

    def nearby(self, seed: int) -> Probe:
        """At another input: x with one per cent of noise."""
        generator = torch.Generator().manual_seed(seed)
        noisy = [
            t + 0.01 * t.std(correction=0) * torch.randn(t.shape, generator=generator).to(t)
            for t in parts(self.x)
        ]
        return Probe(self.stage, state_like(self.x, noisy), self.args, self.kwargs)

    @contextmanager
    def untouched(self, **options: Any) -> Iterator[Mapping[str, Tensor]]:
        """Inside, ``options`` are set, explosions do not raise, and what the stage does to itself
        is forgotten afterwards. Gives the aliases that stand in for its trainable parameters, by
        name."""
        stage, before = self.stage, self.stage.options
        parameters, slots = trainable([stage])
        aliases = [nn.Parameter(p.detach()) for p in parameters]
        numbers = {p: i for i, p in enumerate(parameters)}
        named = {name: aliases[numbers[p]] for name, p in stage.named_parameters() if p in numbers}
        buffers = [(m, key, b) for m in stage.modules() for key, b in m._buffers.items()]
        modes = [(m, m.training) for m in stage.modules()]
        try:
            stage.configure(**options, nonfinite="ignore")  # the error tells
            for m, key, buffer in buffers:
                m._buffers[key] = None if buffer is None else buffer.clone()
            with (
                torch.inference_mode(False),
                self.around.restored(self.generators),
                standing_in(aliases, slots[stage], modes),
            ):
                yield named
        finally:
            stage.options = before
            for m, key, buffer in buffers:
                m._buffers[key] = buffer

    def cotangent(self, loss: Loss | None) -> Any:
        """∂L/∂x[N]. Without a loss: of ⟨v, x[N]⟩ with random v, the same every time."""
        with self.untouched(), torch.no_grad():
            y = self.stage.forward(self.x, *self.args, **self.kwargs)
            if loss is None:
                generator = torch.Generator().manual_seed(0)
                return state_like(
                    y,
                    [
                        torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
                        for t in parts(y)
                    ],
                )
            with torch.enable_grad():
                leaf = state_like(y, [t.detach().requires_grad_() for t in parts(y)])
                value = loss(leaf)
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise TypeError(f"loss must return one number as a tensor, not {value!r}")
                grads = torch.autograd.grad(value, parts(leaf))
        return state_like(y, grads)

    def gradients(self, cotangent: State, **options: Any) -> Gradients:
        """Of a training step with these options."""
        with self.untouched(**options) as named, torch.enable_grad():
            x = state_like(self.x, [t.detach().requires_grad_() for t in parts(self.x)])
            y = self.stage.forward(x, *self.args, **self.kwargs)
            inputs = (*parts(x), *named.values())
            grads = torch.autograd.grad(
                parts(y), inputs, parts(cotangent), allow_unused=True, materialize_grads=True
            )
        width = len(parts(x))
        return Gradients(dict(zip(named, grads[width:], strict=True)), tuple(grads[:width]))

    def held_bytes(self, **options: Any) -> int:
        """What autograd holds between the passes, parameters and input aside."""
        with self.untouched(**options) as named, torch.enable_grad():
            x = state_like(self.x, [t.detach().requires_grad_() for t in parts(self.x)])
            known = {t.untyped_storage().data_ptr() for t in (*named.values(), *parts(x))}
            with saved_bytes(known) as held:
                self.stage.forward(x, *self.args, **self.kwargs)
        return sum(held.values())

    def evaluate(self, n: int, x: Any) -> Any:
        """f_n(x). States in, states out."""
        return in_stream(
            self.stage.residual(n, state_like(x, self.given(x)), *self.args, **self.kwargs)
        )

    def given(self, x: Any) -> list[Tensor]:
        """A state as the input was given."""
        return [t.to(mine.dtype) for t, mine in zip(parts(x), parts(self.x), strict=True)]


@contextmanager
def saved_bytes(known: set[int]) -> Iterator[dict[int, int]]:
    """Collects the sizes of the storages that autograd saves inside, by address, except those in
    ``known``."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield held
