"""Hooks of MkDocs. The site consists of docs/ and of the files that its pages and the README link
to, wherever they are in the repository: README.md is its first page, other Markdown files become
pages, everything else is copied."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

from docs_pages import LINK, ROOT, links, repository_path


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for target, _ in links(page.read_text()):
            linked = ROOT / repository_path(page, target)
            if linked.is_file() and linked not in known:
                known.add(linked)
                if linked.suffix == ".md":
                    waiting.append(linked)
    for path in sorted(known):
        if not path.is_relative_to(ROOT / "docs"):
            name = site_path(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links, which are right in the repository, to those of the site."""
    source, here = Path(page.file.abs_src_path), page.file.src_uri

    def rewritten(match: Any) -> str:
        target = match["target"]
        file, hash, anchor = target.partition("#")
        if file and "://" not in target:
            there = site_path(repository_path(source, file))
            target = posixpath.relpath(there, posixpath.dirname(here) or ".") + hash + anchor
        return str(match["before"]) + target

    return LINK.sub(rewritten, markdown)


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
