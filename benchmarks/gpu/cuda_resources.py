"""Registers, spills, shared memory, occupancy and tensor-core instructions of the CUDA kernels.

    python benchmarks/gpu/cuda_resources.py [--targets sm_90 …]

Needs nvcc, and no GPU. The script compiles everything in csrc/cuda for every target. It prints a
line per kernel, for a depth-fused kernel a line per size of stage with the shared memory of its
launch, and writes cuda_resources.csv; if it is stopped, of the sources that are complete. It fails
if a kernel spills registers, if it needs more shared memory than a thread block may have, or if a
kernel that should use tensor cores does not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import nvcc
import sass
from cuda_plans import plans
from output import add_out, results_folder, table, write_csv
from progress import Progress, Stoppable
from targets import CUDA_TARGETS, occupancy

CUDA_SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"

COMPILING = 8.0
"""Seconds that a source takes for one target."""

# The report of ptxas on a kernel, and the number of threads of a thread block in PTX.
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?\b(\d+) bytes smem)?")
THREADS = re.compile(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+)")


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for a target."""

    name: str
    precision: str  # of its matrix products, if it has any
    target: int
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int  # stored and loaded
    static_shared: int
    tensor_core: int | None  # instructions in the code; None if there is no cuobjdump
    async_copies: int | None


@dataclass(frozen=True)
class Row:
    """One line of the table: a launch of a kernel on a target."""

    kernel: str
    precision: str
    target: str
    dim: int | None
    tile_rows: int | None
    chunk: int | None
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared: int
    dynamic_shared: int
    shared_limit: int
    occupancy: float
    tensor_core: int | None
    async_copies: int | None


def compile_unit(
    compiler: nvcc.Nvcc, source: Path, flags: list[str], targets: list[int]
) -> list[Kernel]:
    """The kernels of a source for all targets."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.fatbin")
        command = [compiler.path, *nvcc.FLAGS, *compiler.host, nvcc.generate(targets), *flags]
        command += ["-Xptxas=-v", "--keep", "--keep-dir", folder, "-fatbin", str(source)]
        run = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr)
        (ptx,) = Path(folder).glob("*.ptx")
        threads = {name: int(count) for name, count in THREADS.findall(ptx.read_text())}
        known = sass.cuobjdump() is not None
        code = {t: sass.kernels(out, f"sm_{t}") if known else {} for t in targets}
    precision = flags[0].partition("=")[2] if flags else ""
    return list(parse(run.stderr, precision, threads, code))


def parse(
    log: str, precision: str, threads: dict[str, int], code: dict[int, dict[str, sass.Code]]
) -> Iterator[Kernel]:
    _, *parts = ENTRY.split(log)
    names = sass.readable(parts[::3])
    for name, mangled, target, said in zip(
        names, parts[::3], parts[1::3], parts[2::3], strict=True
    ):
        frame, used = FRAME.search(said), USED.search(said)
        assert frame, said
        assert used, said
        instructions = code[int(target)].get(mangled)
        yield Kernel(
            name=name,
            precision=precision if is_fused(name) else "",
            target=int(target),
            threads=threads[mangled],
            registers=int(used[1]),
            stack_bytes=int(frame[1]),
            spill_bytes=int(frame[2]) + int(frame[3]),
            static_shared=int(used[2] or 0),
            tensor_core=instructions and instructions.tensor_core,
            async_copies=instructions and instructions.async_copies,
        )


def is_fused(name: str) -> bool:
    """Whether this is a kernel that walks through the steps of a stage."""
    return re.search(r"<(Mlp|Linear)>", name) is not None


def rows(kernel: Kernel) -> Iterator[Row]:
    target = CUDA_TARGETS[f"sm_{kernel.target}"]
    for plan in plans(kernel.name, kernel.precision, target):
        shared = kernel.static_shared + plan.shared
        yield Row(
            kernel=kernel.name,
            precision=kernel.precision,
            target=target.name,
            dim=plan.dim,
            tile_rows=plan.rows,
            chunk=plan.chunk,
            threads=kernel.threads,
            registers=kernel.registers,
            stack_bytes=kernel.stack_bytes,
            spill_bytes=kernel.spill_bytes,
            static_shared=kernel.static_shared,
            dynamic_shared=plan.shared,
            shared_limit=target.shared_per_block,
            occupancy=round(occupancy(target, kernel.threads // 32, kernel.registers, shared), 3),
            tensor_core=kernel.tensor_core,
            async_copies=kernel.async_copies,
        )


def failures(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        where = f"{row.kernel} {row.precision} dim {row.dim}, {row.target}"
        if row.spill_bytes:
            yield f"{where}: spills {row.spill_bytes} bytes"
        if row.static_shared + row.dynamic_shared > row.shared_limit:
            yield f"{where}: needs more shared memory than {row.shared_limit} bytes"
        should = row.precision not in ("", "float32")
        if row.tensor_core is not None and should != (row.tensor_core > 0):
            yield f"{where}: {row.tensor_core} tensor-core instructions"


def measure_all(targets: list[int], workers: int, measured: list[Row]) -> None:
    """Appends the rows in the order of the sources and targets."""
    compiler = nvcc.find()
    units = [unit for unit in nvcc.units(CUDA_SOURCES).values() if unit[0].suffix == ".cu"]
    progress = Progress("source", [COMPILING * len(targets) / workers] * len(units))
    pool = ThreadPoolExecutor(workers)
    try:
        tasks = [
            pool.submit(compile_unit, compiler, source, flags, targets) for source, flags in units
        ]
        for task in progress.over(tasks):
            measured += [row for kernel in task.result() for row in rows(kernel)]
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the sources that are being compiled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(CUDA_TARGETS)
    parser.add_argument("--targets", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, default=2, help="sources compiled at a time")
    add_out(parser)
    args = parser.parse_args()

    measured: list[Row] = []
    with Stoppable() as run:
        targets = [int(name.removeprefix("sm_")) for name in args.targets]
        measure_all(targets, args.workers, measured)
    if measured:
        lines = [asdict(row) for row in measured]
        print(table(lines))
        folder = results_folder(parser, args, besides=["workers"], published=not run.stopped)
        write_csv(folder / "cuda_resources.csv", lines)
        print(f"\nWrote {folder / 'cuda_resources.csv'}")
    run.end()
    if failed := list(failures(measured)):
        raise SystemExit("\n".join(["", *failed]))


if __name__ == "__main__":
    main()
