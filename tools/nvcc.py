"""Finds nvcc, and knows what to compile csrc/cuda with.

build_kernels.py builds the module `resode_kernels_cuda` with it, and
benchmarks/gpu/cuda_resources.py looks at the code. nvcc compiles the files of csrc/cuda that are
plain C++ as well, and links: it knows where its headers and its runtime are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Compute capabilities, 80 for 8.0: a list of those that nvcc may know.
TARGETS = (80, 86, 89, 90, 100, 120)
# fused.cu is compiled once for each.
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")

FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")


class NvccError(Exception):
    """Why nothing can be compiled here."""


@dataclass(frozen=True)
class Nvcc:
    path: str
    version: str
    known: tuple[int, ...]  # the targets it can compile for
    host: tuple[str, ...] = ()  # the flags that name the host compiler, if not nvcc's own choice


def find(compiler: str = "") -> Nvcc:
    """nvcc from $CUDA_HOME or the PATH, with this command as its host compiler."""
    home = os.environ.get("CUDA_HOME")
    path = (home and shutil.which("nvcc", path=str(Path(home, "bin")))) or shutil.which("nvcc")
    if not path:
        raise NvccError("no nvcc found (looked in $CUDA_HOME/bin and on the PATH)")
    release = re.search(r"\bV([\d.]+)", _output(path, "--version"))
    if not release:
        raise NvccError(f"{path} does not say which version it is")
    codes = re.findall(r"^sm_(\d+)$", _output(path, "--list-gpu-code"), re.MULTILINE)
    # Of a command with a launcher and flags (ccache g++ -m64) nvcc takes the compiler.
    words = [word for word in compiler.split() if not word.startswith("-")]
    host = ("-ccbin", words[-1]) if words else ()
    return Nvcc(path, release[1], tuple(sorted(map(int, codes))), host)


def targets(nvcc: Nvcc, asked: str) -> list[int]:
    """The targets of a list like "80;90" in ascending order; without one, all of TARGETS that this
    nvcc knows."""
    if not asked.strip():
        return [target for target in TARGETS if target in nvcc.known]
    names = re.split(r"[\s;,]+", asked.strip(" ;,"))
    known = [str(target) for target in nvcc.known]
    for name in names:
        if name not in known:
            raise ValueError(
                f"RESODE_CUDA_ARCHS={asked!r}: nvcc {nvcc.version} has no target {name!r}; it has "
                + ", ".join(known)
            )
    return sorted({int(name) for name in names})


def visible_gpus() -> list[int]:
    """The compute capabilities of the GPUs that nvidia-smi shows, 80 for 8.0."""
    if not shutil.which("nvidia-smi"):
        return []
    said = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return sorted({int(major + minor) for major, minor in re.findall(r"(\d+)\.(\d)", said)})


def targets_of(nvcc: Nvcc, capabilities: list[int]) -> list[int]:
    """The targets that these GPUs run best: each the newest one that is not newer than the GPU."""
    served = [gpu for gpu in capabilities if gpu >= TARGETS[0]]
    if not served:
        shown = ", ".join(str(gpu / 10) for gpu in capabilities)
        raise NvccError(
            f"the GPUs of this machine have compute capability {shown}; the kernels need "
            f"{TARGETS[0] / 10} (RESODE_CUDA_ARCHS builds them for other machines)"
        )
    known = [target for target in nvcc.known if target >= TARGETS[0]]
    if not known:
        raise NvccError(f"nvcc {nvcc.version} knows no compute capability from 8.0 on")
    return sorted({max((t for t in known if t <= gpu), default=known[0]) for gpu in served})


def generate(targets: list[int]) -> str:
    """The flag for code of all targets from one pass of the front end, and for PTX of the lowest,
    which newer GPUs than these can be given."""
    lowest = min(targets)
    code = ",".join([f"sm_{target}" for target in targets] + [f"compute_{lowest}"])
    return f"-gencode=arch=compute_{lowest},code=[{code}]"


def units(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """What to compile, by the name of the object: the source in this folder and its own flags."""
    out: dict[str, tuple[Path, list[str]]] = {}
    for source in sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")]):
        if source.name == "fused.cu":
            for name in PRECISIONS:
                out[f"{source.stem}_{name}"] = (source, [f"-DRESODE_PRECISION={name}"])
        else:  # elementwise.cu and elementwise.cpp may both be there
            out[source.name.replace(".", "_")] = (source, [])
    return out


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def complaint(nvcc: Nvcc) -> str | None:
    """What keeps this nvcc from compiling anything, or None. To be asked after a failure: most of
    what can be wrong with an nvcc shows with any program, such as a host compiler that is missing
    or too new for it, or a toolkit without headers."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.cu")
        source.write_text("__global__ void probe(float* x) { *x = 1; }\n")
        command = [nvcc.path, *FLAGS, *nvcc.host, "-c", str(source)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if not run.returncode:
        return None
    said = (run.stderr + run.stdout).strip().splitlines()
    line = next((line for line in said if "error" in line.lower()), (said or ["nothing"])[0])
    return f"{nvcc.path} {nvcc.version} compiles nothing here; it says: {line}"
