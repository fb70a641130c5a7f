# SPDX-License-Identifier: Apache-2.0
"""The consumer's pool: memory where bytes land, and the quarantine of what may still land."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from tensorferry.arguments import Deadline
from tensorferry.backends.base import Read
from tensorferry.room import Loan, Room
from tensorferry.steps import Steps

BLOCK_NBYTES = 4096


class Landing:
    """Lends landing memory, and keeps back what an unfinished read may still write to.

    Any method may be called from any thread.

    Args:
        pool: Flat uint8 tensor over the landing pool.
        owner: Who has it, for messages.
    """

    def __init__(self, pool: torch.Tensor, owner: str) -> None:
        self.pool = pool
        self.nbytes = pool.numel()
        self._lock = threading.Lock()
        self._quarantine: list[tuple[Sequence[Read], Loan]] = []
        sweep = weakref.WeakMethod(self.sweep)  # else this and the room would keep each other alive
        self._room = Room(pool.numel(), BLOCK_NBYTES, owner=owner, poll=lambda: _call(sweep))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes in use, quarantine included."""
        return self._room.allocated_nbytes

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes that reads may still write to which nobody waits for."""
        with self._lock:
            return sum(loan.nbytes for _, loan in self._quarantine)

    @property
    def is_short(self) -> bool:
        """Whether calls wait for room while some of it is in quarantine, which nobody reports the end of."""
        return bool(self._quarantine) and self._room.waiters > 0

    @property
    def waiters(self) -> int:
        """How many calls wait for room."""
        return self._room.waiters

    def take(self, nbytes: int, borrower: str, deadline: Deadline) -> Steps[Loan]:
        """Lend memory, first come first served.

        Args:
            nbytes: How much, above 0.
            borrower: For whom, for messages.
            deadline: When to give up waiting.

        Raises:
            PayloadTooLargeError: The pool is smaller than that.
            PoolTimeoutError: There was no room in time.
            ClosedError: The consumer was closed before or meanwhile.
        """
        return self._room.take(nbytes, borrower, deadline)

    def memory(self, loan: Loan) -> torch.Tensor:
        """Return the memory of a loan."""
        return self.pool[loan.offset : loan.offset + loan.nbytes]

    def give_back(self, loan: Loan) -> None:
        """Take memory back that nothing writes to any more."""
        self._room.give_back(loan)

    def give_up(self, loan: Loan, reads: Sequence[Read]) -> None:
        """Cancel reads and take their memory back as soon as nothing can write to it any more."""
        for read in reads:
            read.cancel()
        if all(read.settled for read in reads):
            self.give_back(loan)
            return
        with self._lock:  # the others there are not looked at: thousands may be given up at once
            self._quarantine.append((reads, loan))

    def sweep(self) -> None:
        """Take back what was in quarantine and is settled now."""
        if not self._quarantine:
            return
        settled: list[Loan] = []
        kept: list[tuple[Sequence[Read], Loan]] = []
        with self._lock:
            for reads, loan in self._quarantine:
                if all(read.settled for read in reads):
                    settled.append(loan)
                else:
                    kept.append((reads, loan))
            self._quarantine = kept
        for loan in settled:
            self.give_back(loan)

    def close(self) -> None:
        """Lend nothing any more; those who wait get :class:`ClosedError`."""
        self._room.close()

    def drop(self) -> None:
        """Let go of the memory; it is freed with the last tensor over it."""
        self.pool = self.pool.new_empty(0)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
