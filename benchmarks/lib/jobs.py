"""Independent jobs side by side, one on each core: networks this small gain little from more
threads, and results do not depend on how many cores there are."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch
from progress import Progress, leave_interrupts_to_the_parent

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")

WORKERS = os.cpu_count() or 1
LOOK = 1.0
"""Seconds between two looks at how far the processes are."""


def _nothing() -> None:
    pass


_report = _nothing


def part_done() -> None:
    """For jobs of several parts: one more of them is done."""
    _report()


def side_by_side(
    function: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    device: str = "cpu",
    unit: str = "training",
    parts: int = 0,
) -> Iterator[tuple[Job, Outcome]]:
    """The jobs, each with its ``function``, in their order: begin with the longest. On a GPU one by
    one. Progress is said in jobs; with ``parts`` in the parts of jobs, as many in each, which they
    tell of by ``part_done``. ``unit``: what a job or a part is called."""
    global _report
    progress = Progress(unit, len(jobs) * (parts or 1))
    if WORKERS == 1 or device != "cpu":
        _report = progress.advance if parts else _nothing
        for job in jobs:
            outcome = function(job)
            if not parts:
                progress.advance()
            yield job, outcome
        return
    context = multiprocessing.get_context("spawn")
    done = context.Value("i", 0)
    with ProcessPoolExecutor(WORKERS, context, _begin, (done,)) as pool:
        tasks = [pool.submit(_perform, function, job, not parts) for job in jobs]
        for job, task in zip(jobs, tasks, strict=True):
            while not wait([task], LOOK).done:
                progress.advance(done.value - progress.done)
            progress.advance(done.value - progress.done)
            yield job, task.result()


def _begin(done: Any) -> None:
    global _report
    torch.set_num_threads(1)
    leave_interrupts_to_the_parent()

    def report() -> None:
        with done.get_lock():
            done.value += 1

    _report = report


def _perform(function: Callable[[Job], Outcome], job: Job, whole: bool) -> Outcome:
    outcome = function(job)
    if whole:
        part_done()
    return outcome
