"""benchmarks/paper/all.py runs every experiment and tells honestly what came of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import output
import pytest
from experiment import Options, Result, Verdict, panels

# Not ``import all``, which would hide the function.
report = importlib.import_module("all")
PAPER = Path(report.__file__).parent


def experiment(name: str, holds: bool, seen: list[Options]) -> ModuleType:
    def run(options: Options) -> Result:
        seen.append(options)
        figure, _ = panels(1, name)
        verdict = Verdict("the sun rises", holds, "seen today")
        return Result(f"Title of {name}", [{"x": 1.0}], figure, [verdict], ["a note"], "| a |")

    module = ModuleType(name)
    module.run = run  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("full", [True, False])
def test_the_report_has_every_figure_and_every_verdict(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []
    for name, holds in (("good", True), ("bad", False)):
        monkeypatch.setitem(sys.modules, name, experiment(name, holds, seen))
    arguments = ["all.py", "--out", str(tmp_path), *(["--full"] if full else [])]
    monkeypatch.setattr(sys, "argv", arguments)
    report.main(["good", "bad"])
    assert [options.quick for options in seen] == [not full] * 2
    text = (tmp_path / "README.md").read_text()
    assert "**1 of 2 claims hold.**" in text
    for name, verdict in (("good", "holds"), ("bad", "DOES NOT HOLD")):
        assert f"![Title of {name}]({name}.png)" in text
        assert f"- {verdict}: the sun rises (seen today)" in text
        for ending in ("csv", "png"):
            assert (tmp_path / f"{name}.{ending}").is_file()
    assert text.count("a note") == 2


def test_every_script_is_in_the_report() -> None:
    scripts = {path.stem for path in PAPER.glob("*.py") if "main(run" in path.read_text()}
    assert scripts - {"experiment"} == set(report.EXPERIMENTS)


def test_the_results_that_are_kept_are_of_every_script() -> None:
    published = output.RESULTS / "paper"
    text = (published / "README.md").read_text()
    for name in report.EXPERIMENTS:
        assert f"({name}.png)" in text
        assert (published / f"{name}.png").is_file()
        assert (published / f"{name}.csv").is_file()
