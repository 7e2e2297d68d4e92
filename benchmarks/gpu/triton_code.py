"""Reads the code of compiled Triton kernels: registers, spills, shared memory, occupancy and matrix
instructions.

NVIDIA: the binary does not show spills, and Triton does not keep the report of ptxas. So ptxas runs
once more on the kernel's PTX, for its report. AMD: everything is in the assembly.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass

from targets import occupancy
from triton import knobs
from triton.compiler import CompiledKernel, make_backend
from triton_offline import Launch

TENSOR_CORE = re.compile(
    r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+|\bv_s?mfmac?_\w+", re.ASCII
)
SCRATCH = re.compile(r"^\s*scratch_(load|store)_(?:dword(?:x(\d))?|(\w+))", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    registers: int  # per thread
    spill_stores: int  # bytes per thread, of all instructions in the code
    spill_loads: int
    stack: int  # bytes per thread
    shared: int  # bytes per block
    occupancy: float  # warps resident on a multiprocessor over those it has room for
    tensor_core: frozenset[str]  # the matrix instructions in the code

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


_measured: dict[str, tuple[int, int, int, int, str]] = {}  # cases share kernels


def resources(launch: Launch) -> Resources:
    kernel = launch.compiled
    if kernel.hash not in _measured:
        _measured[kernel.hash] = (_nvidia if launch.target.nvidia else _amd)(kernel)
    registers, stack, stores, loads, code = _measured[kernel.hash]
    return Resources(
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        stack=stack,
        shared=launch.shared,
        occupancy=occupancy(
            launch.target,
            launch.num_warps,
            registers,
            launch.shared,
            getattr(launch.compiled.metadata, "tmem_size", None) or 0,
        ),
        tensor_core=frozenset(TENSOR_CORE.findall(code)),
    )


def _nvidia(kernel: CompiledKernel) -> tuple[int, int, int, int, str]:
    backend = make_backend(kernel.metadata.target)
    options = backend.parse_options(kernel.metadata._asdict())
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(kernel.asm["ptx"], {}, options, kernel.metadata.target.arch)
    report = log.getvalue()
    (registers,) = _numbers(r"Used (\d+) registers", report)
    stack, stores, loads = _numbers(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    return registers, stack, stores, loads, kernel.asm["ptx"]


def _amd(kernel: CompiledKernel) -> tuple[int, int, int, int, str]:
    code = kernel.asm["amdgcn"]
    (registers,) = _numbers(r"\.vgpr_count: +(\d+)", code)  # vector and accumulation registers
    (stack,) = _numbers(r"\.private_segment_fixed_size: +(\d+)", code)
    spilled = {"load": 0, "store": 0}
    for direction, count, part in SCRATCH.findall(code):
        spilled[direction] += 4 if part else 4 * int(count or 1)
    return registers, stack, spilled["store"], spilled["load"], code


def _numbers(pattern: str, text: str) -> list[int]:
    """The groups of the pattern, which must occur once in the text."""
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        raise RuntimeError(f"'{pattern}' is {len(matches)} times in:\n{text[-2000:]}")
    return [int(number) for number in matches[0].groups()]
