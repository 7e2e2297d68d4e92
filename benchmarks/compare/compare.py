"""Compares training steps of this package with everything that one would use instead: time, peak
memory and gradient error, in one run.

    pip install '.[bench-peers]' && pip install --no-deps memcnn momentumnet
    python benchmarks/compare/compare.py [--only 'conv-*'] [--quick] [--redraw]

A gate comes first: no time is printed for a contestant whose outputs or gradients have larger
errors than it states (lib/gate.py says which, and why). Then the script measures the peak memory
of each contestant, in a process of its own that has warmed up on a shallow network: the rise of the
process's peak over the memory in use before the step, with the gradients of the parameters. Then it
measures times: medians and quartiles of steps that take turns in one process. Ratios are relative
to the median of standard backprop, for convolutions in the faster of the two memory formats.
``torch.compile`` gets 16 steps of the loop at a time (at depth 16 the whole loop; of modules: one
step), and one compilation runs all of them. Compiling is not timed.

Fused stages are compared with the roofline: the rate of their matrix products as a fraction of the
multiply-add peak, and the bytes that they must move as a fraction of what a copy streams. Peak and
copy take turns with the contestants. Convolutions are counted as the kernels make them, by
Winograd's scheme, which needs fewer operations than the plain formula. Those of standard backprop
are counted by the plain formula.

The name of a workload is stage-dim-batch-depth, and the side of its images; workloads.py lists
them. The summary has a line for each workload, with speeds instead of times. Writes compare.csv,
compare.md and the pictures compare_batch.png, compare_peers.png and compare_roofline.png. If it is
stopped, it writes the workloads that are complete.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import pictures
import torch
from contestants import EVERYONE, contestants_of
from gate import Contestant, Gate, Refused
from measure import (
    Times,
    bandwidth,
    in_fresh_process,
    interleaved,
    peak_memory,
    peak_rate,
    return_memory,
    time_limit,
)
from networks import COMPILED, RULES, Config, Network, make_network
from output import RESULTS, add_out, machine, results_folder
from peers import PEERS
from progress import Progress, Stoppable
from report import Row, listing_order, read, summary, table, write
from workloads import QUICK, WORKLOADS, Workload

LIMIT = 300.0
"""Seconds that a contestant may take for the steps that are not timed, with compilation."""
CONTESTANT, COMPILING = 4.0, 30.0
"""Seconds that a contestant takes before it is timed, and compilation takes on top."""


def step_memory(config: Config, name: str) -> int:
    """Peak memory of a training step, in a process of its own."""
    warnings.simplefilter("ignore")  # of old packages: the main process has printed them
    return_memory()
    contestant = contestants_of(make_network(config), [name])[name]
    shallow = contestants_of(make_network(replace(config, depth=4)), [name])[name]
    warm = contestant if name == COMPILED else shallow
    with time_limit(LIMIT):
        warm.step()
        warm.network.forget()
        return peak_memory(contestant.step, config.device)


def compare(
    workload: Workload,
    *,
    seconds: float,
    rounds: tuple[int, int],
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    config = workload.config
    network = make_network(config)
    rows: dict[str, Row] = {}
    admitted: dict[str, Contestant] = {}
    gate = Gate()
    for name, contestant in contestants_of(network, workload.names).items():
        say(f"{config.name}, {name}")
        row = rows[name] = Row(config.name, name, stated_error=contestant.stated)
        try:
            # Memory first: if it is too small, that process ends, and this one goes on.
            peak = in_fresh_process(step_memory, config, name)
            if peak is None:
                raise MemoryError("out of memory")
            with time_limit(LIMIT):
                row.gradient_error = gate.check(contestant)
        except Exception as error:  # the others go on
            row.note = (
                str(error) if isinstance(error, Refused | MemoryError) else _first_line(error)
            )
            contestant.network.forget()
            continue
        row.peak_bytes = peak
        admitted[name] = contestant

    say(f"{config.name}, times")
    peaks: list[float] = []
    streams: list[float] = []

    def forget() -> None:
        for trained in {contestant.network for contestant in admitted.values()}:
            trained.forget()

    times = interleaved(
        {
            **{name: contestant.step for name, contestant in admitted.items()},
            "peak": lambda: peaks.append(peak_rate(config.device)),
            "bandwidth": lambda: streams.append(bandwidth(config.device)),
        },
        after=forget,
        device=config.device,
        seconds=seconds,
        rounds=rounds,
    )
    fill(rows, times, network, statistics.median(peaks), statistics.median(streams))
    return list(rows.values())


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:80]}" if text else type(error).__name__


def fill(
    rows: dict[str, Row], times: dict[str, Times], network: Network, peak: float, stream: float
) -> None:
    """Fills in times, ratios and fractions, from the measurements."""
    timed = [name for name in network.baselines if name in times]
    unit = min(timed, key=lambda name: times[name].median) if timed else None
    for name, row in rows.items():
        row.peak_gflops, row.bandwidth_gbs = peak / 1e9, stream / 1e9
        if name not in times:
            continue
        t = times[name]
        row.seconds, row.seconds_low, row.seconds_high = t.median, t.low, t.high
        if unit is not None:
            row.time_ratio = t.median / times[unit].median
            smallest = min(rows[name].peak_bytes or 0 for name in timed)
            row.memory_ratio = (row.peak_bytes or 0) / smallest if smallest else None
        if name in network.products and network.config.scheme == "euler":
            flops = network.kernel_flops() if name in RULES else network.product_flops()
            row.fraction_of_peak = flops * network.product_count(name) / t.median / peak
        if name in network.states_moved and network.config.scheme == "euler":
            row.fraction_of_bandwidth = network.bytes_moved(name) / t.median / stream


def tables(rows: Sequence[Row]) -> str:
    names = dict.fromkeys(row.workload for row in rows)
    return "\n\n".join(table([row for row in rows if row.workload == name]) for name in names)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny workloads: does everything run?")
    parser.add_argument("--only", default="*", metavar="GLOB", help="workloads by name")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the times of a workload")
    parser.add_argument("--everyone", action="store_true", help="all, at all workloads: slow")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add_out(parser)
    parser.add_argument("--redraw", action="store_true", help="tables and pictures of compare.csv")
    args = parser.parse_args(arguments)
    if args.redraw:
        folder = args.out or RESULTS
        return show(*read(folder / "compare.csv"), folder)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here")
    workloads = [
        Workload(replace(w.config, device=args.device), EVERYONE if args.everyone else w.names)
        for w in (QUICK if args.quick else WORKLOADS)
        if fnmatch(w.config.name, args.only)
    ]
    if not workloads:
        parser.error(f"--only {args.only}: no workload is called so")

    print(f"{machine(args.device)}, float32, independent weights\n")
    for name, missing in {p.package: p.missing() for p in PEERS.values()}.items():
        if missing:
            print(f"{name} is left out ({missing}); it can be installed as peers.py says\n")
    rows: list[Row] = []
    configs = {w.config.name: w.config for w in workloads}
    options: dict[str, Any] = {"seconds": args.seconds, "rounds": (4, 60)}
    if args.quick:
        options = {"seconds": 0.2, "rounds": (3, 10)}
    partial = results_folder(parser, args, published=False)
    with Stoppable() as run:
        progress = Progress(
            "workload", [expected_seconds(w, options["seconds"]) for w in workloads]
        )
        for workload in progress.over(workloads):
            measured = compare(workload, **options, say=progress.say)
            rows += measured
            print(table(measured) + "\n", flush=True)
            write(partial / "compare.csv", configs, rows)  # after each workload: nothing is lost
    if rows:
        folder = results_folder(parser, args, published=not run.stopped)
        write(folder / "compare.csv", configs, rows)
        show(rows, configs, machine(args.device), folder)
    run.end()


def expected_seconds(workload: Workload, seconds: float) -> float:
    """How long a workload takes: the times, and for each contestant a process and two checks."""
    return seconds + CONTESTANT * len(workload.names) + COMPILING * (COMPILED in workload.names)


def show(rows: Sequence[Row], configs: dict[str, Config], about: str, out: Path) -> None:
    rows = sorted(rows, key=lambda row: listing_order(configs[row.workload]))
    print(summary(rows))
    markdown = out / "compare.md"
    markdown.write_text(f"{about}\n\n{summary(rows)}\n\n```\n{tables(rows)}\n```\n")
    written = [out / "compare.csv", markdown, *pictures.draw(rows, configs, out)]
    print(f"Wrote {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
