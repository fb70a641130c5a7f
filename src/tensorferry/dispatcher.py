# SPDX-License-Identifier: Apache-2.0
"""One thread that runs the steps of any number of requests."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from tensorferry.errors import ClosedError
from tensorferry.steps import Steps

_T = TypeVar("_T")

_LONGEST_SLEEP = 60.0  # seconds


class Task(Generic[_T]):
    """Steps that a dispatcher runs, and their outcome."""

    def __init__(self, steps: Steps[_T]) -> None:
        self.outcome: Future[_T] = Future()
        # The dispatcher's thread only:
        self.steps: Steps[_T] | None = steps
        self.turn = 0  # how often the steps have been resumed
        self.error: BaseException | None = None  # to be raised inside the steps


class Dispatcher:
    """Resumes steps when what they wait for has ended, when their time is up, or when cancelled.

    Its thread starts with the first task.  It refers to nothing that refers to the owner, so
    that the owner can be collected.  Any method may be called from any thread.

    Args:
        owner: Who has it, for messages.
        sleep: Waits up to so many seconds, or until woken; may call callbacks meanwhile.
        wake: Ends a ``sleep`` that is running, or else the next one.
    """

    def __init__(self, owner: str, sleep: Callable[[float], None], wake: Callable[[], None]) -> None:
        self._owner = owner
        self._sleep = sleep
        self._wake = wake
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_deed: Callable[[], None] | None = None
        self._calls: deque[Callable[[], None]] = deque()  # for the thread to make
        # The thread only:
        self._tasks: set[Task[Any]] = set()
        # Heap of the times at which tasks are resumed in the turn that is given; most get there before.
        # They stay in it after their end, so it must not keep them and their results alive.
        self._deadlines: list[tuple[float, int, weakref.ref[Task[Any]], int]] = []
        self._numbers = itertools.count()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs on the dispatcher's thread."""
        return threading.current_thread() is self._thread

    def submit(self, steps: Steps[_T]) -> Task[_T]:
        """Run steps; the outcome is the task's.

        Raises:
            ClosedError: The dispatcher is closed.
        """
        task = Task(steps)
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._owner} is closed")
            self._calls.append(partial(self._begin, task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensorferry-requests", daemon=True)
                self._thread.start()
        self._wake()
        return task

    def cancel(self, task: Task[Any], error: BaseException) -> None:
        """Raise an error inside the steps where they wait; nothing happens once they have ended."""
        self._call(partial(self._interrupt, task, error))

    def close(self, last_deed: Callable[[], None] | None = None) -> None:
        """End all tasks with :class:`ClosedError` and take no more; idempotent.

        Args:
            last_deed: What the thread does when all tasks have ended, if it runs at all.
        """
        with self._lock:
            self._closed = True
            self._last_deed = self._last_deed or last_deed
        self._wake()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until the thread has ended; not on that thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self.is_this_thread:  # which looks before it sleeps
            self._wake()

    # The methods below run on the thread.

    def _run(self) -> None:
        while True:
            while self._calls:
                self._calls.popleft()()
            self._resume_overdue(time.monotonic())
            if self._closed:
                for task in list(self._tasks):
                    self._interrupt(task, ClosedError(f"{self._owner} was closed"))
                with self._lock:
                    if not self._calls and not self._tasks:
                        break
            if not self._calls:
                self._sleep(self._until_next(time.monotonic()))
        if self._last_deed is not None:
            self._last_deed()

    def _until_next(self, now: float) -> float:
        if not self._deadlines:
            return _LONGEST_SLEEP
        return min(_LONGEST_SLEEP, max(0.0, self._deadlines[0][0] - now))

    def _begin(self, task: Task[Any]) -> None:
        self._tasks.add(task)
        self._advance(task)

    def _resume(self, task: Task[Any], turn: int) -> None:
        if task.turn == turn:
            self._advance(task)

    def _interrupt(self, task: Task[Any], error: BaseException) -> None:
        if task.steps is not None:
            task.error = error
            self._advance(task)

    def _resume_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, reference, turn = heapq.heappop(self._deadlines)
            task = reference()
            if task is not None:  # the call that it makes says in its own words that the time is up
                self._resume(task, turn)

    def _advance(self, task: Task[Any]) -> None:
        steps, error = task.steps, task.error
        if steps is None:
            return
        task.turn += 1
        task.error = None
        try:
            wait = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            self._end(task)
            task.outcome.set_result(end.value)
        except BaseException as failure:
            self._end(task)
            _clear_frames(failure)
            task.outcome.set_exception(failure)
        else:
            if len(self._deadlines) > 64 + 2 * len(self._tasks):
                running = {(id(one), one.turn) for one in self._tasks}
                self._deadlines = [one for one in self._deadlines if (id(one[2]()), one[3]) in running]
                heapq.heapify(self._deadlines)
            entry = (wait.deadline.end, next(self._numbers), weakref.ref(task), task.turn)
            heapq.heappush(self._deadlines, entry)
            wait.pending.watch(partial(self._call, partial(self._resume, task, task.turn)))

    def _end(self, task: Task[Any]) -> None:
        task.steps = None
        task.turn += 1  # nothing resumes it any more
        self._tasks.discard(task)


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an error, and of those behind it, refer to.

    An outcome that is an error refers to frames that refer to the outcome, so it lives until the
    collector comes, which may be long; connections and landing memory shall not.
    """
    cleared: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in cleared:
        cleared.add(id(behind))
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__
