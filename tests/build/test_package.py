"""The package as a user meets it: where its kernels are found, what it imports, what it says."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import resode_kernels as rk
from resode_kernels import backends, info
from resode_kernels.backends import cpp, cuda, native
from resode_kernels.backends.contract import ForwardIO
from resode_kernels.options import Options
from resode_kernels.problem import Kept, Problem

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python and returns what it printed. It must succeed."""
    run = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run


def test_auto_picks_the_kernels_on_the_cpu_and_the_reference_elsewhere() -> None:
    expected = "cpp" if cpp.unavailable() is None else "reference"
    assert backends.choose("auto", torch.device("cpu")) == expected
    assert backends.choose("auto", torch.device("meta")) == "reference"
    with pytest.raises(rk.BackendUnavailableError, match="runs on the CPU, not on 'cuda'"):
        backends.choose("cpp", torch.device("cuda"))


@pytest.mark.needs_cpp
def test_an_environment_variable_forces_a_lower_instruction_set(tmp_path: Path) -> None:
    script = "from resode_kernels.backends import cpp; print(cpp._C.selected())"
    for name in cpp._C.supported():
        assert python("-c", script, cwd=tmp_path, RESODE_ISA=name).stdout.strip() == name


@pytest.mark.needs_cpp
def test_narrow_stages_get_vectors_that_they_fill() -> None:
    """Padding to whole panels must not cost more than wide vectors gain."""

    def picked(dim: int, dtype: torch.dtype = torch.float32) -> str:
        parameters = [torch.zeros(4, dim, dim, dtype=dtype)]
        problem = Problem("linear", "identity", tuple(parameters), Options().method(4))
        x = torch.zeros(8, dim, dtype=dtype)
        stage = native.stage_of(cpp._C, problem, parameters, x)
        plan = cpp._C.plan(stage, native.forward_of(cpp._C, ForwardIO(x, x, Kept(x), x)))
        return str(plan.instruction_set)

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


# ------------------------------------------------------------------------------ finding the kernels

PICKED = """
import torch
import resode_kernels as rk
from resode_kernels.backends import choose
print(rk.__file__, choose("auto", torch.device("cpu")))
"""


@pytest.mark.needs_cpp
@pytest.mark.parametrize("where", ["checkout", "elsewhere"])
def test_kernels_are_found_wherever_python_starts(tmp_path: Path, where: str) -> None:
    """In the checkout Python finds the package's sources before the installed package."""
    cwd = ROOT if where == "checkout" else tmp_path
    run = python("-W", "error::UserWarning", "-c", PICKED, cwd=cwd)
    file, picked = run.stdout.split()
    assert picked == "cpp"
    assert Path(file).is_relative_to(ROOT) or where == "elsewhere"
    out = python("-m", "resode_kernels", "info", cwd=cwd).stdout
    assert ", ".join(cpp._C.built()) in out


