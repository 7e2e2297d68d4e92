"""Every Python block of README and docs runs as it stands, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs_pages import ROOT
from docs_snippets import Output, run, run_documented, with_snippets


def gist(text: str) -> list[str]:
    """The words that lines begin with: numbers and choices differ from run to run, and so does the
    line of a report that says what there was no time for."""
    lines = [line for line in text.splitlines() if not line.startswith("Not measured")]
    return [line.split()[0] for line in lines if line and line[0].isalpha()]


def different(outputs: list[Output]) -> list[str]:
    return [block.text for block, printed in outputs if gist(block.text) != gist(printed)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the pages tell of them
@pytest.mark.parametrize("page", with_snippets(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = run_documented(page)
    assert different(outputs) == [], f"run python tools/docs_snippets.py {page}"
    if page.name == "tutorial.md":
        assert len(outputs) >= 4
        assert (tmp_path / "report.png").is_file()


def test_an_output_that_the_page_shows_differently_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n```python\nprint('error', x + y)\n```\n"
        "```text\nerror 3e-2\n```\n```text\nmistake 3e-2\n```\n"
    )
    assert different(run(page, before="y = 2")) == ["mistake 3e-2\n"]
