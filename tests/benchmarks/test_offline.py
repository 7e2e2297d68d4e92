"""Compiling kernels for GPUs that are not there: what is reported of a kernel made for the purpose.

The session may run kernels in Triton's interpreter, where nothing is compiled: the compiler runs in
processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from targets import TARGETS, occupancy
from triton.runtime import driver
from triton_offline import offline

NVIDIA = [name for name, target in TARGETS.items() if target.nvidia]
GROUPS = [["sm_80", "gfx942"], ["sm_90", "sm_100", "sm_120"]]
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group(__name__)  # one process makes what all share


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """target → way of compiling → what came out, see tiny_kernels.py."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "benchmarks" / "gpu")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests" / "support" / "tiny_kernels.py", *group],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for group in GROUPS
    ]
    result: dict[str, Any] = {}
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        result |= json.loads(output)
    return result


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_is_listed_as_made(found: dict[str, Any], target: str) -> None:
    launch = found[target]["float32"]
    assert launch["kernel"] == "product"
    assert launch["target"] == target
    assert launch["grid"] == [3, 2, 1]
    assert launch["warps"] == 8
    assert launch["signature"] == {
        "operands": ["*fp32", "*fp32", "constexpr"],
        "c": "*fp32",
        "length": "i32",
        "T": "constexpr",
    }
    assert launch["constants"] == {
        "operands[2]": "None",
        "T": "Tile(rows=32, columns=32, precision='ieee')",
    }


def test_options_of_the_launch_reach_the_compiler(found: dict[str, Any]) -> None:
    assert found["sm_90"]["six stages"]["stages"] == 6
    assert found["sm_90"]["few registers"]["registers"] <= 32


@pytest.mark.parametrize("target", TARGETS)
def test_a_second_launch_compiles_nothing(found: dict[str, Any], target: str) -> None:
    assert found[target]["float16"]["same_again"]


def test_every_target_has_its_own_code(found: dict[str, Any]) -> None:
    assert len({found[target]["float16"]["code"] for target in TARGETS}) == len(TARGETS)


@pytest.mark.parametrize("way", ["with a bias", "not aligned", "of length 1"])
def test_arguments_are_specialized(found: dict[str, Any], way: str) -> None:
    plain, special = found["sm_80"]["float16"], found["sm_80"][way]
    assert special["code"] != plain["code"]
    signatures = {
        "with a bias": ["*fp16", "*fp16", "*fp32"],
        "not aligned": plain["signature"]["operands"],
        "of length 1": plain["signature"]["operands"],
    }
    assert special["signature"]["operands"] == signatures[way]
    assert ("length" in special["constants"]) == (way == "of length 1")


@pytest.mark.parametrize("target", TARGETS)
def test_spills_are_reported(found: dict[str, Any], target: str) -> None:
    for way, launch in found[target].items():
        if "required" not in launch:
            for count in ("spill_stores", "spill_loads", "stack"):
                assert (launch[count] > 0) == (way == "few registers")


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_is_limited_as_on_the_gpu(found: dict[str, Any], target: str) -> None:
    """Operands of 160 KiB (where the left one passes through shared memory too: 192 KiB)."""
    launch = found[target]["six stages"]
    limit = TARGETS[target].shared_per_block
    if target in ("sm_120", "gfx942"):
        assert launch == {"required": 160 * 1024, "limit": limit, "name": "shared memory"}
    else:
        assert 160 * 1024 <= launch["shared"] <= limit


INSTRUCTIONS = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "sm_120": "mma.sync",
    "gfx942": "v_mfma",
}


@pytest.mark.parametrize("target", TARGETS)
def test_tensor_cores_are_reported(found: dict[str, Any], target: str) -> None:
    for way, operand in (("float16", "f16"), ("tf32", "xf32" if target == "gfx942" else "tf32")):
        (instruction,) = found[target][way]["tensor_core"]
        assert instruction.startswith(INSTRUCTIONS[target] + ("_" if target == "gfx942" else "."))
        assert operand in instruction
    if target == "gfx942":  # multiplies matrices of float32 as they are
        assert found[target]["float32"]["tensor_core"] == ["v_mfma_f32_32x32x2_f32"]
    else:
        assert found[target]["float32"]["tensor_core"] == []


def test_occupancy_of_registers_is_llvm_s(found: dict[str, Any]) -> None:
    launches = [launch for launch in found["gfx942"].values() if "required" not in launch]
    assert len(launches) == 4
    for launch in launches:
        waves = 8 * occupancy(TARGETS["gfx942"], launch["warps"], launch["registers"])
        assert waves == launch["waves"]


@pytest.mark.parametrize(
    ("target", "arguments", "warps"),
    [
        ("sm_80", (4, 32), 64),
        ("sm_80", (4, 64), 32),
        ("sm_80", (4, 65), 28),
        ("sm_80", (4, 255), 8),
        ("sm_80", (1, 16), 32),  # blocks
        ("sm_80", (4, 32, 81 * 1024), 8),
        ("sm_80", (4, 32, 81 * 1024 + 1), 4),
        ("sm_90", (8, 128, 113 * 1024), 16),
        ("sm_90", (8, 168), 8),
        ("sm_100", (4, 64, 0, 128), 16),
        ("sm_120", (4, 32), 48),
        ("sm_120", (4, 32, 49 * 1024), 8),
        ("gfx942", (4, 128), 16),
        ("gfx942", (4, 129), 12),
        ("gfx942", (8, 64, 24 * 1024), 16),
    ],
)
def test_occupancy(target: str, arguments: tuple[int, ...], warps: int) -> None:
    assert occupancy(TARGETS[target], *arguments) * TARGETS[target].warps == pytest.approx(warps)


def test_the_table_of_resources_fails_for_bad_cases(found: dict[str, Any]) -> None:
    failures = found["failures"]
    assert all(len(messages) == 1 for messages in failures.values())
    assert "product spills" in failures["few registers"][0]
    assert "Required: 163840, Hardware limit: 101376" in failures["six stages"][0]
    assert failures["no launch"] == ["no launch, any, sm_120: no kernel was launched"]


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), offline("sm_80"):
        pass


def test_the_driver_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = driver._active
    with offline("sm_80"):
        with pytest.raises(ZeroDivisionError), offline("gfx942"):
            raise ZeroDivisionError
        assert driver.active.get_current_target().arch == 80
    assert driver._active is before
