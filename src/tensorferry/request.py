# SPDX-License-Identifier: Apache-2.0
"""A pull or publish that was started and goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Generic, TypeVar

from tensorferry import arguments
from tensorferry.dispatcher import Dispatcher
from tensorferry.errors import TransferCancelledError, TransferTimeoutError
from tensorferry.ownership import Lifetime
from tensorferry.steps import Steps

_T = TypeVar("_T")


class Request(Generic[_T]):
    """The outcome, sooner or later, of ``start_pull`` or ``start_publish``.

    Wait for it with :meth:`result` on a thread, or with ``await`` in any event loop of asyncio;
    in several places at once if need be.  It ends by its own timeout in any case.  As long as
    it exists, its producer or consumer is not collected.
    """

    def __init__(
        self,
        owner: object,
        lifetime: Lifetime,
        dispatcher: Dispatcher,
        steps: Steps[_T],
        what: str,
    ) -> None:
        self._owner = owner
        self._lifetime = lifetime
        self._dispatcher = dispatcher
        self._what = what
        self._task = dispatcher.submit(steps)

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            error = self._task.outcome.exception()
            state = "done" if error is None else f"failed with {type(error).__name__}"
        return f"<Request {self._what} {state}>"

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._task.outcome.done()

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, and return the result.

        Args:
            timeout: Seconds to wait here; None waits for the end, which comes by the request's
                own timeout.

        Raises:
            TransferTimeoutError: It has not ended within ``timeout``; it goes on.
            TransferCancelledError: It was cancelled.
            ForkedProcessError: It belongs to the parent process, and had not ended at the fork.
            TensorferryError: Whatever ``pull`` or ``publish`` would have raised.
        """
        seconds = None if timeout is None else arguments.as_seconds(timeout, "timeout")
        outcome = self._task.outcome
        if not outcome.done():
            self._lifetime.check_process()
        try:
            return outcome.result(seconds)
        except FutureTimeoutError:
            if outcome.done():  # just now, or with such an error
                return outcome.result()
        raise TransferTimeoutError(f"{self._what} has not ended within {seconds:g} seconds; it goes on")

    def cancel(self) -> bool:
        """Give it up; it then ends with :class:`TransferCancelledError`, unless it just ends anyway.

        Nothing is handed out then.  A slot that a pull was reading stays held for this consumer,
        memory that may still be written to is used again only when UCX has let go of it, and
        what a publish had begun is undone.

        Returns:
            False if it had ended before.
        """
        if self.done():
            return False
        self._lifetime.check_process()
        self._dispatcher.cancel(self._task, TransferCancelledError(f"{self._what} was cancelled"))
        return True

    def __await__(self) -> Generator[object, None, _T]:
        """Wait in an event loop; when the waiting task is cancelled, so is the request."""
        outcome = self._task.outcome
        if not outcome.done():
            self._lifetime.check_process()
            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def tell(_: Future[_T]) -> None:
                with suppress(RuntimeError):  # the loop was closed; nobody waits any more
                    loop.call_soon_threadsafe(_set, ended)

            outcome.add_done_callback(tell)
            try:
                yield from ended
            except asyncio.CancelledError:
                self.cancel()
                raise
        return outcome.result()


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
