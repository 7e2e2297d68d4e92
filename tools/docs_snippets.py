"""Runs the Python blocks of README and docs, and writes what they print into the pages:

    python tools/docs_snippets.py [PAGE ...]

The picture report.png that a page's blocks save becomes the page's picture, PAGE.png.
The ```python blocks of a page run in order and share their names. A ```text block shows what the
```python block above it prints."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from docs_pages import ROOT, Fence, fences, pages

IMPORTS = """
import torch
from torch import nn

import resode_kernels as rk

torch.manual_seed(0)
"""

BEFORE = {
    "README.md": IMPORTS
    + """
batch = torch.randn(8, 10)

def loss(y):
    return y.square().mean()

def train(model):
    loss(model(batch)).backward()
""",
    "docs/accuracy.md": IMPORTS
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = rk.MLPStage(8, 8, depth=8)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))

model, batch = Model(), torch.randn(16, 4)

def loss(y):
    return y.square().mean()

def train(model):
    loss(model(batch)).backward()
""",
    "docs/guide.md": IMPORTS
    + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.conv(x))

model = nn.Module()
model.layer3 = nn.Sequential(nn.Conv2d(4, 8, 1), Block(), Block())
""",
}
"""What the readers of a page have already: the names that its blocks use, by page."""


class Output(NamedTuple):
    block: Fence
    """A ```text block."""
    printed: str
    """What the ```python block above it prints."""


def run(page: Path, before: str = "") -> list[Output]:
    """Runs the blocks of a page after the code ``before``, on one thread: on a busy machine two
    threads would wait for each other longer than these small networks take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(page, before)
    finally:
        torch.set_num_threads(threads)


def _run(page: Path, before: str) -> list[Output]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(before, names)
    outputs, printed = [], ""
    for block in fences(page.read_text()):
        if block.language == "text":
            outputs.append(Output(block, printed))
        elif block.language == "python":
            capture = io.StringIO()
            code = "\n" * block.line + block.text  # errors then have the page's line numbers
            with contextlib.redirect_stdout(capture):
                exec(compile(code, str(page), "exec"), names)
            printed = capture.getvalue()
    return outputs


def run_documented(page: Path) -> list[Output]:
    return run(page, BEFORE.get(page.relative_to(ROOT).as_posix(), ""))


def with_snippets() -> list[Path]:
    return [p for p in pages() if any(f.language == "python" for f in fences(p.read_text()))]


def write(page: Path) -> None:
    text = page.read_text()
    for block, printed in run_documented(page):
        text = text.replace(f"```text\n{block.text}```", f"```text\n{printed}```")
    page.write_text(text)
    picture = Path("report.png")
    if picture.exists():
        shutil.move(picture, page.with_suffix(".png"))
    print(f"wrote {page}")


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or with_snippets()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # snippets write files
        for page in chosen:
            write(page)
