"""Builds the extension modules `_C` and `_CUDA` with ninja.

`_C`: the CPU kernels, compiled once per instruction set and linked into one module that picks the
best one when it is loaded. `_CUDA`: the CUDA kernels, if there is an nvcc, with the CUDA runtime
linked statically. Nothing here or in csrc/ needs torch. When a module cannot be built, the package
installs without it and remembers why, for `python -m resode_kernels info`.

Environment: CXX (compiler), MAX_JOBS (parallel jobs), RESODE_CXXFLAGS (extra compiler flags of
`_C`), RESODE_ISAS (its instruction sets, e.g. "avx2"), CUDA_HOME, RESODE_CUDA_ARCHS (targets of
`_CUDA`, e.g. "80;90"), RESODE_CPP=1, RESODE_CUDA=1 (a module that cannot be built is an error),
RESODE_CUDA=0 (`_CUDA` is not built).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pybind11
from ninja import ninja_syntax
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import nvcc  # noqa: E402

CSRC = ROOT / "csrc"
REPORT = "build_report.json"

# From the plainest to the widest; x86-64 has all of them, other processors the first. There it is
# for processors from before 2013, and a third less time for compiling it counts more. AVX-512 is
# there twice: see kPanelVectors in csrc/cpu/core/simd.h.
AVX512 = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"]
INSTRUCTION_SETS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "baseline": ["-O2"],
        "avx2": ["-mavx2", "-mfma"],
        "avx512_narrow": [*AVX512, "-DRESODE_PANEL_VECTORS=1"],
        "avx512": AVX512,
    }
if os.environ.get("RESODE_ISAS"):
    INSTRUCTION_SETS = {name: INSTRUCTION_SETS[name] for name in os.environ["RESODE_ISAS"].split()}


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name
    raise CompileError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def accepts(compiler: str, *flags: str) -> bool:
    """Whether a program compiles and links with these flags."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        command = [*compiler.split(), *flags, str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True).returncode == 0


def bindings() -> list[str]:
    return [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]


def write_cpp(ninja: ninja_syntax.Writer, target: Path) -> dict[str, Any]:
    """Writes the rules for `_C`; returns what `info` reports of the build."""
    compiler = find_compiler()
    openmp = ["-fopenmp"] if accepts(compiler, "-fopenmp") else []
    flags = [
        "-std=c++20",
        "-O3",
        "-ffp-contract=fast",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
    ]
    flags += openmp
    asked = os.environ.get("RESODE_CXXFLAGS", "").split()
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    ninja.variable("cxx", compiler)
    ninja.variable("flags", flags)
    ninja.variable("asked", asked)
    ninja.rule(
        "compile",
        "$cxx -MMD -MF $out.d $flags $extra $asked -c $in -o $out",
        depfile="$out.d",
        deps="gcc",
    )
    ninja.rule("link", "$cxx $flags $asked $link $in -o $out")
    objects = []
    for name, isa_flags in INSTRUCTION_SETS.items():
        objects += ninja.build(
            f"kernels_{name}.o",
            "compile",
            str(CSRC / "cpu" / "kernels.cpp"),
            variables={"extra": [f"-DRESODE_ISA={name}", *isa_flags]},
        )
    available = [f"-DRESODE_WITH_{name.upper()}" for name in INSTRUCTION_SETS]
    objects += ninja.build(
        "module.o",
        "compile",
        str(CSRC / "module.cpp"),
        variables={"extra": ["-O1", *bindings(), *available]},  # no faster with more, but later
    )
    ninja.build(str(target), "link", objects, variables={"link": link})
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    return {
        "compiler": version.stdout.splitlines()[0] if version.stdout else compiler,
        "openmp": bool(openmp),
        "flags": " ".join([*flags, *asked]),
    }


