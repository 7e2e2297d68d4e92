"""Tensors as the compiled functions take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import Rows

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def array(t: Tensor | None) -> tuple[int, str]:
    """Address and dtype; address 0 for None."""
    return (0, "float32") if t is None else (t.data_ptr(), DTYPES[t.dtype])


def rows_of(t: Tensor) -> tuple[int, int, int, bool]:
    """Groups, positions, channels of a dense tensor, and whether neighbouring channels adjoin."""
    rows = Rows.of(t)
    return rows.groups, rows.positions, rows.channels, rows.strides[2] == 1
