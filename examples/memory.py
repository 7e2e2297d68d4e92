"""Activation memory: what autograd keeps between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Held(dict[int, int]):
    """The sizes of memory blocks in bytes, by their addresses."""

    @property
    def mib(self) -> float:
        return sum(self.values()) / 2**20


@contextmanager
def activations(model: nn.Module) -> Iterator[Held]:
    """Collects what the forward passes inside this context keep for their backward passes, without
    the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = Held()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield held
