"""Independent trainings side by side, one on each core: networks this small gain little from more
threads, and results do not depend on how many cores there are."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch
from experiment import progress

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

WORKERS = os.cpu_count() or 1


def side_by_side(
    function: Callable[[Job], Outcome], jobs: Sequence[Job], description: str, device: str = "cpu"
) -> list[Outcome]:
    """``function`` of every job, in their order; begin with the longest. On a GPU one by one."""
    if WORKERS == 1 or device != "cpu":
        return [function(job) for job in progress(jobs, description)]
    with ProcessPoolExecutor(
        WORKERS, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        return list(progress(pool.map(function, jobs), description, len(jobs)))
