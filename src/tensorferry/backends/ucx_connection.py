# SPDX-License-Identifier: Apache-2.0
"""The ways of a consumer to a producer over UCX, and the reads on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from tensorferry import _transport
from tensorferry.backends.base import (
    Access,
    Connection,
    ConnectionGivenUpError,
    Read,
    Releaser,
    SlotTicket,
    Span,
)
from tensorferry.backends.ucx_native import native_errors
from tensorferry.errors import (
    ClosedError,
    LeaseExpiredError,
    LeaseRevokedError,
    ManifestError,
    PeerLostError,
    UsageError,
)


def _slot(ticket: SlotTicket) -> tuple[int, int, bytes]:
    return ticket.index, ticket.generation, ticket.token


def _given_up(action: str) -> ConnectionGivenUpError:
    message = f"{action}: the connection was closed for the sake of another read, which was given up"
    return ConnectionGivenUpError(message, scope="peer", status=_transport.CLOSED)


class Reports:
    """Calls back when reads have ended, on the thread that polls."""

    def __init__(self) -> None:
        self._queue = _transport.CompletionQueue()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self.wake = self._queue.wake

    def watch(self, read: _transport.Read, callback: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._callbacks[number] = callback
        read.watch(self._queue, number)

    def poll(self, timeout: float) -> None:
        for number in self._queue.take(timeout):
            self._callbacks.pop(number)()


class UcxRead(Read):
    """A batch of reads, or a question to a producer, that the native unit has posted."""

    def __init__(
        self, read: _transport.Read, action: str, reports: Reports, memories: Sequence[object] = ()
    ) -> None:
        self._read = read
        self._action = action
        self._reports = reports
        self._memories = memories  # alive as long as UCX may write to them

    def wait(self, timeout: float) -> None:
        try:
            with native_errors(self._action):
                if self._read.wait(timeout):
                    return
                self._read.abandon(_transport.TIMED_OUT)
                if self._read.wait(0.0):  # it ended between the two calls
                    return
        except ClosedError as error:
            # Nobody closed the consumer, or its caller says so.
            raise _given_up(self._action) from error

    def watch(self, callback: Callable[[], None]) -> None:
        self._reports.watch(self._read, callback)

    def cancel(self) -> None:
        self._read.abandon(_transport.CANCELLED)

    @property
    def settled(self) -> bool:
        return self._read.settled


class EndpointConnection(Connection):
    """``served`` and ``rdma``: bytes come through an endpoint into the landing pool."""

    def __init__(
        self,
        access: Access,
        endpoint: _transport.Endpoint,
        reports: Reports,
        destination: _transport.MemoryRegion | None,
        keys: tuple[_transport.RemoteKey, _transport.RemoteKey] | None = None,
        *,
        transports: Sequence[str] = (),
        lands_anywhere: bool = False,
    ) -> None:
        self._access: Access = access
        self._endpoint = endpoint
        self._reports = reports
        self._destination = destination
        self._keys = keys
        self._transports = tuple(transports)
        self._lands_anywhere = lands_anywhere

    @property
    def access(self) -> Access:
        return self._access

    @property
    def transports(self) -> tuple[str, ...]:
        return self._transports

    @property
    def broken(self) -> bool:
        return self._endpoint.failure != 0

    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Read:
        wanted = [span for span in spans if span.nbytes > 0]
        slot = (*_slot(ticket), ticket.offset, ticket.nbytes)
        if self._destination is None:
            raise UsageError("mapped access reads by view()")
        self._check_whole()
        try:
            if self._keys is None:
                read = self._endpoint.read_served(*slot, wanted, self._destination, releaser)
            else:
                read = self._endpoint.read_remote(*slot, wanted, self._destination, *self._keys, releaser)
        except _transport.TransportError as error:
            raise UsageError(f"reading a slot: {error}") from error
        nbytes = sum(span.nbytes for span in wanted)
        return UcxRead(read, f"{self._access} read of {nbytes} bytes", self._reports)

    @property
    def lands_anywhere(self) -> bool:
        return self._lands_anywhere

    def read_into(
        self,
        ticket: SlotTicket,
        sources: Sequence[int],
        memories: Sequence[torch.Tensor],
        releaser: Releaser | None = None,
    ) -> Read:
        if not self._lands_anywhere:
            raise UsageError(f"this {self._access!r} connection lands in the pool only")
        self._check_whole()
        native = [_transport.Memory.borrow(one.data_ptr(), one.numel(), owner=one) for one in memories]
        spans = [(source, 0, one.numel()) for source, one in zip(sources, memories, strict=True)]
        try:
            read = self._endpoint.read_served_into(
                *_slot(ticket), ticket.offset, ticket.nbytes, spans, native, releaser
            )
        except _transport.TransportError as error:
            raise UsageError(f"reading a slot: {error}") from error
        nbytes = sum(nbytes for *_, nbytes in spans)
        return UcxRead(read, f"served read of {nbytes} bytes", self._reports, native)

    def _check_whole(self) -> None:
        failure = self._endpoint.failure
        if failure == _transport.CLOSED:
            raise _given_up("reading")
        if failure != 0:
            raise PeerLostError("the connection is lost", scope="peer", status=failure)

    def view(self, ticket: SlotTicket) -> torch.Tensor:
        raise UsageError(f"access {self._access!r} gives no views of the producer's memory")

    def verify(self, ticket: SlotTicket) -> None:
        raise UsageError(f"access {self._access!r} verifies within the read")

    def notify(
        self, kind: Literal["release", "reject"], ticket: SlotTicket, consumer: bytes, mac: bytes
    ) -> None:
        send = self._endpoint.release if kind == "release" else self._endpoint.reject
        send(*_slot(ticket), consumer, mac)

    def close(self, timeout: float) -> None:
        self._endpoint.close(timeout)


class MappedConnection(EndpointConnection):
    """``mapped``: bytes are where the producer wrote them; the endpoint carries notifications."""

    def __init__(self, endpoint: _transport.Endpoint, reports: Reports, peer: _transport.PeerPool) -> None:
        super().__init__("mapped", endpoint, reports, None, transports=("memory",))
        self._peer = peer

    @property
    def broken(self) -> bool:
        return self._peer.alive() != 0

    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Read:
        raise UsageError("mapped access reads by view()")

    def view(self, ticket: SlotTicket) -> torch.Tensor:
        self.verify(ticket)
        if ticket.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return torch.utils.dlpack.from_dlpack(self._peer.array(ticket.offset, ticket.nbytes))
        except ValueError as error:
            raise ManifestError(f"the slot at {ticket.offset} with {ticket.nbytes} bytes: {error}") from error

    def verify(self, ticket: SlotTicket) -> None:
        status = self._peer.verify(ticket.index, ticket.generation)
        if status == _transport.PEER_GONE:
            raise PeerLostError("the mapped pool's producer has closed or died", scope="peer", status=status)
        if status == _transport.LEASE_REVOKED:
            raise LeaseRevokedError(
                f"the producer has revoked generation {ticket.generation} of slot {ticket.index}"
            )
        if status != 0:
            raise LeaseExpiredError(
                f"slot {ticket.index} does not hold generation {ticket.generation} any more: "
                "pull sooner, or publish with a longer lease"
            )
