"""Links and pictures of all pages lead somewhere, in the repository and on the site."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import docs_site
import pytest
from docs_pages import ROOT, anchors, links, pages


def broken(page: Path) -> list[str]:
    out = []
    for file, anchor in links(page.read_text()):
        target = (page.parent / file).resolve() if file else page
        if not target.is_file():
            out.append(f"{file} is not a file")
        elif anchor and anchor not in anchors(target.read_text()):
            out.append(f"{file}#{anchor}: no such heading")
    return out


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A: *heading*\n## A: heading\n[1](#a-heading) [2](#a-heading-1)\n"
        "[3](page.md#a) [4](no.md)\n"
        "![picture](no.png) [5](https://example.com/no.md)\n```\n[6](no)\n```\n"
    )
    assert broken(page) == [
        "page.md#a: no such heading",
        "no.md is not a file",
        "no.png is not a file",
    ]


def test_every_page_of_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("README.md", "docs/guide.md#stages", "guide.md#stages"),
        ("README.md", "benchmarks/results/compare.md", "benchmarks/results/compare.md"),
        ("docs/guide.md", "../README.md", "index.md"),
        ("docs/guide.md", "../benchmarks/results/a.png", "benchmarks/results/a.png"),
        ("benchmarks/results/compare.md", "../../docs/gpu.md", "../../gpu.md"),
        ("docs/guide.md", "#stages", "#stages"),
        ("docs/guide.md", "https://example.com/a.md", "https://example.com/a.md"),
    ],
)
def test_the_site_has_links_of_its_own(page: str, link: str, on_the_site: str) -> None:
    file = SimpleNamespace(abs_src_path=str(ROOT / page), src_uri=docs_site.site_path(page))
    text = docs_site.on_page_markdown(f"See [it]({link}).", page=SimpleNamespace(file=file))
    assert text == f"See [it]({on_the_site})."
