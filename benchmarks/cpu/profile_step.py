"""Repeats one training step, for a profiler.

    perf record -e cpu-clock -F 2000 python benchmarks/cpu/profile_step.py 64,2048,64
    perf report --no-children
    perf annotate                     # where in a kernel: instructions and their samples

    valgrind --tool=callgrind --toggle-collect='*run_reverse*' \
        python benchmarks/cpu/profile_step.py 64,256,8 --steps 2
    callgrind_annotate callgrind.out.*

SHAPE is dim, batch, depth, and for images their side (--stage conv, bottleneck). perf samples the
clock, which needs no counters of the processor and works in virtual machines. callgrind counts
instructions, and its counts repeat exactly. It takes some fifty times as long, and it does not know
AVX-512 (set RESODE_ISA=avx2). Both show kernels with their template arguments: the name of a
product contains its epilogue, multiply<float, Activate<float, Tanh>>.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from networks import NETWORKS, RULES, STANDARD, config_of_shape, make_network


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", metavar="SHAPE")
    parser.add_argument("--stage", default="mlp", choices=list(NETWORKS))
    parser.add_argument("--contestant", default="paper", choices=[STANDARD, *RULES])
    parser.add_argument("--steps", type=int, help="default: as many as 10 seconds allow")
    args = parser.parse_args()

    network = make_network(config_of_shape(args.shape, args.stage))
    step = network.training_steps()[args.contestant]
    step()  # warms up
    network.forget()
    begin, steps = time.perf_counter(), 0
    while steps < args.steps if args.steps else time.perf_counter() - begin < 10:
        step()
        network.forget()
        steps += 1
    taken = (time.perf_counter() - begin) / steps
    print(f"{network.config.name}, {args.contestant}: {1e3 * taken:.2f} ms per step, {steps} steps")


if __name__ == "__main__":
    main()
