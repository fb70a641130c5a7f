# SPDX-License-Identifier: Apache-2.0
"""The publications of a producer, and the thread that ends them.

The thread sleeps in the backend until a consumer reports something or the next lease runs
out.  It refers to :class:`Publications` only, never to the producer, which can therefore be
collected while the thread runs.
"""

from __future__ import annotations

import heapq
import hmac
import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

from tensorferry import wire
from tensorferry.arguments import Deadline
from tensorferry.backends.base import ExportedPool, Notice, SlotTicket
from tensorferry.errors import ClosedError, UsageError
from tensorferry.lease import Lease
from tensorferry.ownership import Lifetime
from tensorferry.room import Loan, Room

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Held:
    """A name and a slot that are kept for a publication to come.

    ``owned`` is False once they have become a publication's, or were given back.
    """

    request_id: str
    loan: Loan
    owned: bool = True


@dataclass(slots=True, eq=False)
class Publication:
    """A slot that consumers may read, or may still be reading."""

    request_id: str
    ticket: SlotTicket
    loan: Loan
    lease: Lease


class Publications:
    """Knows which slots are published, and gives each back once it has ended and is unread.

    Any method may be called from any thread.

    Args:
        pool: The backend's pool; closed with this object.
        room: Where slots come from; closed with this object.
        lifetime: The producer's.
        usual_lease: Seconds that most leases last; shorter ones cost a wake-up of the thread.
        key: With one, releases and rejects are believed only with its MAC.
    """

    def __init__(
        self, pool: ExportedPool, room: Room, lifetime: Lifetime, *, usual_lease: float, key: bytes | None
    ) -> None:
        self.pool = pool
        self.room = room
        self._lifetime = lifetime
        self._key = key
        self._uid = pool.peer.uid
        self._longest_sleep = max(usual_lease, 1.0)
        self._changed = threading.Condition()
        self._names: set[str] = set()  # of publications that live or are being made
        self._live: dict[str, Publication] = {}
        self._by_generation: dict[int, Publication] = {}
        self._draining: dict[int, Publication] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap with generations, some of them ended
        self._forgotten: deque[Held] = deque()
        self._wakes_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tensorferry-producer", daemon=True)
        self._thread.start()

    def claim(self, request_id: str) -> None:
        """Keep a name for a publication that is being made.

        Raises:
            UsageError: A publication of this name lives, or is being made.
            ClosedError: The producer is closed.
        """
        with self._changed:
            self._check_open()
            if request_id in self._names:
                raise UsageError(
                    f"{request_id!r} is published by {self._lifetime.what} already; wait for its release, "
                    f"revoke it, or choose another request id"
                )
            self._names.add(request_id)

    def abandon(self, request_id: str) -> None:
        """Give up a name that was claimed."""
        with self._changed:
            self._names.discard(request_id)
            self._changed.notify_all()

    def give_back(self, held: Held) -> None:
        """Free a name and a slot, unless they are not the caller's any more."""
        with self._changed:
            if not held.owned:
                return
            held.owned = False
            self._names.discard(held.request_id)
            self.room.give_back(held.loan)
            self._changed.notify_all()

    def give_back_later(self, held: Held) -> None:
        """The same without taking a lock, for finalizers, which may run inside any of them."""
        self._forgotten.append(held)
        self.pool.wake()

    def admit(self, held: Held, *, nbytes: int, lease: float, consumers: int) -> Publication:
        """Let consumers read ``nbytes`` of a slot from now on; it belongs to the publication then.

        Raises:
            PoolExhaustedError: The backend has no entry left.
            ClosedError: The producer is closed.

        After an error the slot is still held.
        """
        with self._changed:
            self._check_open()
            now = time.monotonic()
            ticket = self.pool.admit(held.loan.offset, nbytes, lease=lease)
            publication = Publication(
                held.request_id, ticket, held.loan, Lease(duration=lease, consumers=consumers, now=now)
            )
            held.owned = False
            self._live[held.request_id] = publication
            self._by_generation[ticket.generation] = publication
            heapq.heappush(self._deadlines, (now + lease, ticket.generation))
            must_wake = now + lease < self._wakes_at
        if must_wake:
            self.pool.wake()
        return publication

    def undo(self, publication: Publication, held: Held) -> None:
        """Take a publication back whose manifest was never handed out; it is not counted.

        Its slot is held again, unless the publication has ended meanwhile.
        """
        with self._changed:
            if publication.lease.revoke():
                self._remove(publication)
                self._names.add(held.request_id)
                held.owned = self.pool.withdraw(publication.ticket)  # True: nobody could know of it

    def revoke(self, request_id: str) -> bool:
        """End a publication; return False if none of this name lives."""
        with self._changed:
            publication = self._live.get(request_id)
            if publication is None or not publication.lease.revoke():
                return False
            self._counts["revoked"] += 1
            self._end(publication)
            return True

    def wait_released(self, request_id: str, timeout: float) -> bool:
        """Wait until no slot is held under a name; False if the time is up first.

        Raises:
            ClosedError: The producer was closed meanwhile.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._closed or not self._holds(request_id), timeout)
            self._check_open()
            return done

    def count(self) -> Counter[str]:
        """Return how often what happened, and the gauges ``live`` and ``draining``."""
        with self._changed:
            counts = self._counts.copy()
            counts["live"] = len(self._live)
            counts["draining"] = len(self._draining)
            return counts

    def close(self, timeout: float) -> None:
        """End all publications, wake everyone who waits, and close the pool.

        Takes up to ``timeout`` seconds, for the sake of reads that are running.
        """
        self._lifetime.close()
        if threading.current_thread() is self._thread:
            # The collector took the producer while this thread may have been inside the lock;
            # _run closes as soon as it is outside.
            self.pool.wake()
            return
        deadline = Deadline(timeout)
        self._end_all()
        self.room.close()
        self._lifetime.wait_until_unused(deadline.remaining())
        self.pool.wake()
        self._thread.join(deadline.remaining())
        self.pool.close(deadline.remaining())

    def _end_all(self) -> None:
        with self._changed:
            self._closed = True
            for publication in list(self._live.values()):
                publication.lease.close()
                self._end(publication)
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._lifetime.closed:
            with self._changed:
                self._expire(time.monotonic())
                timeout = self._next_wait(time.monotonic())
            try:
                notices = self.pool.notices(timeout)
            except ClosedError:
                break
            while self._forgotten:
                self.give_back(self._forgotten.popleft())
            if notices:
                with self._changed:
                    now = time.monotonic()
                    self._expire(now)
                    for notice in notices:
                        self._apply(notice, now)
        if not self._closed:
            self._end_all()
            self.room.close()
            self.pool.close(1.0)

    # The methods below need the lock.

    def _check_open(self) -> None:
        if self._closed or self._lifetime.closed:
            raise ClosedError(f"{self._lifetime.what} is closed")

    def _holds(self, request_id: str) -> bool:
        return request_id in self._names or any(
            publication.request_id == request_id for publication in self._draining.values()
        )

    def _next_wait(self, now: float) -> float:
        # Sleeping no longer than the usual lease means that no publication with a usual lease
        # has to wake the thread for the sake of its own deadline.
        self._wakes_at = now + self._longest_sleep
        if self._deadlines:
            self._wakes_at = min(self._wakes_at, self._deadlines[0][0])
        return max(0.0, self._wakes_at - now)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, generation = heapq.heappop(self._deadlines)
            publication = self._by_generation.get(generation)
            if publication is not None and publication.lease.expire(now):
                self._counts["expired"] += 1
                logger.info(
                    "%s: the lease of %r ran out with %d consumers missing; its %d bytes are taken back",
                    self._lifetime.what,
                    publication.request_id,
                    publication.lease.missing,
                    publication.loan.nbytes,
                )
                self._end(publication)

    def _apply(self, notice: Notice, now: float) -> None:
        if notice.kind == "drained":
            drained = self._draining.pop(notice.generation, None)
            if drained is not None:
                self._free(drained)
            return
        publication = self._by_generation.get(notice.generation)
        if publication is None or publication.ticket.index != notice.index:
            self._counts["ignored_notices"] += 1
            return
        if not self._genuine(notice, publication.ticket):
            self._counts["forged_notices"] += 1
            return
        if not publication.lease.release(notice.consumer, now):
            self._counts["ignored_notices"] += 1
            return
        if notice.kind == "reject":
            self._counts["rejected"] += 1
        if not publication.lease.live:
            self._counts["released"] += 1
            self._end(publication)

    def _genuine(self, notice: Notice, ticket: SlotTicket) -> bool:
        if self._key is None or notice.kind == "drained":
            return True
        expected = wire.notice_mac(
            self._key,
            notice.kind,
            producer=self._uid,
            index=ticket.index,
            generation=ticket.generation,
            token=ticket.token,
            consumer=notice.consumer,
        )
        return hmac.compare_digest(notice.mac, expected)

    def _remove(self, publication: Publication) -> None:
        del self._live[publication.request_id]
        del self._by_generation[publication.ticket.generation]
        self._names.discard(publication.request_id)
        if len(self._deadlines) > 64 + 2 * len(self._live):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_generation]
            heapq.heapify(self._deadlines)

    def _end(self, publication: Publication) -> None:
        self._remove(publication)
        if self.pool.withdraw(publication.ticket, revoked=publication.lease.state == "revoked"):
            self._free(publication)
        else:
            self._draining[publication.ticket.generation] = publication

    def _free(self, publication: Publication) -> None:
        self.room.give_back(publication.loan)
        self._changed.notify_all()
