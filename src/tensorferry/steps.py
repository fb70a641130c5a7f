# SPDX-License-Identifier: Apache-2.0
"""Work that waits in between, written once for callers that block and for those that do not.

Steps are a generator.  Before it waits for something it yields what for and how long, and
when it goes on it makes the call that waits.  Who runs the steps on a thread of its own ignores
what is yielded, and the calls wait (:func:`run`).  Who has many steps to run resumes each only
once what it waits for has ended or the time is up, so that no call waits
(:mod:`tensorferry.dispatcher`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from tensorferry.arguments import Deadline

_T = TypeVar("_T")


class Pending(Protocol):
    """Something that ends by itself."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once this has ended, by any thread; at once if it has already.

        A second callback may take the place of the first.
        """


class Wait(NamedTuple):
    """What steps are about to wait for, and how long."""

    pending: Pending
    deadline: Deadline


Steps: TypeAlias = Generator[Wait, None, _T]
"""Yields what it is about to wait for; returns the result."""


def run(steps: Steps[_T]) -> _T:
    """Run steps to their end on this thread; return what they return, or raise what they raise."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: _T = end.value
        return result


class Gate:
    """Opens once; any number of threads may wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether nobody has to wait any more."""
        return self._opened.is_set()

    def open(self) -> None:
        """Let everyone through; callbacks run on this thread."""
        with self._lock:
            self._opened.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; return whether it is open."""
        return self._opened.wait(timeout)

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once it is open; at once if it is."""
        with self._lock:
            if not self._opened.is_set():
                self._callbacks.append(callback)
                return
        callback()