def modules_in(folder: Path, **sources: str) -> str:
    """A folder with these modules, to stand before all others on Python's path."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return os.pathsep.join([str(folder), str(ROOT)])


CALL = "import torch, resode_kernels as rk; rk.MLPStage(4, 4, 3)(torch.ones(2, 4))\n"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("INTERFACE = 0", "is of another version of the package (its interface is 0, expected "),
        ("", "(its interface is None, expected "),
        ("raise ImportError('no kernels here')", "no kernels here"),
    ],
)
def test_missing_or_stale_kernels_are_told_once(tmp_path: Path, module: str, reason: str) -> None:
    path = modules_in(tmp_path, resode_kernels_cpu=module)
    run = python("-W", "always", "-c", 3 * CALL, cwd=tmp_path, PYTHONPATH=path)
    (warning,) = (line for line in run.stderr.splitlines() if "MissingKernelsWarning" in line)
    assert reason in warning
    assert "stages on 'cpu' run in the backend 'reference'" in warning
    assert "Install resode_kernels again" in warning
    assert reason in python("-m", "resode_kernels", "info", cwd=tmp_path, PYTHONPATH=path).stdout
    explicit = CALL.replace("3)", "3, backend='reference')")
    run = python("-W", "error", "-c", explicit, cwd=tmp_path, PYTHONPATH=path)
    refused = CALL.replace("3)", "3, backend='cpp')")
    with pytest.raises(AssertionError, match="BackendUnavailableError: backend='cpp'"):
        python("-c", refused, cwd=tmp_path, PYTHONPATH=path)


def test_kernels_for_another_processor_or_python_are_told(tmp_path: Path) -> None:
    info = ("-m", "resode_kernels", "info")
    source = f"INTERFACE = {native.INTERFACE}\nbuilt = lambda: ['avx1024']\nsupported = lambda: []"
    path = modules_in(tmp_path, resode_kernels_cpu=source)
    reason = "the kernels were built for avx1024, which this processor does not run"
    assert reason in python(*info, cwd=tmp_path, PYTHONPATH=path).stdout
    run = python("-W", "always", "-c", CALL, cwd=tmp_path, PYTHONPATH=path)
    assert "MissingKernelsWarning" in run.stderr
    assert reason in run.stderr

    report = '{"cpu": {"suffix": ".cpython-399-x86_64-linux-gnu.so"}}'
    (tmp_path / "resode_kernels_build.json").write_text(report)
    path = modules_in(tmp_path, resode_kernels_cpu="raise ImportError('no such module')")
    out = python(*info, cwd=tmp_path, PYTHONPATH=path).stdout
    assert "built for another Python (they end in .cpython-399-x86_64-linux-gnu.so, this" in out


def test_what_was_not_built_is_reported_with_the_reason(tmp_path: Path) -> None:
    reason = "no C++ compiler found"
    (tmp_path / "resode_kernels_build.json").write_text(f'{{"cpu": {{"error": "{reason}"}}}}')
    path = modules_in(tmp_path, resode_kernels_cpu="raise ImportError('no such module')")
    out = python("-m", "resode_kernels", "info", cwd=tmp_path, PYTHONPATH=path).stdout
    assert f"not available: {reason}" in out
    assert re.search(r'reference .*<- "auto" picks this', out)


SIGNATURES = {1: "87bc4c2d58910d0c", 2: "1a522b8f99af0f6b", 3: "7c30104fd465c737"}
"""For every interface the digest of its signatures. A new interface gets a new line."""


@pytest.mark.needs_cpp
def test_a_new_signature_is_a_new_interface() -> None:
    """A compiled module of another version is then refused by name, and not called in vain."""

    owners = [cpp._C, *(m for m in vars(cpp._C).values() if isinstance(m, type))]
    documented = [str(m.__doc__) for owner in owners for m in vars(owner).values() if callable(m)]
    # pybind11 documents a function by its signature. How it writes types depends on its version.
    signatures = sorted(
        " ".join([line.split("(")[0], *re.findall(r"(\w+):", line)])
        for text in documented
        for line in text.splitlines()
        if re.match(r"\w+\(.*\) ->", line)
    )
    assert len(signatures) > 10
    enums = re.findall(r"^RESODE_ENUM\(.*", (ROOT / "csrc" / "stage.h").read_text(), re.MULTILINE)
    digest = hashlib.sha256("\n".join([*signatures, *enums]).encode()).hexdigest()[:16]
    assert native.INTERFACE == cpp._C.INTERFACE
    assert SIGNATURES[native.INTERFACE] == digest, (
        "the interface changed: raise kInterface in csrc/stage.h and INTERFACE in native.py, and "
        "add its digest to SIGNATURES"
    )


# ------------------------------------------------------------------------------------ importing it


def test_importing_the_package_imports_little_beside_torch(tmp_path: Path) -> None:
    """torch._dynamo, sympy, matplotlib or Triton would take longer than the package itself."""
    script = """
import sys, torch
before = set(sys.modules)
import resode_kernels
print(*(set(sys.modules) - before))
"""
    new = python("-c", script, cwd=tmp_path).stdout.split()
    foreign = {name for name in new if name.split("_")[0] != "resode"}
    standard = {name for name in foreign if name.split(".")[0] in sys.stdlib_module_names}
    assert foreign - standard == set()
    assert len(standard) < 15


def test_the_version_is_that_of_the_installed_package() -> None:
    assert rk.__version__ == version("resode_kernels")


# ------------------------------------------------------------------------------------ command line


def test_the_command_line_shows_its_help_and_version(tmp_path: Path) -> None:
    out = python("-m", "resode_kernels", cwd=tmp_path).stdout
    assert out.startswith("usage: python -m resode_kernels")
    assert "info" in out
    out = python("-m", "resode_kernels", "--version", cwd=tmp_path).stdout
    assert out == f"resode_kernels {rk.__version__}\n"


def test_the_reader_of_info_may_stop_early(tmp_path: Path) -> None:
    command = f"{sys.executable} -m resode_kernels info | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_info_names_what_was_built_and_what_auto_picks(tmp_path: Path) -> None:
    out = python("-m", "resode_kernels", "info", cwd=tmp_path).stdout
    assert f"resode_kernels {rk.__version__}" in out
    assert torch.__version__ in out
    (picked,) = re.findall(r'(\w+) .*<- "auto" picks this', out)
    assert picked == backends.choose("auto", torch.device("cpu"))
    if cpp.unavailable() is None:
        assert ", ".join(cpp._C.built()) in out
        assert f"in use             {cpp._C.selected()}" in out


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


def test_every_page_names_the_tested_versions_of_torch() -> None:
    """The versions of info, the oldest one of pyproject.toml, those of the workflow."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert oldest[1] == info.TESTED_TORCH[0]
    workflow = (ROOT / ".github" / "workflows" / "torch.yml").read_text()
    for named in info.TESTED_TORCH:
        assert f'"{named}"' in workflow
    *others, last = info.TESTED_TORCH
    assert f"{', '.join(others)} and {last}" in (ROOT / "README.md").read_text()
