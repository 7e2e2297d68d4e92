"""Pages say what the sources say: tables, signatures, environment variables. README is short."""

from __future__ import annotations

import re
from pathlib import Path

import docs_api
import docs_tables
import pytest
from docs_pages import ROOT

import resode_kernels as rk


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200


@pytest.mark.parametrize("page", docs_tables.pages_with_tables(), ids=lambda page: page.name)
def test_tables_have_the_figures_of_the_results(page: Path) -> None:
    assert docs_tables.filled(page.read_text()) == page.read_text(), (
        "run python tools/docs_tables.py"
    )


def test_every_table_has_its_place() -> None:
    places = "".join(page.read_text() for page in docs_tables.pages_with_tables())
    assert {name for _, name, _ in docs_tables.PLACE.findall(places)} == set(docs_tables.TABLES)


def test_the_api_page_has_the_docstrings() -> None:
    assert docs_api.page() == docs_api.PAGE.read_text(), "run python tools/docs_api.py"


def test_the_api_page_has_every_public_name() -> None:
    headings = set(re.findall(r"^### (\w+)$", docs_api.PAGE.read_text(), re.M))
    modules = {"functional", "models"}
    assert set(rk.__all__) - modules <= headings
    functions = {name for name in vars(rk.functional) if name.endswith("_stage")}
    assert len(functions) == 4
    assert functions | {"ConvLayer", "ACTIVATIONS"} <= headings


# --------------------------------------------------------------------------- environment variables

READS = re.compile(
    r"""environ(?:\.get\(|\.setdefault\(|\[)\s*["'](\w+)|getenv\("(\w+)"|\$\{?(RESODE_\w+)"""
)
NOT_FOR_USERS = {"PATH", "PYTEST_XDIST_WORKER", "PYTHONPATH"}


def sources() -> list[Path]:
    folders = ("tools", "resode_kernels", "csrc", "tests", "benchmarks", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    kinds = {".py", ".sh", ".h", ".cpp", ".cu"}
    return [ROOT / "setup.py", *(path for path in found if path.suffix in kinds)]


def test_the_table_of_environment_variables_is_complete() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    text = "\n".join(p.read_text() for p in sources() if p != Path(__file__))
    read = {name for names in READS.findall(text) for name in names if name}
    assert read - NOT_FOR_USERS <= listed
    gone = {name for name in listed if not re.search(rf"\b{name}\b", text)}
    assert gone == set()
