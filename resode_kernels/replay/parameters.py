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
        managed = {m for unit in module.modules() if is_sharded(unit) for m in unit.modules()}
        slots[module] = []
        for owner in module.modules():
            for name, p in owner._parameters.items():
                if p is not None and p.requires_grad:
                    slot = Slot(owner, name, numbers.setdefault(p, len(numbers)))
                    if owner not in managed:
                        slots[module].append(slot)
    return list(numbers), slots


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


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module. FSDP then puts its parameters in place
    while it runs, and reduces their gradients itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
