# SPDX-License-Identifier: Apache-2.0
"""The ways of a consumer to a producer over NIXL, and the reads on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tensorferry.backends.base import Access, Connection, Read, Releaser, SlotTicket, Span
from tensorferry.backends.nixl_agent import Agent, Ended
from tensorferry.backends.nixl_memory import ranges
from tensorferry.backends.nixl_slots import HEADER_NBYTES, REVOKED, WORD_NBYTES, pack_notice
from tensorferry.errors import (
    LeaseExpiredError,
    LeaseRevokedError,
    PeerLostError,
    TensorferryError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UsageError,
)

_CELLS_AT_ONCE = 512


class Reports:
    """Calls back when reads have ended, on the thread that polls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._woken = False

    def push(self, callback: Callable[[], None]) -> None:
        with self._changed:
            self._callbacks.append(callback)
            self._changed.notify_all()

    def poll(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._callbacks or self._woken, timeout)
            self._woken = False
            callbacks, self._callbacks = self._callbacks, deque()
        for callback in callbacks:
            callback()

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()


class Cell(NamedTuple):
    """A place of this side where a slot's word, or the head of a table, lands.

    Attributes:
        prepared: What was prepared for words.
        place: Which of them.
        address: Of the cell.
        bytes: Its contents.
    """

    prepared: int
    place: int
    address: int
    bytes: npt.NDArray[np.uint8]

    @property
    def word(self) -> int:
        """The first eight bytes as a number."""
        return int(self.bytes[:WORD_NBYTES].view(np.uint64)[0])


