"""How large are gradient errors, and does ``rk.tune`` keep them below its bound?

    python benchmarks/accuracy/gradient_error.py
    python benchmarks/accuracy/gradient_error.py --only tuned --bound 1e-3 --depths 64 --batches 10
    python benchmarks/accuracy/gradient_error.py --only unchanged --seeds 1 --networks "ViT*"

*Tuned*: the script tunes stages of several kinds and depths on one batch. Then it measures the
error of their gradients, by hand, on batches that ``tune`` has not seen. Writes gradient_error.csv
and .png.

*Unchanged*: networks as they are, x + f(x), at initialisation, after some hundred steps of training
on data that is there (scikit-learn's digits, the bytes of Python's standard library), and one
pretrained network (networks/minilm.py says how to install it). Every rule is compared with exact
backprop in float64, and with what everyone accepts: bfloat16 autocast, and states kept in bfloat16
or, by the same quantiser, in 8 bits. Writes gradient_error_unchanged.csv and .png.

Prints tables. If the script is stopped, they show the stages and networks that are complete.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

import matplotlib as mpl
import torch
import unchanged
from networks import TransformerBlock, minilm
from output import add_out, machine, results_folder, write_csv
from progress import Progress, Stoppable
from torch import Tensor
from unchanged_picture import plot as plot_unchanged

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


def tuned(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Whether all stages keep the bound."""
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
        folder = results_folder(parser, options, besides=["only"], published=not run.stopped)
        print(f"\n{machine()}, bound {options.bound:.0e}\n\n{table(rows)}")
        write_csv(folder / "gradient_error.csv", [asdict(row) for row in rows])
        plot(rows, options.bound, folder / "gradient_error.png")
        print(f"\nWrote {folder / 'gradient_error'}.csv and .png\n")
    run.end()
    return all(row.keeps for row in rows)


def networks_as_they_are(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    names = [n for n in unchanged.NETWORKS if fnmatch(n, options.networks)]
    if (missing := minilm.missing()) is not None:
        print(f"{unchanged.PRETRAINED} is left out: {missing}\n")
    elif fnmatch(unchanged.PRETRAINED, options.networks):
        names.append(unchanged.PRETRAINED)
    if not names:
        parser.error(f"--networks {options.networks}: no network is called so")
    found: unchanged.Found = {}
    with Stoppable() as run:
        unchanged.run(unchanged.jobs_of(names, options.seeds, options.steps), found)
    if found:
        complete = missing is None and not run.stopped
        folder = results_folder(parser, options, besides=["only"], published=complete)
        rows = unchanged.rows(found)
        print(f"{machine()}\n\n{unchanged.table(rows)}\n\n{yardstick(rows)}")
        path = folder / "gradient_error_unchanged"
        write_csv(path.with_suffix(".csv"), [asdict(row) for row in rows])
        plot_unchanged(rows, path.with_suffix(".png"))
        print(f"\nWrote {path}.csv and .png")
    run.end()


def yardstick(rows: Sequence[unchanged.Row]) -> str:
    """A verdict: ``recorded`` with 8 bits against autocast."""
    ratios = {}
    for name, weights in dict.fromkeys((row.network, row.weights) for row in rows):
        mine = [row for row in rows if (row.network, row.weights) == (name, weights)]
        accepted = next(row.error for row in mine if row.setting == unchanged.AUTOCAST.name)
        kinks = any(row.kinks for row in mine)
        ratios[f"{name}, {weights}"] = next(
            row.error / accepted
            for row in mine
            if (row.setting, row.bits, row.kinks) == ("recorded", 8, kinks)
        )
    larger = [name for name, ratio in ratios.items() if ratio > 1]
    return (
        f"recorded with 8 bits: {statistics.median(ratios.values()):.2f} × the error of bfloat16 "
        f"autocast in the median of {len(ratios)} networks, {max(ratios.values()):.2f} × at worst; "
        f"larger for {', '.join(larger) if larger else 'none'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["tuned", "unchanged"], help="one of the two parts")
    parser.add_argument("--bound", type=float, default=1e-2)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--batches", type=int, default=5, help="that were not tuned on")
    parser.add_argument("--networks", default="*", metavar="GLOB", help="unchanged networks")
    parser.add_argument("--seeds", type=int, default=3, help="of unchanged networks (default: 3)")
    parser.add_argument(
        "--steps", type=int, default=300, help="that unchanged networks are trained (default: 300)"
    )
    add_out(parser)
    options = parser.parse_args(arguments)
    if min(options.seeds, options.steps + 1) < 1:
        parser.error("--seeds must be at least 1, --steps at least 0")
    keeps = options.only == "unchanged" or tuned(parser, options)
    if options.only != "tuned":
        networks_as_they_are(parser, options)
    if not keeps:
        raise SystemExit("the bound was left")


if __name__ == "__main__":
    main()
