# SPDX-License-Identifier: Apache-2.0
"""How long producers and consumers live: closing, collection, exit and fork."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from tensorferry.arguments import Deadline
from tensorferry.errors import ClosedError, ForkedProcessError

_EXIT_SECONDS = 1.0


class Lifetime(AbstractContextManager[None]):
    """Whether an object is open, whose it is, and which calls are inside it.

    Args:
        what: What the object is, for messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the object."""
        return os.getpid() != self._process

    @property
    def closed(self) -> bool:
        """Whether closing has begun."""
        return self._closed

    def check_process(self) -> None:
        """Refuse a call in the wrong process, without touching a lock.

        Raises:
            ForkedProcessError: The object belongs to the parent of this process.
        """
        if self.forked:
            raise ForkedProcessError(
                f"{self.what} was made in process {self._process}, before the fork of this process "
                f"{os.getpid()}; make a new one here"
            )

    def check(self) -> None:
        """Refuse a call that came too late or in the wrong process.

        Raises:
            ForkedProcessError: The object belongs to the parent of this process.
            ClosedError: It was closed.
        """
        self.check_process()  # first: a lock that was held at the fork stays locked in the child
        if self._closed:
            raise ClosedError(f"{self.what} is closed")

    def use(self) -> AbstractContextManager[None]:
        """Count a block as a call that :meth:`wait_until_unused` waits for.

        Raises:
            ForkedProcessError: As for :meth:`check`.
            ClosedError: As for :meth:`check`.
        """
        return self  # it keeps nothing of a block; every call of the library comes here several times

    def __enter__(self) -> None:
        self.check_process()
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.what} is closed")
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._changed.notify_all()

    def close(self) -> bool:
        """Let no new call in; return whether this is the first time."""
        with self._changed:
            first = not self._closed
            self._closed = True
            return first

    def wait_until_unused(self, timeout: float) -> bool:
        """Wait until no call is inside; return whether that came true within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout)


class Closer:
    """Closes an object's resources once: when told to, when it is collected, or at exit.

    Args:
        owner: The object; only a weak reference is kept.
        lifetime: The object's.
        close: Takes a number of seconds; must not refer to ``owner``.
    """

    def __init__(self, owner: object, lifetime: Lifetime, close: Callable[[float], None]) -> None:
        self._finalizer = weakref.finalize(owner, _collect, lifetime, close)
        self._finalizer.atexit = False  # _close_all does it, and without the warning
        _open[id(lifetime)] = (lifetime, close)

    def done(self) -> None:
        """Say that the owner has closed its resources."""
        found = self._finalizer.detach()
        if found is not None:
            _open.pop(id(found[2][0]), None)


_open: dict[int, tuple[Lifetime, Callable[[float], None]]] = {}


def _collect(lifetime: Lifetime, close: Callable[[float], None]) -> None:
    _open.pop(id(lifetime), None)
    if lifetime.forked:
        return
    try:
        close(_EXIT_SECONDS)
    finally:
        message = f"{lifetime.what} was not closed; call close(), or use it in a with statement"
        warnings.warn(message, ResourceWarning, stacklevel=2)


def _close_all() -> None:
    deadline = Deadline(_EXIT_SECONDS)
    for lifetime, close in list(_open.values()):
        if not lifetime.forked:
            close(deadline.remaining())
    _open.clear()


atexit.register(_close_all)
