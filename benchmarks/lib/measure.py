"""Measures the peak memory of a step, the times of several steps, and the limits of the machine."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from progress import leave_interrupts_to_the_parent

from resode_kernels.backends import cpp

# ---------------------------------------------------------------------------------------- memory


# Of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def return_memory() -> None:
    """Gives free memory back to the system. For the rest of the process glibc gives large pieces
    back as soon as they are freed. By default it keeps some of them, and a peak would count memory
    that nobody uses."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)
    gc.collect()
    libc.malloc_trim(0)


def keep_memory() -> None:
    """For the rest of the process glibc keeps what is freed, as with MALLOC_MMAP_MAX_=0 and
    MALLOC_TRIM_THRESHOLD_=2000000000 in the environment."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2_000_000_000)


def peak_memory(step: Callable[[], Any], device: str) -> int:
    """Bytes by which the peak during ``step`` exceeds the memory in use before it.

    On the CPU the peak is that of the resident set, reset through /proc (Linux with glibc only).
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - before)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a process of its own, or None if it ran out of memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "resode_kernels", "__main__"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:  # the process was killed
        result = None
    process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _send(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    leave_interrupts_to_the_parent()
    try:
        sender.send(function(*args))
    except (MemoryError, torch.OutOfMemoryError):
        sender.send(None)
    except RuntimeError as error:
        sender.send(None if "can't allocate memory" in str(error) else error)
    except Exception as error:
        sender.send(error)


# ------------------------------------------------------------------------------------------ time


def peak_rate(device: str = "cpu") -> float:
    """FLOPs per second that the machine can do: on the CPU multiply-adds in registers, on a GPU a
    large matrix product of torch."""
    if device == "cpu":
        return float(cpp._C.fma_peak(torch.get_num_threads(), 0.05))
    n = 4096
    a = torch.randn(n, n, device=device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        a @ a
    torch.cuda.synchronize()
    return 4 * 2 * n**3 / (time.perf_counter() - begin)


def bandwidth(device: str = "cpu") -> float:
    """Bytes per second that the machine can stream: those that a copy reads and writes, of tensors
    that no cache holds."""
    source = torch.ones(32 << 20, device=device)
    copy = torch.empty_like(source).copy_(source)  # its pages are there now
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    copy.copy_(source)
    if device != "cpu":
        torch.cuda.synchronize()
    return 2 * source.nbytes / (time.perf_counter() - begin)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the body takes longer, between two operations of Python."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Times:
    """Median and quartiles, in seconds."""

    median: float
    low: float
    high: float


SHORT = 0.2
"""Seconds. The time of a shorter step depends on what the steps before it left behind: the caches,
and the memory that malloc holds or has given back."""
WARM_UP = 2
"""Steps that remove this dependence. One is not enough: malloc may still give back memory that the
next step needs."""


def interleaved(
    contestants: dict[str, Callable[[], Any]],
    *,
    after: Callable[[], None] = lambda: None,
    device: str = "cpu",
    seconds: float = 3.0,
    rounds: tuple[int, int] = (5, 50),
) -> dict[str, Times]:
    """Times the contestants in turns, so that a disturbance of the machine meets all of them. The
    first turn warms up. Every turn has an order of its own. Before a short step is timed, it runs
    ``WARM_UP`` times: in a training it would find the machine as it left it itself, not as the
    other contestants did. ``after`` runs after each step, outside the timing."""

    def once(step: Callable[[], Any]) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        after()
        return seconds

    begin = time.perf_counter()
    last = {name: once(step) for name, step in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    order, generator = list(contestants.items()), random.Random(0)
    turn = 0
    while turn < rounds[0] or (turn < rounds[1] and time.perf_counter() - begin < seconds):
        generator.shuffle(order)
        for name, step in order:
            for _ in range(WARM_UP if last[name] < SHORT else 0):
                once(step)
            last[name] = once(step)
            taken[name].append(last[name])
        turn += 1
    quartiles = {name: statistics.quantiles(t, n=4) for name, t in taken.items()}
    return {name: Times(q[1], q[0], q[2]) for name, q in quartiles.items()}
