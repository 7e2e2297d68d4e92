"""Scripts that take long say so, keep what they have when they are stopped, and leave the published
results alone unless they make them anew."""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare
import experiment
import jobs
import measure
import output
import progress
import pytest
import scaling
import workloads
from networks import (
    BFLOAT16_STATES,
    CHECKPOINT,
    NETWORKS,
    PER_BLOCK,
    STANDARD,
    Config,
    config_of_shape,
)
from progress import Progress, Stoppable, duration

BENCHMARKS = Path(output.__file__).resolve().parents[1]
ALL = importlib.import_module("all")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of results are during a test."""
    monkeypatch.setattr(output, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(output, "QUICK", tmp_path / "quick")
    return tmp_path


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """memory_vs_depth.py, which measures nothing."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("memory_vs_depth")
    monkeypatch.setattr(script, "measure", lambda config, names, say: points_at(config, names))
    monkeypatch.setattr(script, "expected_seconds", lambda *given: [1.0] * len(given[-1]))
    return script


def points_at(config: Config, names: Sequence[str] = (STANDARD, "refined")) -> list[Any]:
    script = sys.modules["memory_vs_depth"]
    return [script.Point(config.depth, n, 10**8, 0.1, 0.1, 0.1, 1.0, 0.0) for n in names]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -------------------------------------------------------------------------- where results are kept


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "published"),
        (["--depth", "64"], "published"),  # the default
        (["--depth", "8"], "quick"),
        (["--fast"], "quick"),
        (["--workers", "8"], "published"),  # does not matter
    ],
)
def test_published_results_are_written_by_the_published_settings_only(
    arguments: list[str], folder: str, folders: Path
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    output.add_out(parser)
    args = parser.parse_args(arguments)
    kept = output.results_folder(parser, args, folder="part", besides=["workers"])
    assert kept == folders / folder / "part"
    assert output.results_folder(parser, args, published=False) == folders / "quick"
    args = parser.parse_args([*arguments, "--out", "mine"])
    assert output.results_folder(parser, args, folder="part") == Path("mine")


def test_the_folder_of_other_runs_is_ignored_by_git() -> None:
    ignored = (BENCHMARKS.parent / ".gitignore").read_text().splitlines()
    assert f"{output.QUICK.relative_to(BENCHMARKS.parent)}/" in ignored


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "published"),
        (["--stage", "conv"], "published"),
        (["--stage", "conv", "--reverse", "recorded"], "published"),
        (["--reverse", "paper"], "quick"),  # is not published
        (["--stage", "linear"], "quick"),  # is not published
        (["--depths", "4", "8"], "quick"),
        (["--batch", "16"], "quick"),
    ],
)
def test_memory_against_depth_is_published_with_default_settings(
    arguments: list[str], folder: str, folders: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "plot", lambda *_: None)
    monkeypatch.setattr(memory, "activation_bytes", lambda points, _: [0] * len(points))
    memory.main(arguments)
    assert {path.parent.name for path in folders.glob("*/*.csv")} == {folder}


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [([], "published"), (["--only", "mlp-*"], "quick"), (["--seconds", "1"], "quick")],
)
def test_the_comparison_is_published_with_default_settings(
    arguments: list[str], folder: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = workloads.Workload(config_of_shape("64,16,16"), (STANDARD,))
    monkeypatch.setattr(compare, "WORKLOADS", [case])
    monkeypatch.setattr(compare, "compare", lambda *_, **__: [compare.Row(case.config.name, "a")])
    monkeypatch.setattr(compare, "show", lambda rows, configs, about, out: shown.append(out.name))
    shown: list[str] = []
    compare.main(arguments)
    assert shown == [folder]
    assert (folders / folder / "compare.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "folder"), [([], "published"), (["--seconds", "1"], "quick")]
)
def test_scaling_is_published_with_default_settings(
    arguments: list[str], folder: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = scaling.Line("depth", "paper", "mlp", 1.0, 1.0, "1", True)
    quick = {name: scaling.Experiment(lambda _: iter([line]), 1) for name in scaling.EXPERIMENTS}
    monkeypatch.setattr(scaling, "EXPERIMENTS", quick)
    scaling.main(arguments)
    assert [path.parent.name for path in folders.glob("*/*")] == [folder]


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [([], "quick"), (["--full"], "published"), (["--full", "one"], "published"),
     (["--full", "--seeds", "1"], "quick")],
)  # fmt: skip
def test_only_the_full_report_of_the_paper_is_published(
    arguments: list[str], folder: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "one", small_experiment(lambda: None))
    monkeypatch.setattr(sys, "argv", ["all.py", *arguments])
    ALL.main(["one"])
    assert {path.parent.parent.name for path in folders.glob("*/paper/*")} == {folder}


# ------------------------------------------------------------------------------------ when stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_depths_that_are_complete_are_kept(
    number: signal.Signals, folders: Path, memory: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def measure(config: Config, names: list[str], say: Callable[[str], None]) -> list[Any]:
        if config.depth == 64:
            os.kill(os.getpid(), number)
        return points_at(config)

    monkeypatch.setattr(memory, "measure", measure)
    with pytest.raises(SystemExit) as stopped:
        memory.main([])
    assert stopped.value.code == 130
    assert {row["depth"] for row in rows_of(folders / "quick/memory_vs_depth.csv")} == {"4", "16"}
    assert (folders / "quick/memory_vs_depth.png").is_file()
    assert not (folders / "published").exists()
    printed = capsys.readouterr()
    assert "Stopped" in printed.err
    assert "quick/memory_vs_depth.csv" in printed.out


def test_stopped_before_the_first_depth_nothing_is_written(
    folders: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "measure", lambda *_: stop())
    with pytest.raises(SystemExit):
        memory.main([])
    assert not list(folders.iterdir())


def test_the_workloads_that_are_complete_are_kept(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [workloads.Workload(config_of_shape(f"64,{b},16"), (STANDARD,)) for b in (16, 32)]

    def one(workload: workloads.Workload, **_: Any) -> list[Any]:
        if workload.config == cases[1].config:
            stop()
        times = {"seconds": 1.0, "seconds_low": 1.0, "seconds_high": 1.0, "time_ratio": 1.0}
        errors = {"gradient_error": 0.0, "stated_error": 0.0}
        return [compare.Row(workload.config.name, STANDARD, **times, **errors, peak_bytes=8)]

    monkeypatch.setattr(compare, "WORKLOADS", cases)
    monkeypatch.setattr(compare, "compare", one)
    with pytest.raises(SystemExit) as stopped:
        compare.main([])
    assert stopped.value.code == 130
    rows = rows_of(folders / "quick/compare.csv")
    assert [row["workload"] for row in rows] == [cases[0].config.name]
    assert not (folders / "published").exists()


def small_experiment(then: Callable[[], None]) -> Any:
    """A module of benchmarks/paper, which does something after its first row."""

    def run(options: experiment.Options) -> experiment.Result:
        options.rows.append({"x": 1})
        then()
        options.rows.append({"x": 2})
        figure, _ = experiment.panels(1, "title")
        verdict = experiment.Verdict("the sun rises", True, "seen today")
        return experiment.Result("title", options.rows, figure, [verdict])

    return type("module", (), {"run": staticmethod(run)})


def test_the_rows_of_a_stopped_experiment_are_kept(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fig4_depth.py"])
    with pytest.raises(SystemExit) as stopped:
        experiment.main(small_experiment(stop).run, "")
    assert stopped.value.code == 130
    assert rows_of(folders / "quick/paper/fig4_depth.csv") == [{"x": "1"}]
    assert not (folders / "published").exists()


def test_the_experiments_that_are_complete_are_reported(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "one", small_experiment(lambda: None))
    monkeypatch.setitem(sys.modules, "two", small_experiment(stop))
    monkeypatch.setattr(sys, "argv", ["all.py", "--full"])
    with pytest.raises(SystemExit) as stopped:
        ALL.main(["one", "two"])
    assert stopped.value.code == 130
    assert "1 of 1 claims hold" in (folders / "published/paper/README.md").read_text()
    assert not (folders / "published/paper/two.csv").exists()


@pytest.mark.parametrize("wait", [
    lambda: list(jobs.side_by_side(time.sleep, [600.0] * 2)),
    lambda: measure.in_fresh_process(time.sleep, 600.0),
], ids=["of a pool", "of one"])  # fmt: skip
def test_processes_end_with_the_script(
    wait: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "WORKERS", 2)
    begin = time.monotonic()
    threading.Timer(1, stop).start()
    with Stoppable() as run:
        wait()
    assert run.stopped
    assert time.monotonic() - begin < 300  # not the ten minutes that they sleep


def test_what_is_complete_is_written_after_a_second_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stoppable() as run:
        stop()
    stop()  # as timeout(1) does, to the process and to its group
    with pytest.raises(SystemExit):
        run.end()
    assert signal.getsignal(signal.SIGTERM) is before


def test_errors_are_no_stops_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="mine"), Stoppable():
        raise ValueError("mine")
    with Stoppable() as run:
        pass
    run.end()  # does not exit
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------------------------------- progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes on when it is told to."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_progress_says_how_long_it_will_take_and_what_is_left(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds in Progress("depth", [10.0, 20.0, 60.0]).over([20.0, 40.0, 120.0]):
        clock(seconds)  # a busy machine: everything takes twice as long
    assert capsys.readouterr().err.splitlines() == [
        "3 depths, about 1 min 30 s on free cores",
        "1 of 3 depths after 20 s, about 2 min 40 s left",
        "2 of 3 depths after 1 min, about 2 min left",
        "3 of 3 depths after 3 min",
    ]


def test_lines_come_while_an_item_takes_long_and_not_too_often(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Progress("workload", 2)
    for i in range(30):
        clock(1)
        shown.say(f"part {i}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "2 workloads",
        *(f"0 of 2 workloads after {10 * i} s; now part {10 * i - 1}" for i in (1, 2, 3)),
    ]


def in_two_parts(x: int) -> int:
    for _ in range(2):
        jobs.part_done()
    return 2 * x


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("parts", "last"), [(0, "3 of 3 trainings"), (2, "6 of 6 parts")])
def test_jobs_side_by_side_say_how_many_or_which_parts_are_done(
    workers: int, parts: int, last: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(jobs, "WORKERS", workers)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    function, unit = (in_two_parts, "part") if parts else (abs, "training")
    found = list(jobs.side_by_side(function, [1, 2, 3], unit=unit, parts=parts))
    assert found == [(x, (2 if parts else 1) * x) for x in (1, 2, 3)]
    assert capsys.readouterr().err.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.4, "8 s"), (59.9, "1 min"), (130, "2 min 10 s"), (1000, "17 min"), (4800, "1 h 20 min")],
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------- the picture


def test_memory_against_depth_is_drawn_again_from_its_csv(memory: Any, tmp_path: Path) -> None:
    config = config_of_shape("8,16,4")
    points = points_at(config)
    memory.write(tmp_path, config, points)
    picture = tmp_path / "memory_vs_depth.png"
    drawn = picture.read_bytes()
    picture.unlink()
    assert memory.read(tmp_path / "memory_vs_depth.csv") == (config, points)
    memory.main(["--redraw", "--out", str(tmp_path)])
    assert picture.read_bytes() == drawn


def test_activations_are_the_peak_less_the_gradients_of_the_parameters(memory: Any) -> None:
    config = config_of_shape("8,16,4")
    (share, *_) = memory.activation_bytes(points_at(config), config)
    # Two 8 × 8 matrices and two biases per block.
    assert share == 10**8 - 4 * 4 * (2 * 64 + 2 * 8)


def test_a_rule_is_compared_with_the_other_ways_to_keep_less(memory: Any) -> None:
    for stage in ("mlp", "residual", "conv"):
        names = memory.contestants(config_of_shape("8,16,4,4", stage), "recorded")
        assert names == [STANDARD, PER_BLOCK, CHECKPOINT, BFLOAT16_STATES, "recorded"]
        points = points_at(config_of_shape("8,16,4,4", stage), names)
        assert memory.shown(points) == names  # in the picture too
    assert memory.shown(points_at(config_of_shape("8,16,4"), NETWORKS["mlp"].contestant_names)) == [
        STANDARD, CHECKPOINT, "refined", "recorded",
    ]  # fmt: skip
    heun = config_of_shape("8,16,4", scheme="heun")
    assert BFLOAT16_STATES not in memory.contestants(heun, "recorded")


def test_growth_is_counted_in_states_a_block(memory: Any) -> None:
    config = config_of_shape("8,16,4")
    state, parameters = 4 * 8 * 16, 4 * (2 * 64 + 2 * 8)
    points = [
        memory.Point(n, "recorded", 999 + n * (parameters + state // 4), 1.0, 1.0, 1.0, 1.0, 0.0)
        for n in (4, 24)
    ]
    assert "recorded" in memory.growth(points, config)
    assert "0.25 states a block, 4 to 24" in memory.growth(points, config)
