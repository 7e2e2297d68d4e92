"""Processes, threads and devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from compatibility import Case, Section, backward, loss, works
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

section = Section(__file__)
FORKED = "after a fork call `torch.set_num_threads(1)`, as for all of PyTorch"
DISTRIBUTED = "api/test_distributed.py::test_gradients_are_those_of_one_process"

section.proved("`DistributedDataParallel`", DISTRIBUTED)
section.proved(
    "FSDP2 (`fully_shard`)",
    DISTRIBUTED,
    modules=works("blocks that are units of their own must be untied and use Euler's scheme"),
)


ALONE = works("without GPUs the module itself")


@section.row("`nn.DataParallel`", ALONE, ALONE)
def test_data_parallel(case: Case) -> None:
    case.agree(lambda module, x: backward(nn.DataParallel(module), x))


@section.row("Threads that train one stage")
def test_threads(case: Case) -> None:
    case.stage.eval(), case.twin.eval()
    inputs = [case.x + i for i in range(4)]

    def gradients(module: nn.Module, x: Tensor) -> object:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(module(x)), [x, *module.parameters()])

    expected = [gradients(case.twin, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            got = list(pool.map(lambda x: gradients(case.stage, x), inputs))
            torch.testing.assert_close(got, expected)


def in_child(queue: Any, case: Case) -> None:
    torch.set_num_threads(1)
    queue.put([t.detach().numpy() for t in backward(case.stage, case.x.requires_grad_())])


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@section.row("A stage in another process, by `fork` and by `spawn`", works(FORKED), works(FORKED))
def test_processes(case: Case, method: str, threads: int) -> None:
    """The parent has run the stage on several threads before."""
    case.stage.eval(), case.twin.eval()
    case.x = torch.cat([case.x] * 300)
    expected = backward(case.twin, case.x.clone().requires_grad_())
    backward(case.stage, case.x.clone().requires_grad_())
    case.stage.share_memory()
    context = mp.get_context(method)
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, case), daemon=True)
    child.start()
    got = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    torch.testing.assert_close([torch.from_numpy(t) for t in got], expected)


class Features(Dataset[Tensor]):
    """A data set that a frozen stage computes."""

    def __init__(self, stage: nn.Module, x: Tensor) -> None:
        self.stage, self.x = stage, x

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.stage(self.x + i)


@section.row("`DataLoader` whose workers run a stage")
def test_data_loader(case: Case) -> None:
    case.stage.eval()
    backward(case.stage, torch.cat([case.x] * 300).requires_grad_())
    got = torch.cat(list(DataLoader(Features(case.stage, case.x), num_workers=2)))
    twin = case.twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(got, torch.stack([twin(case.x + i) for i in range(4)]))
