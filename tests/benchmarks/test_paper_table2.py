"""benchmarks/paper/table2_finetune.py, in a smaller form: what it measures, and how it judges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import table2_finetune as table2
import torch
from data import digits, load, noisy
from experiment import Options, save
from torch import Generator

from resode_kernels.models import ResNet


@pytest.fixture(scope="module")
def setting() -> table2.Setting:
    whole = table2.SETTINGS["digits"]
    return replace(
        whole,
        depths=(5, 8),
        seeds=1,
        pretraining=replace(whole.pretraining, epochs=2, batch=200),
        refinement=replace(whole.refinement, epochs=1, batch=400),
    )


def network(setting: table2.Setting) -> ResNet:
    torch.manual_seed(0)
    return ResNet(**setting.network, classes=10, in_channels=1, tied=True)


def test_a_run_has_a_row_for_every_part_and_writes_table_and_figure(
    setting: table2.Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(table2.SETTINGS, "digits", setting)
    monkeypatch.setattr(table2, "load", lambda _: digits(train=1600))  # few to test
    result = table2.run(Options())
    assert [(row["part"], row["depth"]) for row in result.rows] == [
        ("pretrained", 4),
        ("transferred", 5),
        ("transferred", 8),
        ("tied", 4),
        *((part, 8) for part in ("statistics", "exact", "paper", "refined")),
    ]
    assert all(0 < row["accuracy"] <= 1 and row["failed"] is None for row in result.rows)
    errors = {row["part"]: row["gradient_error"] for row in result.rows}
    assert 0 < errors["refined"] < errors["paper"] < 0.5
    assert len(result.verdicts) == 3
    assert result.table.count("\n") == 1 + len(table2.LABELS)
    save(result, "table2", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"table2.csv", "table2.png"}


def test_the_strategy_leaves_the_pretrained_network_alone_and_unties_exactly(
    setting: table2.Setting,
) -> None:
    model = network(setting)
    before = copy.deepcopy(model.state_dict())
    deep = table2.transferred(model, setting, 8)
    untied = table2.untied(deep, setting)
    assert [layer.stage.depth for layer in untied.layers] == [4, 8]
    assert [layer.stage.num_blocks for layer in untied.layers] == [1, 8]
    x, _ = next(load(None).test.batches(20))
    assert torch.equal(untied.eval()(x), deep.eval()(x))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [False, True])
def test_only_the_deeper_stage_is_refined_unless_everything_is(
    setting: table2.Setting, whole: bool
) -> None:
    model = table2.refinable(network(setting), replace(setting, whole=whole), table2.EXACT)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    stage = {name for name, _ in model.named_parameters() if name.startswith("layer2.stage.")}
    assert stage
    assert trained == ({name for name, _ in model.named_parameters()} if whole else stage)


def test_statistics_alone_move_no_weight(setting: table2.Setting) -> None:
    assert table2.recipe(setting, "statistics").rate == 0
    assert table2.recipe(setting, "tied").rate == setting.refinement.rate / 8
    assert table2.recipe(setting, "paper") == setting.refinement


def test_training_noise_is_new_and_test_noise_is_not() -> None:
    data = noisy(digits(train=100), 4, copies=3)
    generator = Generator().manual_seed(0)
    one, other = (next(data.train.batches(100, generator))[0] for _ in range(2))
    assert not torch.equal(one.sort().values, other.sort().values)
    first, again = (next(data.test.batches(50))[0] for _ in range(2))
    assert torch.equal(first, again)
    assert len(data.test) == 3 * (1797 - 100)
    clean = next(digits(train=100).test.batches(50))[0]
    noise = (first - clean) * data.test.deviation
    assert noise.std() == pytest.approx(4, rel=0.05)


# ------------------------------------------------------------------------------------- verdicts


def rows(**accuracy: float) -> list[dict[str, Any]]:
    """Of three seeds that differ by a lot, with the same gains."""
    values = {
        "pretrained": 0.9,
        "transferred": 0.899,
        "tied": 0.9,
        "statistics": 0.9,
        "exact": 0.912,
        "paper": 0.91,
        "refined": 0.911,
    } | accuracy
    return [
        {
            "seed": seed,
            "part": part,
            "depth": 4 if part in ("pretrained", "tied") else 64,
            "accuracy": value - 0.05 * seed,
            "gradient_error": 0.01,
        }
        for seed in range(3)
        for part, value in values.items()
    ]


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ({}, [True, True, True]),
        ({"transferred": 0.88}, [False, True, True]),
        ({"paper": 0.9, "exact": 0.9}, [True, False, True]),
        ({"paper": 0.1}, [True, False, False]),
        ({"exact": 0.93}, [True, True, False]),
    ],
    ids=["all hold", "transfer fails", "no gain", "the adjoint method fails", "exact is better"],
)
def test_verdicts_follow_the_numbers(accuracy: dict[str, float], expected: list[bool]) -> None:
    assert [verdict.holds for verdict in table2.verdicts(rows(**accuracy))] == expected


@pytest.mark.parametrize("text", [table2.table, lambda r: str(table2.verdicts(r)[1])])
def test_gains_are_those_over_the_pretrained_network(
    text: Callable[[list[dict[str, Any]]], str],
) -> None:
    assert "+1.00" in text(rows())
