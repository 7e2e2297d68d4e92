"""Threads take turns at running modules.

A replay puts stand-ins for parameters and buffers into a module, sets its modes and the states of
the random number generators, and takes all of that back when the evaluation is over. Threads that
share a model must not see it in between. So every evaluation that is recorded or replayed has a
turn *alone*, and every other evaluation of a block one that is *shared* with its like.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock with shared and exclusive holders. Turns alone belong to a *run*, any object: inside
    one of them, others of the same run begin at once, in whatever thread. So a block may contain a
    stage, whose backward pass autograd may run in another thread of its own."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._sharing = 0
        self._waiting = 0
        self._run: object = None
        self._mine = threading.local()

    def run(self) -> object:
        """The run in whose turn this thread is, or None."""
        return getattr(self._mine, "run", None)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Context with a turn that is shared. It begins at once inside another turn."""
        if self.run() is not None or getattr(self._mine, "shares", False):
            yield
            return
        self._begin_sharing()
        try:
            yield
        finally:
            self._end_sharing()

    @contextmanager
    def alone(self, run: object) -> Iterator[None]:
        """Context with a turn alone; inside another turn alone of this thread, a part of that. A
        shared turn around it pauses: what it holds is whole, since a turn alone takes back what it
        changes."""
        before = self.run()
        run = before or run
        self._mine.run = run
        try:
            if self._run is run:
                yield
                return
            paused = getattr(self._mine, "shares", False)
            if paused:
                self._end_sharing()
            try:
                self._begin(run)
                try:
                    yield
                finally:
                    self._end()
            finally:
                if paused:
                    self._begin_sharing()
        finally:
            self._mine.run = before

    def _begin_sharing(self) -> None:
        with self._free:
            # A turn alone that waits comes first, or threads that share would keep it waiting.
            self._free.wait_for(lambda: self._run is None and not self._waiting)
            self._sharing += 1
        self._mine.shares = True

    def _end_sharing(self) -> None:
        self._mine.shares = False
        with self._free:
            self._sharing -= 1
            self._free.notify_all()

    def _begin(self, run: object) -> None:
        with self._free:
            self._waiting += 1
            try:
                self._free.wait_for(lambda: self._run is None and not self._sharing)
                self._run = run
            finally:
                self._waiting -= 1
                self._free.notify_all()

    def _end(self) -> None:
        with self._free:
            self._run = None
            self._free.notify_all()


turns = Turns()
