"""Writes tables into README and docs: measured figures from the CSVs in benchmarks/results, and
what works with what from the tests in tests/compatibility:

    python tools/docs_tables.py

A page has <!-- table NAME --> above the place of a table and <!-- end --> below it."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from docs_pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TESTS = ROOT / "tests"
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)
Line = dict[str, str]


def read(name: str) -> list[Line]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def factor(value: float) -> str:
    return f"{value:.2f} ×"


def percent(error: str) -> str:
    """A relative error in per cent with two significant digits."""
    value = float(f"{100 * float(error):.1e}")
    if value == 0:
        return "exact"
    return f"{value:.5f}".rstrip("0").rstrip(".") + " %" if value >= 1e-5 else f"{value:.1e} %"


def mebibytes(count: str) -> str:
    size = int(count) / 2**20
    return f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB"


SPEED = {
    "mlp-64-32-64": ("`MLPStage`", "width 64, 32 rows, 64 blocks"),
    "mlp-64-2048-64": ("`MLPStage`", "width 64, 2048 rows, 64 blocks"),
    "mlp-128-2048-64": ("`MLPStage`", "width 128, 2048 rows, 64 blocks"),
    "mlp-512-256-16": ("`MLPStage`", "width 512, 256 rows, 16 blocks"),
    "conv-16-256-64-10": ("`ConvStage`", "basic, 16 channels, 256 images of 10², 64 blocks"),
    "conv-64-32-16-32": ("`ConvStage`", "basic, 64 channels, 32 images of 32², 16 blocks"),
    "conv-256-32-16-8": ("`ConvStage`", "basic, 256 channels, 32 images of 8², 16 blocks"),
    "bottleneck-256-32-16-8": (
        "`ConvStage`",
        "bottleneck, 256 channels, 32 images of 8², 16 blocks",
    ),
    "residual-256-512-16": ("`ResidualStage`", "MLP modules, width 256, 512 rows, 16 blocks"),
    "residual-conv-32-16-64-16": (
        "`ResidualStage`",
        "convolutional modules, 32 channels, 16 images of 16², 64 blocks",
    ),
}
"""The workloads of the README's table: stage and block."""


def speed() -> str:
    """A training step with the default rule beside standard backprop."""
    lines = {line["workload"]: line for line in read("compare.csv") if is_refined(line)}
    return markdown(
        ("stage", "blocks", "speed", "memory", "gradient error"),
        [
            (
                *names,
                factor(1 / float(lines[workload]["time_ratio"])),
                factor(float(lines[workload]["memory_ratio"])),
                percent(lines[workload]["gradient_error"]),
            )
            for workload, names in SPEED.items()
        ],
    )


def is_refined(line: Line) -> bool:
    return line["contestant"] == "refined"


GROWTH = {
    "MLP, tanh, width 64": "memory_vs_depth.csv",
    "transformer block, width 64": "memory_vs_depth_residual.csv",
    "convolutional, relu, 64 channels": "memory_vs_depth_conv.csv",
}


def depths() -> str:
    """The gradient error of the default rule, by kind of block and depth."""
    columns = (4, 16, 64, 128, 256, 1024)
    found = {
        (kind, int(line["depth"])): percent(line["gradient_error"])
        for kind, name in GROWTH.items()
        for line in filter(is_refined, read(name))
    }
    return markdown(
        ("blocks", *(f"depth {n}" for n in columns)),
        [(kind, *(found.get((kind, n), "") for n in columns)) for kind in GROWTH],
    )


def memory(name: str) -> Callable[[], str]:
    def table() -> str:
        """Peak memory, time and gradient error of a training step against depth."""
        cells: dict[str, dict[str, str]] = {}
        for line in read(name):
            error = "" if is_exact(line) else f", {percent(line['gradient_error'])}"
            cells.setdefault(line["depth"], {})[line["contestant"]] = (
                f"{mebibytes(line['peak_bytes'])}, {1e3 * float(line['seconds']):,.1f} ms{error}"
            )
        contestants = next(iter(cells.values()))
        return markdown(
            ("depth", *contestants),
            [(depth, *(found[name] for name in contestants)) for depth, found in cells.items()],
        )

    return table


def is_exact(line: Line) -> bool:
    return line["contestant"].startswith(("standard", "checkpoint"))


def tuned() -> str:
    """What ``rk.tune`` chose, and its error on other batches."""
    return markdown(
        ("blocks", "depth", "chosen", "tuned", "held out", "paper", "memory", "time"),
        [
            (
                line["stage"],
                line["depth"],
                line["setting"],
                *(percent(line[f"{key}_error"]) for key in ("tuned", "held_out", "paper")),
                factor(float(line["memory_ratio"])),
                factor(float(line["time_ratio"])),
            )
            for line in read("gradient_error.csv")
        ],
    )


def growth() -> str:
    """scaling.csv: the range of every experiment's values over its workloads."""
    values: dict[tuple[str, str], list[float]] = {}
    bars = {}
    for line in read("scaling.csv"):
        key = line["experiment"], line["rule"]
        values.setdefault(key, []).append(float(line["value"]))
        bars[key] = line["bar"]
    return markdown(
        ("experiment", "rule, product or build", "from", "to", "expected"),
        [
            (*key, f"{min(found):.2f}", f"{max(found):.2f}", bars[key])
            for key, found in values.items()
        ],
    )


def link(test: str) -> str:
    """A test, given as ``folder/file.py::function``."""
    file, _, function = test.partition("::")
    return f"[{function.removeprefix('test_')}](../tests/{file})"


def compatibility(name: str) -> Callable[[], str]:
    def table() -> str:
        """The rows of a file in tests/compatibility, which the tests there prove."""
        sys.path.insert(0, str(TESTS / "support"))
        try:
            section = runpy.run_path(str(TESTS / "compatibility" / f"test_{name}.py"))["section"]
        finally:
            sys.path.pop(0)
        return markdown(
            ("feature", "fused stages", "`ResidualStage`", "tests"),
            [
                (row.feature, row.fused.text, row.modules.text, ", ".join(map(link, row.tests)))
                for row in section.rows
            ],
        )

    return table


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "depths": depths,
    "tuned": tuned,
    "growth": growth,
    "memory_mlp": memory("memory_vs_depth.csv"),
    "memory_conv": memory("memory_vs_depth_conv.csv"),
    "works_gradients": compatibility("gradients"),
    "works_transforms": compatibility("transforms"),
    "works_compilers": compatibility("compilers"),
    "works_modules": compatibility("modules"),
    "works_training": compatibility("training"),
    "works_processes": compatibility("processes"),
}


def filled(text: str) -> str:
    """A page with its tables as the CSVs have them."""
    return PLACE.sub(lambda place: place[1] + "\n" + TABLES[place[2]]() + "\n" + place[3], text)


def pages_with_tables() -> list[Path]:
    return [
        page
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        if PLACE.search(page.read_text())
    ]


if __name__ == "__main__":
    for page in pages_with_tables():
        page.write_text(filled(page.read_text()))
        print(f"wrote {page}")
