"""Independent trainings side by side, one on each core: networks this small gain little from more
threads, and results do not depend on how many cores there are."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from experiment import progress
from progress import leave_interrupts_to_the_parent

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

WORKERS = os.cpu_count() or 1


def side_by_side(
    function: Callable[[Job], Outcome], jobs: Sequence[Job], device: str = "cpu"
) -> Iterator[tuple[Job, Outcome]]:
    """The jobs, each with its ``function``, in their order: begin with the longest. On a GPU one by
    one."""
    if WORKERS == 1 or device != "cpu":
        for job in progress(jobs, "training", len(jobs)):
            yield job, function(job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, context, _begin) as pool:
        tasks = [pool.submit(function, job) for job in jobs]
        for job, task in progress(zip(jobs, tasks, strict=True), "training", len(jobs)):
            yield job, task.result()


def _begin() -> None:
    torch.set_num_threads(1)
    leave_interrupts_to_the_parent()
