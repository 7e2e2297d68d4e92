"""Speed of a training step against standard backprop, and the rate of the matrix products in it
against the machine's peak.

    python benchmarks/throughput.py [--shapes 64,1024,256 …] [--activation relu]

Standard backprop is the same network as a plain PyTorch loop with autograd. All contestants and the
peak are measured in turns in one process; medians are printed, and quartiles of the times written
to throughput.csv. A rate is 2 · rows · dim · hidden · (products per block) · depth / time.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from measure import interleaved, machine
from memory_vs_depth import compare_gradients
from networks import PRODUCTS, RULES, STANDARD, WEIGHTS, Config, make_network
from tqdm import tqdm

from resode_kernels.backends import cpp

SHAPES = ("64,1024,256", "128,2048,64", "256,1024,32", "64,32,256")


def measure(config: Config) -> list[dict[str, object]]:
    network = make_network(config)
    errors = compare_gradients(network)
    peaks: list[float] = []
    contestants = {name: step for name, step in network.contestants().items() if name in PRODUCTS}
    contestants["peak"] = lambda: peaks.append(cpp._C.fma_peak(torch.get_num_threads(), 0.05))
    times = interleaved(contestants, after=network.forget, seconds=10, rounds=(9, 60))
    peak = statistics.median(peaks)
    rows: list[dict[str, object]] = []
    for name, products in PRODUCTS.items():
        flops = 2 * config.batch * config.dim * config.hidden * products * config.depth
        rows.append(
            {
                **asdict(config),
                "contestant": name,
                **asdict(times[name]),
                "speed_up": times[STANDARD].median / times[name].median,
                "fraction_of_peak": flops / times[name].median / peak,
                "peak_gflops": peak / 1e9,
                "gradient_error": errors[name],
                "machine": machine(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="DIM,BATCH,DEPTH")
    parser.add_argument("--activation", default="tanh", choices=["relu", "tanh", "gelu", "silu"])
    parser.add_argument("--weights", default="independent", choices=WEIGHTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()

    print(f"MLP stages, euler, {args.activation}, dim = hidden, float32\n{machine()}\n")
    head = f"{'dim, batch, depth':>18}  {STANDARD:>22}  " + "  ".join(
        f"{rule:>22}" for rule in RULES
    )
    print(head + f"  {'peak':>9}\n" + "-" * (len(head) + 11))
    rows = []
    for shape in tqdm(args.shapes, unit="shape", leave=False):
        dim, batch, depth = map(int, shape.split(","))
        config = Config(
            dim=dim, hidden=dim, batch=batch, depth=depth,
            activation=args.activation, weights=args.weights,
        )  # fmt: skip
        results = measure(config)
        rows += results
        cells = [
            f"{1e3 * r['median']:7.1f} ms {r['speed_up']:4.2f}x "
            f"{100 * r['fraction_of_peak']:4.0f} %"
            for r in results
        ]
        tqdm.write(f"{shape:>18}  " + "  ".join(cells) + f"  {results[0]['peak_gflops']:4.0f} GF/s")
    print("\nEach cell: time per training step, speed relative to standard backprop, rate / peak")

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "throughput.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
