# SPDX-License-Identifier: Apache-2.0
"""The ways to the producers: which connection is taken, and what follows if it turns out lost or silent."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Literal, TypeVar

from tensorferry.arguments import Deadline
from tensorferry.backends.base import Access, Connection, ConnectionGivenUpError, Read, Reader
from tensorferry.errors import PeerLostError, TransferError, TransferTimeoutError
from tensorferry.orders import Order
from tensorferry.ownership import Lifetime
from tensorferry.silence import PATIENCE_SECONDS, SilentPeers
from tensorferry.steps import Steps, Wait

_RECONNECT_SECONDS = 5.0

_T = TypeVar("_T")


class Routes:
    """Connects to the producers of orders; any method may be called from any thread.

    Args:
        reader: The backend's.
        access: Which way to read.
        lifetime: The consumer's.
    """

    def __init__(self, reader: Reader, access: Access | Literal["auto"], lifetime: Lifetime) -> None:
        self._reader = reader
        self._access = access
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._reads: set[Read] = set()
        self._silent = SilentPeers()
        self._reconnects = 0

    @property
    def reconnects(self) -> int:
        """Connections that were found broken and made anew within an attempt."""
        return self._reconnects

    def take(
        self, order: Order, deadline: Deadline, attempt: Callable[[Connection], Steps[_T]]
    ) -> Steps[tuple[Connection, _T]]:
        """Make attempts until one ends with a result, or with an error that is about the peer.

        Returns:
            The connection that it was made with, and its result.

        Raises:
            PeerLostError: The peer is lost, or still silent.
            TransferTimeoutError: The time was up.
            TensorferryError: What connecting or the attempt raises.
        """
        uid = order.manifest.peer.uid
        try:
            while True:
                try:
                    connection, result = yield from self._attempt(order, deadline, attempt)
                    break
                except ConnectionGivenUpError as given_up:
                    if deadline.remaining() == 0.0:
                        raise TransferTimeoutError(
                            f"{given_up}; no time was left to connect anew"
                        ) from given_up
        except TransferTimeoutError:
            self._silent.add(uid)
            raise
        self._silent.discard(uid)
        return connection, result

    def _attempt(
        self, order: Order, deadline: Deadline, attempt: Callable[[Connection], Steps[_T]]
    ) -> Steps[tuple[Connection, _T]]:
        """Make an attempt, and one more with a new connection if one from the cache was stale."""
        connection, cached = yield from self._reach(order, deadline)
        try:
            return connection, (yield from attempt(connection))
        except PeerLostError as lost:
            if not cached or deadline.remaining() == 0.0 or isinstance(lost, ConnectionGivenUpError):
                raise
            fresh = yield from self._reconnect(order, connection, deadline)
            if fresh is None:
                raise
            try:
                return fresh, (yield from attempt(fresh))
            except PeerLostError as again:
                raise again from lost

    def _reach(self, order: Order, deadline: Deadline) -> Steps[tuple[Connection, bool]]:
        """Connect, and where the peer was silent last time make sure soon that it answers now."""
        uid = order.manifest.peer.uid
        silent = self._silent.seconds(uid)
        if silent is None or deadline.remaining() <= PATIENCE_SECONDS:
            return (yield from self.connect(order, deadline))
        soon = Deadline(PATIENCE_SECONDS)
        try:
            connection, cached = yield from self.connect(order, soon)
            if connection.access != "mapped":
                yield from self.wait(connection.read(order.manifest.ticket, ()), soon)
        except TransferTimeoutError as error:
            self._silent.add(uid)
            raise PeerLostError(
                f"the producer has been silent for {silent:.0f} seconds, and did not answer within "
                f"{PATIENCE_SECONDS:g} now; it is asked again by the next pull",
                scope="peer",
                status=error.status,
            ) from error
        self._silent.discard(uid)
        return connection, cached

    def connect(self, order: Order, deadline: Deadline) -> Steps[tuple[Connection, bool]]:
        """Return a connection, and whether it was used before.

        Raises:
            TensorferryError: As :meth:`tensorferry.backends.base.Reader.connect` says.
        """
        connection = yield from self._reader.connect(order.manifest.peer, self._access, deadline)
        with self._lock:
            cached = connection in self._known
            self._known.add(connection)
        return connection, cached

    def _reconnect(self, order: Order, stale: Connection, deadline: Deadline) -> Steps[Connection | None]:
        soon = Deadline(min(_RECONNECT_SECONDS, deadline.remaining()))
        try:
            fresh, _ = yield from self.connect(order, soon)
        except TransferError:
            return None  # the peer is lost indeed, and the first error says so
        if fresh is stale:
            return None
        with self._lock:
            self._reconnects += 1
        return fresh

    def wait(self, read: Read, deadline: Deadline) -> Steps[None]:
        """Wait for a read, which :meth:`cancel_reads` ends.

        Raises:
            TensorferryError: As :meth:`tensorferry.backends.base.Read.wait` says.
        """
        with self._lock:
            self._reads.add(read)
        try:
            if self._lifetime.closed:  # close() may have looked before the read was added
                read.cancel()
            yield Wait(read, deadline)
            read.wait(deadline.remaining())
        finally:
            with self._lock:
                self._reads.discard(read)

    def cancel_reads(self) -> None:
        """Give up all reads that are being waited for."""
        with self._lock:
            running = list(self._reads)
        for read in running:
            read.cancel()
