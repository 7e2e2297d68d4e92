"""Registers, spills, shared memory and occupancy of the Triton kernels on several GPUs. Needs none
of them.

    python benchmarks/gpu/triton_resources.py [--targets sm_90 gfx942 …] [--quick]

The script compiles every case of triton_cases.py for every target, by the code that would launch it
there. It prints a line per kernel and writes gpu_resources.csv; if it is stopped, of the cases that
are complete. It fails if a kernel does not
compile, needs more shared memory than a thread block may have or, in its default tile, spills
registers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from output import add_out, results_folder, table, write_csv
from progress import Progress, Stoppable, leave_interrupts_to_the_parent
from targets import TARGETS
from triton_cases import Case, cases
from triton_code import resources
from triton_offline import Launch, offline

COMPILING = 4.0
"""Seconds that a case takes on one target."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a kernel of a case on a target."""

    kernel: str
    case: str
    dtype: str
    default: bool
    tile_rows: int | None
    tile_columns: int | None
    chunk: int | None
    warps: int
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    occupancy: float
    tensor_core: str


@dataclass(frozen=True)
class Result:
    """The kernels of a case on a target, as far as it ran without an error."""

    rows: list[Row]
    failures: list[str]


def form_field(launch: Launch, name: str) -> int | None:
    """A field of the kernel's form: a constexpr argument that is a NamedTuple. None if there is
    none."""
    forms = [value for value in launch.constants.values() if hasattr(value, "_fields")]
    return next((getattr(form, name) for form in forms if name in form._fields), None)


def row(case: Case, launch: Launch) -> Row:
    taken = resources(launch)
    return Row(
        kernel=launch.kernel,
        case=case.name,
        dtype=case.dtype,
        default=case.default,
        tile_rows=form_field(launch, "rows"),
        tile_columns=form_field(launch, "width"),
        chunk=form_field(launch, "chunk"),
        warps=launch.num_warps,
        target=launch.target.name,
        registers=taken.registers,
        spill_bytes=taken.spills,
        shared_bytes=taken.shared,
        shared_limit=launch.target.shared_per_block,
        occupancy=round(taken.occupancy, 3),
        tensor_core=" ".join(sorted(taken.tensor_core)),
    )


def measure(case: Case, target: str) -> Result:
    """A kernel that is launched several times is measured once."""
    where = f"{case.name}, {case.dtype}, {target}"
    failures = []
    with offline(target) as launches:
        try:
            case.run()
        except Exception as error:  # a compiler may raise anything; the other cases go on
            failures.append(f"{where}: {type(error).__name__}: {error}")
    kernels = {launch.compiled.hash: launch for launch in launches}
    rows = [row(case, launch) for launch in kernels.values()]
    if case.default:
        failures += [
            f"{where}: {r.kernel} spills {r.spill_bytes} bytes" for r in rows if r.spill_bytes
        ]
    if not launches and not failures:
        failures.append(f"{where}: no kernel was launched")
    return Result(rows, failures)


def measure_all(
    chosen: Sequence[Case], targets: Sequence[str], workers: int, results: list[Result]
) -> None:
    """Appends the results of all cases on all targets, in the order given."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, leave_interrupts_to_the_parent) as pool:
        tasks = [pool.submit(measure, case, target) for case in chosen for target in targets]
        for task in Progress("case", [COMPILING / workers] * len(tasks)).over(tasks):
            results.append(task.result())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="half of the cases")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    add_out(parser)
    args = parser.parse_args()

    results: list[Result] = []
    with Stoppable() as run:
        measure_all(cases(args.quick), args.targets, args.workers, results)
    lines = [asdict(row) for result in results for row in result.rows]
    if lines:
        print(table(lines))
        folder = results_folder(parser, args, besides=["workers"], published=not run.stopped)
        write_csv(folder / "gpu_resources.csv", lines)
        print(f"\nWrote {folder / 'gpu_resources.csv'}")
    run.end()
    if failures := [failure for result in results for failure in result.failures]:
        raise SystemExit("\n".join(["", *failures]))


if __name__ == "__main__":
    main()
