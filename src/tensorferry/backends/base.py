# SPDX-License-Identifier: Apache-2.0
"""What a backend is: a registered pool that peers read, and connections that read it.

A backend has two faces.  The producer's is an :class:`ExportedPool`: memory that peers may
read slot by slot while the slot is admitted.  The consumer's is a :class:`Reader`: landing
memory and :class:`Connection` objects, one per producer and access mode.

Threads: every method may be called from any thread, except that one thread at a time may be in
:meth:`ExportedPool.notices` and one in :meth:`Reader.poll`.  Blocking methods release the GIL.  A
method that returns :data:`tensorferry.steps.Steps` is a generator, which says what it is about
to wait for.  A backend's own threads call nothing of the user's: callbacks run inside ``poll``.

Ownership: whoever makes a pool or a reader closes it, and does not just drop it.  Pool tensors are
views of memory that the backend object owns; they must not be used after ``close``.  A reader owns
its connections and keeps them while they are whole; a connection or a :class:`Read` that is
still referred to afterwards is dead but safe to call.

Order of death: a pool withdraws everything, lets reads that are running end in the time it is given,
drops its connections, and frees memory last.  A reader makes no new connection, ends its reads, drops
connections, and frees memory last, once nothing can write to it any more.  Neither waits longer than it
is told, whatever a peer does.

After ``fork()`` the child may call ``close`` only, which does nothing there; the layer above sees to it.

Errors: every method raises only classes of :mod:`tensorferry.errors`; native errors are mapped
once, inside the backend.  An error that is about a peer has the scope ``"peer"``.

What of this can be tested, :mod:`tensorferry.testing` tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tensorferry.arguments import Deadline
from tensorferry.errors import PeerLostError
from tensorferry.steps import Steps

if TYPE_CHECKING:
    import torch

Access = Literal["served", "rdma", "mapped"]
NoticeKind = Literal["release", "reject", "drained"]


class Span(NamedTuple):
    """One contiguous range to read: ``nbytes`` from ``source`` to ``destination``.

    ``source`` is a byte offset inside the published slot, ``destination`` a byte offset
    inside the reader's landing pool.
    """

    source: int
    destination: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AccessOffer:
    """One way to read a producer's pool; the bytes mean something to the backend only.

    Attributes:
        access: How the pool is read.
        address: Where the peer is (for UCX a worker address), opaque.
        key: What opens the pool (for UCX packed remote keys), opaque.
    """

    access: Access
    address: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """The part of a manifest that stays the same for the life of a producer.

    Attributes:
        uid: 16 random bytes that name this producer for its life.
        backend: Name of the backend, for example ``"ucx"``.
        host: Opaque mark of the host and user, equal where ``mapped`` may work.
        offers: The ways to read the pool, the best one first.
    """

    uid: bytes
    backend: str
    host: bytes
    offers: tuple[AccessOffer, ...]


@dataclass(frozen=True, slots=True)
class SlotTicket:
    """What names one admitted slot to a peer.

    Attributes:
        index: Entry in the producer's slot table.
        generation: Number that no other publication of this producer ever has, in 1..2^63 - 1.
        token: 16 random bytes that the peer must show.
        offset: First byte of the slot in the producer's pool.
        nbytes: Bytes of the slot that may be read.
    """

    index: int
    generation: int
    token: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Notice:
    """What the producer's backend reports about a slot.

    ``release`` and ``reject`` come from a consumer that proved the slot's token; ``drained``
    says that a withdrawn slot, which still had readers, has none left now.  ``mac`` is what
    the consumer gave to :meth:`Connection.notify`; the backend does not look at it.
    """

    kind: NoticeKind
    index: int
    generation: int
    consumer: bytes
    mac: bytes


class ExportedPool(ABC):
    """The producer's pool: registered memory whose admitted slots peers may read."""

    @property
    @abstractmethod
    def pool(self) -> torch.Tensor:
        """One-dimensional uint8 tensor over the whole pool."""

    @property
    @abstractmethod
    def peer(self) -> PeerOffer:
        """What goes into every manifest of this producer."""

    @abstractmethod
    def admit(self, offset: int, nbytes: int, *, lease: float) -> SlotTicket:
        """Let peers read ``nbytes`` at ``offset`` for at most ``lease`` seconds from now.

        The caller withdraws the slot when the lease ends, on which one-sided access relies; a producer
        that is asked for each read (``served``) refuses by its own clock as well.

        Raises:
            PoolExhaustedError: The slot table is full; nothing was admitted.
            ClosedError: The pool is closed.
        """

    @abstractmethod
    def withdraw(self, ticket: SlotTicket, *, revoked: bool = False) -> bool:
        """Stop admitting reads of the slot, in every access mode, before returning.

        Args:
            ticket: Of the slot.
            revoked: Whether late readers get :class:`LeaseRevokedError`, for as long as the
                slot's entry is not used again, instead of :class:`LeaseExpiredError`.

        Returns:
            True if no read is running: the memory may be reused at once.  False if reads
            are still running: a ``drained`` notice follows when the last has ended, and the
            memory must not be reused before it.  Also True for a ticket withdrawn before.
        """

    @abstractmethod
    def notices(self, timeout: float) -> list[Notice]:
        """Wait up to ``timeout`` seconds for notices and return all there are.

        Returns an empty list on timeout, after :meth:`wake`, and once the pool is closed.
        Only one thread may wait at a time.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a running :meth:`notices` return now."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Stop serving, let running reads end for ``timeout`` seconds, free the pool.

        Idempotent.  After it no peer can read the pool, and mapped peers find it closed; ``admit``
        raises :class:`ClosedError`, and all other methods return at once.
        """


