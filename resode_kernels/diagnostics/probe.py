"""Runs a stage at one input any number of times without changing the stage."""

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
    """The arguments of a call of a stage."""

    x: State
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def input_of(stage: Stage, run: Callable[[], Any]) -> StageInput:
    """The arguments with which ``run()`` calls ``stage``, detached, for ``diagnose`` and ``tune``:

        seen = rk.input_of(model.layer3, lambda: model(images))
        rk.tune(model.layer3, seen.x)

    If the stage is called several times, the last call counts.
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
        raise RuntimeError(
            f"run() did not call the stage ({type(stage).__name__}): it must run the model that "
            "contains this stage"
        )
    return calls[-1]


class Gradients(NamedTuple):
    parameters: dict[str, Tensor]
    """The gradients of the parameters that require grad, by name."""
    x: tuple[Tensor, ...]
    """The gradients of the tensors of the stage's input."""

    def errors(self, exact: Gradients) -> tuple[GradientError, GradientError]:
        """The errors of all parameter gradients together, and of the input's gradient."""
        return (
            compare(self.parameters.values(), exact.parameters.values()),
            compare(self.x, exact.x),
        )


class Probe:
    """Repeats ``stage(x, *args, **kwargs)``. Every run sees the same parameters, buffers and random
    numbers. Aliases of the parameters are differentiated, so that ``.grad`` is not written and
    hooks of parameters do not fire. Hooks of the stage do not fire either. Buffers are copies;
    generators, train/eval modes and options are restored."""

    def __init__(
        self, stage: Stage, x: State, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        if not isinstance(stage, Stage):
            raise TypeError(
                f"stage must be a stage (rk.MLPStage, rk.ResidualStage, …), not {type(stage)}; "
                "give the stage inside your model and that stage's input (rk.input_of records it)"
            )
        if any(map(is_sharded, stage.modules())):
            raise TypeError("the parameters of stage are sharded; diagnose it before fully_shard")
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
        """Context with ``options`` set, in which reconstructions that are not finite raise no
        error. Afterwards the stage is as before. Yields the stand-ins for its trainable parameters,
        by name."""
        stage, before = self.stage, self.stage.options
        parameters, slots = trainable([stage])
        aliases = [nn.Parameter(p.detach()) for p in parameters]
        numbers = {p: i for i, p in enumerate(parameters)}
        named = {name: aliases[numbers[p]] for name, p in stage.named_parameters() if p in numbers}
        buffers = [(m, key, b) for m in stage.modules() for key, b in m._buffers.items()]
        modes = [(m, m.training) for m in stage.modules()]
        try:
            stage.configure(**options, nonfinite="ignore")  # the gradient error shows it
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
        """∂L/∂x[N]. Without a loss, L = ⟨v, x[N]⟩ with a random v that is always the same."""
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
        """The gradients of a training step with these options."""
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
        """The bytes that autograd holds between the passes, without parameters and input."""
        with self.untouched(**options) as named, torch.enable_grad():
            x = state_like(self.x, [t.detach().requires_grad_() for t in parts(self.x)])
            known = {t.untyped_storage().data_ptr() for t in (*named.values(), *parts(x))}
            with saved_bytes(known) as held:
                self.stage.forward(x, *self.args, **self.kwargs)
        return sum(held.values())

    def evaluate(self, n: int, x: Any) -> Any:
        """f_n(x), from a state to a state."""
        return in_stream(
            self.stage.residual(n, state_like(x, self.given(x)), *self.args, **self.kwargs)
        )

    def given(self, x: Any) -> list[Tensor]:
        """The tensors of a state in the dtypes of the input."""
        return [t.to(mine.dtype) for t, mine in zip(parts(x), parts(self.x), strict=True)]


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
