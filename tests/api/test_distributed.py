"""Two processes with half of the batch each compute the gradients of one with all of it."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import resode_kernels as rk

WORLD, SECONDS = 2, 120
Case = tuple[str, str, str, bool, str]
HOW: dict[str, dict[str, Any]] = {
    "adjoint": {},
    "predicted": {"reverse": "predicted", "anchor_every": 2},
    "checkpoint": {"backward": "checkpoint"},
    "stored": {"backward": "stored"},
}


def wrap_ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def shard_model(model: nn.Sequential) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def shard_stage(model: nn.Sequential) -> nn.Module:
    """The stage is a unit of its own, gathered again for the backward pass."""
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[1], mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def shard_blocks(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model[1].blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_parts_of_blocks(model: nn.Sequential) -> nn.Module:
    """Each block has parameters that FSDP manages and parameters that it does not."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model[1].blocks:
        fully_shard(block[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    f.__name__: f for f in (wrap_ddp, shard_model, shard_stage, shard_blocks, shard_parts_of_blocks)
}
# wrapper, kind of stage, scheme, tied, how
CASES: list[Case] = [
    case
    for case in itertools.product(
        WRAPPERS, ["modules", "mlp", "conv"], ["euler", "heun"], [True, False], HOW
    )
    if case[1] == "modules" or not case[0].startswith(("shard_blocks", "shard_parts"))
]
# FSDP units inside a stage can serve one evaluation each.
REFUSED = [
    case
    for case in CASES
    if case[0] in ("shard_blocks", "shard_parts_of_blocks")
    and case[2:4] != ("euler", False)
    and case[4] != "stored"
]


def make_model(kind: str, scheme: str, tied: bool, how: str) -> nn.Sequential:
    """Three parts, the second of which is the stage."""
    torch.manual_seed(0)
    options = {"scheme": scheme, **HOW[how]}

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    if kind == "mlp":
        stage: rk.Stage = rk.MLPStage(6, 8, 4, tied=tied, **options)
    elif kind == "conv":  # in eval mode: half a batch has other statistics than the whole
        stage = rk.ConvStage(6, 4, activation="tanh", tied=tied, **options).eval()
    elif tied:
        stage = rk.ResidualStage([block()], depth=4, **options)
    else:
        count = 4 + (scheme == "heun")
        stage = rk.ResidualStage([block() for _ in range(count)], **options)
    if kind == "conv":
        first = nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (6, 2, 2)))
        return nn.Sequential(first, stage, nn.Sequential(nn.Flatten(), nn.Linear(24, 2))).double()
    return nn.Sequential(nn.Linear(6, 6), stage, nn.Linear(6, 2)).double()


def train(model: nn.Module, parameters: list[nn.Parameter], batch: Tensor) -> list[Tensor]:
    """Two steps, the second with gradients summed over two batches; the parameters afterwards."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for passes in (1, 2):
        for _ in range(passes):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    batch = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results: dict[Case, str | None] = {}
    for case in CASES:
        wrapper, *options = case
        try:
            alone = make_model(*options)
            expected = train(alone, list(alone.parameters()), batch)
            model = make_model(*options)
            wrapped = WRAPPERS[wrapper](model)
            got = train(wrapped, list(model.parameters()), batch.chunk(WORLD)[rank])
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
            results[case] = None
        except Exception:
            results[case] = traceback.format_exc()
    torch.save(results, folder / f"results{rank}")
    # FSDP2 keeps the process group, and gloo's threads with it, beyond destroy_process_group. Now
    # and then one of them asks for the interpreter while that shuts down, and aborts the process.
    os._exit(0)


pytestmark = pytest.mark.xdist_group(__name__)  # one process makes what all share


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, str | None]]:
    """All cases are run by one pair of processes: most of the time goes into starting them."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch.distributed with gloo is not available")
    folder = tmp_path_factory.mktemp("distributed")
    processes = mp.spawn(worker, (folder,), nprocs=WORLD, join=False)
    if not processes.join(timeout=SECONDS) and not processes.join(timeout=1):
        for process in processes.processes:
            process.kill()
        pytest.fail(f"the processes did not finish within {SECONDS} s")
    return [torch.load(folder / f"results{rank}") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_one_process(
    case: Case, results: list[dict[Case, str | None]]
) -> None:
    for of_rank in results:
        if case in REFUSED:
            assert "FSDP unit (fully_shard) and serves more than one evaluation" in of_rank[case]
        else:
            assert of_rank[case] is None, of_rank[case]
