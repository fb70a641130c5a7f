# SPDX-License-Identifier: Apache-2.0
"""The life of one publication, as a state machine without clock, threads or I/O."""

from __future__ import annotations

from typing import Literal

LeaseState = Literal["live", "released", "expired", "revoked", "closed"]


class Lease:
    """Says whether a publication still holds its slot, and why it ended.

    A lease begins ``live`` and ends once: ``released`` when enough distinct consumers have
    given it back, ``expired`` when its time is up, ``revoked`` or ``closed`` by the producer.
    Whatever happens after its end changes nothing.  The caller brings the time, in seconds of
    any clock that never goes back, and sees to it that only one thread is inside.

    Args:
        duration: Seconds from ``now`` on.
        consumers: Distinct consumers that must release it, at least 1.
        now: The time at which the lease begins.
    """

    def __init__(self, *, duration: float, consumers: int, now: float) -> None:
        if not duration > 0:
            raise ValueError(f"a lease of {duration} seconds")
        if consumers < 1:
            raise ValueError(f"a lease for {consumers} consumers")
        self._deadline = now + duration
        self._consumers = consumers
        self._seen: set[bytes] = set()
        self._state: LeaseState = "live"

    def __repr__(self) -> str:
        return f"<Lease {self._state}, released by {len(self._seen)} of {self._consumers}>"

    @property
    def state(self) -> LeaseState:
        """Where the publication is in its life."""
        return self._state

    @property
    def live(self) -> bool:
        """Whether the publication still holds its slot."""
        return self._state == "live"

    @property
    def deadline(self) -> float:
        """The time at which the lease runs out."""
        return self._deadline

    @property
    def missing(self) -> int:
        """How many consumers have not released it yet."""
        return self._consumers - len(self._seen)

    def release(self, consumer: bytes, now: float) -> bool:
        """Count a consumer, once however often it releases.

        Returns:
            True if it counted.  False if the lease has ended (also by its time being up
            ``now``) or the consumer had been counted before.
        """
        self.expire(now)
        if self._state != "live" or consumer in self._seen:
            return False
        self._seen.add(consumer)
        if self.missing == 0:
            self._state = "released"
        return True

    def expire(self, now: float) -> bool:
        """End the lease if its time is up; return whether this call ended it."""
        return now >= self._deadline and self._end("expired")

    def revoke(self) -> bool:
        """End the lease because the producer takes it back; return whether this call did."""
        return self._end("revoked")

    def close(self) -> bool:
        """End the lease because the producer closes; return whether this call did."""
        return self._end("closed")

    def _end(self, state: LeaseState) -> bool:
        if self._state != "live":
            return False
        self._state = state
        return True
