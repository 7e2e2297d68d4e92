"""Which of several tiles is fastest: measured once per kind of problem and remembered, in memory
and in a file.

Nothing is measured and the first tile is taken under ``torch.use_deterministic_algorithms(True)``
(the same tile gives the same roundings on every machine), while a CUDA graph is captured, with
``RESODE_TUNE=0``, and in the interpreter.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .spec import Tile

_remembered: dict[str, Tile] = {}


def cache_file() -> Path:
    folder = os.environ.get("RESODE_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "resode_kernels") / "tiles.json"


def measures(x: Tensor) -> bool:
    return (
        x.is_cuda
        and os.environ.get("RESODE_TUNE") != "0"
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def best(key: Sequence[Any], tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    """The fastest tile for problems of the kind ``key``. ``seconds`` may raise OutOfResources if a
    tile's kernel does not fit the device."""
    name = " ".join(map(str, key))
    if name not in _remembered:
        stored = _read().get(name)
        if stored in [list(tile) for tile in tiles]:
            _remembered[name] = Tile(*stored)
        else:
            _remembered[name] = min(tiles, key=lambda tile: _or_never(seconds, tile))
            _write(name, _remembered[name])
    return _remembered[name]


def _or_never(seconds: Callable[[Tile], float], tile: Tile) -> float:
    from triton.runtime.errors import OutOfResources

    try:
        return seconds(tile)
    except OutOfResources:
        return float("inf")


def _read() -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(cache_file().read_text())
    except (OSError, ValueError):  # no file, or an incomplete one
        return {}
    return stored


def _write(name: str, tile: Tile) -> None:
    """Replaces the file as a whole: other processes may be reading and writing it."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump({**_read(), name: tile}, new, indent=0)
        os.replace(new.name, file)
    except OSError:  # the file cannot be written: the next process measures again
        pass
