"""Whether a change of the C++ kernels is worth it: training steps with one build and with another,
in turns, in one process.

    git worktree add ../before HEAD
    (cd ../before && RESODE_CUDA=0 python setup.py build_ext --inplace)
    RESODE_CUDA=0 python setup.py build_ext --inplace
    python benchmarks/compare_builds.py ../before/resode_kernels/_C.*.so resode_kernels/_C.*.so \
        --shapes 64,2048,64 512,256,16

A build is named after the folder it was made in; SHAPE is as in profile_step.py. Gradients have to
agree with the first build's before anything is timed. Times are medians; the quartiles say what the
machine's other work made of them.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from contestants import relative
from measure import interleaved, peak_rate, table
from networks import RULES, Config, make_network
from workloads import shaped

from resode_kernels.backends import cpp

STAGES = ("mlp", "linear", "conv", "bottleneck")
"""Which the kernels run; the others are modules."""
AGREEMENT = 1e-5
"""Of gradients, relative: sums may be formed in another order."""


def load(path: Path, number: int) -> Any:
    """The module in this file. Each has a package of its own: under one name pybind11 would hand
    out the module that it made first, whatever the file. The package's own build is there already,
    and a file cannot be loaded twice."""
    if path.samefile(cpp._C.__file__):
        return cpp._C
    name = f"build{number}._C"
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
    for name, found in gradients.items():
        error = relative(found, first)
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
        f"{number} {path.resolve().parents[1].name}": load(path, number)
        for number, path in enumerate(args.builds, 1)
    }
    for shape in args.shapes:
        for rule in args.rules:
            config = shaped(shape, args.stage)
            print(table(compare(config, rule, builds, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
