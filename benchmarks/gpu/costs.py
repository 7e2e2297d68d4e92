"""What a training step costs on a GPU, and which speed-up to expect: a calculation, not a
measurement.

    python benchmarks/gpu/costs.py
    python benchmarks/gpu/costs.py --dim 128 --hidden 128 --dtype bfloat16 --rule predicted
    python benchmarks/gpu/costs.py --stage conv --dim 64 --size 32 --batch 128

The kernels have the plan that they would make on that GPU. Their bytes are counted from their own
loads and stores (traffic.py, extrapolation.py, pass_traffic.py), those of standard backprop in
eager PyTorch from its operations, by the same rule: every launch begins with a cold cache and moves
each byte that it touches once. The minimum reads and writes state and cotangent once, and the
weights and their gradients once per tile group. A tile group is either one tile of rows or all the
tiles of a program. The time is a sum over launches. Each takes the largest of three times: DRAM
bytes / DRAM bandwidth, issued bytes / bandwidth of the last cache, and FLOPs / peak rate.

A convolutional stage runs by layers: PyTorch's convolutions, the same as those of standard
backprop, and the kernels between them. Everything crosses DRAM in every layer, so no such pass can
reach the minimum, which counts state, cotangent, weights and gradients once.

The calculation leaves out three effects. A tensor smaller than the cache may still be there when
the next launch begins; that helps standard backprop, at small batches above all. Launches take time
themselves, and standard backprop has more of them. The first-level cache serves a part of the
issued bytes; that helps the kernels. Writes gpu_costs.csv.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import torch
from output import add_out, results_folder, write_csv
from pass_traffic import (
    Case,
    kernel_traffic,
    minimum_bytes,
    pass_size,
    plan_on,
    standard_traffic,
)
from progress import Progress, Stoppable
from traffic import Launch

from resode_kernels.backends.triton.device import LAST_LEVEL_CACHE, Device
from resode_kernels.options import ORDERS


@dataclass(frozen=True)
class GPU:
    name: str
    device: Device
    bandwidth: float
    """Of DRAM, bytes per second."""
    cache_bandwidth: float
    """Of the last-level cache."""
    tf32: float
    """Peak rate of products of float32 numbers in TF32, dense, FLOPs per second."""
    half: float
    """Of bfloat16 and float16 numbers."""

    def seconds(self, launches: Iterable[Launch], dtype: torch.dtype) -> float:
        peak = self.tf32 if dtype == torch.float32 else self.half
        return sum(
            max(one.dram / self.bandwidth, one.issued / self.cache_bandwidth, one.flops / peak)
            for one in launches
        )


# The vendors' figures: "NVIDIA A100 Tensor Core GPU" data sheet (80 GB SXM) and "NVIDIA A100 Tensor
# Core GPU Architecture" white paper; "NVIDIA H100 Tensor Core GPU" data sheet (SXM; rates without
# sparsity are half of those printed) and "NVIDIA H100 Tensor Core GPU Architecture" white paper;
# "AMD Instinct MI300X Accelerator" data sheet and "AMD CDNA 3 Architecture" white paper. Shared
# memory of a program: the CUDA C++ Programming Guide's table of compute capabilities, and the LDS.
# Caches: 5120 bytes a clock at 1.41 GHz (A100); NVIDIA prints no figure for the H100, the same at
# 1.755 GHz is assumed; the Infinity Cache's 17.2 TB/s (MI300X).
GPUS = (
    GPU("A100", Device("cuda:80", 32, 108, 163 << 10, 40 << 20), 2.04e12, 7.2e12, 156e12, 312e12),
    GPU("H100", Device("cuda:90", 32, 132, 227 << 10, 50 << 20), 3.35e12, 9e12, 495e12, 989e12),
    GPU(
        "MI300X",
        Device("hip:gfx942", 64, 304, 64 << 10, LAST_LEVEL_CACHE["gfx942"]),
        5.3e12,
        17.2e12,
        653.7e12,
        1307e12,
    ),
)
DTYPES = {
    "float32": (torch.float32, "float32 (TF32)"),
    "bfloat16": (torch.bfloat16, "bfloat16"),
    "float16": (torch.float16, "float16"),
}
CONV = Case(stage="conv", depth=64, batch=128, size=32, activation="relu")
CASES = (
    Case(),
    Case(depth=1024),
    Case(batch=4096),
    Case(dtype=torch.bfloat16),
    Case(rule="predicted"),
    Case(dim=32, hidden=32),
    Case(dim=128, hidden=128),
    Case(stage="linear"),
    CONV,
    replace(CONV, dtype=torch.bfloat16),
)


@dataclass
class Costs:
    """One line of the table: a pass of a case on a GPU. Bytes, FLOPs of products, seconds."""

    gpu: str
    stage: str
    dim: int
    hidden: int
    depth: int
    batch: int
    size: int
    dtype: str
    rule: str
    direction: str
    tile_rows: int | None
    """None, as is the rest of the plan: it runs by layers."""
    tiles: int | None
    programs: int | None
    launches: int
    steps_per_launch: int | None
    flops: int
    dram: int
    issued: int
    minimum_per_tile: int
    minimum_per_program: int
    standard_flops: int
    standard_dram: int
    seconds: float
    standard_seconds: float
    revisited: int
    """The most that a launch comes back to, which the cache has to hold."""
    cache: int


def costs(case: Case, gpu: GPU, *, reverse: bool) -> Costs | None:
    """None: an MLP or linear stage too wide for the depth-fused kernels."""
    layout = plan_on(case, gpu.device, reverse=reverse)
    if layout is None and case.stage != "conv":
        return None
    scale = pass_size(case, layout, reverse=reverse) if layout else None
    ours = kernel_traffic(case, layout, reverse=reverse).values()
    theirs = standard_traffic(case, reverse=reverse).values()
    return Costs(
        gpu=gpu.name,
        stage=case.stage,
        dim=case.dim,
        hidden=case.hidden,
        depth=case.depth,
        batch=case.batch,
        size=case.size,
        dtype=str(case.dtype).removeprefix("torch."),
        rule=case.rule,
        direction="reverse" if reverse else "forward",
        tile_rows=layout.spec.rows if layout else None,
        tiles=scale.tiles if scale else None,
        programs=scale.programs if scale else None,
        launches=sum(one.count for one in ours),
        steps_per_launch=scale.longest if scale else None,
        flops=sum(one.flops for one in ours),
        dram=sum(one.dram for one in ours),
        issued=sum(one.issued for one in ours),
        minimum_per_tile=minimum_bytes(case, scale.tiles if scale else 1, reverse=reverse),
        minimum_per_program=minimum_bytes(case, scale.programs if scale else 1, reverse=reverse),
        standard_flops=sum(one.flops for one in theirs),
        standard_dram=sum(one.dram for one in theirs),
        seconds=gpu.seconds(ours, case.dtype),
        standard_seconds=gpu.seconds(theirs, case.dtype),
        revisited=max(one.revisited for one in ours),
        cache=gpu.device.cache,
    )


def step(forward: Costs, reverse: Costs) -> Costs:
    """Both passes; plan of the reverse pass."""
    summed = (
        "launches", "flops", "dram", "issued", "minimum_per_tile", "minimum_per_program",
        "standard_flops", "standard_dram", "seconds", "standard_seconds",
    )  # fmt: skip
    totals = {name: getattr(forward, name) + getattr(reverse, name) for name in summed}
    most = max(forward.revisited, reverse.revisited)
    return replace(reverse, direction="step", revisited=most, **totals)


# ---------------------------------------------------------------------------------------- output


def describe(case: Case) -> str:
    hidden = f", hidden {case.hidden}" if case.stage == "mlp" else ""
    images = f" of {case.size} x {case.size}" if case.stage == "conv" else ""
    precision = next(label for dtype, label in DTYPES.values() if dtype == case.dtype)
    return (
        f"{case.stage}, dim {case.dim}{hidden}, depth {case.depth}, "
        f"batch {case.batch}{images}, {precision}, {case.rule}"
    )


Columns = tuple[tuple[str, str, Callable[[Costs], str]], ...]
TRAFFIC: Columns = (
    ("GFLOP", "kernels", lambda c: f"{c.flops / 1e9:,.0f}"),
    ("GFLOP", "standard", lambda c: f"{c.standard_flops / 1e9:,.0f}"),
    ("DRAM GB", "kernels", lambda c: f"{c.dram / 1e9:.3f}"),
    ("DRAM GB", "standard", lambda c: f"{c.standard_dram / 1e9:.2f}"),
    ("standard", "/ kernels", lambda c: f"{c.standard_dram / c.dram:.1f} x"),
)
MINIMUM: Columns = (
    ("minimum", "GB", lambda c: f"{c.minimum_per_tile / 1e9:.2f}"),
    ("kernels", "/ minimum", lambda c: f"{c.dram / c.minimum_per_tile:.1f} x"),
)
MINIMUM_OF_TILES: Columns = (
    ("minimum GB", "per tile", lambda c: f"{c.minimum_per_tile / 1e9:.2f}"),
    ("kernels", "/ minimum", lambda c: f"{c.dram / c.minimum_per_tile:.3f} x"),
    ("minimum GB", "per program", lambda c: f"{c.minimum_per_program / 1e9:.2f}"),
    ("kernels", "/ minimum", lambda c: f"{c.dram / c.minimum_per_program:.3f} x"),
)
TIME: Columns = (
    ("expected ms", "kernels", lambda c: f"{1e3 * c.seconds:.2f}"),
    ("expected ms", "standard", lambda c: f"{1e3 * c.standard_seconds:.2f}"),
    ("", "speed-up", lambda c: f"{c.standard_seconds / c.seconds:.1f} x"),
    ("issued", "GB", lambda c: f"{c.issued / 1e9:.1f}"),
)


def table(rows: list[Costs]) -> str:
    by_layers = any(r.tile_rows is None for r in rows)
    columns = (*TRAFFIC, *(MINIMUM if by_layers else MINIMUM_OF_TILES), *TIME)
    head = [["", ""], ["", ""], *([top, bottom] for top, bottom, _ in columns)]
    body = [[r.gpu, r.direction, *(cell(r) for _, _, cell in columns)] for r in rows]
    lines = [*zip(*head, strict=True), *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def notes(rows: list[Costs]) -> list[str]:
    """The plans, and where the rule that counts the bytes does not hold."""
    lines = [
        f"{r.gpu}: {r.programs} programs walk {r.tiles} tiles of {r.tile_rows} rows backwards, "
        f"launches make up to {r.steps_per_launch} steps"
        for r in rows
        if r.direction == "reverse" and r.tile_rows is not None
    ]
    if any(r.tile_rows is None for r in rows):
        lines.append(
            "This stage runs by layers, alike on every GPU, and no layer-wise pass can reach the "
            "minimum: states and weights once"
        )
    lines += [
        f"{r.gpu}, {r.direction}: a launch comes back to {r.revisited / 2**20:.0f} MiB and the "
        f"cache has {r.cache / 2**20:.0f} MiB: DRAM sees more than that, at most what is issued"
        for r in rows
        if r.direction != "step" and r.revisited > r.cache
    ]
    return lines


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=["mlp", "linear", "conv"], help="default: mlp")
    parser.add_argument("--dim", type=int, help="width of the state, channels (default: 64)")
    parser.add_argument("--hidden", type=int, help="width of an MLP's hidden layer (default: dim)")
    parser.add_argument("--depth", type=int, help="default: 256, conv: 64")
    parser.add_argument("--batch", type=int, help="rows or images (default: 65536, conv: 128)")
    parser.add_argument("--size", type=int, help="height and width of images (default: 32)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of x and weights (default: float32)")
    parser.add_argument("--rule", choices=list(ORDERS), help="default: refined")
    add_out(parser)
    return parser


def cases(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Case, ...]:
    """The one that is asked for; all by default."""
    asked = {name: value for name, value in vars(args).items() if value is not None}
    asked.pop("out", None)
    if not asked:
        return CASES
    if min(value for value in (*asked.values(), 1) if isinstance(value, int)) < 1:
        parser.error("--dim, --hidden, --depth, --batch and --size must be at least 1")
    if "dtype" in asked:
        asked["dtype"], _ = DTYPES[asked["dtype"]]
    default = CONV if asked.get("stage") == "conv" else Case()
    if "size" in asked and default is not CONV:
        parser.error("--size is of images: --stage conv")
    asked.setdefault("hidden", asked.get("dim", default.hidden))
    return (replace(default, **asked),)


def expected_seconds(case: Case) -> float:
    """The kernels run on small batches, whose size depends on the tiles, so on the stage."""
    return 20.0


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    results: list[Costs] = []
    print(
        "A calculation, not a measurement: DRAM bytes and FLOPs per pass, by the vendors' rates\n"
    )
    chosen = cases(parser, args)
    with Stoppable() as run:
        progress = Progress("case", [expected_seconds(case) for case in chosen])
        for case in progress.over(chosen):
            rows, misfits = [], []
            for gpu in GPUS:
                progress.say(f"{describe(case)}, {gpu.name}")
                passes = []
                for reverse in (False, True):
                    row = costs(case, gpu, reverse=reverse)
                    if row is not None:
                        passes.append(row)
                    else:
                        direction = "reverse" if reverse else "forward"
                        misfits.append(f"{gpu.name}, {direction}: no tile fits; runs by layers")
                rows += [*passes, step(*passes)] if len(passes) == 2 else passes
            results += rows
            lines = [describe(case), table(rows), *notes(rows), *misfits, ""]
            print("\n".join(lines), flush=True)
    if results:
        path = results_folder(parser, args, published=not run.stopped) / "gpu_costs.csv"
        write_csv(path, [asdict(row) for row in results])
        print(f"Wrote {path}")
    run.end()


if __name__ == "__main__":
    main()
