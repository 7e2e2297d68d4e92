"""Does ``rk.tune`` keep its promise? The script tunes stages of several kinds and depths on one
batch. Then it measures the error of their gradients, by hand, on batches that ``tune`` has not
seen.

    python benchmarks/accuracy/gradient_error.py
    python benchmarks/accuracy/gradient_error.py --bound 1e-3 --depths 64 --batches 10

Prints a table and writes a CSV and a PNG. If it is stopped, they show the stages that are complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import matplotlib as mpl
import torch
from networks import TransformerBlock
from output import add_out, machine, results_folder, write_csv
from progress import Progress, Stoppable
from torch import Tensor

import resode_kernels as rk

mpl.use("Agg")
import matplotlib.pyplot as plt


def mlp(depth: int) -> tuple[rk.Stage, tuple[int, ...]]:
    return rk.MLPStage(64, 64, depth), (256, 64)


def convolutional(depth: int) -> tuple[rk.Stage, tuple[int, ...]]:
    return rk.ConvStage(16, depth), (32, 16, 8, 8)


def transformer(depth: int) -> tuple[rk.Stage, tuple[int, ...]]:
    return rk.ResidualStage([TransformerBlock(32, 64) for _ in range(depth)]), (4, 16, 32)


def resnet101(depth: int, **options: Any) -> tuple[rk.Stage, tuple[int, ...]]:
    return rk.ConvStage(64, depth, "bottleneck", **options), (16, 64, 8, 8)


STAGES: dict[str, Callable[..., tuple[rk.Stage, tuple[int, ...]]]] = {
    "MLP, tanh": mlp,
    "convolutional, relu": convolutional,
    "transformer": transformer,
}
RESNET101_BLOCKS = 23
"""Blocks in the third stage of ResNet-101, where the paper's method fails."""
MARKERS = {"MLP, tanh": "o", "convolutional, relu": "s", "transformer": "^"}


@dataclass
class Row:
    stage: str
    depth: int
    setting: str
    tuned_error: float
    """The largest error that ``tune`` measured."""
    held_out_error: float
    """The largest error on the other batches."""
    paper_error: float
    """The error of the paper's rule, on the batch of ``tune``."""
    memory_ratio: float
    """Relative to checkpointing, like the time."""
    time_ratio: float
    keeps: bool


def gradients(stage: rk.Stage, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    first, *rest = torch.autograd.grad(stage(leaf), [leaf, *stage.parameters()], cotangent)
    return [first.double().flatten(), torch.cat([g.flatten() for g in rest]).double()]


def error(stage: rk.Stage, x: Tensor, cotangent: Tensor) -> float:
    """The larger of two relative errors: of the gradients of all parameters, and of the input's."""
    before = stage.options
    mine = gradients(stage, x, cotangent)
    exact = gradients(stage.configure(backward="checkpoint", anchor_every=None), x, cotangent)
    stage.options = before
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True))


def measure(name: str, stage: rk.Stage, shape: tuple[int, ...], bound: float, batches: int) -> Row:
    report = rk.tune(stage, torch.randn(shape), max_gradient_error=bound, seconds=600)
    held_out = max(error(stage, *torch.randn(2, *shape)) for _ in range(batches))
    best, unit = report.recommended, report.of(rk.Setting("checkpoint"))
    return Row(
        stage=name,
        depth=stage.depth,
        setting=str(best.setting),
        tuned_error=best.error,
        held_out_error=held_out,
        paper_error=report.of(rk.Setting("adjoint", "paper", 1)).error,
        memory_ratio=best.memory / unit.memory,
        time_ratio=best.seconds / unit.seconds,
        keeps=held_out <= bound,
    )


def expected_seconds(stage: rk.Stage) -> float:
    return 5 + 0.1 * stage.depth


def table(rows: Sequence[Row]) -> str:
    width = max(len(row.stage) for row in rows)
    choice = max(len(row.setting) for row in rows)
    lines = [
        f"{'':<{width}}  depth  {'chosen':<{choice}}    tuned  held out    paper  memory    time"
    ]
    lines += [
        f"{r.stage:<{width}}  {r.depth:>5}  {r.setting:<{choice}}  {r.tuned_error:.1e}   "
        f"{r.held_out_error:.1e}  {r.paper_error:.1e}  {r.memory_ratio:>4.2f} ×  "
        f"{r.time_ratio:>4.2f} ×{'' if r.keeps else '  BOUND LEFT'}"
        for r in rows
    ]
    return "\n".join(lines)


def plot(rows: Sequence[Row], bound: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    floor = 1e-8
    for name, marker in MARKERS.items():
        mine = [row for row in rows if row.stage == name]
        depths = [row.depth for row in mine]
        axes.plot(depths, [row.paper_error for row in mine], "--", marker=marker, color="#0072b2",
                  alpha=0.5, label=f"{name}: the paper's rule")  # fmt: skip
        axes.plot(depths, [max(row.held_out_error, floor) for row in mine], marker=marker,
                  color="#009e73", label=f"{name}: tuned, batches not seen")  # fmt: skip
    axes.axhline(bound, color="#d55e00", linewidth=2, label="the bound that tune was given")
    axes.set(xlabel="depth", ylabel="relative error of the gradients", yscale="log",
             title="Gradients after rk.tune, on batches that it has not seen")  # fmt: skip
    axes.set_xscale("log", base=2)
    depths = sorted({row.depth for row in rows if row.stage in MARKERS})
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.text(depths[0], 2 * floor, "exact (checkpoints)", color="#666666", fontsize=9, va="bottom")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bound", type=float, default=1e-2)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--batches", type=int, default=5, help="that were not tuned on")
    add_out(parser)
    options = parser.parse_args()

    torch.manual_seed(0)
    cases = [(name, *make(depth)) for name, make in STAGES.items() for depth in options.depths]
    for name, step in (("ResNet-101's third, x + f/N", None), ("the same, x + f", 1.0)):
        cases.append((name, *resnet101(RESNET101_BLOCKS, step=step)))
    rows: list[Row] = []
    with Stoppable() as run:
        progress = Progress("stage", [expected_seconds(stage) for _, stage, _ in cases])
        for name, stage, shape in progress.over(cases):
            rows.append(measure(name, stage, shape, options.bound, options.batches))
            print(table(rows[-1:]), flush=True)
    if rows:
        folder = results_folder(parser, options, published=not run.stopped)
        print(f"\n{machine()}, bound {options.bound:.0e}\n\n{table(rows)}")
        write_csv(folder / "gradient_error.csv", [asdict(row) for row in rows])
        plot(rows, options.bound, folder / "gradient_error.png")
        print(f"\nWrote {folder / 'gradient_error'}.csv and .png")
    run.end()
    if not all(row.keeps for row in rows):
        raise SystemExit("the bound was left")


if __name__ == "__main__":
    main()
