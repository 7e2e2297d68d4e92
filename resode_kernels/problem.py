"""What a backend is given to run: a block, its parameters and a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from . import recording
from .kinks import signs_shape
from .options import Method

Shape = Sequence[int]


class ConvLayer(NamedTuple):
    """A layer of ``functional.conv_stage``, stacked over blocks: a convolution, then batch
    normalization.

    weight          [blocks, out, in, size, size], size 1 or 3
    gamma, beta     [blocks, out] or None
    mean, variance  [blocks, out] to normalize by, without gradients; None: normalize by the batch
    """

    weight: Tensor
    gamma: Tensor | None = None
    beta: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None


class Kept(NamedTuple):
    """What the forward pass keeps for the reverse pass, besides one state and the parameters."""

    anchors: Tensor
    """[count, …], in a layout of the backend's choice: the states x[k], x[2k], …, k =
    ``anchor_every``. With ``recorded`` all states that are kept (``Method.increments``), of which
    the last is x̂[N−1]."""
    codes: Tensor | None = None
    """uint8: one after the other, the codes of every recorded increment (``recording.py``)."""
    scales: Tensor | None = None
    """bfloat16 [recorded increments, rows, groups of a row]"""
    signs: Tensor | None = None
    """uint8: which arguments u of relu were positive, in every evaluation of the forward pass. Bit
    j of byte b of a row is u > 0 for the row's argument 8 b + j.
    mlp: [evaluations, rows, ⌈hidden/8⌉], u = W1 x + b1.
    conv: [evaluations, bytes], the input u of every layer, one after the other, each [images ·
    height · width, ⌈channels/8⌉]."""


PER_LAYER = len(ConvLayer._fields)
STACKED = {"mlp": ("w1", "b1", "w2", "b2"), "linear": ("weight",)}
"""The names of the parameters that are stacked over blocks."""


class Problem(NamedTuple):
    block: str
    """``"mlp"``, ``"linear"`` or ``"conv"``."""
    activation: str
    """σ; ``"identity"`` for blocks without an activation."""
    parameters: tuple[Tensor | None, ...]
    """mlp: w1, b1, w2, b2, stacked over blocks. linear: weight, stacked over blocks.
    conv: for every block and each of its layers the convolution's weight [out, in, size, size] and
    the normalization's weight, bias, mean and variance. A layer whose mean and variance are None
    normalizes by its batch. A tied stage has one block."""
    method: Method
    layers: int = 0
    """conv: the number of layers of a block."""
    epsilon: float = 0.0
    """conv: ε of batch normalization."""

    @property
    def tied(self) -> bool:
        if self.block == "conv":
            return len(self.parameters) == PER_LAYER * self.layers
        first = self.parameters[0]
        return first is not None and first.shape[0] == 1

    def name_of(self, i: int) -> str:
        """What error messages call the i-th parameter."""
        if self.block != "conv":
            return STACKED[self.block][i]
        n, k = divmod(i, PER_LAYER * self.layers)
        return f"{ConvLayer._fields[k % PER_LAYER]} of block {n}, layer {k // PER_LAYER + 1}"

    def layers_of(self, n: int) -> list[tuple[Tensor | None, ...]]:
        """conv: the tensors of each of block n's layers."""
        first = n * PER_LAYER * self.layers
        starts = range(first, first + PER_LAYER * self.layers, PER_LAYER)
        return [self.parameters[i : i + PER_LAYER] for i in starts]

    @property
    def convolutions(self) -> list[tuple[int, int, int]]:
        """conv: channels in, channels out and window size of each layer of a block."""
        if not self.layers:
            return []
        shapes = []
        for weight, *_ in self.layers_of(0):
            assert weight is not None
            shapes.append((weight.shape[1], weight.shape[0], weight.shape[2]))
        return shapes

    @property
    def evaluations(self) -> int:
        """The number of evaluations in the forward pass."""
        return self.method.steps * (2 if self.method.scheme == "heun" else 1)

    @property
    def statistics(self) -> tuple[int, int]:
        """The shape of the batch statistics that the forward pass returns: for every evaluation,
        the mean and the unbiased variance of every channel of every layer. Empty unless conv."""
        channels = sum(out for _, out, _ in self.convolutions) if self.layers else 0
        return self.evaluations, 2 * channels

    @property
    def blocks(self) -> int:
        """The number of blocks that the steps use."""
        return self.method.steps + (1 if self.method.scheme == "heun" else 0)

    @property
    def is_recorded(self) -> bool:
        return self.method.reverse_rule == "recorded"

    @property
    def keeps_signs(self) -> bool:
        """Whether the forward pass keeps the signs of relu's arguments."""
        method = self.method
        return method.kinks and self.activation == "relu" and method.reverse_rule != "exact"

    @property
    def anchor_count(self) -> int:
        if self.is_recorded:
            return self.method.increments().count(0)
        anchor_every = self.method.anchor_every
        return (self.method.steps - 1) // anchor_every if anchor_every else 0

    @property
    def kept_names(self) -> list[str]:
        """The fields of ``Kept`` that the forward pass fills."""
        recorded = ["codes", "scales"] if self.is_recorded else []
        return ["anchors", *recorded, *(["signs"] if self.keeps_signs else [])]

    def kept(self, x: Shape) -> dict[str, tuple[Shape, torch.dtype | None]]:
        """The shape and the dtype of each field of ``Kept`` for a state of the shape x; None: the
        dtype of the state."""
        shapes: dict[str, tuple[Shape, torch.dtype | None]] = {
            "anchors": ((self.anchor_count, *x), None)
        }
        if not (self.method.bits or self.method.kinks):  # asked first: it is the common case
            return shapes
        row = x[1]
        rows = math.prod(x) // row if row else 0
        if self.is_recorded:
            recorded = [bits for bits in self.method.increments() if bits]
            codes = sum(recording.code_bytes(row, bits) for bits in recorded)
            shapes["codes"] = ((rows * codes,), torch.uint8)
            shapes["scales"] = ((len(recorded), rows, recording.groups(row)), torch.bfloat16)
        if self.keeps_signs:
            shapes["signs"] = (self.signs(rows), torch.uint8)
        return shapes

    def signs(self, rows: int) -> Shape:
        """The shape of ``Kept.signs`` for a state of so many rows."""
        first = self.parameters[0]
        assert first is not None
        conv = self.block == "conv"
        widths = [width for width, _, _ in self.convolutions] if conv else [first.shape[1]]
        return signs_shape(self.evaluations, rows, widths, flat=conv)

    def kept_of(self, tensors: Sequence[Tensor]) -> Kept:
        """The fields of ``kept_names``, from their list."""
        if not (self.method.bits or self.method.kinks):
            (anchors,) = tensors
            return Kept(anchors)
        return Kept(**dict(zip(self.kept_names, tensors, strict=True)))

    def flat(self) -> tuple[Any, ...]:
        """The fields as ``torch.library`` takes them: ``method`` is replaced by its fields."""
        return (*self[:_METHOD], *self.method, *self[_METHOD + 1 :])

    @staticmethod
    def from_flat(values: Sequence[Any]) -> Problem:
        end = _METHOD + len(Method._fields)
        fields = list(values[_METHOD:end])
        fields[_BITS] = tuple(fields[_BITS])  # a list if torch has had it
        return Problem._make((*values[:_METHOD], Method._make(fields), *values[end:]))


_METHOD = Problem._fields.index("method")
_BITS = Method._fields.index("bits")
FLAT = len(Problem._fields) - 1 + len(Method._fields)
"""The number of values in ``Problem.flat()``."""
_SCHEMA_TYPES: dict[Any, str] = {
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    tuple[Tensor | None, ...]: "Tensor?[]",
    tuple[int, ...]: "int[]",
}


def schema() -> str:
    """The arguments ``Problem.flat()`` as a ``torch.library`` schema."""
    hints = list(get_type_hints(Problem).items())
    hints[_METHOD : _METHOD + 1] = get_type_hints(Method).items()
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in hints)
