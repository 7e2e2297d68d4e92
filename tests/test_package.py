"""The package as a user gets it: what it builds from, what it says about itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import resode_kernels as rk
from resode_kernels import backends
from resode_kernels.backends import cpp

ROOT = Path(__file__).resolve().parent.parent


def test_csrc_includes_no_torch_header() -> None:
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert len(sources) > 5
    for source in sources:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", source.read_text())


def test_auto_picks_the_kernels_on_the_cpu_and_the_reference_elsewhere() -> None:
    expected = "cpp" if cpp.unavailable() is None else "reference"
    assert backends.choose("auto", torch.device("cpu")) == expected
    assert backends.choose("auto", torch.device("meta")) == "reference"
    with pytest.raises(rk.BackendUnavailableError, match="runs on the CPU, not on 'cuda'"):
        backends.choose("cpp", torch.device("cuda"))


def test_info_names_what_was_built_and_what_auto_picks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resode_kernels", "info"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    out = run.stdout
    assert f"resode_kernels {rk.__version__}" in out
    assert torch.__version__ in out
    (picked,) = re.findall(r'(\w+) .*<- "auto" picks this', out)
    assert picked == backends.choose("auto", torch.device("cpu"))
    if cpp.unavailable() is None:
        assert ", ".join(cpp._C.built()) in out
        assert f"in use             {cpp._C.selected()}" in out


@pytest.mark.needs_cpp
def test_an_environment_variable_forces_a_lower_instruction_set(tmp_path: Path) -> None:
    script = "from resode_kernels.backends import cpp; print(cpp._C.selected())"
    for name in cpp._C.supported():
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "RESODE_ISA": name},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == name


@pytest.mark.needs_cpp
def test_instruction_sets_differ_in_speed() -> None:
    """Each build uses its own vectors: the FMA peak rises from one to the next."""
    before = cpp._C.selected()
    peaks = []
    for name in cpp._C.supported():
        cpp._C.select(name)
        peaks.append(max(cpp._C.fma_peak(threads=1, seconds=0.05) for _ in range(5)))
    cpp._C.select(before)
    assert peaks == sorted(peaks)
    if len(peaks) > 1:
        assert peaks[-1] > 2 * peaks[0]


def install_without_a_compiler(directory: Path, **environment: str) -> Any:
    """`pip install` of the sources into directory/site, with no compiler to be found."""
    source = directory / "source"
    built = shutil.ignore_patterns("*.so", "build_report.json", "__pycache__")
    for name in ("csrc", "resode_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", str(source)]
    return subprocess.run(
        [*command, "--target", str(directory / "site")],
        env={**os.environ, "PATH": str(directory), "CXX": "no-such-compiler", **environment},
        cwd=directory,
        capture_output=True,
        text=True,
    )


def test_without_a_compiler_the_reference_is_installed_and_says_why(tmp_path: Path) -> None:
    assert install_without_a_compiler(tmp_path, RESODE_CPP="0").returncode == 0
    script = """
import sys
# An editable install beside this one would supply the module that is missing here.
sys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in getattr(f, "__name__", "")]
import resode_kernels as rk, torch
from resode_kernels.info import lines
print(rk.__file__, *lines(), rk.MLPStage(4, 4, 3)(torch.ones(2, 4)).sum().item(), sep="\\n")
"""
    site = str(tmp_path / "site")
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": site},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(site)
    assert "no C++ compiler found (looked for $CXX, c++, g++, clang++)" in run.stdout
    assert re.search(r'reference .*<- "auto" picks this', run.stdout)


def test_a_failed_build_is_an_error_if_the_user_insists(tmp_path: Path) -> None:
    run = install_without_a_compiler(tmp_path, RESODE_CPP="1")
    assert run.returncode != 0
    assert "the C++ kernels could not be built: no C++ compiler found" in run.stderr + run.stdout
