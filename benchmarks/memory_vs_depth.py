"""Peak memory and time of a training step against depth, for standard backprop, checkpointing and
the reverse rules of resode_kernels.

    python benchmarks/memory_vs_depth.py

Memory is the rise of the process's peak over the memory in use before the step, in a fresh process
per point, with the gradients of the parameters. Times are medians of steps that take turns in one
process. The relative error is that of all parameter gradients against those of standard backprop.
Writes memory_vs_depth.csv and memory_vs_depth.png; the names of other stages end in the stage.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from colours import COLOURS
from gate import relative_error, run_step
from matplotlib.ticker import FuncFormatter, NullFormatter
from measure import in_fresh_process, interleaved, peak_memory
from networks import (
    NETWORKS,
    RULES,
    STANDARD,
    WEIGHTS,
    Config,
    Network,
    label,
    make_network,
)
from output import RESULTS, machine, megabytes, write_csv
from tqdm import tqdm


@dataclass
class Point:
    """One line of the table."""

    depth: int
    contestant: str
    peak_bytes: int | None
    seconds: float
    seconds_low: float
    seconds_high: float
    time_ratio: float
    gradient_error: float


def step_memory(config: Config, contestant: str) -> int:
    """Runs in a process of its own."""
    warm = make_network(replace(config, depth=4))
    warm.contestants()[contestant]()
    warm.forget()
    network = make_network(config)
    return peak_memory(network.contestants()[contestant], config.device)


def compare_gradients(network: Network) -> dict[str, float]:
    """Relative gradient errors. Exits if the outputs do not agree."""
    steps = network.contestants()
    exact = run_step(network, steps[STANDARD])
    errors = {}
    for name, step in steps.items():
        mine = run_step(network, step)
        difference = relative_error(mine.output, exact.output)
        if not difference < 1e-4:
            raise SystemExit(
                f"{name}: the output differs from standard backprop's by {difference:.1e}"
            )
        errors[name] = relative_error(mine.gradients, exact.gradients)
    return errors


def measure(config: Config, depths: list[int]) -> list[Point]:
    points = []
    names = NETWORKS[config.stage].contestant_names
    with tqdm(total=2 * len(depths) * len(names), unit="point", leave=False) as bar:
        for depth in depths:
            config = replace(config, depth=depth)
            peaks = {}
            for name in names:
                bar.set_description(f"memory, depth {depth}, {name}")
                peaks[name] = in_fresh_process(step_memory, config, name)
                bar.update()
            bar.set_description(f"time, depth {depth}")
            network = make_network(config)
            errors = compare_gradients(network)
            times = interleaved(
                network.contestants(),
                after=network.forget,
                device=config.device,
                seconds=4,
                rounds=(3, 50),
            )
            bar.update(len(names))
            points += [
                Point(
                    depth, name, peaks[name], t.median, t.low, t.high,
                    t.median / times[STANDARD].median, errors[name],
                )
                for name, t in times.items()
            ]  # fmt: skip
    return points


def parameter_bytes(config: Config) -> int:
    return sum(p.nbytes for p in make_network(replace(config, batch=1)).stage.parameters())


# ---------------------------------------------------------------------------------------- output


def describe(config: Config) -> str:
    hidden = "" if config.stage == "linear" else f", hidden {config.hidden}"
    images = f" images of {config.size} × {config.size}" if config.size > 1 else ""
    return f"{config.scheme}, width {config.dim}{hidden}, batch {config.batch}{images}"


def table(points: list[Point]) -> str:
    width = max(len(p.contestant) for p in points)
    head = (
        f"{'depth':>6}  {'':<{width}}  {'peak memory':>13}  {'time/step':>10}  {'vs standard':>11}"
        f"  {'gradient error':>14}"
    )
    lines = [head, "-" * len(head)]
    for p in points:
        if p.contestant == STANDARD and p is not points[0]:
            lines.append("")
        error = f"{p.gradient_error:.1e}" if p.contestant in RULES else "exact"
        lines.append(
            f"{p.depth:>6}  {p.contestant:<{width}}  {megabytes(p.peak_bytes):>13}  "
            f"{1e3 * p.seconds:>7,.1f} ms  {p.time_ratio:>9.2f} x  {error:>14}"
        )
    return "\n".join(lines)


def plot(points: list[Point], config: Config, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.9), constrained_layout=True)
    for name in NETWORKS[config.stage].contestant_names:
        mine = [p for p in points if p.contestant == name]
        style = {
            "color": COLOURS[name],
            "label": label(name),
            "marker": "o" if name in RULES else "s",
            "markersize": 5,
            "linewidth": 2,
            "linestyle": "-" if name in RULES else "--",
        }
        known = [p for p in mine if p.peak_bytes is not None]
        left.plot([p.depth for p in known], [p.peak_bytes / 2**20 for p in known], **style)
        right.plot([p.depth for p in mine], [p.time_ratio for p in mine], **style)
    depths = sorted({p.depth for p in points})
    floor = [parameter_bytes(replace(config, depth=depth)) / 2**20 for depth in depths]
    left.plot(
        depths, floor, color="#999999", linewidth=1.2, linestyle=":",
        label="parameter gradients alone",
    )  # fmt: skip
    left.set(yscale="log", title="Peak memory of a training step", ylabel="MiB")
    left.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    right.set(title="Time of a training step, relative to standard backprop", ylim=(0, None))
    right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    right.text(
        0.02, 0.03, "lower is faster", transform=right.transAxes, color="#666666", fontsize=9
    )
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("depth (number of residual blocks)")
        axes.set_xticks(depths)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle(f"{NETWORKS[config.stage].title}, {describe(config)}")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--stage", default="mlp", choices=list(NETWORKS))
    parser.add_argument("--scheme", default="euler", choices=["euler", "heun"])
    parser.add_argument(
        "--weights",
        default="independent",
        choices=WEIGHTS,
        help="across depth: independent draws as at initialisation (default), smooth (linear "
        "between two draws), or tied",
    )
    parser.add_argument("--dim", type=int, default=64, help="width of the state (default: 64)")
    parser.add_argument(
        "--hidden", type=int, help="width of the hidden layer (default: dim; residual: 4 dim)"
    )
    parser.add_argument("--batch", type=int, help="default: 1024 (conv: 32)")
    parser.add_argument("--size", type=int, help="conv: side of the images (default: 16)")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        help="default: 4 16 64 256 1024 (residual: 4 16 64; conv: 4 16 64 128)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here")
    kind = NETWORKS[args.stage]
    depths = sorted(args.depths or kind.depths)
    if args.hidden is None:
        args.hidden = int(kind.hidden_factor * args.dim)
    batch, size = args.batch or kind.batch, args.size or kind.size
    if min(args.dim, args.hidden, batch, size, *depths) < 1:
        parser.error("--dim, --hidden, --batch, --size and --depths must be at least 1")

    config = Config(
        stage=args.stage,
        scheme=args.scheme,
        weights=args.weights,
        dim=args.dim,
        hidden=args.hidden,
        batch=batch,
        size=size,
        activation=kind.activation,
        device=args.device,
    )
    print(f"{kind.title}, {describe(config)}, {config.weights} weights, float32")
    print(f"{machine(config.device)}\n")
    points = measure(config, depths)
    print(table(points))

    name = "memory_vs_depth" + ("" if args.stage == "mlp" else f"_{args.stage}")
    csv_path, png_path = args.out / f"{name}.csv", args.out / f"{name}.png"
    about = {"machine": machine(config.device)}
    write_csv(csv_path, [{**asdict(config), **asdict(p), **about} for p in points])
    plot(points, config, png_path)
    print(f"\nWrote {csv_path} and {png_path}")


if __name__ == "__main__":
    main()
