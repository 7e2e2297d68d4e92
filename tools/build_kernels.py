"""Builds the compiled modules with ninja.

`resode_kernels_cpu`: the CPU kernels, compiled once per instruction set and linked into one module
that picks the best one for each stage. `resode_kernels_cuda`: the CUDA kernels, if nvcc is found,
with the CUDA runtime linked statically. Nothing here or in csrc/ needs torch. docs/environment.md
lists the environment variables.

Nothing is compiled again that was compiled from the same sources by the same commands. Therefore
commands must not mention paths that change: pip has a new folder for pybind11 in every build.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvcc
import pybind11
from ninja import ninja_syntax

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MODULES = {"cpu": f"resode_kernels_cpu{SUFFIX}", "cuda": f"resode_kernels_cuda{SUFFIX}"}

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


class BuildError(Exception):
    """Why the package cannot be installed as it was asked for."""


class Unavailable(Exception):
    """Why these kernels cannot be built here."""


def switch(variable: str) -> str:
    """An environment variable that is "0" (do not build), "1" (a failure is an error) or empty."""
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise BuildError(
            f"{variable}={value!r} is not known: give 0 (do not build these kernels), 1 (fail if "
            "they cannot be built), or leave it unset"
        )
    return value


def say(text: str) -> None:
    print(f"resode_kernels: {text}", file=sys.stderr, flush=True)


def build(directory: Path) -> dict[str, Any]:
    """Builds in this folder what can be built, all modules in one run so that no processor waits.
    Returns a report for each of ``MODULES``, which has an "error" if the module was not built."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "build.ninja").open("w") as file:
        writer = ninja_syntax.Writer(file)
        report = {
            "cpu": attempt(write_cpu, "RESODE_CPP", writer, directory),
            "cuda": attempt(write_cuda, "RESODE_CUDA", writer, directory),
        }
    ninja = [sys.executable, "-m", "ninja", "-C", str(directory), "-k", "0"]
    jobs = os.environ.get("MAX_JOBS")
    subprocess.run(ninja + (["-j", jobs] if jobs else []))
    for name, part in report.items():
        if "error" not in part and not up_to_date(ninja, MODULES[name]):
            part["error"] = "the compiler failed; `pip install -v` shows its messages"
            if name == "cuda" and (reason := nvcc.complaint(nvcc.find(find_compiler()))):
                part["error"] = reason
    check(report)
    for part in report.values():
        part["suffix"] = SUFFIX
    return report


def attempt(
    write: Callable[[ninja_syntax.Writer, Path], dict[str, Any]],
    variable: str,
    ninja: ninja_syntax.Writer,
    directory: Path,
) -> dict[str, Any]:
    if switch(variable) == "0":
        return {"error": f"{variable}=0 when the package was installed"}
    try:
        return write(ninja, directory)
    except (Unavailable, nvcc.NvccError) as error:
        return {"error": str(error)}


def up_to_date(ninja: list[str], target: str) -> bool:
    """Whether a run of ninja has made this target, now or before."""
    run = subprocess.run([*ninja, "-n", target], capture_output=True, text=True)
    return run.returncode == 0 and "no work to do" in run.stdout


def check(report: dict[str, Any]) -> None:
    """Raises BuildError if kernels are missing that should be there, otherwise says what is."""
    cpu, cuda = report["cpu"].get("error"), report["cuda"].get("error")
    if cpu and switch("RESODE_CPP") != "0":
        if switch("RESODE_CPP") == "1" or "compiler" in report["cpu"]:
            raise BuildError(
                f"the C++ kernels could not be built: {cpu} (RESODE_CPP=0 installs without them: "
                "stages then run in PyTorch, slower)"
            )
        say(f"installing without the C++ kernels, which need a C++20 compiler: {cpu}")
    if cuda and switch("RESODE_CUDA") == "1":
        raise BuildError(f"the CUDA kernels could not be built: {cuda}")
    if cuda and switch("RESODE_CUDA") == "":
        say(f"installing without the CUDA kernels: {cuda}")


