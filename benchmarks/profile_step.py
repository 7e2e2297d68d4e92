"""Takes one training step again and again, for a profiler to look at.

    perf record -e cpu-clock -F 2000 python benchmarks/profile_step.py 64,2048,64
    perf report --no-children
    perf annotate                     # where in a kernel: instructions and their samples

    valgrind --tool=callgrind --toggle-collect='*run_reverse*' \
        python benchmarks/profile_step.py 64,256,8 --steps 2
    callgrind_annotate callgrind.out.*

SHAPE is dim, batch, depth, and for images their side (--stage conv, bottleneck). perf samples the
clock, which needs no counters of the processor and works in virtual machines. callgrind counts
instructions, and repeats exactly; it takes some fifty times as long, and knows no AVX-512 (set
RESODE_ISA=avx2). Both name the kernels after what they are templates of: a product is called after
its epilogue, multiply<float, Activate<float, Tanh>>.
"""

from __future__ import annotations

import argparse
import time

from networks import NETWORKS, RULES, STANDARD, make_network
from workloads import shaped


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", metavar="SHAPE")
    parser.add_argument("--stage", default="mlp", choices=list(NETWORKS))
    parser.add_argument("--contestant", default="paper", choices=[STANDARD, *RULES])
    parser.add_argument("--steps", type=int, help="default: as many as 10 seconds allow")
    args = parser.parse_args()

    network = make_network(shaped(args.shape, args.stage))
    step = network.training_steps()[args.contestant]
    step()  # what is done once
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
