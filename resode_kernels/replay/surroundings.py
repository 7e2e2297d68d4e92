"""The surroundings of an evaluation: states of random number generators, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..states import State, parts


class Surroundings:
    """The devices of a state, and the autocast settings when this object was made."""

    def __init__(self, x: State) -> None:
        devices = dict.fromkeys([torch.device("cpu"), *(t.device for t in parts(x))])
        self.devices = [device for device in devices if device.type != "meta"]
        types = dict.fromkeys(device.type for device in self.devices)
        self.types = [t for t in types if torch.amp.is_autocast_available(t)]
        self.autocast = self.autocast_now()

    def generators(self) -> dict[torch.device, Tensor]:
        return {device: generator_state(device) for device in self.devices}

    def autocast_now(self) -> list[tuple[bool, torch.dtype]]:
        return [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self.types]

    @contextmanager
    def restored(self, generators: dict[torch.device, Tensor]) -> Iterator[None]:
        """Context with the generators in the given states; afterwards they are as before."""
        now = {device: generator_state(device) for device in generators}
        try:
            for device, state in generators.items():
                set_generator_state(device, state)
            with self.autocast_as_it_was(), uncached_parametrizations():
                yield
        finally:
            for device, state in now.items():
                set_generator_state(device, state)

    def autocast_as_it_was(self) -> ExitStack:
        """Its cache is off: it would give casts made under no_grad to evaluations with grad."""
        stack = ExitStack()
        for name, (now, _), (enabled, dtype) in zip(
            self.types, self.autocast_now(), self.autocast, strict=True
        ):
            if enabled or now:
                stack.enter_context(
                    torch.autocast(name, dtype, enabled=enabled, cache_enabled=False)
                )
        return stack


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Context without ``parametrize.cached()``: its cache would give parameters computed under
    no_grad to evaluations with grad, whose gradients would be lost."""
    now = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = now


HAVE_ONE_GENERATOR = ("cpu", "mps")


def generator_state(device: torch.device) -> Tensor:
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    of_device = () if device.type in HAVE_ONE_GENERATOR else (device,)
    state: Tensor = module.get_rng_state(*of_device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    of_device = () if device.type in HAVE_ONE_GENERATOR else (device,)
    module.set_rng_state(state, *of_device)
