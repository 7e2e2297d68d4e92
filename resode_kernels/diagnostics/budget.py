"""Keeps a call within its seconds, and shows on stderr what it does."""

from __future__ import annotations

import sys
import time

EVERY = 10.0
"""The seconds between two lines where stderr is not a terminal."""


def now() -> float:
    """The time in seconds."""
    return time.perf_counter()


class Display:
    """On a terminal one line, which is overwritten and removed at the end. Elsewhere a plain line
    every ``EVERY`` seconds, so nothing for a short call."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.begin = self.last = now()
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        self.open = False

    def show(self, what: str) -> None:
        if sys.stderr is None or now() - self.last < (0.2 if self.terminal else EVERY):
            return
        self.last = now()
        passed = f"{self.last - self.begin:.0f} of {self.seconds:g} s"
        text = f"{self.name}: {what} ({passed})"
        if self.terminal:
            text, self.open = f"\r{text}\x1b[K", True
        print(text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Budget:
    """The time that is left to a call or to a part of it. Work that is not indispensable is begun
    only if the budget allows it, that is, if it is expected to end in time."""

    def __init__(self, seconds: float, display: Display, about: str = "") -> None:
        self.end = now() + seconds
        self.display, self.about = display, about

    @property
    def left(self) -> float:
        return self.end - now()

    def allows(self, cost: float) -> bool:
        """Whether work that takes ``cost`` seconds would end in time."""
        return 0 < cost <= self.left

    def part(self, share: float, about: str = "") -> Budget:
        """A budget of this share of the time that is left."""
        return Budget(share * self.left, self.display, about or self.about)

    def show(self, what: str) -> None:
        self.display.show(f"{self.about}: {what}" if self.about else what)
