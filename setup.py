"""Builds the extension module `_C` with ninja.

The kernels are compiled once per instruction set and linked into one module that picks the best
one when it is loaded. Nothing here or in csrc/ needs torch. When the build fails, the package
installs without the module (its reference backend still works) and remembers why, for
`python -m resode_kernels info`.

Environment: CXX (compiler), MAX_JOBS (parallel jobs), RESODE_CXXFLAGS (extra compiler flags),
RESODE_CPP=1 (a failed build is an error).
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
from pathlib import Path

import pybind11
from ninja import ninja_syntax
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
REPORT = "build_report.json"

# From the plainest to the widest; x86-64 has all three, other processors the first.
INSTRUCTION_SETS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"],
    }


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


def write_ninja(path: Path, target: Path, compiler: str) -> dict[str, object]:
    """Writes build.ninja for `target`; returns what `info` reports of the build."""
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
    flags += openmp + os.environ.get("RESODE_CXXFLAGS", "").split()
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    with path.open("w") as file:
        ninja = ninja_syntax.Writer(file)
        ninja.variable("cxx", compiler)
        ninja.variable("flags", flags)
        ninja.rule(
            "compile",
            "$cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
        )
        ninja.rule("link", "$cxx $flags $link $in -o $out")
        objects = []
        for name, isa_flags in INSTRUCTION_SETS.items():
            objects += ninja.build(
                f"kernels_{name}.o",
                "compile",
                str(CSRC / "cpu" / "kernels.cpp"),
                variables={"extra": [f"-DRESODE_ISA={name}", *isa_flags]},
            )
        includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        available = [f"-DRESODE_WITH_{name.upper()}" for name in INSTRUCTION_SETS]
        objects += ninja.build(
            "module.o",
            "compile",
            str(CSRC / "module.cpp"),
            variables={"extra": [*includes, *available]},
        )
        ninja.build(str(target), "link", objects, variables={"link": link})
        ninja.close()
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    return {
        "compiler": version.stdout.splitlines()[0] if version.stdout else compiler,
        "openmp": bool(openmp),
        "flags": " ".join(flags),
    }


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        directory = Path(self.build_temp).resolve()
        for folder in (target.parent, directory):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            report = write_ninja(directory / "build.ninja", target, find_compiler())
            jobs = os.environ.get("MAX_JOBS")
            ninja = [sys.executable, "-m", "ninja", "-C", str(directory)]
            subprocess.run(ninja + (["-j", jobs] if jobs else []), check=True)
        except (CompileError, OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            report = {"error": f"the C++ kernels could not be built: {error}"}
            if os.environ.get("RESODE_CPP") == "1":
                raise RuntimeError(report["error"]) from error
            print(
                f"resode_kernels: {report['error']}. Installing with the slower reference backend; "
                "install a C++20 compiler and run pip again to get them.",
                file=sys.stderr,
            )
        (target.parent / REPORT).write_text(json.dumps(report, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        """For editable installs: the report goes where the module goes."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib, "resode_kernels", REPORT)
        shutil.copy(built, ROOT / "resode_kernels" / REPORT)

    def get_outputs(self) -> list[str]:
        modules = [path for path in super().get_outputs() if Path(path).exists()]
        return [*modules, str(Path(self.build_lib, "resode_kernels", REPORT))]


setup(
    ext_modules=[Extension("resode_kernels._C", sources=[], optional=True)],
    cmdclass={"build_ext": NinjaBuild},
)