def write_cuda(ninja: ninja_syntax.Writer, target: Path) -> dict[str, Any]:
    """Writes the rules for `_CUDA`; returns what `info` reports of the build."""
    if os.environ.get("RESODE_CUDA") == "0":
        raise nvcc.NvccError("RESODE_CUDA=0 when the package was installed")
    cuda = nvcc.find(find_compiler())
    targets = nvcc.targets(cuda, os.environ.get("RESODE_CUDA_ARCHS", ""))
    names = ",".join(map(str, targets))
    ninja.variable("nvcc", cuda.path)
    ninja.variable("nvcc_flags", [*nvcc.FLAGS, *cuda.host, *bindings()])
    ninja.variable("generate", f"'{nvcc.generate(targets)}'")
    ninja.rule(
        "compile_cuda",
        "$nvcc -MMD -MF $out.d $nvcc_flags $generate $extra -c $in -o $out",
        depfile="$out.d",
        deps="gcc",
    )
    ninja.rule("link_cuda", "$nvcc $nvcc_flags $generate -shared -cudart static $in -o $out")
    objects = []
    for name, (source, extra) in nvcc.units(CSRC / "cuda").items():
        extra = [*extra, f"""'-DRESODE_CUDA_ARCHS="{names}"'"""]
        objects += ninja.build(
            f"cuda/{name}.o", "compile_cuda", str(source), variables={"extra": extra}
        )
    ninja.build(str(target), "link_cuda", objects)
    return {"nvcc": cuda.version, "path": cuda.path, "architectures": targets}


def build(directory: Path, cpp: Path, cuda: Path) -> dict[str, Any]:
    """Builds what can be built, both modules in one run so that no processor waits; returns the
    report, which has an "error" for what could not."""
    for module in (cpp, cuda):
        module.parent.mkdir(parents=True, exist_ok=True)
        module.unlink(missing_ok=True)  # what is there after the run was made by it
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "build.ninja").open("w") as file:
        ninja = ninja_syntax.Writer(file)
        report = attempt(write_cpp, ninja, cpp)
        report["cuda"] = attempt(write_cuda, ninja, cuda)
    jobs = os.environ.get("MAX_JOBS")
    command = [sys.executable, "-m", "ninja", "-C", str(directory), "-k", "0"]
    subprocess.run(command + (["-j", jobs] if jobs else []))
    for module, part in ((cpp, report), (cuda, report["cuda"])):
        if not module.exists():
            part.setdefault("error", "the compiler failed; `pip install -v` shows its messages")
    return report


def attempt(
    write: Callable[[ninja_syntax.Writer, Path], dict[str, Any]],
    ninja: ninja_syntax.Writer,
    target: Path,
) -> dict[str, Any]:
    try:
        return write(ninja, target)
    except (CompileError, nvcc.NvccError) as error:
        return {"error": str(error)}


def tell(kernels: str, error: str, variable: str, instead: str) -> None:
    """Of kernels that were not built; an error if the user insists on them."""
    error = f"the {kernels} kernels could not be built: {error}"
    if os.environ.get(variable) == "1":
        raise RuntimeError(error)
    print(f"resode_kernels: {error}. Installing {instead}.", file=sys.stderr)


class NinjaBuild(build_ext):
    def build_extensions(self) -> None:
        modules = [Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions]
        report = build(Path(self.build_temp).resolve(), *modules)
        if "error" in report:
            instead = "with the slower reference backend; they need a C++20 compiler"
            tell("C++", report["error"], "RESODE_CPP", instead)
        if "error" in report["cuda"] and os.environ.get("RESODE_CUDA") != "0":
            tell("CUDA", report["cuda"]["error"], "RESODE_CUDA", "without them")
        (modules[0].parent / REPORT).write_text(json.dumps(report, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        """For editable installs: the report goes where the modules go, and those of an earlier
        build that are no longer built go away."""
        for ext in self.extensions:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        built = Path(self.build_lib, "resode_kernels", REPORT)
        shutil.copy(built, ROOT / "resode_kernels" / REPORT)

    def get_outputs(self) -> list[str]:
        modules = [path for path in super().get_outputs() if Path(path).exists()]
        return [*modules, str(Path(self.build_lib, "resode_kernels", REPORT))]


setup(
    ext_modules=[
        Extension("resode_kernels._C", sources=[], optional=True),
        Extension("resode_kernels._CUDA", sources=[], optional=True),
    ],
    cmdclass={"build_ext": NinjaBuild},
)
