"""What a long script says while it runs, and how it ends when it is stopped.

    progress = Progress("depth", [1.0, 4.0, 16.0])  # 3 depths, about 21 s on free cores
    with Stoppable() as run:
        for depth in progress.over(depths):         # 2 of 3 depths after 5 s, about 16 s left
            progress.say(f"depth {depth}, times")   # between two depths
            rows += measure(depth)
    write_csv(path, rows)
    run.end()                                       # exits with 130 if it was stopped

The lines go to stderr, with or without a terminal.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

EVERY = 10.0
"""Seconds between two lines, at least."""


class Progress:
    """Says how long a number of items will take, and how many are done.

    ``items``: the seconds that each item is expected to take, or only how many there are. Without
    seconds an estimate needs the first item to be done.
    """

    def __init__(self, unit: str, items: Sequence[float] | int) -> None:
        known = not isinstance(items, int)
        self.unit = unit
        self.expected: Sequence[float] = items if known else [1.0] * items
        self.done = 0
        self.begin = self.printed = time.perf_counter()
        start = self._count(len(self.expected))
        _print(f"{start}, about {duration(sum(self.expected))} on free cores" if known else start)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            yield item
            self.advance()

    def advance(self, items: int = 1) -> None:
        """So many more are done."""
        self.done += items
        self.say("")

    def say(self, text: str) -> None:
        """Prints a line, unless the last one is too recent."""
        now = time.perf_counter()
        if now - self.printed < EVERY:
            return
        self.printed = now
        elapsed = now - self.begin
        line = f"{self.done} of {self._count(len(self.expected))} after {duration(elapsed)}"
        if text:
            line += f"; now {text}"
        elif 0 < self.done < len(self.expected):
            left = sum(self.expected[self.done :]) / sum(self.expected[: self.done])
            line += f", about {duration(elapsed * left)} left"
        _print(line)

    def _count(self, count: int) -> str:
        return f"{count} {self.unit}{'' if count == 1 else 's'}"


class Stoppable:
    """Ctrl-C and SIGTERM end the block, and nothing else: the script can still write what it has.
    They also end the processes that multiprocessing has started, for which pools would wait."""

    def __init__(self) -> None:
        self.stopped = False

    def __enter__(self) -> Stoppable:
        self._before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        # Not always KeyboardInterrupt: a pool whose processes were ended raises its own error.
        self.stopped = self.stopped and error is not None
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        if not self.stopped:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        return self.stopped

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends two
        for child in multiprocessing.active_children():
            child.terminate()
        raise KeyboardInterrupt

    def end(self) -> None:
        """Exits as a stopped process does, if it was stopped."""
        if self.stopped:
            _print("Stopped: only results that were complete by then are kept.")
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
            raise SystemExit(130)


def leave_interrupts_to_the_parent() -> None:
    """For child processes: Ctrl-C reaches all processes of a terminal, and the parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def duration(seconds: float) -> str:
    """As people say it: 8 s, 2 min 10 s, 1 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60 // 10 * 10} s".replace(" 0 s", "")
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _print(line: Any) -> None:
    print(line, file=sys.stderr, flush=True)
