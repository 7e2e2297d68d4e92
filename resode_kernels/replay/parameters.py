"""The places where modules keep their parameters, and stand-ins in these places."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn


class Slot(NamedTuple):
    """A place where a module keeps a parameter, and the parameter's number in the stage."""

    owner: nn.Module
    name: str
    number: int

    def put(self, parameter: nn.Parameter | None) -> None:
        if type(self.owner).__setattr__ is nn.Module.__setattr__:
            self.owner._parameters[self.name] = parameter
        else:  # the module reacts to new parameters, as nn.RNNBase does
            setattr(self.owner, self.name, parameter)


def trainable(
    modules: Sequence[nn.Module],
) -> tuple[list[nn.Parameter], dict[nn.Module, list[Slot]]]:
    """The parameters that require grad, each once, and the slots of every module. Parameters that
    FSDP manages inside a module have no slots, because FSDP puts them in place."""
    numbers: dict[nn.Parameter, int] = {}
    slots: dict[nn.Module, list[Slot]] = {}
    for module in dict.fromkeys(modules):
        managed = managed_modules(module)
        slots[module] = []
        for owner in module.modules():
            for name, p in owner._parameters.items():
                if p is not None and p.requires_grad:
                    refuse_unusable(owner, name, p)
                    slot = Slot(owner, name, numbers.setdefault(p, len(numbers)))
                    if owner not in managed:
                        slots[module].append(slot)
    return list(numbers), slots


def refuse_unusable(owner: nn.Module, name: str, parameter: Tensor) -> None:
    """Raises for parameters that autograd cannot save."""
    whose = f"the parameter {name!r} of a {type(owner).__name__} in a block"
    if type(parameter) is nn.UninitializedParameter:
        raise ValueError(
            f"{whose} is not initialized yet: call the stage once under torch.no_grad() before "
            "training, as lazy modules ask for"
        )
    if parameter.is_inference():
        raise RuntimeError(
            f"{whose} was made in torch.inference_mode(), so it has no gradients: make the blocks "
            "outside of inference mode"
        )


class Held(NamedTuple):
    """A tensor that replays need as the forward pass had it. It is not copied."""

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Held:
        return cls(tensor, None if tensor.is_inference() else tensor._version)

    def as_it_was(self, what: str) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                f"{what} was changed in place after the forward pass. The backward pass runs the "
                "blocks again and needs it as it was: change it after the backward pass, or put "
                "another tensor in its place"
            )
        return self.tensor


def frozen(module: nn.Module, sharded: bool) -> list[tuple[Slot, Held]]:
    """The slots of the parameters that require no grad, with what is in them."""
    managed = managed_modules(module) if sharded else ()
    return [
        (Slot(owner, name, -1), Held.of(p))
        for owner in module.modules()
        if owner not in managed
        for name, p in owner._parameters.items()
        if p is not None and not p.requires_grad
    ]


def replaced(held: Sequence[tuple[Slot, Held]], block: object) -> list[tuple[Slot, nn.Parameter]]:
    """What must be put back into slots of frozen parameters, as after a ``functional_call``."""
    result: list[tuple[Slot, nn.Parameter]] = []
    for slot, own in held:
        tensor = own.as_it_was(f"the parameter {slot.name!r} of {block}")
        if slot.owner._parameters.get(slot.name) is not tensor:
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            result.append((slot, tensor))
    return result


def stand_ins_for(
    slots: Sequence[Slot],
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    all_of: bool,
) -> dict[int, nn.Parameter]:
    """Stand-ins for the parameters in some slots, by number: detached aliases of what the forward
    pass saved. Where the parameter itself will do there is none, so that threads may use the module
    meanwhile. It will not if it has hooks, which are to see only the finished gradient, if it was
    replaced since the forward pass, or if ``all_of`` them are asked for."""
    result: dict[int, nn.Parameter] = {}
    for slot in slots:
        now = slot.owner._parameters.get(slot.name)
        will_do = now is not None and now is saved[slot.number] and now.requires_grad
        if all_of or not will_do or saved[slot.number]._backward_hooks:
            result[slot.number] = nn.Parameter(saved[slot.number].detach(), needs[slot.number])
    return result


@contextmanager
def standing_in(
    stand_ins: Sequence[tuple[Slot, nn.Parameter]], modes: Sequence[tuple[nn.Module, bool]]
) -> Iterator[None]:
    """Context with the stand-ins in their slots and the modules in the given train/eval modes."""
    now = [(slot, slot.owner._parameters[slot.name]) for slot, _ in stand_ins]
    changed = [(m, mode) for m, mode in modes if m.training != mode]
    try:
        for slot, parameter in stand_ins:
            slot.put(parameter)
        for m, mode in changed:
            m.training = mode
        yield
    finally:
        for slot, own in now:
            slot.put(own)
        for m, mode in changed:
            m.training = not mode


def managed_modules(module: nn.Module) -> set[nn.Module]:
    """The modules whose parameters FSDP manages."""
    return {m for unit in module.modules() if is_sharded(unit) for m in unit.modules()}


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module. FSDP then puts its parameters in place
    while it runs, and reduces their gradients itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
