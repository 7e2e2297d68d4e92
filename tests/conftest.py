"""Fixtures for all tests."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of `pytest -n auto` share the processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

import providers

from resode_kernels.backends import cpp, triton
from resode_kernels.backends.layerwise import Kernels

if triton.unavailable() is not None:
    collect_ignore = [
        "benchmarks/test_costs.py",
        "benchmarks/test_offline.py",
        "benchmarks/test_triton_compile.py",
        "kernels/test_triton.py",
    ]
INSTRUCTION_SETS = cpp._C.supported() if cpp.unavailable() is None else []
FEW, SAMPLE = 6, 12
"""Of a test with more than ``FEW`` cases one case in ``SAMPLE`` is not marked as slow."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests go first, so that no worker is left with one of them when all others are done.
    Tests of the C++ kernels need them, unless they were not built; RESODE_CPP=1 insists."""
    items.sort(key=lambda item: "slow" not in item.keywords)
    mark_all_but_a_sample(items)
    if triton.unavailable() is not None:
        leave_out_triton(config, items)
    if cpp.unavailable() is None or os.environ.get("RESODE_CPP") == "1":
        return
    skip = pytest.mark.skip(reason=f"the C++ backend is not available: {cpp.unavailable()}")
    for item in items:
        if "needs_cpp" in item.keywords:
            item.add_marker(skip)


def leave_out_triton(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips one test of Triton's kernels with the reason, and deselects the others."""
    needing = [item for item in items if "triton" in words(item)]
    for first in needing[:1]:
        first.add_marker(pytest.mark.skip(reason=str(triton.unavailable())))
    others = needing[1:]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def words(item: pytest.Item) -> list[str]:
    """The words in the name of a test's case."""
    return item.name.partition("[")[2].rstrip("]").split("-")


def mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    """Marks as slow the cases that ``-m "not slow"`` leaves out of tests with many: all but the
    first, and those that a hash of the name chooses, the same in every run and every process."""
    total = Counter(function_of(item) for item in items)
    seen: Counter[str] = Counter()
    for item in items:
        test = function_of(item)
        seen[test] += 1
        chosen = seen[test] == 1 or zlib.crc32(item.name.encode()) % SAMPLE == 0
        if total[test] > FEW and not chosen:
            item.add_marker("slow")


def function_of(item: pytest.Item) -> str:
    """The name of a test without that of the case."""
    return item.nodeid.partition("[")[0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Everything torch.empty returns, the kernels' workspace too, is full of NaNs."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=INSTRUCTION_SETS or ["none"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every build of the kernels that this processor can run."""
    before = cpp._C.selected()
    cpp._C.select(request.param)
    yield request.param
    cpp._C.select(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ----------------------------------------------------------------------------- layer-wise kernels


@pytest.fixture(params=["triton", "cuda"])
def provider(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[providers.Provider]:
    """In memory full of NaNs; tensors are made where the kernels run."""
    request.getfixturevalue("nan_memory")
    with torch.device(providers.DEVICE):
        yield providers.load(request.param, monkeypatch)


@pytest.fixture
def kernels(provider: providers.Provider) -> Kernels:
    return provider.kernels


@pytest.fixture
def small_tiles(provider: providers.Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    providers.divide(provider, monkeypatch)


@pytest.fixture
def launches(provider: providers.Provider, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return providers.count_launches(provider, monkeypatch)