class Releaser(NamedTuple):
    """Who gives a slot back.

    Attributes:
        consumer: 16 bytes that name the consumer.
        mac: 32 bytes of :func:`tensorferry.wire.notice_mac` for a release.
    """

    consumer: bytes
    mac: bytes


class ConnectionGivenUpError(PeerLostError):
    """This side closed the connection, to get the memory of another read back; connect again.

    Nothing is known of the peer, and nothing was read.
    """


class Read(ABC):
    """A batch of reads that was posted as one.

    Whoever gives it up keeps its destination untouched until it is settled; to drop the object
    changes nothing about that.
    """

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Wait until every byte has arrived and is known to be the ticket's; the GIL is released.

        Raises:
            TransferTimeoutError: Not all bytes came within ``timeout`` seconds; the batch
                was cancelled.
            TransferCancelledError: :meth:`cancel` was called.
            PeerLostError: The peer is gone.
            ConnectionGivenUpError: The connection was closed with another read that was given up.
            LeaseExpiredError: The slot does not hold the ticket's generation any more.
            LeaseRevokedError: So it is, because the producer revoked it.
            RemoteAccessError: The producer or the device refused the read.

        After an error the destination must not be reused until :attr:`settled` is True.
        """

    @abstractmethod
    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by :meth:`Reader.poll` once :meth:`wait` would not wait any more.

        It is called once, also if the read has ended before, and for a read that fails or is cancelled.
        A second callback takes the place of the first.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Give the batch up; harmless once it has ended."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """True once nothing will write to the destination any more; soon after a read that ended well."""


class Connection(ABC):
    """A way to one producer by one access mode."""

    @property
    @abstractmethod
    def access(self) -> Access:
        """How this connection reads."""

    @property
    @abstractmethod
    def transports(self) -> tuple[str, ...]:
        """What carries the bytes, each as ``transport/device``, for example ``tcp/eth0``, for people to read.

        ``mapped`` gives ``("memory",)``.
        """

    @property
    @abstractmethod
    def broken(self) -> bool:
        """True once the peer is known to be lost; connect again."""

    @abstractmethod
    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Read:
        """Post reads from the slot into the landing pool, all of them as one batch.

        ``served`` and ``rdma`` only.  Spans are checked against both pools before anything
        is posted; spans of zero bytes are skipped.  Without any span only the slot is checked.

        With a ``releaser`` the slot is given back as soon as the read has ended well, that is, if
        :meth:`Read.wait` raises nothing.

        Raises:
            UsageError: A span leaves the slot or the landing pool.
            PeerLostError: The connection is broken.
        """

    @property
    @abstractmethod
    def lands_anywhere(self) -> bool:
        """Whether :meth:`read_into` works, at no more cost than landing in the pool."""

    @abstractmethod
    def read_into(
        self,
        ticket: SlotTicket,
        sources: Sequence[int],
        memories: Sequence[torch.Tensor],
        releaser: Releaser | None = None,
    ) -> Read:
        """Post reads from the slot straight into the caller's memory, all of them as one batch.

        Args:
            ticket: Of the slot.
            sources: First byte of each range, inside the slot.
            memories: Flat uint8 tensors on the CPU, one for each range and as long as it.  The
                :class:`Read` keeps them alive; whoever gives it up keeps the read until it is settled.
            releaser: As for :meth:`read`.

        Raises:
            UsageError: A range leaves the slot, or this connection lands in the pool only.
            PeerLostError: The connection is broken.
        """

    @abstractmethod
    def view(self, ticket: SlotTicket) -> torch.Tensor:
        """Return a uint8 view of the slot in the producer's own memory (``mapped`` only).

        The caller must call :meth:`verify` after it has copied or used the bytes.

        Raises:
            LeaseExpiredError: The slot does not hold this generation now.
            LeaseRevokedError: The producer has revoked it.
            PeerLostError: The producer has closed or died.
        """

    @abstractmethod
    def verify(self, ticket: SlotTicket) -> None:
        """Check that the slot still holds the ticket's generation, and so what was read up to now.

        ``mapped`` only: must be called after bytes were taken from :meth:`view` and before they
        are handed to anyone.  :meth:`Read.wait` has checked already.

        Raises:
            LeaseExpiredError: It may not; discard the data.
            LeaseRevokedError: The producer has revoked it; discard the data.
            PeerLostError: The producer has closed or died; discard the data.
        """

    @abstractmethod
    def notify(
        self, kind: Literal["release", "reject"], ticket: SlotTicket, consumer: bytes, mac: bytes
    ) -> None:
        """Send a release or reject to the producer; returns as soon as it is queued.

        Args:
            kind: Which of the two.
            ticket: Of the slot.
            consumer: 16 bytes that name the consumer.
            mac: 32 bytes of :func:`tensorferry.wire.notice_mac`.

        A notification that cannot be delivered is dropped: the lease covers it.
        """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, beyond what each must.

    Attributes:
        accesses: How it can read pools.
        takes_reads_back: Whether a read that was given up settles although its peer is silent.  Where it
            does not, its landing memory stays in quarantine until the peer goes on or the reader closes.
    """

    accesses: tuple[Access, ...]
    takes_reads_back: bool


