"""What must be true of every case: the result is that of plain PyTorch, or an error of the
package's own says why there is none. Nothing else has changed."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fuzz_wrappers import Inputs, Results
from torch import Tensor, nn

import resode_kernels as rk

PACKAGE = str(Path(rk.__file__).parent)
DIGITS = {torch.float64: 1e-7, torch.float32: 3e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""The largest relative error of results in a dtype."""


@contextmanager
def full_of_nans() -> Iterator[None]:
    """Fresh memory is full of NaNs, so that unwritten results show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_own(error: BaseException) -> None:
    """The package raised it on purpose, or a block of the user's did and the error names it."""
    notes = getattr(error, "__notes__", [str(error)])  # Python 3.10 has no notes
    if any("raised by block" in note for note in notes):
        return
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    if not last.filename.startswith(PACKAGE) or not line.startswith("raise"):
        raise AssertionError(f"the error is not the package's own: {error}") from error


class Snapshot:
    """What a call must leave as it is: inputs, parameters and modes."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        self.tensors = [leaf.leaf for leaf in (*inputs.state, *inputs.arguments.values())]
        self.tensors += module.parameters()
        self.values = [(t._version, t.detach().clone()) for t in self.tensors]
        self.module = module
        self.of_module = self.look()

    def look(self) -> Any:
        module = self.module
        return [
            {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)},
            [(name, m.training) for name, m in module.named_modules()],
            [(name, b.shape, b.dtype) for name, b in module.named_buffers()],
        ]

    def assert_unchanged(self) -> None:
        assert self.look() == self.of_module, "the module was changed"
        for t, (version, value) in zip(self.tensors, self.values, strict=True):
            assert t._version == version, "an input or a parameter was written to"
            torch.testing.assert_close(t.detach(), value, rtol=0, atol=0, equal_nan=True)


def dense(t: Tensor) -> Tensor:
    return t.detach().as_subclass(Tensor).resolve_neg().double()


def assert_equal(got: Results, expected: Results, digits: float, overflows: bool = False) -> None:
    """None is the gradient zero. Where plain PyTorch's result is not finite, neither is this. If
    the input ``overflows``, more entries may be NaN: kernels multiply infinity by the zeros that
    pad their tiles."""
    assert got.keys() == expected.keys()
    norms = {
        name: float(dense(t).nan_to_num(0, 0, 0).norm())
        for name, t in expected.items()
        if t is not None
    }
    largest = max((norm for name, norm in norms.items() if name[0] != "y"), default=0.0)
    for name, t in expected.items():
        mine = got[name]
        if t is None and mine is None:
            continue
        shape = (t if t is not None else mine).shape  # type: ignore[union-attr]
        a, b = (torch.zeros(shape) if r is None else r for r in (mine, t))
        assert a.shape == b.shape, f"{name} has the shape {list(a.shape)}, not {list(b.shape)}"
        a, b = dense(a), dense(b)
        finite = a.isfinite()
        assert not (finite & ~b.isfinite()).any(), f"{name} hides what is not finite: {a} {b}"
        assert overflows or not (b.isfinite() & ~finite).any(), f"{name} is not finite: {a} {b}"
        error = float((a - b)[finite].norm())
        # A gradient may be the small difference of large ones.
        scale = max(norms.get(name, 0.0), 0.0 if name[0] == "y" else 0.2 * largest, 1e-3)
        assert error <= digits * scale, f"{name} is off by {error / scale:.1e}: {a} {b}"
