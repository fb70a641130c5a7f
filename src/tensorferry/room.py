# SPDX-License-Identifier: Apache-2.0
"""Room in a pool: memory that is lent, and a queue of those who wait for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from tensorferry.allocator import BuddyAllocator
from tensorferry.arguments import Deadline
from tensorferry.errors import ClosedError, PayloadTooLargeError, PoolExhaustedError, PoolTimeoutError
from tensorferry.steps import Gate, Steps, Wait

SWEEP_SECONDS = 0.005
"""How often those who wait look for memory whose return nobody reports."""


class Loan(NamedTuple):
    """Memory that is lent.

    Attributes:
        offset: First byte in the pool.
        nbytes: Bytes that were asked for; 0 for a loan without memory.
        generation: The allocator's number of the block, 0 without memory.
    """

    offset: int
    nbytes: int
    generation: int


class _Waiter:
    """One who waits; ``ready`` is set when there is a loan or the room was closed."""

    def __init__(self, nbytes: int, borrower: str) -> None:
        self.nbytes = nbytes
        self.borrower = borrower
        self.loan: Loan | None = None
        self.ready = Gate()


class Room:
    """Lends the memory of a pool, first come first served.

    Nobody is let in past the head of the queue, also where a smaller request would fit, so a
    large one is not starved.  Memory that is given back goes to the head at once, by the
    thread that gives it back.  Any method may be called from any thread.

    Args:
        nbytes: Size of the pool.
        min_block_size: Of the allocator.
        owner: Who has the pool, for messages.
        max_loans: Loans that there may be at a time; None for any number.
        poll: Called every few milliseconds by those who wait, and before each loan; may give
            memory back.
    """

    def __init__(
        self,
        nbytes: int,
        min_block_size: int,
        *,
        owner: str,
        max_loans: int | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._allocator = BuddyAllocator(nbytes, min_block_size, exact=True, trim=True)
        self._owner = owner
        self._max_loans = max_loans
        self._poll = poll
        self._lock = threading.Lock()
        self._queue: OrderedDict[_Waiter, None] = OrderedDict()  # any of them may leave at any time
        self._loans = 0
        self._closed = False

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that are lent, with what rounding added."""
        return self._allocator.allocated_bytes

    @property
    def requested_nbytes(self) -> int:
        """Bytes that are lent, as they were asked for."""
        requested: int = self._allocator.get_stats()["requested_bytes"]
        return requested

    @property
    def waiters(self) -> int:
        """How many wait."""
        return len(self._queue)

    def take(self, nbytes: int, borrower: str, deadline: Deadline | None) -> Steps[Loan]:
        """Lend memory, waiting for it if need be.

        Args:
            nbytes: How much; 0 takes part in the queue and counts as a loan, but needs no memory.
            borrower: For whom, for messages.
            deadline: When to give up waiting; None does not wait.

        Raises:
            PayloadTooLargeError: The pool is smaller than that.
            PoolExhaustedError: There is no room now, and ``deadline`` is None.
            PoolTimeoutError: There was no room in time.
            ClosedError: The room was closed before or meanwhile.

        After an error nothing is lent.
        """
        if nbytes > self._allocator.pool_size:
            raise PayloadTooLargeError(
                f"{borrower} needs {nbytes} bytes, the pool of {self._owner} has "
                f"{self._allocator.pool_size}: make the pool larger, or send the tensors in parts"
            )
        if self._poll is not None:
            self._poll()
        with self._lock:
            self._check_open()
            loan = None if self._queue else self._lend(nbytes, borrower)
            if loan is not None:
                return loan
            if deadline is None:
                raise PoolExhaustedError(
                    f"no room for {borrower}: {self._state(nbytes)}. Release publications sooner, make the "
                    f"pool larger, or pass timeout= to wait",
                    **self._figures(nbytes),
                )
            waiter = _Waiter(nbytes, borrower)
            self._queue[waiter] = None
        return (yield from self._wait(waiter, deadline))

    def give_back(self, loan: Loan) -> None:
        """Take memory back, and hand it to those who wait."""
        with self._lock:
            if loan.generation:
                self._allocator.free(loan.offset, loan.generation)
            self._loans -= 1
            self._serve()

    def close(self) -> None:
        """Lend nothing any more; those who wait get :class:`ClosedError`."""
        with self._lock:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
        for waiter in waiting:
            waiter.ready.open()

    def _wait(self, waiter: _Waiter, deadline: Deadline) -> Steps[Loan]:
        try:
            yield Wait(waiter.ready, deadline)
            while not waiter.ready.is_open:
                remaining = deadline.remaining()
                if remaining == 0.0:
                    break
                waiter.ready.wait(remaining if self._poll is None else min(remaining, SWEEP_SECONDS))
                if self._poll is not None:
                    self._poll()
        except BaseException:
            with self._lock:
                loan = self._leave(waiter)
            if loan is not None:
                self.give_back(loan)
            raise
        with self._lock:
            if waiter.loan is not None:
                return waiter.loan
            state, figures = self._state(waiter.nbytes), self._figures(waiter.nbytes)
            self._leave(waiter)
            self._check_open()
        raise PoolTimeoutError(
            f"no room for {waiter.borrower} within {deadline.timeout:g} seconds: {state}. "
            f"Release publications sooner, make the pool larger, or wait longer",
            **figures,
        )

    # The methods below need the lock.

    def _leave(self, waiter: _Waiter) -> Loan | None:
        """Take a waiter out of the queue; what it got, if it got something."""
        if waiter in self._queue:
            del self._queue[waiter]
            self._serve()
        return waiter.loan

    def _serve(self) -> None:
        while self._queue:
            head = next(iter(self._queue))
            head.loan = self._lend(head.nbytes, head.borrower)
            if head.loan is None:
                return
            del self._queue[head]
            head.ready.open()

    def _lend(self, nbytes: int, borrower: str) -> Loan | None:
        if self._max_loans is not None and self._loans >= self._max_loans:
            return None
        loan = Loan(0, 0, 0)
        if nbytes:
            block = self._allocator.allocate_block(nbytes, borrower)
            if block is None:
                return None
            loan = Loan(block.offset, nbytes, block.generation)
        self._loans += 1
        return loan

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._owner} is closed")

    def _figures(self, nbytes: int) -> dict[str, int]:
        return {
            "requested_nbytes": nbytes,
            "free_nbytes": self._allocator.free_bytes,
            "pool_nbytes": self._allocator.pool_size,
        }

    def _state(self, nbytes: int) -> str:
        largest = self._allocator.get_stats()["largest_free_block"]
        slots = "" if self._max_loans is None else f" of at most {self._max_loans}"
        return (
            f"{nbytes} bytes are needed; of the {self._allocator.pool_size} bytes of the pool of "
            f"{self._owner} {self._allocator.free_bytes} are free, {largest} of them in one piece; "
            f"{self._loans}{slots} slots are held, and {len(self._queue)} calls wait"
        )