# ------------------------------------------------------------------------------------ CPU kernels


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name.split()[0]):
            return name
    raise Unavailable("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def accepts(compiler: str, *flags: str) -> bool:
    """Whether a program compiles and links with these flags."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        command = [*compiler.split(), *flags, str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True).returncode == 0


def bindings(directory: Path) -> list[str]:
    """Flags for the headers of pybind11 and Python. Those of pybind11 are copied, see above."""
    copy = directory / f"pybind11-{pybind11.__version__}"
    if not copy.exists():
        partial = Path(tempfile.mkdtemp(dir=directory))
        shutil.copytree(pybind11.get_include(), partial, dirs_exist_ok=True)
        partial.rename(copy)
    return [f"-I{copy.name}", shlex.quote(f"-I{sysconfig.get_path('include')}")]


def instruction_sets() -> dict[str, list[str]]:
    asked = os.environ.get("RESODE_ISAS", "").split()
    unknown = [name for name in asked if name not in INSTRUCTION_SETS]
    if unknown:
        raise BuildError(
            f"RESODE_ISAS={' '.join(asked)!r}: {unknown[0]!r} is not an instruction set of this "
            f"processor's family, which has {', '.join(INSTRUCTION_SETS)}"
        )
    return {name: INSTRUCTION_SETS[name] for name in asked or INSTRUCTION_SETS}


def write_cpu(ninja: ninja_syntax.Writer, directory: Path) -> dict[str, Any]:
    """Writes the rules for the CPU kernels; returns what `info` reports of the build."""
    compiler, isas = find_compiler(), instruction_sets()
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
    for name, isa_flags in isas.items():
        objects += ninja.build(
            f"kernels_{name}.o",
            "compile",
            str(CSRC / "cpu" / "kernels.cpp"),
            variables={"extra": [f"-DRESODE_ISA={name}", *isa_flags]},
        )
    available = [f"-DRESODE_WITH_{name.upper()}" for name in isas]
    objects += ninja.build(
        "module.o",
        "compile",
        str(CSRC / "module.cpp"),
        variables={"extra": ["-O1", *bindings(directory), *available]},  # no faster with more
    )
    ninja.build(MODULES["cpu"], "link", objects, variables={"link": link})
    say(f"C++ kernels for {', '.join(isas)}: a minute on two processors, if they are not built yet")
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True)
    return {
        "compiler": version.stdout.splitlines()[0] if version.stdout else compiler,
        "openmp": bool(openmp),
        "flags": " ".join([*flags, *asked]),
    }


# ----------------------------------------------------------------------------------- CUDA kernels


def write_cuda(ninja: ninja_syntax.Writer, directory: Path) -> dict[str, Any]:
    """Writes the rules for the CUDA kernels; returns what `info` reports of the build."""
    cuda = nvcc.find(find_compiler())
    targets, why = choose_targets(cuda)
    names = ",".join(map(str, targets))
    ninja.variable("nvcc", shlex.quote(cuda.path))
    ninja.variable("nvcc_flags", [*nvcc.FLAGS, *cuda.host, *bindings(directory)])
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
    ninja.build(MODULES["cuda"], "link_cuda", objects)
    say(
        f"CUDA kernels for {', '.join(f'sm_{target}' for target in targets)}, {why}: "
        f"{1 + len(targets) // 2} more minutes of processor time, if they are not built yet "
        "(RESODE_CUDA=0 leaves them out)"
    )
    return {"nvcc": cuda.version, "path": cuda.path, "architectures": targets}


def choose_targets(cuda: nvcc.Nvcc) -> tuple[list[int], str]:
    """The targets to compile for, and why these."""
    asked = os.environ.get("RESODE_CUDA_ARCHS", "")
    if asked.strip():
        try:
            return nvcc.targets(cuda, asked), "as RESODE_CUDA_ARCHS says"
        except ValueError as error:  # never silently something else than what was asked for
            raise BuildError(str(error)) from None
    capabilities = nvcc.visible_gpus()
    if capabilities:
        return nvcc.targets_of(cuda, capabilities), "which nvidia-smi shows in this machine"
    return nvcc.targets(cuda, ""), "because nvidia-smi shows no GPU"
