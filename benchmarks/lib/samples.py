"""Data that is there without a download: the Python files of the standard library, and
scikit-learn's handwritten digits."""

from __future__ import annotations

import sysconfig
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

HELD_OUT = 10
"""One file in so many is held out."""


class Text(NamedTuple):
    """Bytes, as uint8. Each file is in one of the two parts."""

    train: Tensor
    held_out: Tensor


@cache
def standard_library() -> Text:
    """The Python files of the standard library, without its tests. A hash of a file's name says in
    which part it is."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out & set(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT == 0
            parts[held_out].append(path.read_bytes())
    return Text(*(torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts))


def windows(text: Tensor, count: int, length: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of a text [count, length], and for each byte the next one."""
    begin = torch.randint(len(text) - length, (count, 1), generator=generator)
    piece = text[begin + torch.arange(length + 1)].long()
    return piece[:, :-1], piece[:, 1:]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images [n, 1, 8, 8], normalized, and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    return (images - images.mean()) / images.std(), torch.from_numpy(labels).long()
