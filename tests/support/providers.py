"""Who has layer-wise kernels: Triton, run by its interpreter where there is no GPU, and CUDA,
emulated there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import emulated
import numpy as np
import pytest
import torch

from resode_kernels.backends.layerwise import Kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Every provider with the dtypes that it computes in. What is read and written may be narrower.
FLOATS = [("triton", torch.float32), ("triton", torch.float64), ("cuda", torch.float32)]
NARROW = [torch.float16, torch.bfloat16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


class Provider(NamedTuple):
    name: str
    elementwise: ModuleType
    normalization: ModuleType
    layerwise: ModuleType
    widest: torch.dtype

    @property
    def kernels(self) -> Kernels:
        kernels: Kernels = self.layerwise.KERNELS
        return kernels


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Provider:
    if name == "triton":
        round_to_nearest(monkeypatch)
    elif DEVICE == "cuda":
        pytest.importorskip("resode_kernels_cuda")
    else:
        emulated.install(monkeypatch)
    files = ("elementwise", "normalization", "layerwise")
    modules = [importlib.import_module(f"resode_kernels.backends.{name}.{file}") for file in files]
    return Provider(name, *modules, torch.float64 if name == "triton" else torch.float32)


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 off to bfloat16, where a GPU rounds."""
    import triton
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source != triton.language.float32 or target != triton.language.bfloat16:
            result: np.ndarray = convert(data, source, target, mode)
            return result
        nearest = torch.from_numpy(np.array(data)).to("cpu", torch.bfloat16)
        return nearest.view(torch.uint16).numpy().copy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def divide(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few numbers become many tiles, and more tiles than a reduction has programs."""
    if provider.name == "triton":
        rows = importlib.import_module("resode_kernels.backends.triton.rows")
        monkeypatch.setattr(rows, "TILE", 32)
        monkeypatch.setattr(rows, "CHANNELS", 4)
    programs = {"triton": 5, "cuda": 2}[provider.name]
    monkeypatch.setattr(provider.normalization, "PROGRAMS", programs)


def count_launches(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every launch of an elementwise kernel."""
    seen: list[str] = []

    def counting(name: str, run: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: seen.append(name) or run(*args, **options)

    elementwise = provider.elementwise
    if provider.name == "triton":
        monkeypatch.setattr(elementwise, "launch", counting("triton", elementwise.launch))
    else:
        module = elementwise.module()
        for name in ("combine", "apply_activation"):
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return seen
