"""How the time of a training step grows with depth, with the batch, and from two threads to one;
what a small problem costs beyond its arithmetic; how fast convolutions are; and how fast the builds
for other instruction sets are.

    python benchmarks/cpu/scaling.py [--only depth batch threads small products builds]

depth, batch   slopes of the time between neighbouring sizes, relative to the slope over all of
               them: 1 everywhere if the cost is linear. Over depth with 1024 rows; with few rows
               the slopes would show when parameters and their gradients outgrow a cache
depth-kept,    the same where glibc keeps the memory that is freed. By default it gives gradients
batch-kept     above some size back to the system and gets them anew in every step
threads        time on one thread over time on two, in processes of their own, which take turns
small          time of a step over 3 × its arithmetic at the measured peak + 50 µs
products       of convolutional stages: rates of the forward products, of the data gradients and of
               the weight gradients over the measured peak, with all the work around them. The
               operations are those of the plain formula. Winograd's scheme needs fewer, so a rate
               may exceed the peak
builds         rate of the matrix products in a step over the peak of the same instruction set,
               relative to the best instruction set of this machine

Prints tables and writes scaling.csv. If the script is stopped, it writes what is complete.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import torch
from measure import (
    in_fresh_process,
    interleaved,
    keep_memory,
    peak_rate,
)
from networks import RULES, Config, Network, config_of_shape, make_network
from output import add_out, machine, results_folder, table, write_csv
from progress import Progress, Stoppable
from torch import Tensor

from resode_kernels.backends import cpp

LINEAR = 0.05
"""The difference from 1 that a slope may have."""
THREADS = 1.8
PRODUCTS = 0.8
BUILDS = 0.9
BUILT = ("64,2048,64", "256,2048,16")
CONVOLUTIONS = ("16,256,64,10", "64,32,16,32", "256,32,16,8")
SEVERAL = 20
"""Steps of a small problem that are timed together."""


@dataclass
class Line:
    """A measurement. ``value``: the number that the docstring of this file defines for
    ``experiment``; ``bar``: the bound that it should keep."""

    experiment: str
    rule: str
    """Or the kind of product, or the build."""
    workload: str
    milliseconds: float
    value: float
    bar: str
    holds: bool


def depth(seconds: float, rules: Sequence[str] = RULES) -> Iterator[Line]:
    config = config_of_shape("64,1024,1")
    sizes = [replace(config, depth=64 * 4**i) for i in range(4)]
    yield from slopes("depth", sizes, [c.depth for c in sizes], seconds, rules)


def batch(seconds: float, rules: Sequence[str] = RULES) -> Iterator[Line]:
    config = config_of_shape("64,1,16")
    sizes = [replace(config, batch=256 * 4**i) for i in range(5)]
    yield from slopes("batch", sizes, [c.batch for c in sizes], seconds, rules)


Slopes = Callable[[float, Sequence[str]], Iterator[Line]]


def kept(experiment: Slopes, seconds: float) -> Iterator[Line]:
    """An experiment in processes where freed memory is kept."""
    for rule in RULES:
        for line in in_fresh_process(_kept, experiment, seconds, rule):
            yield replace(line, experiment=f"{line.experiment}, memory kept")


def _kept(experiment: Slopes, seconds: float, rule: str) -> list[Line]:
    keep_memory()
    return list(experiment(seconds, [rule]))


def slopes(
    experiment: str,
    configs: Sequence[Config],
    sizes: Sequence[int],
    seconds: float,
    rules: Sequence[str],
) -> Iterator[Line]:
    """The slopes between neighbouring sizes."""
    networks = [make_network(config) for config in configs]

    def forget() -> None:
        for network in networks:
            network.forget()

    for rule in rules:
        steps = {n.config.name: n.training_steps()[rule] for n in networks}
        times = interleaved(steps, after=forget, seconds=seconds, rounds=(7, 100))
        medians = [t.median for t in times.values()]
        overall = (medians[-1] - medians[0]) / (sizes[-1] - sizes[0])
        points = list(zip(times, medians, sizes, strict=True))
        for (_, below, smaller), (name, above, larger) in pairwise(points):
            slope = (above - below) / (larger - smaller) / overall
            holds = abs(slope - 1) <= LINEAR
            yield Line(experiment, rule, name, 1e3 * above, slope, f"1 ± {LINEAR}", holds)


def threads(seconds: float) -> Iterator[Line]:
    if (os.cpu_count() or 1) < 2:
        print("threads: left out, this machine has one processor")
        return
    shapes = [
        config_of_shape("64,2048,64"),
        config_of_shape("256,2048,16"),
        config_of_shape("64,32,16,16", "conv"),
    ]
    for config in shapes:
        for rule in RULES:
            taken: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(5):
                for count, times in taken.items():
                    times.append(in_fresh_process(step_seconds, config, rule, count, seconds / 40))
            one, two = (statistics.median(times) for times in taken.values())
            ratio = one / two
            bar = f"≥ {THREADS}"
            yield Line("threads", rule, config.name, 1e3 * two, ratio, bar, ratio >= THREADS)


def step_seconds(config: Config, rule: str, count: int, seconds: float) -> float:
    """The time of a training step on ``count`` threads."""
    torch.set_num_threads(count)
    network = make_network(config)
    step = {"step": network.training_steps()[rule]}
    return interleaved(step, after=network.forget, seconds=seconds)["step"].median


def small(seconds: float) -> Iterator[Line]:
    network = make_network(config_of_shape("32,8,64"))
    peaks: list[float] = []

    def several(step: Callable[[], None]) -> None:
        for _ in range(SEVERAL):
            step()
            network.stage.zero_grad()

    steps = network.training_steps()
    contestants = {rule: lambda rule=rule: several(steps[rule]) for rule in RULES}
    times = interleaved(
        {**contestants, "peak": lambda: peaks.append(peak_rate())},
        seconds=seconds,
        rounds=(7, 100),
    )
    for rule in RULES:
        taken = times[rule].median / SEVERAL
        flops = network.product_flops() * network.product_count(rule)
        value = taken / (3 * flops / statistics.median(peaks) + 50e-6)
        yield Line("small", rule, network.config.name, 1e3 * taken, value, "≤ 1", value <= 1)


def products(seconds: float) -> Iterator[Line]:
    """The times are differences. The reverse pass of ``paper`` evaluates f twice at every step, and
    computes weight gradients only if parameters require them."""
    for shape in CONVOLUTIONS:
        network = make_network(config_of_shape(shape, "conv"))
        stage, x = network.stage.configure(reverse="paper"), network.x.detach().requires_grad_()
        data_only = stage.requires_grad_(False)(x)
        everything = stage.requires_grad_(True)(x)
        peaks: list[float] = []

        def forget(x: Tensor = x, network: Network = network) -> None:
            x.grad = None
            network.forget()

        def back(y: Tensor, g: Tensor = network.cotangent) -> Callable[[], None]:
            return lambda: y.backward(g, retain_graph=True)

        times = interleaved(
            {
                "forward": torch.no_grad()(lambda stage=stage, x=x: stage(x)),
                "data": back(data_only),
                "all": back(everything),
                "peak": lambda peaks=peaks: peaks.append(peak_rate()),
            },
            after=forget,
            seconds=seconds,
            rounds=(7, 100),
        )
        forward, data, both = (times[name].median for name in ("forward", "data", "all"))
        flops = 2 * network.product_flops() * network.config.depth / statistics.median(peaks)
        parts = {
            "forward": forward,
            "data gradient": data - 2 * forward,
            "weight gradient": both - data,
        }
        for name, taken in parts.items():
            rate, bar = flops / taken, f"≥ {PRODUCTS}"
            yield Line(
                "products", name, network.config.name, 1e3 * taken, rate, bar, rate >= PRODUCTS
            )


def builds(seconds: float) -> Iterator[Line]:
    in_use = cpp._C.selected()
    try:
        for shape in BUILT:
            yield from rates_of_builds(make_network(config_of_shape(shape)), seconds)
    finally:
        cpp._C.select(in_use)


def rates_of_builds(network: Network, seconds: float) -> Iterator[Line]:
    # One build for each instruction set: these widths fill the vectors of the wide AVX-512 build.
    names = [name for name in cpp._C.supported() if not name.endswith("_narrow")]
    peaks: dict[str, list[float]] = {name: [] for name in names}
    step = network.training_steps()["paper"]

    def train(build: str) -> None:
        cpp._C.select(build)
        step()

    def measure_peak(build: str) -> None:
        cpp._C.select(build)
        peaks[build].append(peak_rate())

    contestants = {name: partial(train, name) for name in peaks}
    contestants |= {f"peak of {name}": partial(measure_peak, name) for name in peaks}
    times = interleaved(contestants, after=network.forget, seconds=seconds, rounds=(7, 100))
    flops = network.product_flops() * network.product_count("paper")
    rates = {n: flops / times[n].median / statistics.median(peaks[n]) for n in peaks}
    for name, rate in rates.items():
        value, bar = rate / max(rates.values()), f"≥ {BUILDS}"
        workload = f"{network.config.name}, {rate:.0%} of its peak"
        taken = 1e3 * times[name].median
        yield Line("builds", name, workload, taken, value, bar, value >= BUILDS)


class Experiment(NamedTuple):
    run: Callable[[float], Iterator[Line]]
    """Takes the seconds of ``--seconds``."""
    tables: int
    """It times so many tables for these seconds."""
    processes: int = 0
    """And starts so many processes."""


EXPERIMENTS = {
    "depth": Experiment(depth, 3),
    "depth-kept": Experiment(partial(kept, depth), 3, 3),
    "batch": Experiment(batch, 3),
    "batch-kept": Experiment(partial(kept, batch), 3, 3),
    "threads": Experiment(threads, 2, 90),
    "small": Experiment(small, 1),
    "products": Experiment(products, 3),
    "builds": Experiment(builds, 2),
}
PROCESS = 1.0
"""Seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for each table and rule (default: 20)"
    )
    add_out(parser)
    args = parser.parse_args(arguments)
    print(f"{machine()}, float32\n", flush=True)
    chosen = {name: EXPERIMENTS[name] for name in args.only}
    lines: list[Line] = []
    with Stoppable() as run:
        progress = Progress(
            "experiment",
            [args.seconds * e.tables + PROCESS * e.processes for e in chosen.values()],
        )
        for name, experiment in progress.over(chosen.items()):
            measured: list[Line] = []
            for line in experiment.run(args.seconds):
                measured.append(line)
                progress.say(f"{name}, {line.rule}, {line.workload}")
            lines += measured
            if measured:
                print(table([_readable(line) for line in measured]) + "\n", flush=True)
    if lines:
        path = results_folder(parser, args, published=not run.stopped) / "scaling.csv"
        write_csv(path, [{**asdict(x), "machine": machine()} for x in lines])
        print(f"Wrote {path}")
    run.end()


def _readable(line: Line) -> dict[str, str]:
    return {
        line.experiment: line.workload,
        "": line.rule,
        "time/step": f"{line.milliseconds:,.2f} ms",
        "value": f"{line.value:.3f}",
        "bar": line.bar,
        "holds": "yes" if line.holds else "NO",
    }


if __name__ == "__main__":
    main()
