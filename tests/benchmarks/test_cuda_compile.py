"""The code that nvcc made of the CUDA kernels, as installed, and the script that looks at it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import nvcc
import pytest
import sass

from resode_kernels.backends import native

cuda_resources = pytest.importorskip("cuda_resources", reason="Triton is not installed")

REPORT = native.build_report().get("cuda", {})
ARCHITECTURES = REPORT.get("architectures", [])


@pytest.fixture
def module() -> Path:
    """The installed module `resode_kernels_cuda`, not the emulated one."""
    spec = importlib.util.find_spec("resode_kernels_cuda")
    if spec is None and os.environ.get("RESODE_CUDA") != "1":
        pytest.skip(f"the CUDA kernels are not built: {REPORT.get('error', 'not installed')}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


@pytest.fixture
def cuobjdump() -> str:
    path = sass.cuobjdump()
    if path is None:
        pytest.skip("cuobjdump, of CUDA's toolkit or Triton's package, is not here")
    return path


def test_the_module_needs_no_driver_and_no_toolkit(module: Path) -> None:
    if not shutil.which("ldd"):
        pytest.skip("ldd is not here")
    needed = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True)
    assert "libcuda" not in needed.stdout
    assert "not found" not in needed.stdout


def test_the_module_has_code_for_every_architecture_and_ptx_for_newer_ones(
    module: Path, cuobjdump: str
) -> None:
    def listed(kind: str) -> set[int]:
        command = [cuobjdump, f"--list-{kind}", str(module)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return {int(number) for number in re.findall(r"\.sm_(\d+)\.", run.stdout)}

    assert ARCHITECTURES
    assert listed("elf") == set(ARCHITECTURES)
    assert listed("ptx") == {min(ARCHITECTURES)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_to_registers_and_multiply_on_tensor_cores(
    module: Path, cuobjdump: str, architecture: int
) -> None:
    kernels = sass.kernels(module, f"sm_{architecture}")
    fused = 0
    for mangled, name in zip(kernels, sass.readable(list(kernels)), strict=True):
        code = kernels[mangled]
        assert code.instructions, mangled
        assert code.local_memory == 0, mangled
        if cuda_resources.is_fused(name):
            fused += 1
            assert (code.tensor_core > 0) == ("Float32" not in mangled), mangled
            assert code.async_copies > 0, mangled
        else:
            assert code.tensor_core == 0, mangled
    assert fused == 4 * len(nvcc.PRECISIONS)  # forward and reverse, of MLPs and linear stages


# ---------------------------------------------------------------- benchmarks/gpu/cuda_resources.py


@pytest.fixture
def spilling(tmp_path: Path) -> list[cuda_resources.Kernel]:
    """Two kernels, one of which has more numbers than a thread can have registers."""
    try:
        compiler = nvcc.find()
    except nvcc.NvccError as error:
        pytest.skip(str(error))
    source = tmp_path / "kernels.cu"
    source.write_text("""
namespace resode {
template <int N>
__global__ void __launch_bounds__(1024) sum_kernel(float* x) {
  __shared__ float shared[32];
  float all[N];
#pragma unroll
  for (int i = 0; i < N; ++i) all[i] = x[i * 1024 + threadIdx.x];
  shared[threadIdx.x % 32] = x[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) x[i * 1024 + threadIdx.x] = all[i] * all[N - 1 - i] * shared[i % 32];
}
template __global__ void sum_kernel<4>(float*);
template __global__ void sum_kernel<200>(float*);
}  // namespace resode
""")
    return cuda_resources.compile_unit(compiler, source, [], [90])


def test_the_script_sees_spills(spilling: list[cuda_resources.Kernel]) -> None:
    good, bad = sorted(spilling, key=lambda kernel: kernel.spill_bytes)
    assert (good.name, bad.name) == ("sum_kernel<4>", "sum_kernel<200>")
    assert good.spill_bytes == 0 < bad.spill_bytes
    for kernel in spilling:
        assert (kernel.target, kernel.threads, kernel.static_shared) == (90, 1024, 128)
        assert 0 < kernel.registers <= 64
    rows = [row for kernel in (good, bad) for row in cuda_resources.rows(kernel)]
    assert rows[0].occupancy == 1.0
    (failure,) = cuda_resources.failures(rows)
    assert "sum_kernel<200>" in failure
    assert "spills" in failure


def test_the_script_fails_where_it_should() -> None:
    good = cuda_resources.Row(
        kernel="walk_kernel<Mlp>",
        precision="float16",
        target="sm_90",
        dim=64,
        tile_rows=64,
        chunk=32,
        threads=256,
        registers=128,
        stack_bytes=0,
        spill_bytes=0,
        static_shared=0,
        dynamic_shared=1000,
        shared_limit=1024,
        occupancy=0.25,
        tensor_core=8,
        async_copies=2,
    )
    plain = replace(good, precision="float32", tensor_core=0)
    other = replace(good, kernel="reduce_kernel", precision="", tensor_core=0)
    unknown = replace(good, tensor_core=None)
    assert not list(cuda_resources.failures([good, plain, other, unknown]))
    for bad, message in (
        (replace(good, spill_bytes=8), "spills 8 bytes"),
        (replace(good, static_shared=25), "more shared memory"),
        (replace(good, tensor_core=0), "0 tensor-core"),
        (replace(plain, tensor_core=8), "8 tensor-core"),
    ):
        (failure,) = cuda_resources.failures([bad])
        assert message in failure
