"""The results of compare.py: as tables, as a summary, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from networks import (
    CHANNELS_LAST,
    CHECKPOINT,
    COMPILED,
    NETWORKS,
    RULES,
    STANDARD,
    Config,
    label,
)
from output import machine, megabytes, write_csv
from peers import PEERS


@dataclass
class Row:
    """A contestant at a workload. Unknown numbers are None, and the note says why."""

    workload: str
    contestant: str
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    time_ratio: float | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None
    gradient_error: float | None = None
    stated_error: float | None = None
    fraction_of_peak: float | None = None
    fraction_of_bandwidth: float | None = None
    peak_gflops: float | None = None
    bandwidth_gbs: float | None = None
    note: str = ""


def listing_order(config: Config) -> tuple[Any, ...]:
    """The sort key of workloads in tables and pictures."""
    kind = list(NETWORKS).index(config.stage)
    return kind, config.scheme, config.dim, config.batch, config.depth


def table(rows: Sequence[Row]) -> str:
    """The rows of one workload."""
    width = max(len(label(row.contestant)) for row in rows)
    head = (
        f"{rows[0].workload:<{width}}  {'time/step (quartiles), ms':>30}  {'vs std':>7}"
        f"  {'peak memory':>13}  {'vs std':>7}  {'error (stated)':>17}  {'of peak':>7}"
        f"  {'of copy':>7}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        name = f"{label(row.contestant):<{width}}"
        if row.seconds is None:
            lines.append(f"{name}  {row.note}")
            continue
        spread = f"{1e3 * (row.seconds_low or 0):,.2f} – {1e3 * (row.seconds_high or 0):,.2f}"
        error = f"{row.gradient_error:.0e} ({row.stated_error:.0e})"
        lines.append(
            f"{name}  {1e3 * row.seconds:>10,.2f}  {f'({spread})':>18}  {_times(row.time_ratio):>7}"
            f"  {megabytes(row.peak_bytes):>13}  {_times(row.memory_ratio):>7}  {error:>17}"
            f"  {_percent(row.fraction_of_peak):>7}  {_percent(row.fraction_of_bandwidth):>7}"
        )
    return "\n".join(line.rstrip() for line in lines)


COLUMNS = (
    "workload",
    "standard",
    "compiled",
    "checkpoints",
    "other packages",
    *RULES,
    "memory",
    "error",
)


def summary(rows: Sequence[Row]) -> str:
    """A line per workload, in Markdown: the time of standard backprop, and the speed of the others
    relative to it. Of the other packages only the fastest is listed. The rules also have their
    rates over the peak; memory and gradient error are those of the most precise rule."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for workload in dict.fromkeys(row.workload for row in rows):
        timed = {row.contestant: row for row in rows if row.workload == workload and row.time_ratio}
        peers = sorted((row for name, row in timed.items() if name in PEERS), key=_ratio)
        precise = timed.get("refined") or timed.get("paper")
        unit = min(
            (timed[n] for n in (STANDARD, CHANNELS_LAST) if n in timed), key=_ratio, default=None
        )
        cells = [
            workload,
            f"{1e3 * (unit.seconds or 0):,.1f} ms" if unit else "",
            *(_speed(timed.get(name)) for name in (COMPILED, CHECKPOINT)),
            f"{_speed(peers[0])} ({peers[0].contestant})" if peers else "",
            *(_speed(timed.get(rule)) for rule in RULES),
            _times(precise.memory_ratio) if precise else "",
            f"{precise.gradient_error:.0e}" if precise else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(row: Row) -> float:
    return row.time_ratio or 0


def _speed(row: Row | None) -> str:
    if row is None or row.time_ratio is None:
        return ""
    rate = "" if row.fraction_of_peak is None else f" ({_percent(row.fraction_of_peak)})"
    return f"{1 / row.time_ratio:.2f} ×{rate}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} ×"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"


def read(path: Path) -> tuple[list[Row], dict[str, Config], str]:
    """Reads what ``write`` wrote: the rows, the workloads by name, and the machine."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    configs = {line["workload"]: Config(**_typed(Config, line)) for line in lines}
    return [Row(**_typed(Row, line)) for line in lines], configs, lines[0]["machine"]


def _typed(kind: type[Config | Row], line: dict[str, str]) -> dict[str, Any]:
    """The fields of ``kind`` in a line, converted to their types."""
    types = get_type_hints(kind)
    return {field.name: _parse(line[field.name], types[field.name]) for field in fields(kind)}


def _parse(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    return None if not text else int(text) if kind in (int, int | None) else float(text)


def write(path: Path, configs: dict[str, Config], rows: Sequence[Row]) -> None:
    """Writes a CSV with the rows, their workloads and the machine. ``configs``: by name."""
    about = {name: machine(config.device) for name, config in configs.items()}
    write_csv(
        path,
        [
            {**asdict(configs[row.workload]), **asdict(row), "machine": about[row.workload]}
            for row in rows
        ],
    )
