"""The package as a user gets it: what it builds from, what it says about itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import nvcc
import pytest
import torch

import resode_kernels as rk
from resode_kernels import backends, info
from resode_kernels.backends import cpp, cuda, native
from resode_kernels.backends.contract import ForwardIO
from resode_kernels.options import Options
from resode_kernels.problem import Problem

ROOT = Path(__file__).resolve().parents[2]


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
def test_narrow_stages_get_vectors_that_they_fill() -> None:
    """Padding to whole panels must not cost more than wide vectors gain."""

    def picked(dim: int, dtype: torch.dtype = torch.float32) -> str:
        parameters = [torch.zeros(4, dim, dim, dtype=dtype)]
        problem = Problem("linear", "identity", tuple(parameters), Options().method(4))
        x = torch.zeros(8, dim, dtype=dtype)
        stage = native.stage_of(cpp._C, problem, parameters, x)
        return str(cpp._C.plan(stage, native.forward_of(cpp._C, ForwardIO(x, x, x, x))).instruction_set)

    supported, in_use = cpp._C.supported(), cpp._C.selected()
    cpp._C.select("auto")
    try:
        widest = supported[-1]
        assert {picked(dim) for dim in (32, 64, 128, 512)} == {widest}
        # A panel of AVX-512 has 32 floats: of 16 half of it would be padding, in both directions.
        narrow = next(n for n in ("avx512_narrow", "avx2", widest) if n in supported)
        assert {picked(dim) for dim in (16, 48, 80)} == {narrow}
        assert picked(16, torch.float64) == widest
        for name in supported:
            cpp._C.select(name)
            assert picked(16) == name
    finally:
        cpp._C.select(in_use)


@pytest.mark.needs_cpp
def test_instruction_sets_differ_in_speed() -> None:
    """Builds for different instruction sets use their own vectors: the FMA peak rises from one to
    the next. In turns and for moments, of which some are undisturbed even if others use the
    processor, too."""
    before = cpp._C.selected()
    best = {name: 0.0 for name in cpp._C.supported() if not name.endswith("_narrow")}
    for _ in range(100):
        for name in best:
            cpp._C.select(name)
            best[name] = max(best[name], cpp._C.fma_peak(threads=1, seconds=0.001))
    cpp._C.select(before)
    peaks = list(best.values())
    assert peaks == sorted(peaks)
    if len(peaks) > 1:
        assert peaks[-1] > 2 * peaks[0]


def copy_sources(directory: Path) -> Path:
    """What a source distribution has, in directory/source."""
    source = directory / "source"
    built = shutil.ignore_patterns("*.so", "build_report.json", "__pycache__")
    for name in ("csrc", "resode_kernels", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def install_without_a_compiler(directory: Path, **environment: str) -> Any:
    """`pip install` of the sources into directory/site, with no compiler to be found."""
    source = copy_sources(directory)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", str(source)]
    return subprocess.run(
        [*command, "--target", str(directory / "site")],
        env={
            **os.environ,
            "PATH": str(directory),
            "CXX": "no-such-compiler",
            "RESODE_CUDA": "",
            **environment,
        },
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


# ------------------------------------------------------------------------------ the CUDA kernels


def fake_nvcc(folder: Path, version: str = "13.0.88", works: bool = True) -> Path:
    """An nvcc that knows three targets and makes empty objects, of the project's own sources only
    if it works."""
    script = folder / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(f"""#!/bin/sh
