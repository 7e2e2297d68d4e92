"""The pages of the documentation and what is in them. For tests and for the other docs_*.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

FENCE = re.compile(r"^(?P<mark>```+)(?P<language>\S*)\n(?P<text>.*?)^(?P=mark)$", re.M | re.S)
LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^()\s]+)(?=\))")
HEADING = re.compile(r"^#+ (.+)$", re.M)


def pages() -> list[Path]:
    """All Markdown files that people read, except templates and the log of an experiment."""
    folders = ["", "docs", "benchmarks", "benchmarks/results", "benchmarks/results/paper"]
    return [
        page for folder in [*folders, "examples"] for page in sorted((ROOT / folder).glob("*.md"))
    ]


class Fence(NamedTuple):
    language: str
    text: str
    line: int
    """The number of the line above ``text``."""


def fences(text: str) -> list[Fence]:
    """The fenced blocks of a page."""
    return [
        Fence(m["language"], m["text"], text.count("\n", 0, m.start()) + 1)
        for m in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A page without its fenced blocks and without code inside a line."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def links(text: str) -> Iterator[tuple[str, str]]:
    """File and anchor of every link into the repository. Either may be empty."""
    for match in LINK.finditer(FENCE.sub("", text)):
        if "://" not in match["target"] and not match["target"].startswith("mailto:"):
            file, _, anchor = match["target"].partition("#")
            yield file, anchor


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in found.items() for n in range(last + 1)}


def repository_path(page: Path, target: str) -> str:
    """A link's target as a path from the root of the repository."""
    return os.path.relpath(os.path.normpath(page.parent / target), ROOT).replace(os.sep, "/")
