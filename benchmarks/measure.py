"""Measuring: peak memory of a step, times of several steps side by side, and on what machine."""

from __future__ import annotations

import csv
import ctypes
import gc
import multiprocessing
import platform
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resode_kernels.backends import cpp


def machine(device: str = "cpu") -> str:
    """The processor, the number of threads and the version of torch; the GPU, if it is used."""
    if device != "cpu":
        precision = torch.backends.cuda.matmul.fp32_precision
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32 {precision}"
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Makes the folder, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys, which are the headings, as text in columns."""
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------- memory


# Of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def return_memory() -> None:
    """Gives what is free back to the system. For the rest of the process glibc is told to do so
    with large blocks at once: by default it keeps some of them, and a peak would count memory that
    nobody uses."""
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
    """Bytes by which the peak during ``step`` exceeds what was in use before it.

    On the CPU that is the resident set's peak, reset through /proc (Linux with glibc only).
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


def megabytes(count: float | None) -> str:
    if count is None:
        return "out of memory"
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a process of its own, or None if it ran out of memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "__main__"])
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
    """FLOPs per second that the machine can do: of multiply-adds in registers on the CPU, on a GPU
    of a large matrix product of torch."""
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
    """Bytes per second that the machine can stream: read and written by a copy that no cache
    holds."""
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
    """TimeoutError when the block takes longer; it comes between two operations of Python's."""

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
"""Seconds of a step below which it matters what steps before it left behind: the caches, and the
memory that malloc holds or has given back."""
WARM_UP = 2
"""Steps that take that away. After one, malloc may still give memory back that the next needs."""


def interleaved(
    contestants: dict[str, Callable[[], Any]],
    *,
    after: Callable[[], None] = lambda: None,
    device: str = "cpu",
    seconds: float = 3.0,
    rounds: tuple[int, int] = (5, 50),
) -> dict[str, Times]:
    """Times the contestants in turns, after a turn of warming up, so that a disturbance of the
    machine meets all of them. Every turn has an order of its own. A step that is short first goes
    ``WARM_UP`` times without being timed: in a training it would find the machine as itself left
    it, not as the others did. ``after`` tidies up behind each step, outside the timing."""

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
