"""docs/tutorial.md runs as it stands, and prints what it says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"


def parts() -> list[tuple[str, str]]:
    """The fenced parts of the page: language and text."""
    return re.findall(r"^```(python|text)\n(.*?)^```$", TUTORIAL.read_text(), re.M | re.S)


def gist(text: str) -> list[str]:
    """The words that lines begin with: numbers and choices differ from run to run."""
    return [line.split()[0] for line in text.splitlines() if line and line[0].isalpha()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::resode_kernels.GradientErrorWarning")  # it tells of one
def test_the_tutorial_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "tutorial"}
    printed = ""
    shown = 0
    for language, text in parts():
        if language == "text":
            assert gist(printed)[:-1] == gist(text)[:-1]
            shown += 1
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(text, str(TUTORIAL), "exec"), names)
        printed = output.getvalue()
    assert shown >= 4
    assert (tmp_path / "report.png").is_file()


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TUTORIAL.read_text()):
        assert (TUTORIAL.parent / target).exists(), target
