"""The examples run as their first lines say, explain themselves and report what was gained."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "deep_mlp.py": ["--depth", "8", "--width", "16", "--batch", "64"],
    "digits_resnet.py": ["--depth", "4", "--batch", "16"],
    "small_transformer.py": ["--depth", "4", "--batch", "4"],
}

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as ``python examples/script arguments`` does, and returns what it prints."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_script_is_run() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(SMALL)


@pytest.mark.parametrize("script", SMALL)
def test_help_says_what_it_does_and_how_to_compare(
    script: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(script, "--help")
    assert not end.value.code
    text = capsys.readouterr().out
    for part in (f"python examples/{script} --backward stored", "--steps", "--depth", "learn"):
        assert part in text


@pytest.mark.parametrize("script", SMALL)
def test_a_few_steps_show_progress_and_what_was_gained(script: str, run: Run) -> None:
    text = run(script, *SMALL[script], "--steps", "3")
    steps = re.findall(
        r"^step +(\d)/3  loss \d+\.\d+.* s  activations (\d+\.\d+) MiB$", text, re.MULTILINE
    )
    assert [number for number, _ in steps] == ["1", "3"]
    gained = re.search(
        r"^Activation memory of a training step: (\S+) MiB with --backward adjoint, (\S+) MiB "
        r"with standard backprop\.$",
        text,
        re.MULTILINE,
    )
    assert gained is not None
    ours, standard = map(float, gained.groups())
    assert ours == float(steps[-1][1])
    assert ours < standard
    assert re.search(r"^Largest relative gradient error .*: \d\.\de[-+]\d+$", text, re.MULTILINE)


@pytest.mark.parametrize("script", SMALL)
def test_one_flag_runs_standard_backprop(script: str, run: Run) -> None:
    text = run(script, *SMALL[script], "--steps", "1", "--backward", "stored")
    ours, standard = re.findall(r"(\S+) MiB (?:with --backward stored|with standard)", text)
    assert ours == standard
    errors = re.findall(r"gradient error that rk.monitor measured: (\S+)", text)
    assert float(errors[0]) < 1e-6


def test_digits_without_scikit_learn_say_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        run("digits_resnet.py", *SMALL["digits_resnet.py"])
