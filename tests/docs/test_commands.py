"""The commands that pages name exist: scripts, their options, extras and files."""

from __future__ import annotations

import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
from docs_pages import ROOT, pages

SCRIPT = re.compile(r"python ((?:benchmarks|examples|tools)/[\w/.]+\.py)([^\n`|&]*)")


def commands() -> dict[str, set[str]]:
    """The scripts that pages name, and the options that they name with them."""
    found: dict[str, set[str]] = {}
    for page in pages():
        for script, rest in SCRIPT.findall(page.read_text()):
            found.setdefault(script, set()).update(re.findall(r"(?<!\S)--[\w-]+", rest))
    return found


@cache
def extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.M))


def test_the_workflow_installs_the_extra_docs() -> None:
    (extra,) = re.findall(r"^docs = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    workflow = (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    (installed,) = re.findall(r"run: pip install (.*)  #", workflow)
    assert re.findall(r'"(.*?)"', extra) == re.findall(r"'(.*?)'", installed)


@pytest.mark.parametrize(("script", "options"), sorted(commands().items()))
def test_scripts_have_the_options_that_pages_name(
    script: str,
    options: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = ROOT / script
    assert path.is_file()
    if not options:
        return
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    help = capsys.readouterr().out
    assert {option for option in options if option not in help} == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_extras_and_test_files_that_exist(page: Path) -> None:
    text = page.read_text()
    named = {one for group in re.findall(r"'\.\[([\w,-]+)\]'", text) for one in group.split(",")}
    assert named <= extras()
    for path in re.findall(r"`?((?:tests|tools)/[\w/]+\.(?:py|sh))", text):
        assert (ROOT / path).is_file(), path
