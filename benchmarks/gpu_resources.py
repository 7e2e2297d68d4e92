"""Registers, spills, shared memory and occupancy of the Triton kernels on GPUs that need not be
there.

    python benchmarks/gpu_resources.py [--targets sm_90 gfx942 …] [--quick]

Every case of gpu_cases.py is compiled for every target by the code that would launch it there; one
line per kernel is printed and written to gpu_resources.csv. Fails if a kernel does not compile,
needs more shared memory than a block may have or, in its default tile, spills registers.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_cases import Case, cases
from measure import table, write_csv
from offline import Launch, offline
from resources import resources
from targets import TARGETS
from tqdm import tqdm


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
    """The kernels of a case on a target, up to the one that failed."""

    rows: list[Row]
    failures: list[str]


def size(launch: Launch, name: str) -> int | None:
    """The field of the kernel's form, if it has one: a constexpr argument that is a NamedTuple."""
    forms = [value for value in launch.constants.values() if hasattr(value, "_fields")]
    return next((getattr(form, name) for form in forms if name in form._fields), None)


def row(case: Case, launch: Launch) -> Row:
    taken = resources(launch)
    return Row(
        kernel=launch.kernel,
        case=case.name,
        dtype=case.dtype,
        default=case.default,
        tile_rows=size(launch, "rows"),
        tile_columns=size(launch, "width"),
        chunk=size(launch, "chunk"),
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
    """A kernel is measured once, however often it is launched."""
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


def measure_all(of: Iterable[Case], targets: Iterable[str], workers: int) -> Result:
    """All cases on all targets, in the order given."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        tasks = [pool.submit(measure, case, target) for case in of for target in targets]
        for _ in tqdm(as_completed(tasks), total=len(tasks), unit="case", leave=False):
            pass
        results = [task.result() for task in tasks]
    return Result(
        [row for result in results for row in result.rows],
        [failure for result in results for failure in result.failures],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="half of the cases")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results" / "gpu_resources.csv",
    )
    args = parser.parse_args()

    result = measure_all(cases(args.quick), args.targets, args.workers)
    lines = [asdict(row) for row in result.rows]
    print(table(lines))
    write_csv(args.output, lines)
    print(f"\nWrote {args.output}")
    if result.failures:
        raise SystemExit("\n".join(["", *result.failures]))


if __name__ == "__main__":
    main()
