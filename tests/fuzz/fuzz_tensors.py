"""Tensors of every kind, by name: ways to lay out a value in memory, all of which stages take, and
things that are no plain floating-point tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Named(Tensor):
    """A harmless subclass: only its name differs."""


def transposed(v: Tensor) -> Tensor:
    return v.transpose(0, -1).contiguous().transpose(0, -1) if v.dim() else v


def spoiled(v: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory full of NaNs, or of the largest integers."""
    return v.new_full(shape, float("nan") if v.is_floating_point() else torch.iinfo(v.dtype).max)


def strided(v: Tensor) -> Tensor:
    """Every second entry, between NaNs."""
    memory = spoiled(v, (*v.shape, 2))
    memory[..., 0] = v
    return memory[..., 0]


def padded(v: Tensor) -> Tensor:
    """Rows that do not follow each other, with NaNs between them."""
    memory = spoiled(v, (*v.shape[:-1], v.shape[-1] + 3))
    memory[..., 1:-2] = v
    return memory[..., 1:-2]


def shifted(v: Tensor) -> Tensor:
    """Contiguous, beginning one element into its memory."""
    memory = spoiled(v, (v.numel() + 1,))
    memory[1:] = v.flatten()
    return memory[1:].view(v.shape)


def channels_last(v: Tensor) -> Tensor:
    return v.to(memory_format=torch.channels_last) if v.dim() == 4 else transposed(v)


def expanded(v: Tensor) -> Tensor:
    """Its first entry, repeated with stride 0: another value, of the same shape."""
    return v[:1].expand_as(v) if v.dim() and v.shape[0] else v


def constant(v: Tensor) -> Tensor:
    """A single number, repeated, as ``sum().backward()`` makes cotangents."""
    return v.new_tensor(0.0625).expand_as(v)


def negative(v: Tensor) -> Tensor:
    return torch._neg_view(-v)


def conjugate(v: Tensor) -> Tensor:
    if v.dtype not in (torch.float32, torch.float64):  # no complex numbers of 16 bits everywhere
        return negative(v)
    return torch.complex(v, -v).conj().imag


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda v: v,
    "transposed": transposed,
    "strided": strided,
    "padded": padded,
    "shifted": shifted,
    "channels_last": channels_last,
    "expanded": expanded,
    "constant": constant,
    "negative": negative,
    "conjugate": conjugate,
    "subclass": lambda v: v.as_subclass(Named),
}
LEAVES = ("leaf", "parameter", "view of a leaf", "computed", "frozen")


class Leaf:
    """An input x with a layout, and how autograd knows it: as a leaf, as a view of one, …"""

    def __init__(self, value: Tensor, layout: str, role: str) -> None:
        value = LAYOUTS[layout](value)
        self.role = role
        if role == "parameter" and type(value) is Tensor:
            value = nn.Parameter(value)
        self.leaf = value if role == "frozen" else value.requires_grad_()

    def tensor(self) -> Tensor:
        if self.role == "computed":
            return self.leaf * 1
        return self.leaf[:] if self.role == "view of a leaf" and self.leaf.dim() else self.leaf


def nested(t: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(t.detach()))


def quantized(t: Tensor) -> Tensor:
    return torch.quantize_per_tensor(t.detach().float(), 0.05, 0, torch.qint8)


def fake(t: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(t.detach())


def inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.detach().clone()


STRANGE: dict[str, Callable[[Tensor], Any]] = {
    **{
        str(dtype).removeprefix("torch."): lambda t, dtype=dtype: t.detach().to(dtype)
        for dtype in (
            *DTYPES.values(),
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    },
    "sparse": lambda t: t.detach().to_sparse(),
    "sparse with gradient": lambda t: t.detach().to_sparse().requires_grad_(),
    "mkldnn": lambda t: t.detach().float().to_mkldnn(),
    "nested": nested,
    "quantized": quantized,
    "meta": lambda t: t.detach().to("meta"),
    "fake": fake,
    "functional": lambda t: torch._to_functional_tensor(t.detach()),
    "two tensors": lambda t: TwoTensor(t.detach(), t.detach().clone()),
    "inference": inference,
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "uninitialized": lambda t: nn.UninitializedParameter(),
    "wider": lambda t: torch.cat([t, t], -1).detach(),
    "of no width": lambda t: t[..., :0].detach(),
    "of no rows": lambda t: t[:0].detach(),
    "of a dimension more": lambda t: t[None].detach(),
    "of a dimension less": lambda t: t[0].detach(),
    "of zero dimensions": lambda t: t.sum().detach(),
    "empty": lambda t: t.new_empty(0).detach(),
    "None": lambda t: None,
    "number": lambda t: 1.0,
    "text": lambda t: "x",
    "list": lambda t: t.tolist(),
    "tuple": lambda t: (t,),
    "array": lambda t: t.detach().float().numpy(),
    "type": lambda t: Tensor,
}
