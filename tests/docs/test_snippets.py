"""Every Python block of README and docs runs as it stands, and prints what the page shows.

The blocks of a page run in order and share their names. A ```text block below a ```python block
shows what that block prints; lines must begin with the same words, since numbers differ from run
to run.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, fences, pages

MODEL = """
import torch
from torch import nn

import resode_kernels as rk

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
    model(batch).square().mean().backward()
"""

BEFORE = {
    "README.md": """
import torch
batch = torch.randn(8, 10)

def loss(y):
    return y.square().mean()

def train(model):
    loss(model(batch)).backward()
""",
    "docs/accuracy.md": MODEL,
    "docs/guide.md": """
import torch
from torch import nn

import resode_kernels as rk

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
"""What a reader of a page has already: names that its blocks use, by page."""

PAGES = [page for page in pages() if any(f.language == "python" for f in fences(page.read_text()))]


def gist(text: str) -> list[str]:
    """The words that lines begin with: numbers and choices differ from run to run."""
    return [line.split()[0] for line in text.splitlines() if line and line[0].isalpha()]


def run(page: Path) -> int:
    """Runs the blocks of a page; returns how many outputs were compared."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(BEFORE.get(page.relative_to(ROOT).as_posix(), ""), names)
    printed, shown = "", 0
    for block in fences(page.read_text()):
        if block.language == "text":
            assert gist(printed) == gist(block.text), f"{page}:{block.line}"
            shown += 1
        elif block.language == "python":
            output = io.StringIO()
            lines = "\n" * block.line + block.text  # so that errors have the page's line numbers
            with contextlib.redirect_stdout(output):
                exec(compile(lines, str(page), "exec"), names)
            printed = output.getvalue()
    return shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the pages tell of them
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run(page)
    if page.name == "tutorial.md":
        assert shown >= 4
        assert (tmp_path / "report.png").is_file()


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('error 1e-2')\n```\n```text\nerror 3e-2\n```\n")
    names = pytest.MonkeyPatch()
    names.setitem(globals(), "ROOT", tmp_path)
    with names.context():
        assert run(page) == 1
    page.write_text(page.read_text().replace("error 3e-2", "mistake 3e-2"))
    names.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        run(page)
    names.undo()
