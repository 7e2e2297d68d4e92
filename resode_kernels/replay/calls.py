"""Calls of blocks, with the arguments that a stage passes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..states import State, parts, state_like


class Call:
    """A call ``module(x, *args, **kwargs)``, the same for every block of a stage, with x in the
    dtypes of the stage's input."""

    def __init__(self, x: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.dtypes = [t.dtype for t in parts(x)]
        self.args, self.kwargs = args, kwargs

    def given(self, x: State) -> Any:
        """The state in the dtypes in which modules receive it."""
        return state_like(x, [t.to(dtype) for t, dtype in zip(parts(x), self.dtypes, strict=True)])

    def __call__(self, module: nn.Module, given: Any) -> Any:
        return module(given, *self.args, **self.kwargs)


class RepeatedCall(Call):
    """A call that replays repeat. The tensors among its arguments, also those in lists and dicts,
    are held only inside ``filled``; other arguments must not hold any."""

    def __init__(self, x: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(x, (), {})
        leaves, self.tree = tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [out_of_inference(leaves[i]) for i in self.places]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.objects = [leaf for leaf in self.leaves if not isinstance(leaf, PLAIN)]
        self.refuse_tensors_in_objects(args, kwargs)

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        leaves: list[Any] = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        self.args, self.kwargs = tree_unflatten(leaves, self.tree)
        self.filling = leaves, [t._version for t in tensors]
        try:
            yield
            self.refuse_changes()
        finally:
            self.args, self.kwargs = (), {}
            del self.filling

    def refuse_changes(self) -> None:
        """Raises if a block has changed an argument, because a replay would change it again."""
        leaves, versions = self.filling
        now, tree = tree_flatten((self.args, self.kwargs))
        if tree != self.tree or any(a is not b for a, b in zip(now, leaves, strict=True)):
            before = tree_unflatten(leaves, self.tree)
            old, new = (dict(named(*arguments)) for arguments in (before, (self.args, self.kwargs)))
            name, value = next((n, v) for n, v in new.items() if not same_items(v, old[n]))
            raise RuntimeError(changes(name, value))
        self.refuse_tensors_in_objects(self.args, self.kwargs)
        tensors = [leaves[place] for place in self.places]
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(changes(name_of(tensor, self.args, self.kwargs), tensor))

    def refuse_tensors_in_objects(self, args: Any, kwargs: Any) -> None:
        for value in self.objects:
            if holds_tensors(value):
                raise TypeError(
                    f"{name_of(value, args, kwargs)} {described(value)} that holds tensors. A "
                    "stage runs its blocks again in the backward pass, and there it must know "
                    "every tensor: pass tensors, or lists, tuples and dicts of them. For a cache "
                    "of keys and values pass use_cache=False; with backward='stored' every block "
                    "runs only once"
                )


def out_of_inference(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments with their names in error messages."""
    for i, value in enumerate(args, 1):
        yield f"argument {i} after the state is", value
    for key, value in kwargs.items():
        yield f"the argument {key!r} is", value


def name_of(leaf: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The name of the argument that a leaf is in."""
    return next(
        name
        for name, value in named(args, kwargs)
        if any(other is leaf for other in tree_leaves(value))
    )


def same_items(a: Any, b: Any) -> bool:
    (leaves, tree), (others, other_tree) = tree_flatten(a), tree_flatten(b)
    return tree == other_tree and all(x is y for x, y in zip(leaves, others, strict=True))


def changes(name: str, value: object) -> str:
    return (
        f"{name} {described(value)} that a block changes. A stage runs its blocks again in the "
        "backward pass, and they would change it again: give a block its own copy, for a cache of "
        "keys and values pass use_cache=False, or use backward='stored', which runs every block "
        "only once"
    )


def described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(type, ModuleType, FunctionType, MethodType, nn.Module),
)
"""The types of objects that are not searched for tensors."""


def holds_tensors(value: object) -> bool:
    """Whether an object has tensors in its attributes or items, or in those of these."""
    seen, inner = set(), [value]
    while inner:
        value = inner.pop()
        if isinstance(value, Tensor):
            return True
        if id(value) in seen or isinstance(value, PLAIN):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            inner += value
        inner += getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            inner += [getattr(value, name, None) for name in names]
    return False
