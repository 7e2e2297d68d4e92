"""Speed of a training step against what is there without this package, and the rate of the products
in it against the machine's peak.

    python benchmarks/throughput.py [--stage conv] [--shapes 64,32,16,32 …]

mlp and conv are compared with standard backprop, the same network as a plain PyTorch loop with
autograd (conv: the faster of the two memory formats), stages of modules (residual: transformer
blocks, residual-conv: convolutional ones) with torch.utils.checkpoint on every block. All
contestants and the peak are measured in turns in one process; medians are printed, and quartiles of
the times written to throughput.csv (throughput_conv.csv and so on). A rate is that of the plain
formula's operations: the kernels of the convolutions need fewer, and may exceed the peak. On a GPU
(--device cuda) the peak is the rate of a large matrix product of torch.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from measure import interleaved, machine, peak_rate, write_csv
from memory_vs_depth import compare_gradients
from networks import NETWORKS, WEIGHTS, Config, make_network
from tqdm import tqdm

# dim, batch, depth; conv: and the side of the images
SHAPES = {
    "mlp": ("64,1024,256", "128,2048,64", "256,1024,32", "64,32,256"),
    "conv": ("16,256,64,10", "64,32,16,32", "256,32,16,8"),
    "residual": ("256,512,64", "256,512,16"),
    "residual-conv": ("32,16,64,16", "64,32,16,16"),
}


def measure(config: Config) -> list[dict[str, object]]:
    network = make_network(config)
    errors = compare_gradients(network)
    peaks: list[float] = []
    contestants = {
        name: step for name, step in network.contestants().items() if name in network.products
    }
    contestants["peak"] = lambda: peaks.append(peak_rate(config.device))
    times = interleaved(
        contestants, after=network.forget, device=config.device, seconds=10, rounds=(9, 60)
    )
    peak = statistics.median(peaks)
    unit = network.unit({name: t.median for name, t in times.items()})
    rows: list[dict[str, object]] = []
    for name, products in network.products.items():
        flops = network.product_flops() * products * config.depth
        rows.append(
            {
                **asdict(config),
                "contestant": name,
                **asdict(times[name]),
                "speed_up": unit / times[name].median,
                "fraction_of_peak": flops / times[name].median / peak,
                "peak_gflops": peak / 1e9,
                "gradient_error": errors[name],
                "machine": machine(config.device),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", default="mlp", choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", metavar="DIM,BATCH,DEPTH[,SIZE]")
    parser.add_argument("--activation", choices=["relu", "tanh", "gelu", "silu"])
    parser.add_argument("--weights", default="independent", choices=WEIGHTS)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here")

    kind = NETWORKS[args.stage]
    activation = args.activation or kind.activation
    print(f"{kind.title}, euler, {activation}, float32\n{machine(args.device)}\n")
    names = list(kind.products)
    shape_head = "dim, batch, depth" + (", size" if kind.size > 1 else "")
    head = f"{shape_head:>23}  " + "  ".join(f"{name:>23}" for name in names)
    print(head + f"  {'peak':>9}\n" + "-" * (len(head) + 11))
    rows = []
    for shape in tqdm(args.shapes or SHAPES[args.stage], unit="shape", leave=False):
        dim, batch, depth, *size = map(int, shape.split(","))
        config = Config(
            stage=args.stage, dim=dim, hidden=kind.hidden_factor * dim, batch=batch, depth=depth,
            size=size[0] if size else kind.size, activation=activation, weights=args.weights,
            device=args.device,
        )  # fmt: skip
        results = measure(config)
        rows += results
        cells = [
            f"{1e3 * r['median']:8.1f} ms {r['speed_up']:4.2f}x "
            f"{100 * r['fraction_of_peak']:4.0f} %"
            for r in results
        ]
        tqdm.write(f"{shape:>23}  " + "  ".join(cells) + f"  {results[0]['peak_gflops']:4.0f} GF/s")
    base = " / ".join(kind.baselines)
    print(f"\nEach cell: time per training step, speed relative to {base}, rate / peak")

    path = args.out / f"throughput{'' if args.stage == 'mlp' else '_' + args.stage}.csv"
    write_csv(path, rows)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
