"""The Triton kernels, compiled for every GPU of targets.py by the code that launches them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from resode_kernels.backends import IMPLEMENTED

pytest.importorskip("triton")
if "triton" not in IMPLEMENTED:
    pytest.skip("there is no Triton backend", allow_module_level=True)

from gpu_cases import cases
from targets import TARGETS

Row = dict[str, str]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CASES = {(case.name, case.dtype) for case in cases()}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The table of gpu_resources.py, made in processes where Triton compiles."""
    path = tmp_path_factory.mktemp("compiled") / "gpu_resources.csv"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    script = [sys.executable, BENCHMARKS / "gpu_resources.py", "--output", path]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # does not compile, spills, or too much shared memory
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_case_compiles_for_every_target(rows: list[Row]) -> None:
    assert {(row["case"], row["dtype"], row["target"]) for row in rows} == {
        (*case, target) for case in CASES for target in TARGETS
    }


def test_nothing_spills_and_everything_fits(rows: list[Row]) -> None:
    for row in rows:
        assert row["spill_bytes"] == "0", row
        assert int(row["shared_bytes"]) <= int(row["shared_limit"]), row
        assert float(row["occupancy"]) > 0, row


def test_products_run_on_tensor_cores_unless_in_full_float32(rows: list[Row]) -> None:
    found = defaultdict(set)
    for row in rows:
        found[row["case"], row["dtype"], row["target"]] |= set(row["tensor_core"].split())
    for (case, dtype, target), instructions in found.items():
        names = {instruction.partition(".")[0] for instruction in instructions}
        if target == "gfx942":  # multiplies matrices of float32 as they are
            assert instructions, (case, dtype, target)
            assert all(name.startswith("v_mfma") for name in names)
        elif dtype == "float32":
            assert not instructions, (case, dtype, target)
        else:
            assert names, (case, dtype, target)
            assert names <= {"mma", "wgmma", "tcgen05"}
