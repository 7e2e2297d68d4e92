"""The bytes that kernels move between the DRAM of a GPU and its units, counted from their own loads
and stores.

    with counting() as launches:
        …                           # Triton kernels under TRITON_INTERPRET=1, torch operations

Every kernel that Triton's interpreter runs is a launch, and so is every torch operation that is one
on a GPU. Views, metadata and uninitialised memory cost nothing. One rule holds for all of them: the
cache is cold when a launch begins, and then every byte that the launch touches crosses DRAM once on
the way in, unless the launch has written it before, and once on the way out if it is written,
however many programs touch it. That takes a cache which holds
what the launch comes back to, ``Launch.revisited``; what the caches serve meanwhile are the bytes
as issued. A torch operation reads its arguments once, except where a GPU needs two launches for it
(``TWICE``). FLOPs are those of products (tl.dot, mm, convolution, …): nothing else is near a GPU's
limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton.runtime import interpreter

Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class Launch:
    """Bytes and FLOPs of one launch. Elements that are masked out do not count."""

    name: str
    grid: tuple[int, ...] = ()
    """() for a torch operation."""
    issued_loads: int = 0
    issued_stores: int = 0
    loads: int = 0
    """Each byte once, and those not at all that the launch has stored before."""
    stores: int = 0
    revisited: int = 0
    """Bytes loaded or stored more than once: what the cache has to hold meanwhile."""
    flops: int = 0
    count: int = 1
    """Of launches, if this is the sum of several."""

    @property
    def dram(self) -> int:
        return self.loads + self.stores

    @property
    def issued(self) -> int:
        return self.issued_loads + self.issued_stores


@contextmanager
def counting(known: dict[Any, Launch] | None = None) -> Iterator[list[Launch]]:
    """The launches of the block, in order.

    ``known``  kernels' launches by what they were called with, to save time: one that is there is
               not run but counts as before, any other is added. What the block computes is wrong
               then, so nothing that a kernel loads or stores may depend on it.
    """
    launches: list[Launch] = []
    kernels = _Kernels(launches, known)
    numbers = np.errstate(all=None if known is None else "ignore")
    with numbers, kernels.watched(), _Operations(launches, kernels):
        yield launches


def sum_by_kernel(launches: Iterable[Launch]) -> dict[str, Launch]:
    """The sum over the launches of each kernel; ``revisited`` is the largest."""
    sums: dict[str, Launch] = {}
    for launch in launches:
        total = sums.setdefault(launch.name, Launch(launch.name, count=0))
        for name in ("issued_loads", "issued_stores", "loads", "stores", "flops", "count"):
            setattr(total, name, getattr(total, name) + getattr(launch, name))
        total.revisited = max(total.revisited, launch.revisited)
    return sums


# ------------------------------------------------------------------------------- Triton kernels


class _Accesses:
    """The elements that a launch loads, or stores."""

    def __init__(self) -> None:
        self.elements: list[tuple[Addresses, int]] = []
        """Addresses, and the size of an element."""
        self.times: list[int] = []
        """Of each of them, among the loads and stores of the launch."""

    def add(self, pointers: Any, mask: Any, time: int) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        self.elements.append((addresses.astype(np.int64), size))
        self.times.append(time)

    def issued(self) -> int:
        return sum(len(addresses) * size for addresses, size in self.elements)

    def grain(self) -> int:
        """The smallest element, of which the others are multiples."""
        return min((size for _, size in self.elements), default=1)

    def distinct(self, grain: int) -> tuple[Addresses, Addresses, Addresses]:
        """Where they are, in grains, each once; when each was met first; and those that occur more
        than once."""
        nothing = np.empty(0, np.int64)
        every = [(a[:, None] + np.arange(0, size, grain)).ravel() for a, size in self.elements]
        times = np.repeat(np.array(self.times, np.int64), [len(places) for places in every])
        places, first, counts = np.unique(
            np.concatenate([nothing, *every]), return_index=True, return_counts=True
        )
        return places, times[first], places[counts > 1]


class _Kernels:
    """Watches Triton's interpreter: the grids it runs, and what its builder does meanwhile."""

    def __init__(self, launches: list[Launch], known: dict[Any, Launch] | None) -> None:
        self.launches, self.known = launches, known
        self.running = False
        self.loaded, self.stored, self.flops, self.clock = _Accesses(), _Accesses(), 0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Loads and stores without a mask, and those of descriptors, end in the masked ones.
        hooks = {
            "create_masked_load": self.on_load,
            "create_masked_store": self.on_store,
            "create_atomic_rmw": self.on_atomic_rmw,
            "create_atomic_cas": self.on_atomic_cas,
            "create_dot": self.on_dot,
        }
        with ExitStack() as hooked:
            for name, hook in hooks.items():
                hooked.enter_context(_before(interpreter.InterpreterBuilder, name, hook))
            run = interpreter.GridExecutor.__call__
            hooked.enter_context(
                patch.object(interpreter.GridExecutor, "__call__", self.counted(run))
            )
            yield

    def on_load(self, pointers: Any, mask: Any, *_: Any) -> None:
        self.clock += 1
        self.loaded.add(pointers, mask, self.clock)

    def on_store(self, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self.clock += 1
        self.stored.add(pointers, mask, self.clock)

    def on_atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self.on_load(pointers, mask)
        self.on_store(pointers, value, mask)

    def on_atomic_cas(self, pointers: Any, *_: Any) -> None:
        everywhere = interpreter.TensorHandle(np.ones_like(pointers.data, bool), tl.int1)
        self.on_load(pointers, everywhere)
        self.on_store(pointers, None, everywhere)

    def on_dot(self, a: Any, b: Any, *_: Any) -> None:
        self.flops += 2 * a.data.size * b.data.shape[-1]

    def counted(self, run: Callable[..., None]) -> Callable[..., None]:
        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            call = (executor.fn, executor.grid, *_signature([*args, *kwargs.items()]))
            if self.known is not None and call in self.known:
                self.launches.append(self.known[call])
                return
            self.loaded, self.stored, self.flops, self.clock = _Accesses(), _Accesses(), 0, 0
            self.running = True
            try:
                run(executor, *args, **kwargs)
            finally:
                self.running = False
            grain = min(self.loaded.grain(), self.stored.grain())
            loads, first_loads, loaded_again = self.loaded.distinct(grain)
            stores, first_stores, stored_again = self.stored.distinct(grain)
            _, i, j = np.intersect1d(loads, stores, assume_unique=True, return_indices=True)
            written_before = np.count_nonzero(first_stores[j] < first_loads[i])
            self.launches.append(
                Launch(
                    executor.fn.__name__,
                    tuple(interpreter.interpreter_builder.grid_dim),
                    issued_loads=self.loaded.issued(),
                    issued_stores=self.stored.issued(),
                    loads=grain * (len(loads) - written_before),
                    stores=grain * len(stores),
                    revisited=grain * len(np.union1d(loaded_again, stored_again)),
                    flops=self.flops,
                )
            )
            if self.known is not None:
                self.known[call] = self.launches[-1]

        return launch


def _signature(arguments: list[Any]) -> Iterator[Any]:
    """All that matters of a kernel's arguments. Of tensors that is how they are laid out, and which
    of them are the same."""
    places: dict[int, int] = {}
    for one in arguments:
        if isinstance(one, Tensor):
            place = places.setdefault(one.data_ptr(), len(places))
            yield one.shape, one.stride(), one.dtype, place
        else:
            yield one


def _before(owner: type, name: str, hook: Callable[..., None]) -> AbstractContextManager[Any]:
    """Calls hook with a method's arguments before every call of the method."""
    method = getattr(owner, name)

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return method(self, *args, **kwargs)

    return patch.object(owner, name, hooked)


# ---------------------------------------------------------------------------- torch operations

# They make memory without looking at what is in their arguments, and leave it as it is,
UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# or fill it.
FILLING = (
    "zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones",
    "full", "full_like", "new_full", "fill_",
)  # fmt: skip
# They are two launches at least, and both read these arguments, if called like this: batch
# normalization in training begins with sums over the batch, a convolution's two gradients are two
# products.
TWICE: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], bool]]] = {
    "native_batch_norm": (("input",), lambda values: values["training"]),
    "native_batch_norm_backward": (("grad_out", "input"), lambda values: values["train"]),
    "convolution_backward": (("grad_output",), lambda values: all(values["output_mask"][:2])),
}


