"""What a compiled kernel takes of a multiprocessor: registers, spills, shared memory, occupancy.

NVIDIA: the binary does not tell what was spilled, and Triton keeps no report of ptxas. So it calls
ptxas once more on the kernel's PTX, for the report. AMD: everything is in the assembly.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass

from offline import Launch
from targets import Target
from triton import knobs
from triton.compiler import CompiledKernel, make_backend

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


def occupancy(
    target: Target, num_warps: int, registers: int, shared: int = 0, tensor_memory: int = 0
) -> float:
    """Warps of as many whole blocks as fit, over the warps of a multiprocessor."""
    granted = -(-registers // target.register_step) * target.register_step
    limits = [
        target.blocks,
        target.warps // num_warps,
        4 * (target.registers // granted) // num_warps,
        target.shared_per_multiprocessor // max(1, shared + target.shared_reserved),
    ]
    if tensor_memory:
        limits.append(target.tensor_memory // tensor_memory)
    return min(limits) * num_warps / target.warps


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
    """The groups of the pattern, which must be in the text once."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise RuntimeError(f"'{pattern}' is {len(found)} times in:\n{text[-2000:]}")
    return [int(number) for number in ([found[0]] if isinstance(found[0], str) else found[0])]
