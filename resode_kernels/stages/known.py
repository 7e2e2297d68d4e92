"""Whether a module is still the one that the kernels know.

Kernels compute what a module computed when it was made. Anyone can change a module later: its
attributes, its hooks, its ``forward``. Therefore everything that decides its result is compared at
every call. Nothing is kept between calls that could be out of date.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

HARMLESS = ("_compiled_call_impl",)  # of block.compile(), which computes the same


class Known:
    """A class of modules as the kernels know it.

    methods     those that compute the result; nobody may have replaced them in the class
    attributes  the attributes of an instance that must have these values
    """

    def __init__(self, kind: type[nn.Module], methods: tuple[str, ...], **attributes: Any) -> None:
        self.kind = kind
        self.methods = [(name, getattr(kind, name)) for name in methods]
        self.attributes = list(attributes.items())
        self.of_class = frozenset(dir(kind)).difference(HARMLESS)

    def difference(self, module: nn.Module) -> str | None:
        """What was changed, or None."""
        kind, own = self.kind, module.__dict__
        if type(module) is not kind:
            return f"is a {type(module).__name__}, not a {kind.__name__}"
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return f"is a {kind.__name__} with hooks"
        if not self.of_class.isdisjoint(own):
            changed = min(self.of_class.intersection(own))
            return f"is a {kind.__name__} with a {changed} of its own"
        for name, value in self.attributes:
            if own[name] != value:
                return f"is a {kind.__name__} with {name}={own[name]!r}"
        for name, method in self.methods:
            if getattr(kind, name) is not method:
                return f"is a {kind.__name__} whose {name} was replaced"
        return None


def tensor_of(module: nn.Module, name: str) -> Any:
    """A parameter or buffer, or a tensor in its place. Faster than ``getattr(module, name)``."""
    for group in (module._parameters, module._buffers):
        if name in group:
            return group[name]
    return getattr(module, name)


def global_hooks() -> bool:
    """Whether hooks are registered for all modules, see ``register_module_forward_hook``."""
    return bool(torch_module._has_any_global_hook())
