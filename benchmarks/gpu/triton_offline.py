"""Launches of Triton kernels without a GPU: kernels are compiled for a given one, and nothing runs.

    with offline("sm_90") as launches:
        forward(problem, x, y, anchors, statistics)  # any host code, on tensors in main memory

A fake driver replaces Triton's, so that ``kernel[grid](...)`` specializes
its arguments, compiles and checks the limits of the device as it would on that GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from targets import TARGETS, Target
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver


@dataclass(frozen=True)
class Launch:
    """A launch, as it would be made on the GPU."""

    kernel: str
    grid: tuple[int, int, int]
    target: Target
    num_warps: int
    num_stages: int
    shared: int  # bytes per block
    signature: dict[str, Any]  # the type of every argument; of a tuple, the types of its entries
    constants: dict[str, Any]  # what the code depends on: constexprs, None, integers equal to 1
    compiled: CompiledKernel  # its ``asm`` has the texts: ttir, ttgir, ptx and cubin or amdgcn


class _Launcher:
    """What Triton calls in order to launch one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source = source
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
        # Triton keeps a launcher with its kernel, beyond one ``with``: so look up the list again.
        active = driver.active
        function = self.source.fn
        kernels = function.device_caches[active.get_current_device()][0].values()
        active.launches.append(
            Launch(
                kernel=function.__name__,
                grid=(x, y, z),
                target=active.target,
                num_warps=self.metadata.num_warps,
                num_stages=self.metadata.num_stages,
                shared=self.metadata.shared,
                signature=dict(self.source.signature),
                constants={
                    function.arg_names[path[0]] + "".join(f"[{i}]" for i in path[1:]): value
                    for path, value in self.source.constants.items()
                },
                compiled=next(kernel for kernel in kernels if kernel.src is self.source),
            )
        )


class _Utils:
    """What Triton asks of the CUDA or HIP runtime."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.target.shared_per_block,
            "multiprocessor_count": self.target.multiprocessors,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[None, None, int, int, int]:
        """Module and function (no module: nothing to unload), registers, spills, threads."""
        return None, None, 0, 0, 1024


class _Driver:
    launcher_cls = _Launcher

    def __init__(self, target: Target) -> None:
        self.target = target
        self.utils = _Utils(target)
        self.launches: list[Launch] = []

    def get_current_target(self) -> Any:
        return self.target.gpu

    def get_current_device(self) -> int:
        return self.target.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """An autotuner compiles every configuration and keeps the first."""

        def benchmark(
            call: Callable[[], Any], quantiles: tuple[float, ...], **_: Any
        ) -> list[float]:
            call()
            return [0.0] * len(quantiles)

        return benchmark


@contextmanager
def offline(target: str) -> Iterator[list[Launch]]:
    """Every launch in the block is compiled for the target (see ``targets.py``) and listed."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET=1 runs kernels in Python and compiles nothing: unset it before "
            "the kernels are imported."
        )
    before = driver._active
    fake = _Driver(TARGETS[target])
    driver.set_active(fake)
    try:
        yield fake.launches
    finally:
        driver.set_active(before)