class Cells:
    """Registered memory for cells."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._free: list[Cell] = []

    def take(self) -> Cell:
        """Return a cell.

        Raises:
            ClosedError: The agent is closed.
        """
        with self._lock:
            if not self._free:
                memory = torch.zeros(_CELLS_AT_ONCE * HEADER_NBYTES, dtype=torch.uint8)
                self._agent.register(memory)
                start = memory.data_ptr()
                rows = [[start, WORD_NBYTES, 0, HEADER_NBYTES, _CELLS_AT_ONCE]]
                prepared = self._agent.prepare("DRAM", np.array(rows, dtype=np.uint64))
                cells = memory.numpy().reshape(_CELLS_AT_ONCE, HEADER_NBYTES)
                self._free = [
                    Cell(prepared, index, start + index * HEADER_NBYTES, cells[index])
                    for index in range(_CELLS_AT_ONCE)
                ]
            return self._free.pop()

    def give_back(self, cell: Cell) -> None:
        """Take a cell back whose transfer has ended well; others may still be written to, and are lost."""
        with self._lock:
            self._free.append(cell)


class Peer(NamedTuple):
    """A producer as this side knows it: where its pool and its table are, and how its agent is called."""

    name: str
    memory: str
    address: int
    nbytes: int
    device: int
    table: int
    slots: int


class NixlRead(Read):
    """A batch of reads, and then the look at the slot's word: only after it is the data known to be right."""

    def __init__(self, connection: NixlConnection, action: str, reports: Reports) -> None:
        self._connection = connection
        self._action = action
        self._reports = reports
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failure: Callable[[], TensorferryError] | None = None
        self._callback: Callable[[], None] | None = None
        self._flying = False

    def fly(self, land: Callable[[Ended], None], then: Callable[[], None]) -> None:
        """Post a transfer into the destination with ``land``; do ``then`` once it has ended well."""

        def ended(error: TensorferryError | None) -> None:
            self._flying = False
            if error is not None:
                self._connection.breaks()
                self.finish(partial(_again, error))
            elif not self._ended.is_set():
                then()

        self._flying = True
        try:
            land(ended)
        except TensorferryError:
            self._flying = False
            self._connection.breaks()
            raise

    def finish(
        self, failure: Callable[[], TensorferryError] | None, first: Callable[[], None] | None = None
    ) -> None:
        """End the batch for the caller, unless it has ended; ``first`` is done before anyone learns of it."""
        with self._lock:
            if self._ended.is_set():
                return
            if first is not None:
                first()
            self._failure = failure
            self._ended.set()
            callback = self._callback
        if callback is not None:
            self._reports.push(callback)

    def wait(self, timeout: float) -> None:
        if not self._ended.wait(timeout):
            self.finish(
                lambda: TransferTimeoutError(f"{self._action} took longer than {timeout:.3f} seconds")
            )
        if self._failure is not None:
            raise self._failure()

    def watch(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callback = callback
            if not self._ended.is_set():
                return
        self._reports.push(callback)

    def cancel(self) -> None:
        self.finish(lambda: TransferCancelledError(f"{self._action} was cancelled"))

    @property
    def settled(self) -> bool:
        return self._ended.is_set() and not self._flying


class NixlConnection(Connection):
    """One-sided reads of a producer's pool by NIXL."""

    def __init__(
        self, agent: Agent, peer: Peer, landing: torch.Tensor, cells: Cells, reports: Reports
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._landing = landing
        self._cells = cells
        self._reports = reports
        self._broken = False
        rows = [[peer.table + HEADER_NBYTES, WORD_NBYTES, 0, WORD_NBYTES, peer.slots]]
        self.words = agent.prepare("DRAM", np.array(rows, dtype=np.uint64), peer.name)

    @property
    def access(self) -> Access:
        return "rdma"

    @property
    def transports(self) -> tuple[str, ...]:
        return (f"NIXL/{self._agent.plugin}",)

    @property
    def broken(self) -> bool:
        return self._broken

    def breaks(self) -> None:
        """Take note that a transfer has failed."""
        self._broken = True

    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Read:
        wanted = [span for span in spans if span.nbytes > 0]
        self._check(ticket, wanted)
        if self.broken:
            raise PeerLostError("the connection is lost", scope="peer")
        read = NixlRead(self, f"rdma read of {sum(span.nbytes for span in wanted)} bytes", self._reports)
        if wanted:
            read.fly(
                lambda ended: self._land(ticket, wanted, ended), lambda: self._judge(read, ticket, releaser)
            )
        else:
            self._judge(read, ticket, releaser)
        return read

    def _check(self, ticket: SlotTicket, spans: Sequence[Span]) -> None:
        if ticket.index >= self._peer.slots or ticket.offset + ticket.nbytes > self._peer.nbytes:
            raise UsageError(
                f"the slot at {ticket.offset} with {ticket.nbytes} bytes leaves the producer's pool"
            )
        room = self._landing.numel()
        for span in spans:
            if span.source + span.nbytes > ticket.nbytes or span.destination + span.nbytes > room:
                raise UsageError(f"{span} leaves the slot or the landing memory")

    def _land(self, ticket: SlotTicket, spans: Sequence[Span], ended: Ended) -> None:
        here, device = self._landing.data_ptr(), self._landing.get_device()
        there = self._peer.address + ticket.offset
        local = ranges([(here + span.destination, span.nbytes, max(device, 0)) for span in spans])
        remote = ranges([(there + span.source, span.nbytes, self._peer.device) for span in spans])
        action = f"reading {len(spans)} ranges of {self._peer.name}"
        memory = "DRAM" if device < 0 else "VRAM"
        self._agent.read(self._peer.name, (memory, local), (self._peer.memory, remote), action, ended)

    def _judge(self, read: NixlRead, ticket: SlotTicket, releaser: Releaser | None) -> None:
        """Read the slot's word and end the read by what it says."""
        try:
            cell = self._cells.take()
            self._agent.read_prepared(
                self._peer.name,
                (cell.prepared, cell.place),
                (self.words, ticket.index),
                f"looking at slot {ticket.index} of {self._peer.name}",
                partial(self._judged, read, ticket, releaser, cell),
            )
        except TensorferryError as error:
            self.breaks()
            read.finish(partial(_again, error))

    def _judged(
        self,
        read: NixlRead,
        ticket: SlotTicket,
        releaser: Releaser | None,
        cell: Cell,
        error: TensorferryError | None,
    ) -> None:
        if error is not None:
            self.breaks()
            read.finish(partial(_again, error))
            return
        failure = _judgement(cell.word, ticket)
        self._cells.give_back(cell)
        released = partial(self.notify, "release", ticket, *releaser) if releaser and not failure else None
        read.finish(failure, released)

    @property
    def lands_anywhere(self) -> bool:
        return False

    def read_into(
        self,
        ticket: SlotTicket,
        sources: Sequence[int],
        memories: Sequence[torch.Tensor],
        releaser: Releaser | None = None,
    ) -> Read:
        raise UsageError("over NIXL reads land in the pool only, which is registered")

    def view(self, ticket: SlotTicket) -> torch.Tensor:
        raise UsageError("access 'rdma' gives no views of the producer's memory")

    def verify(self, ticket: SlotTicket) -> None:
        raise UsageError("access 'rdma' verifies within the read")

    def notify(
        self, kind: Literal["release", "reject"], ticket: SlotTicket, consumer: bytes, mac: bytes
    ) -> None:
        self._agent.notify(self._peer.name, pack_notice(kind, ticket, consumer, mac))


def _again(error: TensorferryError) -> TensorferryError:
    """Return the error anew: each who waits gets one of his own."""
    if isinstance(error, TransferError):
        return type(error)(str(error), scope=error.scope, status=error.status)
    return type(error)(str(error))


def _judgement(word: int, ticket: SlotTicket) -> Callable[[], TensorferryError] | None:
    if word == ticket.generation:
        return None
    if word == ticket.generation | REVOKED:
        return lambda: LeaseRevokedError(
            f"the producer has revoked generation {ticket.generation} of slot {ticket.index}"
        )
    return lambda: LeaseExpiredError(
        f"slot {ticket.index} does not hold generation {ticket.generation} any more: "
        "pull sooner, or publish with a longer lease"
    )