case "$*" in
*--version*) echo "release, V{version}" && exit ;;
*--list-gpu-code*) printf 'sm_75\\nsm_80\\nsm_90\\n' && exit ;;
*csrc*) {str(works).lower()} || exit ;;
esac
while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done
: > "${{2:-probe.o}}"
""")
    script.chmod(0o755)
    return script


def test_nvcc_of_cuda_home_comes_before_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, path = fake_nvcc(tmp_path / "home", "13.1.2"), fake_nvcc(tmp_path / "path", "12.9.1")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert (nvcc.find().path, nvcc.find().version) == (str(home), "13.1.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing here"))
    assert (nvcc.find().path, nvcc.find().version) == (str(path), "12.9.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nvcc.NvccError, match=r"no nvcc found .*CUDA_HOME.*PATH"):
        nvcc.find()


def test_an_nvcc_that_compiles_nothing_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake_nvcc(tmp_path)
    refusal = "*probe*) echo 'error: old gcc' >&2; exit 1 ;;\nesac"
    script.write_text(script.read_text().replace("esac", refusal))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(nvcc.NvccError, match="compiles nothing here; it says: error: old gcc"):
        nvcc.find()


def test_the_host_compiler_of_nvcc_is_that_of_the_cpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvcc.find().host == ()
    assert nvcc.find("g++-12").host == ("-ccbin", "g++-12")
    assert nvcc.find("ccache /opt/g++ -m64").host == ("-ccbin", "/opt/g++")


def test_targets_are_those_asked_for_or_those_that_nvcc_knows() -> None:
    old = nvcc.Nvcc("nvcc", "12.4", known=(75, 80, 86, 89, 90))
    assert nvcc.targets(old, "") == [80, 86, 89, 90]
    for asked in ("90;80", "80,90", " 90 80 ", "80; 90;", "80;80;90"):
        assert nvcc.targets(old, asked) == [80, 90]
    with pytest.raises(ValueError, match=r"'90;120'.* 12\.4 has no target '120'; it has 75, 80,"):
        nvcc.targets(old, "90;120")
    assert nvcc.generate([80, 90]) == "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"


def test_fused_kernels_are_compiled_once_per_precision(tmp_path: Path) -> None:
    for name in ("fused.cu", "fused.cpp", "elementwise.cu", "activate.h"):
        (tmp_path / name).touch()
    units = nvcc.units(tmp_path)
    assert sorted(units) == [
        "elementwise_cu",
        "fused_bfloat16",
        "fused_cpp",
        "fused_float16",
        "fused_float32",
        "fused_tf32",
    ]
    assert units["fused_tf32"] == (tmp_path / "fused.cu", ["-DRESODE_PRECISION=tf32"])


def build_in_place(
    directory: Path, nvcc_works: bool = True, **environment: str
) -> tuple[Any, set[str], dict[str, Any]]:
    """Builds a copy of the sources by compilers that are not real. Returns the run, the modules
    that are there then, and the report."""
    source = directory / "source"
    if not source.exists():
        copy_sources(directory)
        fake_nvcc(directory / "cxx")
        fake_nvcc(directory / "True", works=True)
        fake_nvcc(directory / "False", works=False)
    defaults = {
        "CXX": str(directory / "cxx" / "bin" / "nvcc"),
        "CUDA_HOME": str(directory / str(nvcc_works)),
        "RESODE_CPP": "1",
        "RESODE_CUDA": "",
        "RESODE_CUDA_ARCHS": "",
    }
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        env={**os.environ, **defaults, **environment},
        cwd=source,
        capture_output=True,
        text=True,
    )
    modules = {path.name.split(".")[0] for path in (source / "resode_kernels").glob("*.so")}
    report = source / "resode_kernels" / "build_report.json"
    return run, modules, json.loads(report.read_text()) if report.exists() else {}


def test_cuda_kernels_are_built_for_the_targets_that_nvcc_knows(tmp_path: Path) -> None:
    run, modules, report = build_in_place(tmp_path, RESODE_CUDA="1")
    assert run.returncode == 0, run.stderr
    assert modules == {"_C", "_CUDA"}
    path = str(tmp_path / "True" / "bin" / "nvcc")
    assert report["cuda"] == {"nvcc": "13.0.88", "path": path, "architectures": [80, 90]}
    assert "code=[sm_80,sm_90,compute_80]" in run.stdout
    assert "-cudart static" in run.stdout


def test_a_failed_cuda_build_takes_nothing_else_down(tmp_path: Path) -> None:
    build_in_place(tmp_path)
    run, modules, report = build_in_place(tmp_path, nvcc_works=False, MAX_JOBS="1")
    assert run.returncode == 0
    assert modules == {"_C"}  # what the first build made of _CUDA is gone
    assert "compiler failed" in report["cuda"]["error"]
    assert "error" not in report
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("resode_kernels:"))
    assert "the CUDA kernels could not be built" in line


def test_resode_cuda_insists_or_skips(tmp_path: Path) -> None:
    message = "the CUDA kernels could not be built"
    run, _, _ = build_in_place(tmp_path, nvcc_works=False, RESODE_CUDA="1")
    assert run.returncode != 0
    assert message in run.stderr
    run, _, _ = build_in_place(
        tmp_path, RESODE_CUDA="1", CUDA_HOME=str(tmp_path), PATH=str(tmp_path)
    )
    assert run.returncode != 0
    assert f"{message}: no nvcc found" in run.stderr
    run, modules, report = build_in_place(tmp_path, RESODE_CUDA="0", RESODE_CUDA_ARCHS="no such")
    assert run.returncode == 0
    assert modules == {"_C"}
    assert "RESODE_CUDA=0" in report["cuda"]["error"]
    assert message not in run.stderr


def test_a_target_that_was_asked_for_is_never_left_out(tmp_path: Path) -> None:
    run, _, _ = build_in_place(tmp_path, RESODE_CUDA_ARCHS="90;120")
    assert run.returncode != 0
    assert "RESODE_CUDA_ARCHS='90;120': nvcc 13.0.88 has no target '120'" in run.stderr
    run, _, report = build_in_place(tmp_path, RESODE_CUDA_ARCHS="90")
    assert report["cuda"]["architectures"] == [90]
    assert "code=[sm_90,compute_90]" in run.stdout


def test_a_source_distribution_has_all_sources(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=copy_sources(tmp_path), check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    wanted = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    assert {"tools/nvcc.py", "resode_kernels/backends/cpp.py"} <= names


def test_info_says_which_gpus_the_cuda_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"Old": (7, 5), "A100": (8, 0), "Orin": (8, 7), "H100": (9, 0), "New": (12, 1)}
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "architectures", lambda: ["80", "90"])
    monkeypatch.setattr(cuda, "report", {"nvcc": "13.0.88"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: list(gpus)[i])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: list(gpus.values())[i])
    text = "\n".join(info.lines())
    assert "built with         nvcc 13.0.88" in text
    assert "architectures      sm_80, sm_90; PTX for GPUs newer than sm_80" in text
    other = "supported by code for an older GPU"
    assert (
        f"GPUs               Old (sm_75, not supported), A100 (sm_80), Orin (sm_87, {other}), "
        f"H100 (sm_90), New (sm_121, {other})" in text
    )


def test_info_says_why_there_are_no_cuda_kernels(tmp_path: Path) -> None:
    """In a process of its own: what is imported here was built otherwise."""
    _, _, report = build_in_place(tmp_path, RESODE_CUDA="0")
    script = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from resode_kernels.info import lines
print(*lines(), sep="\\n")
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "source")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"not available: {report['cuda']['error']}" in run.stdout
