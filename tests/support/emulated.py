"""The CUDA kernels as the host's compiler builds them with the headers of tests/support/emulation.

Every build is kept in a folder that is named by a hash of what went into it. Environment: CXX
(compiler) and RESODE_EMULATION_FLAGS (more flags for it, such as -fsanitize=thread).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import nvcc
import pybind11
import pytest
from ninja import ninja_syntax

ROOT = Path(__file__).resolve().parents[2]
EMULATION = Path(__file__).resolve().parent / "emulation"
CSRC = ROOT / "csrc"
FOLDER = Path(tempfile.gettempdir(), f"resode_emulation_{os.getuid()}")

MODULE = f"resode_kernels_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-restrict"]
FLAGS = ["-std=c++20", "-O2", "-march=native", "-g1", "-fPIC", "-fvisibility=hidden", *WARNINGS]

Unit = tuple[Path, Sequence[str]]  # a source and the flags that only it has


def build(flags: Sequence[str] = (), sources: Path = CSRC) -> Path:
    """The emulated module `resode_kernels_cuda`."""
    units = list(nvcc.units(sources / "cuda").values())
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    architectures = '-DRESODE_CUDA_ARCHS="\\"emulated\\""'
    flags = [*flags, *more_flags()]
    own = [*flags, *includes, architectures]
    return link(MODULE, units, own, ["-shared", *flags], [sources])


def more_flags() -> list[str]:
    return os.environ.get("RESODE_EMULATION_FLAGS", "").split()


def load(path: Path) -> ModuleType:
    """The module in `path`. Not by the name of the installed one, which pybind11 would return."""
    spec = importlib.util.spec_from_file_location("emulated.resode_kernels_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def module() -> ModuleType:
    return load(build())


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the emulated module run the backend "cuda", for one test."""
    from resode_kernels.backends import cuda

    monkeypatch.setattr(cuda, "_CUDA", module())
    monkeypatch.setattr(cuda, "_reason", None)


def link(
    name: str,
    units: Iterable[Unit],
    flags: Sequence[str],
    link_flags: Sequence[str],
    sources: Iterable[Path] = (),
) -> Path:
    """A program or library of `units` and the emulator, unless it was built before.

    `sources` are folders on which `units` depend beside the emulation's own.
    """
    compiler = os.environ.get("CXX", "g++")
    version = output([*compiler.split(), "--version"])
    key = hashlib.sha256(repr((name, units, flags, link_flags, FLAGS)).encode() + version.encode())
    for folder in (EMULATION, *sources):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            key.update(str(path).encode() + path.read_bytes())
    directory = FOLDER / key.hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # closing it releases the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / name).exists():
            write_ninja(directory, name, units, compiler, flags, link_flags)
            ninja = [sys.executable, "-m", "ninja", "--quiet", "-C", str(directory)]
            print(output(ninja), end="")  # warnings
    return directory / name


def run_alone(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a program without the sanitizer that this process may run under."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, text=True, capture_output=True, env=environment)


def output(command: Sequence[str]) -> str:
    done = run_alone(command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed\n{done.stdout}{done.stderr}")
    return done.stdout


def write_ninja(
    directory: Path,
    name: str,
    units: Iterable[Unit],
    compiler: str,
    flags: Sequence[str],
    link_flags: Sequence[str],
) -> None:
    """Sanitizers watch the kernels and not the emulator, which tells them what they must know."""
    with (directory / "build.ninja").open("w") as file:
        ninja = ninja_syntax.Writer(file)
        ninja.variable("cxx", compiler)
        ninja.variable("flags", [*FLAGS, f"-I{EMULATION / 'include'}"])
        ninja.rule("compile", "$cxx $flags $own -x c++ -c $in -o $out")
        ninja.rule("link", "$cxx $link $in -o $out.new && mv $out.new $out")
        emulator: list[Unit] = [(EMULATION / name, []) for name in ("emulator.cpp", "warp.cpp")]
        objects = []
        for i, (source, own) in enumerate([*emulator, *((s, [*flags, *f]) for s, f in units)]):
            target = f"{i}_{source.stem}.o"
            objects += ninja.build(target, "compile", str(source), variables={"own": list(own)})
        ninja.build(name, "link", objects, variables={"link": list(link_flags)})
        ninja.close()
