"""The Triton kernels, compiled for every GPU of targets.py by the code that launches them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from targets import TARGETS
from triton_cases import QUICK, cases

from resode_kernels.backends.triton.spec import Tile
from resode_kernels.backends.triton.tiles import shared_bytes

Row = dict[str, str]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FUSED = {"forward_kernel", "reverse_kernel"}
KERNELS = FUSED | {
    "reduce_kernel",
    "combine_kernel",
    "activation_kernel",
    "partial_statistics_kernel",
    "join_statistics_kernel",
    "normalized_kernel",
    "vjp_sums_kernel",
    "vjp_kernel",
}
CASES = {(case.name, case.dtype) for case in cases(quick=True)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group(__name__),  # one process makes what all share
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The table of triton_resources.py, made in processes where Triton compiles."""
    path = tmp_path_factory.mktemp("compiled") / "gpu_resources.csv"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    script = BENCHMARKS / "gpu" / "triton_resources.py"
    command = [sys.executable, script, "--quick", "--out", path.parent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # does not compile, spills, or too much shared memory
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_case_compiles_for_every_target(rows: list[Row]) -> None:
    assert len(CASES) == len(QUICK)
    assert {(row["case"], row["dtype"], row["target"]) for row in rows} == {
        (*case, target) for case in CASES for target in TARGETS
    }
    assert {row["kernel"] for row in rows} == KERNELS


def test_nothing_spills_and_everything_fits(rows: list[Row]) -> None:
    for row in rows:
        assert row["spill_bytes"] == "0", row
        assert int(row["shared_bytes"]) <= int(row["shared_limit"]), row
        assert float(row["occupancy"]) > 0, row


def test_the_tiles_need_no_more_shared_memory_than_they_are_said_to(rows: list[Row]) -> None:
    """So that what is chosen for a device fits there."""
    checked = 0
    for row in rows:
        if row["kernel"] in FUSED:
            element = 4 if row["dtype"] in ("tf32", "float32") else 2
            linear = row["case"].startswith("linear")
            scheme = "heun" if "heun" in row["case"] else "euler"
            tile = Tile(int(row["tile_rows"]), int(row["chunk"]), 0)
            spec = SimpleNamespace(
                block="linear" if linear else "mlp", scheme=scheme, width=int(row["tile_columns"])
            )
            assert int(row["shared_bytes"]) <= shared_bytes(tile, spec, element), row
            checked += 1
    assert checked > 100


def test_products_run_on_tensor_cores_unless_in_full_float32(rows: list[Row]) -> None:
    kinds = defaultdict(set)
    for row in rows:
        if row["kernel"] not in FUSED:
            continue
        instructions = row["tensor_core"].split()
        names = {instruction.partition(".")[0] for instruction in instructions}
        kinds[row["target"]] |= names
        if row["target"] == "gfx942":  # multiplies matrices of float32 as they are
            assert names, row
            assert all(name.startswith("v_mfma") for name in names), row
        elif row["dtype"] == "float32":
            assert not names, row
        else:
            assert names, row
            assert names <= {"mma", "wgmma", "tcgen05"}, row
    assert "wgmma" in kinds["sm_90"]
    assert "tcgen05" in kinds["sm_100"]
