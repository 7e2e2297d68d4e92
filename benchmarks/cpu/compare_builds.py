"""Shows whether a change of the C++ kernels is worth it: training steps with several builds take
turns in one process.

    git worktree add ../before HEAD
    (cd ../before && RESODE_CUDA=0 python setup.py build_ext --inplace)
    RESODE_CUDA=0 python setup.py build_ext --inplace
    python benchmarks/cpu/compare_builds.py ../before/resode_kernels_cpu.*.so \
        resode_kernels_cpu.*.so --shapes 64,2048,64 512,256,16

A build is named after the folder that it was made in. SHAPE is as in profile_step.py. Nothing is
timed before the gradients of all builds agree with those of the first. Times are medians; the
quartiles show how much other work disturbed the machine.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from gate import relative_error
from measure import interleaved, peak_rate
from networks import RULES, Config, config_of_shape, make_network
from output import table

from resode_kernels.backends import cpp

STAGES = ("mlp", "linear", "conv", "bottleneck")
"""The stages that the kernels run."""
AGREEMENT = 1e-5
"""Relative error of gradients between builds, which may add in different orders."""


def load(path: Path, number: int) -> Any:
    """The module in this file. Each module gets a package name of its own: for one name pybind11
    would return the module that it made first, whatever the file. The build of the package is
    loaded already, and a file cannot be loaded twice."""
    if path.samefile(cpp._C.__file__):
        return cpp._C
    name = f"build{number}.{path.name.partition('.')[0]}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compare(
    config: Config, rule: str, builds: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    network = make_network(config)
    step = network.training_steps()[rule]

    def train(build: Any) -> None:
        cpp._C = build
        step()

    steps = {name: partial(train, build) for name, build in builds.items()}
    gradients = {}
    for name, run in steps.items():
        run()
        gradients[name] = network.gradients()
        network.forget()
    first = next(iter(gradients.values()))
    for name, gradient in gradients.items():
        error = relative_error(gradient, first)
        if not error <= AGREEMENT:
            raise SystemExit(f"{config.name}, {rule}: {name}'s gradients are off by {error:.1e}")

    peaks: list[float] = []
    times = interleaved(
        {**steps, "peak": lambda: peaks.append(peak_rate())},
        after=network.forget,
        seconds=seconds,
        rounds=(5, 1000),
    )
    flops = network.kernel_flops() * network.product_count(rule)
    base = times[next(iter(steps))].median
    return [
        {
            "workload": config.name,
            "rule": rule,
            "build": name,
            "ms": f"{1e3 * times[name].median:.2f}",
            "quartiles": f"{1e3 * times[name].low:.2f}–{1e3 * times[name].high:.2f}",
            "of peak": f"{flops / times[name].median / statistics.median(peaks):.0%}",
            "× the first": f"{base / times[name].median:.2f}",
        }
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", type=Path, nargs="+", metavar="BUILD")
    parser.add_argument("--shapes", nargs="+", default=["64,2048,64"], metavar="SHAPE")
    parser.add_argument("--stage", default="mlp", choices=STAGES)
    parser.add_argument("--rules", nargs="+", default=["paper"], choices=RULES)
    parser.add_argument("--seconds", type=float, default=20, help="for each shape and rule")
    args = parser.parse_args()

    builds = {
        f"{number} {path.resolve().parent.name}": load(path, number)
        for number, path in enumerate(args.builds, 1)
    }
    for shape in args.shapes:
        for rule in args.rules:
            config = config_of_shape(shape, args.stage)
            print(table(compare(config, rule, builds, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
