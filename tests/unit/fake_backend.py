# SPDX-License-Identifier: Apache-2.0
"""A backend inside one process, for states that the real one cannot be brought into at will.

It is a module as ``tensorferry.backends.registry`` expects one.  ``POOLS`` and ``READERS``
hold what was made, the newest last; their attributes script what happens.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from tensorferry.arguments import Deadline
from tensorferry.backends.base import (
    Access,
    AccessOffer,
    Capabilities,
    Connection,
    ExportedPool,
    Notice,
    PeerOffer,
    Read,
    Reader,
    Releaser,
    SlotTicket,
    Span,
)
from tensorferry.errors import (
    ClosedError,
    ConnectError,
    LeaseExpiredError,
    LeaseRevokedError,
    PeerLostError,
    PoolExhaustedError,
    TransferCancelledError,
    TransferTimeoutError,
)
from tensorferry.steps import Gate, Steps, Wait

POOLS: list[FakePool] = []
READERS: list[FakeReader] = []


def export_pool(
    nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
) -> FakePool:
    POOLS.append(FakePool(nbytes, access, slots))
    return POOLS[-1]


def open_reader(nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> FakeReader:
    READERS.append(FakeReader(nbytes))
    return READERS[-1]


class FakePool(ExportedPool):
    """``drains`` makes withdrawals wait for :meth:`drain`; ``refuse`` is raised by ``admit``."""

    def __init__(self, nbytes: int, access: str, slots: int) -> None:
        self._pool = torch.zeros(nbytes, dtype=torch.uint8)
        self.access = access
        self.slots = slots
        self.uid = secrets.token_bytes(16)
        self.live: dict[int, SlotTicket] = {}
        self.revoked: set[int] = set()
        self.drains = False
        self.refuse: Exception | None = None
        self.closed = False
        self.calls_of_notices = 0
        self._changed = threading.Condition()
        self._queue: list[Notice] = []
        self._woken = False
        self._next = 1

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def peer(self) -> PeerOffer:
        modes: list[Access] = ["mapped", "served"] if self.access == "auto" else [self.access]  # type: ignore[list-item]
        return PeerOffer(self.uid, "fake", b"here", tuple(AccessOffer(mode, b"", b"") for mode in modes))

    def admit(self, offset: int, nbytes: int, *, lease: float) -> SlotTicket:
        if self.refuse is not None:
            raise self.refuse
        if self.closed:
            raise ClosedError("the fake pool is closed")
        if len(self.live) >= self.slots:
            raise PoolExhaustedError("no slot")
        ticket = SlotTicket(len(self.live), self._next, secrets.token_bytes(16), offset, nbytes)
        self._next += 1
        self.live[ticket.generation] = ticket
        return ticket

    def withdraw(self, ticket: SlotTicket, *, revoked: bool = False) -> bool:
        if revoked:
            self.revoked.add(ticket.generation)
        return self.live.pop(ticket.generation, None) is None or not self.drains

    def notices(self, timeout: float) -> list[Notice]:
        with self._changed:
            self.calls_of_notices += 1
            self._changed.wait_for(lambda: self._queue or self._woken or self.closed, timeout)
            taken, self._queue, self._woken = self._queue, [], False
            return taken

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        self.closed = True
        self.live.clear()
        self.wake()

    def tell(
        self, kind: str, ticket: SlotTicket, consumer: bytes = b"c" * 16, mac: bytes = bytes(32)
    ) -> None:
        """Deliver a notice."""
        with self._changed:
            self._queue.append(Notice(kind, ticket.index, ticket.generation, consumer, mac))  # type: ignore[arg-type]
            self._changed.notify_all()

    def drain(self, ticket: SlotTicket) -> None:
        """Say that nobody reads a withdrawn slot any more."""
        self.tell("drained", ticket, b"")

    def slot(self, ticket: SlotTicket) -> torch.Tensor:
        return self._pool[ticket.offset : ticket.offset + ticket.nbytes]


class FakeRead(Read):
    """Ends at once, unless ``failure`` is set; then it settles when told to."""

    def __init__(
        self, failure: Exception | None, verify: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self._failure = failure
        self._verify = verify
        self._release = release
        self.cancelled = threading.Event()
        self._callback: Callable[[], None] = lambda: None
        self.is_settled = failure is None

    def watch(self, callback: Callable[[], None]) -> None:
        """Call back at once, or for a read that hangs when it is cancelled."""
        self._callback = callback
        if not isinstance(self._failure, TransferTimeoutError) or self.cancelled.is_set():
            callback()

    def wait(self, timeout: float) -> None:
        if isinstance(self._failure, TransferTimeoutError):
            if self.cancelled.wait(timeout):
                raise TransferCancelledError("cancelled")
            raise TransferTimeoutError(f"nothing came within {timeout:.3f} seconds")
        if self._failure is not None:
            raise self._failure
        self._verify()
        self._release()

    def cancel(self) -> None:
        self.cancelled.set()
        self._callback()

    @property
    def settled(self) -> bool:
        return self.is_settled


class FakeConnection(Connection):
    def __init__(self, reader: FakeReader, pool: FakePool, access: Access) -> None:
        self.reader = reader
        self.peer = pool
        self._access: Access = access
        self.is_broken = False
        self.breaks = False  # when it is used next, as a connection that broke while idle

    @property
    def access(self) -> Access:
        return self._access

    @property
    def transports(self) -> tuple[str, ...]:
        return ("nothing",)

    @property
    def broken(self) -> bool:
        return self.is_broken

    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Read:
        read = self._post(ticket, spans, releaser)
        if read.is_settled:
            source = self.peer.slot(ticket)
            for span in spans:
                landed = self.reader.pool[span.destination : span.destination + span.nbytes]
                landed.copy_(source[span.source : span.source + span.nbytes])
        return read

    def _post(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None) -> FakeRead:
        self._check(ticket)
        self.reader.posted.append(list(spans))
        failure = self.reader.read_failures.pop(0) if self.reader.read_failures else None
        read = FakeRead(
            failure,
            lambda: self.verify(ticket),
            lambda: None if releaser is None else self.notify("release", ticket, *releaser),
        )
        self.reader.reads.append(read)
        self.reader.on_read(read)
        return read

    @property
    def lands_anywhere(self) -> bool:
        return self.reader.lands_anywhere and self._access == "served"

    def read_into(
        self,
        ticket: SlotTicket,
        sources: Sequence[int],
        memories: Sequence[torch.Tensor],
        releaser: Releaser | None = None,
    ) -> Read:
        ranges = list(zip(sources, memories, strict=True))
        read = self._post(ticket, [Span(source, -1, len(one)) for source, one in ranges], releaser)
        if read.is_settled:
            for source, one in ranges:
                one.copy_(self.peer.slot(ticket)[source : source + len(one)])
        return read

    def view(self, ticket: SlotTicket) -> torch.Tensor:
        self._check(ticket)
        return self.peer.slot(ticket)

    def verify(self, ticket: SlotTicket) -> None:
        self.reader.before_verify(self.peer, ticket)
        self._check(ticket)

    def notify(
        self, kind: Literal["release", "reject"], ticket: SlotTicket, consumer: bytes, mac: bytes
    ) -> None:
        self.peer.tell(kind, ticket, consumer, mac)

    def _check(self, ticket: SlotTicket) -> None:
        if self.breaks or self.is_broken or self.peer.closed:
            self.is_broken = True
            raise PeerLostError("the fake peer is lost", scope="peer")
        if ticket.generation in self.peer.revoked:
            raise LeaseRevokedError("revoked")
        if ticket.generation not in self.peer.live:
            raise LeaseExpiredError("not this generation")


class FakeReader(Reader):
    """``read_failures`` are met by the next reads; ``connect_seconds`` delays connecting."""

    def __init__(self, nbytes: int) -> None:
        self._pool = torch.zeros(nbytes, dtype=torch.uint8)
        self.connections: dict[tuple[bytes, str], FakeConnection] = {}
        self.connected = 0
        self.posted: list[list[Span]] = []
        self.reads: list[FakeRead] = []
        self.read_failures: list[Exception | None] = []
        self.connect_seconds = 0.0
        self.lands_anywhere = False
        self.unreachable = False
        self.closed = False
        self._woken = threading.Event()
        self.before_verify: Callable[[FakePool, SlotTicket], Any] = lambda pool, ticket: None
        self.on_read: Callable[[FakeRead], Any] = lambda read: None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(("served", "rdma", "mapped"), takes_reads_back=True)

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    def connect(
        self, peer: PeerOffer, access: Access | Literal["auto"], deadline: Deadline
    ) -> Steps[Connection]:
        mode: Access = peer.offers[0].access if access == "auto" else access
        cached = self.connections.get((peer.uid, mode))
        if cached is not None and not cached.is_broken:
            return cached
        if self.connect_seconds:
            answered = Gate()
            threading.Timer(self.connect_seconds, answered.open).start()
            yield Wait(answered, deadline)
            answered.wait(deadline.remaining())
        found = [pool for pool in POOLS if pool.uid == peer.uid and not pool.closed]
        if not found or self.unreachable:
            raise ConnectError("nobody there", scope="peer")
        self.connected += 1
        self.last = connection = FakeConnection(self, found[0], mode)
        self.connections[peer.uid, mode] = connection
        return connection

    def poll(self, timeout: float) -> None:
        self._woken.wait(timeout)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        pass

    def close(self, timeout: float) -> None:
        self.closed = True