class Reader(ABC):
    """The consumer's side: landing memory and cached connections."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do."""

    @property
    @abstractmethod
    def pool(self) -> torch.Tensor:
        """One-dimensional uint8 tensor over the landing pool."""

    @abstractmethod
    def connect(
        self, peer: PeerOffer, access: Access | Literal["auto"], deadline: Deadline
    ) -> Steps[Connection]:
        """Return a live connection to the producer, cached by ``peer.uid`` and access.

        ``"auto"`` takes ``mapped`` on one host where mapping works, ``rdma`` where both
        sides have RDMA devices, else ``served``.

        Raises:
            ManifestError: The offer is malformed or of another backend.
            ConnectError: The mode is not offered, or connecting failed.
            PeerLostError: The producer has closed or died (``mapped``).
            TransferTimeoutError: It did not answer in time.
            ClosedError: The reader is closed.
        """

    @abstractmethod
    def poll(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for reads that are watched, and call their callbacks.

        Returns once any were called, on timeout, and after :meth:`wake`.  One thread at a time.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a :meth:`poll` that is running, or else the next one, return at once."""

    @abstractmethod
    def stop(self) -> None:
        """Let no new connection be made, and end those that are being made; the rest goes on."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Cancel running reads, close connections, free the landing pool.  Idempotent.

        Whoever waits for a read gets an error; all reads are settled when it returns.  After it
        ``connect`` raises :class:`ClosedError`, and reading on a connection :class:`PeerLostError`.
        """
