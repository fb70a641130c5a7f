# SPDX-License-Identifier: Apache-2.0
"""How tensors come from a producer: connection, landing, verification, release."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from tensorferry import layout, packing, steps, wire
from tensorferry.arguments import Deadline
from tensorferry.backends.base import Access, Connection, Read, Reader, Releaser
from tensorferry.counting import Counts, PeerCounts
from tensorferry.dispatcher import Dispatcher
from tensorferry.errors import (
    ClosedError,
    IntegrityError,
    TensorferryError,
    TransferError,
)
from tensorferry.landing import Landing
from tensorferry.metrics import PeerStatistics
from tensorferry.orders import Order, Piece
from tensorferry.ownership import Lifetime
from tensorferry.payload import unflatten
from tensorferry.room import SWEEP_SECONDS, Loan
from tensorferry.routes import Routes
from tensorferry.steps import Steps
from tensorferry.streams import completed_copies, finish_queued_work

_CPU = torch.device("cpu")

# From two of these on, bytes that land in the pool are copied to the results part by part, where that takes
# no CPU from the threads that move them.
_PART_NBYTES = 8 << 20
_COPIES_BESIDE = len(os.sched_getaffinity(0)) > 4

_T = TypeVar("_T")


class Arrival(NamedTuple):
    """Verified bytes, and what has to be given back for them."""

    connection: Connection
    order: Order
    pieces: list[Piece]
    loan: Loan | None
    tensors: list[torch.Tensor] | None = None  # the results, where bytes landed in them
    released: bool = False  # together with the read


class Receiver:
    """Brings tensors over the connections of a backend; all of a consumer that must be closed.

    Any method may be called from any thread.

    Args:
        reader: The backend's; closed with this object.
        access: Which way to read.
        lifetime: The consumer's.
        key: For the MACs of releases and rejects.
    """

    def __init__(
        self, reader: Reader, access: Access | Literal["auto"], lifetime: Lifetime, key: bytes | None
    ) -> None:
        self.landing = Landing(reader.pool, lifetime.what)
        # Nothing of ours that refers to this object: it would live until the collector comes.
        self.dispatcher = Dispatcher(lifetime.what, partial(_sleep, reader, self.landing), reader.wake)
        self.device = reader.pool.device
        self._reader = reader
        self._lifetime = lifetime
        self._key = key
        self._consumer = secrets.token_bytes(16)
        self._routes = Routes(reader, access, lifetime)
        self._counts = Counts()
        self._peers = PeerCounts()
        self.counting_failures = self._counts.failing("failed_pulls")
        """Counts each block that raises as a failed pull."""

    def pull(
        self,
        order: Order,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        deadline: Deadline,
        *,
        release: bool,
    ) -> Steps[dict[str, Any]]:
        """Return the wanted part of the payload in fresh memory, all of it complete.

        Raises:
            TensorferryError: As :meth:`tensorferry.Consumer.pull` says.
        """

        def copied(order: Order, pieces: list[Piece]) -> list[torch.Tensor]:
            with torch.no_grad(), completed_copies({device, self.device}, stream):
                return order.copies(pieces, device)

        def attempt(connection: Connection) -> Steps[list[torch.Tensor]]:
            if connection.access == "mapped":
                with self._counts.timed("wire"):
                    in_place, pieces = self._mapped(connection, order)
                    results = copied(in_place, pieces)
                    self._verify(connection, in_place, pieces)
                if release:
                    self._release(connection, order)
                return results
            direct = device.type == "cpu" and connection.lands_anywhere and order.suits_results
            beside = _COPIES_BESIDE or device.type == "cuda"
            if beside and not direct and not order.selections and order.nbytes >= 2 * _PART_NBYTES:
                return (yield from self._land_in_parts(connection, order, device, stream, deadline, release))
            arrival = yield from self._land(connection, order, deadline, direct=direct, release=release)
            try:
                if release and not arrival.released:
                    self._release(connection, order)
                if arrival.tensors is not None:
                    return arrival.tensors
                with self._counts.timed("landing"), torch.no_grad():
                    return copied(order, arrival.pieces)
            finally:
                self._give_back(arrival)

        with self._lifetime.use(), self.counting_failures, _Explained(self._lifetime, order):
            tensors = yield from self._counted(order, self._routes.take(order, deadline, attempt))
            return unflatten(order.structure, tensors)

    @contextmanager
    def lend(
        self, order: Order, device: torch.device | None, deadline: Deadline, *, release: bool
    ) -> Iterator[dict[str, Any]]:
        """Lend the wanted part of the payload as views for the time of the block.

        Raises:
            TensorferryError: As :meth:`tensorferry.Consumer.borrow` says.
        """

        def attempt(connection: Connection) -> Steps[Arrival]:
            if connection.access != "mapped" or device not in (None, torch.device("cpu")):
                return (yield from self._land(connection, order, deadline))
            in_place, pieces = self._mapped(connection, order)
            self._verify(connection, in_place, pieces)
            return Arrival(connection, in_place, pieces, None)

        with self._lifetime.use(), self.counting_failures, _Explained(self._lifetime, order):
            arrival = steps.run(self._counted(order, self._routes.take(order, deadline, attempt)))
        place = torch.device("cpu") if arrival.loan is None else self.device
        try:
            with torch.no_grad():
                views = arrival.order.views(arrival.pieces, place)
            yield unflatten(order.structure, views)
            with self._lifetime.use(), _Explained(self._lifetime, order):
                if arrival.connection.access == "mapped" and arrival.loan is None:
                    arrival.connection.verify(order.manifest.ticket)
                if release:
                    self._release(arrival.connection, order)
        finally:
            finish_queued_work(self.device)  # of the block, which may still read the views
            self._give_back(arrival)

    def notify(self, kind: Literal["release", "reject"], order: Order, deadline: Deadline) -> None:
        """Give a slot back; a producer that cannot be reached has nothing to give back to."""
        try:
            connection, _ = steps.run(self._routes.connect(order, deadline))
        except TransferError:
            return
        self._tell(connection, kind, order)

    def figures(self) -> tuple[Counter[str], dict[str, float]]:
        """Return copies of the counters, and of the seconds."""
        counts, seconds = self._counts.figures()
        counts["reconnects"] = self._routes.reconnects
        return counts, seconds

    def peers(self) -> tuple[PeerStatistics, ...]:
        """Return what came from whom."""
        return self._peers.figures()

    def close(self, timeout: float) -> None:
        """Cancel running reads, wake everyone who waits, and close the reader."""
        self._lifetime.close()
        if self.dispatcher.is_this_thread:
            # The collector took the consumer while this thread may have been inside a lock.
            self.dispatcher.close(last_deed=lambda: self._close(timeout))
        else:
            self._close(timeout)

    def _close(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        self.landing.close()
        self.dispatcher.close()
        self._reader.stop()
        self._routes.cancel_reads()
        self._lifetime.wait_until_unused(deadline.remaining())
        if not self.dispatcher.is_this_thread:
            self.dispatcher.join(deadline.remaining())
        self._reader.close(deadline.remaining())
        self.landing.drop()

    def _counted(self, order: Order, attempt: Steps[tuple[Connection, _T]]) -> Steps[_T]:
        connection, result = yield from attempt
        self._counts.add(pulls=1, bytes_pulled=order.nbytes, **{connection.access: 1})
        self._peers.add(order.manifest.peer.uid, connection.access, connection.transports, order.nbytes)
        return result

    def _mapped(self, connection: Connection, order: Order) -> tuple[Order, list[Piece]]:
        """Return what is wanted where the producer has it."""
        slot = connection.view(order.manifest.ticket)
        placed = order.in_place()
        return placed, [
            Piece(region, slot[region.start : region.start + region.nbytes]) for region in placed.regions
        ]

    def _land(
        self,
        connection: Connection,
        order: Order,
        deadline: Deadline,
        *,
        direct: bool = False,
        release: bool = False,
    ) -> Steps[Arrival]:
        """Bring the wanted bytes into landing memory, or ``direct`` into that of the results.

        Both take room in the pool, which bounds what is under way; there is no loan where there
        are no bytes.  To ``release`` is a wish, which a backend grants where nothing is left to be checked.
        """
        offsets, nbytes = layout.landing_offsets(order.regions)
        if not nbytes:
            if connection.access == "mapped":
                self._verify(connection, order, [])
            else:
                yield from self._routes.wait(connection.read(order.manifest.ticket, ()), deadline)
            return Arrival(connection, order, [], None, order.views([], _CPU) if direct else None)
        releaser = self._releaser(order) if release and order.manifest.checksum is None else None
        loan = yield from self.landing.take(nbytes, str(order), deadline)
        read: Read | None = None
        tensors: list[torch.Tensor] | None = None
        try:
            pieces = order.destinations(order.regions, _CPU) if direct else self._landing_pieces(order, loan)
            with self._counts.timed("wire"):
                if connection.access == "mapped":
                    self._copy_into(connection, order, pieces)
                else:
                    ticket = order.manifest.ticket
                    if direct:
                        sources, memories = zip(*order.targets(pieces), strict=True)
                        read = connection.read_into(ticket, sources, memories, releaser)
                        with torch.no_grad():
                            tensors = order.views(pieces, _CPU)  # while the bytes are on their way
                    else:
                        spans = order.spans([loan.offset + at for at in offsets])
                        read = connection.read(ticket, spans, releaser)
                    yield from self._routes.wait(read, deadline)
                self._verify(connection, order, pieces)
        except BaseException:
            if read is None:
                self.landing.give_back(loan)
            else:
                self.landing.give_up(loan, [read])
                self._reader.wake()  # requests that wait for room look for it from now on
            raise
        return Arrival(connection, order, pieces, loan, tensors, releaser is not None and read is not None)

    def _landing_pieces(self, order: Order, loan: Loan) -> list[Piece]:
        memory, (offsets, _) = self.landing.memory(loan), layout.landing_offsets(order.regions)
        return [
            Piece(region, memory[offset : offset + region.nbytes])
            for region, offset in zip(order.regions, offsets, strict=True)
        ]

    def _land_in_parts(
        self,
        connection: Connection,
        order: Order,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        deadline: Deadline,
        release: bool,
    ) -> Steps[list[torch.Tensor]]:
        """Bring whole tensors through landing memory; each part is copied out while later ones arrive."""
        _, nbytes = layout.landing_offsets(order.regions)
        loan = yield from self.landing.take(nbytes, str(order), deadline)
        reads: list[Read] = []
        devices = {device, self.device}
        try:
            landed = self._landing_pieces(order, loan)
            with completed_copies(devices, stream):  # the stream's memory, that is
                results = order.destinations(order.regions, device)
            parts = order.parts(results, self.landing.pool, loan.offset, _PART_NBYTES)
            for part in parts:
                reads.append(connection.read(order.manifest.ticket, part.spans))
            for read, part in zip(reads, parts, strict=True):
                with self._counts.timed("wire"):
                    yield from self._routes.wait(read, deadline)
                if read is reads[-1]:
                    self._verify(connection, order, landed)
                    if release:
                        self._release(connection, order)
                with self._counts.timed("landing"), torch.no_grad(), completed_copies(devices, stream):
                    for target, source in part.copies:
                        packing.copy_out(target, source)
        except BaseException:
            self.landing.give_up(loan, reads)
            self._reader.wake()  # requests that wait for room look for it from now on
            raise
        self.landing.give_back(loan)
        with torch.no_grad():
            return order.views(results, device)

    def _copy_into(self, connection: Connection, order: Order, pieces: list[Piece]) -> None:
        with torch.no_grad(), completed_copies({self.device}, None):
            slot = connection.view(order.manifest.ticket)
            for source, target in order.targets(pieces):
                target.copy_(slot[source : source + target.numel()])

    def _verify(self, connection: Connection, order: Order, pieces: list[Piece]) -> None:
        """Make sure that the bytes are those of this publication, before anyone sees them."""
        mismatch: IntegrityError | None = None
        try:
            order.check(pieces)
        except IntegrityError as error:
            mismatch = error
        # First the producer's word: bytes of another publication are no corruption.
        if connection.access == "mapped":  # else Read.wait() has checked already
            connection.verify(order.manifest.ticket)
        if mismatch is not None:
            self._counts.add(integrity_failures=1)
            raise mismatch

    def _release(self, connection: Connection, order: Order) -> None:
        self._tell(connection, "release", order)

    def _tell(self, connection: Connection, kind: Literal["release", "reject"], order: Order) -> None:
        connection.notify(kind, order.manifest.ticket, self._consumer, self._mac(kind, order))

    def _releaser(self, order: Order) -> Releaser:
        return Releaser(self._consumer, self._mac("release", order))

    def _mac(self, kind: Literal["release", "reject"], order: Order) -> bytes:
        ticket = order.manifest.ticket
        return wire.notice_mac(
            self._key,
            kind,
            producer=order.manifest.peer.uid,
            index=ticket.index,
            generation=ticket.generation,
            token=ticket.token,
            consumer=self._consumer,
        )

    def _give_back(self, arrival: Arrival) -> None:
        if arrival.loan is not None:
            self.landing.give_back(arrival.loan)


class _Explained(AbstractContextManager[None]):
    """Says in errors of the backend which request they are about."""

    def __init__(self, lifetime: Lifetime, order: Order) -> None:
        self._lifetime = lifetime
        self._order = order

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, TensorferryError) or isinstance(error, ClosedError):
            return
        if self._lifetime.closed:
            raise ClosedError(f"{self._lifetime.what} was closed during {self._order}") from error
        text = str(error)
        if repr(self._order.manifest.request_id) not in text:
            error.args = (f"{self._order}: {text}", *error.args[1:])


def _sleep(reader: Reader, landing: Landing, timeout: float) -> None:
    """Wait for reads, for the dispatcher."""
    reader.poll(min(timeout, SWEEP_SECONDS) if landing.is_short else timeout)
    landing.sweep()
