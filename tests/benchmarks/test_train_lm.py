"""train_lm.py: the same training for every setting, and what is concluded from it."""

from __future__ import annotations

import csv
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import jobs
import output
import pytest
import torch

BENCHMARKS = Path(output.__file__).resolve().parents[1]


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script with a tiny model, in this process."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("train_lm")
    for name, value in {
        **{"LAYERS": 2, "WIDTH": 32, "CONTEXT": 8, "BATCH": 2},
        **{"EVERY": 2, "HELD_OUT_BATCHES": 1},
    }.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(jobs, "WORKERS", 1)
    monkeypatch.setattr(output, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(output, "QUICK", tmp_path / "quick")
    return script


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_settings_train_the_same_model_on_the_same_batches(lm: Any) -> None:
    runs = {way: lm.train(lm.Job(way, 0, 6)) for way in lm.WAYS}
    exact = runs[lm.EXACT]
    assert [point.step for point in exact] == [0, 1, 2, 3, 4, 5, 6]
    for way, points in runs.items():
        assert points[0].loss == exact[0].loss
        assert points[-1].loss == pytest.approx(exact[-1].loss, abs=0.1)
        assert (points[-1].loss == exact[-1].loss) == (way == lm.EXACT)
    coarse, fine = (abs(runs[f"recorded, {b} bits"][-1].loss - exact[-1].loss) for b in (2, 8))
    assert fine < coarse
    assert lm.train(lm.Job(lm.EXACT, 1, 1))[0].loss != exact[0].loss


def test_the_model_learns(lm: Any) -> None:
    points = lm.train(lm.Job("recorded, 8 bits", 0, 40))
    assert points[-1].loss < points[0].loss - 0.3


def test_the_learning_rate_rises_and_falls_to_zero(lm: Any) -> None:
    factors = [lm.factor(step, 1500) for step in range(1, 1501)]
    assert max(factors) == factors[lm.WARM_UP - 1] == 1
    assert factors[-1] == pytest.approx(0)
    assert factors[lm.WARM_UP - 1 :] == sorted(factors[lm.WARM_UP - 1 :], reverse=True)
    assert [lm.factor(step, 1) for step in (1,)] == [pytest.approx(0)]


def losses(lm: Any, **last: list[float]) -> list[Any]:
    names = {"exact": lm.EXACT, "autocast": lm.AUTOCAST, "two": "recorded, 2 bits"}
    return [
        lm.Point(names[key], seed, 10, step, loss if step else 5.0)
        for key, values in last.items()
        for seed, loss in enumerate(values)
        for step in (0, 10)
    ]


def test_verdicts_compare_with_the_spread_of_exact_backprop(lm: Any) -> None:
    points = losses(lm, exact=[1.70, 1.74], autocast=[1.72, 1.79], two=[1.73, 1.80])
    ends, within, not_within = lm.verdicts(points)
    assert "1.720 (1.700, 1.740)" in ends
    assert "ends within the spread" in within
    assert "0.035 above" in within
    assert "DOES NOT END within the spread" in not_within
    assert "spread 0.040" in not_within
    assert "takes two seeds" in lm.verdicts(losses(lm, exact=[1.7], two=[1.7]))[0]


def test_a_stopped_run_keeps_complete_trainings_and_goes_on(
    lm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train, trained = lm.train, []

    def then_stop(job: Any) -> Any:
        if len(trained) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        trained.append(job)
        return train(job)

    monkeypatch.setattr(lm, "train", then_stop)
    with pytest.raises(SystemExit) as stopped:
        lm.main(["--steps", "2", "--seeds", "2"])
    assert stopped.value.code == 130
    first = rows_of(tmp_path / "quick/train_lm.csv")
    assert {(row["way"], row["seed"]) for row in first} == {(j.way, str(j.seed)) for j in trained}
    monkeypatch.setattr(lm, "train", lambda job: trained.append(job) or train(job))
    lm.main(["--steps", "2", "--seeds", "2", "--resume"])
    assert len(trained) == len(set(trained)) == 2 * len(lm.WAYS)
    rows = rows_of(tmp_path / "quick/train_lm.csv")
    assert {(row["way"], row["seed"]) for row in rows} == {
        (way, seed) for way in lm.WAYS for seed in "01"
    }
    assert (tmp_path / "quick/train_lm.png").stat().st_size > 10_000
    assert [path.name for path in (tmp_path / "quick").glob("*.csv")] == ["train_lm.csv"]
    assert not (tmp_path / "published").exists()


def test_trainings_of_other_lengths_are_not_resumed(lm: Any, tmp_path: Path) -> None:
    lm.write(tmp_path / "a.csv", losses(lm, exact=[1.7]))
    assert lm.read(tmp_path / "a.csv", 10) == losses(lm, exact=[1.7])
    assert lm.read(tmp_path / "a.csv", 20) == []
    assert lm.read(tmp_path / "b.csv", 10) == []


@pytest.mark.parametrize(("arguments", "folder"), [([], "published"), (["--resume"], "published"),
                                                   (["--quick"], "quick")])  # fmt: skip
def test_it_is_published_with_default_settings(
    arguments: list[str], folder: str, lm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lm, "plot", lambda *_: None)
    monkeypatch.setattr(lm, "train", lambda job: [lm.Point(job.way, job.seed, 0, 0, 1.0)])
    lm.main(arguments)
    assert [path.parent.name for path in tmp_path.glob("*/*")] == [folder]


def test_autocast_is_autocast(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And held-out text is measured without it."""
    seen: list[tuple[bool, bool]] = []
    loss = lm.ByteGPT.loss

    def note(self: Any, *given: Any) -> Any:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return loss(self, *given)

    monkeypatch.setattr(lm.ByteGPT, "loss", note)
    lm.train(lm.Job(lm.AUTOCAST, 0, 2))
    assert all(training == autocast for training, autocast in seen)
    assert (True, True) in seen