class _Operations(TorchDispatchMode):
    """Watches torch: an operation reads its arguments and writes its results."""

    def __init__(self, launches: list[Launch], kernels: _Kernels) -> None:
        super().__init__()
        self.launches, self.kernels = launches, kernels

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        # The interpreter's own copies are no part of the kernel that it runs.
        if self.kernels.running or function.is_view or name in UNINITIALISED:
            return result
        values = _by_name(function._schema, args, kwargs)
        read, written = _touched(function._schema, name, values, result)
        if written:
            names, like_this = TWICE.get(name, ((), bool))
            twice = [values[argument] for argument in names] if like_this(values) else []
            loads, stores = _bytes(read) + _bytes(twice), _bytes(written)
            flops = flop_registry.get(function.overloadpacket)
            self.launches.append(
                Launch(
                    name,
                    issued_loads=loads,
                    issued_stores=stores,
                    loads=loads,
                    stores=stores,
                    flops=flops(*args, **kwargs, out_val=result) if flops else 0,
                    count=2 if twice else 1,
                )
            )
        return result


def _by_name(schema: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments."""
    return {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}


def _touched(
    schema: Any, name: str, values: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    read, written = [], []
    for argument in schema.arguments:
        tensors = _tensors(values.get(argument.name))
        mutable = argument.alias_info is not None and argument.alias_info.is_write
        if mutable:
            written += tensors
        overwritten = argument.is_out or (mutable and name == "copy_")
        if not (overwritten or name in FILLING):
            read += tensors
    known = {t.untyped_storage().data_ptr() for t in _tensors(values)}
    written += [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in known]
    return read, written


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    """In memory, of different tensors: an expanded one has fewer than elements, a transposed one
    is no other."""
    sizes: dict[int, int] = {}
    for t in tensors:
        elements = math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
        sizes[t.data_ptr()] = max(sizes.get(t.data_ptr(), 0), elements * t.element_size())
    return sum(sizes.values())
