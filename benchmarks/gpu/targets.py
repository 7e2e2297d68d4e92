"""The GPUs that kernels are compiled for, the limits of one multiprocessor, and the occupancy that
they allow. None of the GPUs has to be there.

NVIDIA: CUDA C++ Programming Guide, technical specifications per compute capability. AMD: CDNA 3
instruction set architecture; a multiprocessor is a compute unit and a warp a wavefront.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Target:
    """A GPU as Triton's compiler names it and the resources that the blocks running on one of its
    multiprocessors share."""

    name: str
    product: str
    gpu: GPUTarget
    device: int  # the number under which Triton keeps this target's kernels; no real GPU has it
    shared_per_block: int  # bytes, with the opt-in that Triton makes
    shared_per_multiprocessor: int
    shared_reserved: int  # taken by the system from every block
    registers: int  # of 32 bits in one of the four partitions, per lane of a warp
    register_step: int  # a warp is given a multiple of this many registers per lane
    warps: int
    blocks: int
    multiprocessors: int
    cache: int  # bytes of the last one before DRAM
    tensor_memory: int = 0  # columns

    @property
    def nvidia(self) -> bool:
        return bool(self.gpu.backend == "cuda")


def _nvidia(
    capability: int,
    product: str,
    multiprocessors: int,
    per_block: int,
    per_sm: int,
    cache: int,
    warps: int = 64,
    blocks: int = 32,
) -> Target:
    return Target(
        name=f"sm_{capability}",
        product=product,
        gpu=GPUTarget("cuda", capability, 32),
        device=1000 + capability,
        shared_per_block=per_block * KIB,
        shared_per_multiprocessor=per_sm * KIB,
        shared_reserved=1 * KIB,
        registers=512,
        register_step=8,
        warps=warps,
        blocks=blocks,
        multiprocessors=multiprocessors,
        cache=cache * MIB,
        tensor_memory=512 if capability == 100 else 0,
    )


# The CUDA kernels are compiled for these.
CUDA_TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, "A100", 108, 163, 164, 40),
        _nvidia(86, "RTX A6000", 84, 99, 100, 6, warps=48, blocks=16),
        _nvidia(89, "RTX 4090", 128, 99, 100, 72, warps=48, blocks=24),
        _nvidia(90, "H100", 132, 227, 228, 50),
        _nvidia(100, "B200", 148, 227, 228, 126),
        _nvidia(120, "RTX PRO 6000 Blackwell", 188, 99, 100, 128, warps=48, blocks=24),
    )
}

_AMD = Target(
    name="gfx942",
    product="MI300X",
    gpu=GPUTarget("hip", "gfx942", 64),
    device=1942,
    shared_per_block=64 * KIB,
    shared_per_multiprocessor=64 * KIB,
    shared_reserved=0,
    registers=512,
    register_step=8,
    warps=32,
    blocks=32,
    multiprocessors=304,
    cache=256 * MIB,
)

# The Triton kernels are compiled for these: one of each kind, for compiling takes long.
TARGETS = {
    name: (CUDA_TARGETS | {"gfx942": _AMD})[name]
    for name in ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
}


def occupancy(
    target: Target, num_warps: int, registers: int, shared: int = 0, tensor_memory: int = 0
) -> float:
    """The warps of as many thread blocks as fit, over the warps that a multiprocessor holds."""
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
