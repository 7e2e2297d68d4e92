"""What scripts print and write: the machine, tables, CSV files, and the folder of the results."""

from __future__ import annotations

import argparse
import csv
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"
"""The published results, which README and docs show."""
QUICK = RESULTS / "quick"
"""Everything else that is measured without ``--out``. Ignored by git."""


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="default: for a complete run with the published settings benchmarks/results, where "
        "the published results are; otherwise benchmarks/results/quick",
    )


def results_folder(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *,
    folder: str = "",
    besides: Sequence[str] = (),
    published: bool = True,
) -> Path:
    """Where a run writes: the folder of ``--out``, if there is one. Published results are written
    only by the published settings: all options have their defaults, ``besides`` some that do not
    matter or that ``published`` covers. ``folder``: the part of the results that the script writes.
    """
    if args.out is not None:
        return Path(args.out)
    for name, value in vars(args).items():
        published = published and (name in besides or value == parser.get_default(name))
    return (RESULTS if published else QUICK) / folder


def machine(device: str = "cpu") -> str:
    """The processor, the number of threads and the version of torch; the GPU, if it is used."""
    if device != "cpu":
        precision = torch.backends.cuda.matmul.fp32_precision
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32 {precision}"
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows with the same keys. Makes the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as text in columns. The keys are the headings."""
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def megabytes(count: float | None) -> str:
    if count is None:
        return "out of memory"
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"
