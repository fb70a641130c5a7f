# SPDX-License-Identifier: Apache-2.0
"""The UCX backend: pools that UCX serves, and connections that read them."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import struct
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgpack
import torch

from tensorferry import _transport
from tensorferry.arguments import Deadline
from tensorferry.backends.base import (
    Access,
    AccessOffer,
    Connection,
    ExportedPool,
    Notice,
    NoticeKind,
    PeerOffer,
    Read,
    Reader,
    SlotTicket,
    Span,
)
from tensorferry.backends.ucx_native import (
    PoolMemory,
    create_context,
    host_mark,
    load_library,
    native_errors,
    offers_rdma,
    translate,
)
from tensorferry.errors import (
    ClosedError,
    ConnectError,
    LeaseExpiredError,
    LeaseRevokedError,
    ManifestError,
    PeerLostError,
    PoolExhaustedError,
    RemoteAccessError,
    TransferTimeoutError,
    UsageError,
)
from tensorferry.steps import Gate, Steps

logger = logging.getLogger(__name__)

MAPPED_KEY = struct.Struct("<iiiIQ")  # pid, control descriptor, pool descriptor, slots, pool bytes
_NOTICE_KINDS: dict[int, NoticeKind] = {1: "release", 2: "reject", 3: "drained"}


def _slot(ticket: SlotTicket) -> tuple[int, int, bytes]:
    return ticket.index, ticket.generation, ticket.token


class UcxExportedPool(ExportedPool):
    """A pool that UCX workers serve; see :func:`export_pool`."""

    def __init__(
        self, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
    ) -> None:
        self._uid = secrets.token_bytes(16)
        self._owner = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self._workers: list[_transport.Worker] = []
        self._regions: list[_transport.MemoryRegion] = []
        self._memory = PoolMemory(nbytes, device, shared=True)
        with native_errors("making the slot table"):
            self._table = _transport.SlotTable(
                pool_nbytes=nbytes, slots=slots, uid=self._uid, serves=access in ("auto", "served")
            )
        try:
            offers = self._make_offers(nbytes, slots, device, access, options)
        except BaseException:
            self.close(0.0)
            raise
        self._peer = PeerOffer(self._uid, "ucx", host_mark(), tuple(offers))

    def _make_offers(
        self, nbytes: int, slots: int, device: torch.device, access: str, options: Mapping[str, str]
    ) -> list[AccessOffer]:
        offers = []
        rdma_address = plain_address = b""
        if access == "rdma" or (access == "auto" and offers_rdma(options)):
            if not offers_rdma(options):
                warnings.warn(
                    "access='rdma' without an RDMA device: UCX emulates it, and over tcp whoever reaches "
                    "the port can read any memory of this process; use it in trusted networks only",
                    stacklevel=5,
                )
            rdma_address, key = self._serve(create_context(options, device, rdma=True), nbytes)
            offers.append(AccessOffer("rdma", rdma_address, key))
        if access != "rdma":
            plain_address, _ = self._serve(create_context(options, device, rdma=False), nbytes)
        if access in ("auto", "served"):
            offers.append(AccessOffer("served", plain_address, b""))
        if access in ("auto", "mapped") and device.type == "cpu":
            key = MAPPED_KEY.pack(
                os.getpid(), self._table.control.descriptor, self._memory.memory.descriptor, slots, nbytes
            )
            # Where the pool is served as well, notifications go to that address; it is not sent twice.
            offers.insert(0, AccessOffer("mapped", plain_address if access == "mapped" else b"", key))
        if not offers:
            raise UsageError(f"access={access!r} cannot be offered for a pool on {device}")
        return offers

    def _serve(self, context: _transport.Context, nbytes: int) -> tuple[bytes, bytes]:
        region = self._memory.register(context)
        self._regions.append(region)
        with native_errors("starting a UCX worker"):
            control = _transport.MemoryRegion.create(context, self._table.control, _transport.MemoryType.HOST)
            self._regions.append(control)
            worker = _transport.Worker.create(context)
            self._workers.append(worker)
            worker.serve(self._table, region)
            key = msgpack.packb(
                [
                    self._memory.memory.address,
                    nbytes,
                    region.pack_key(),
                    self._table.control.address,
                    self._table.control.nbytes,
                    control.pack_key(),
                ]
            )
        return worker.address, key

    @property
    def pool(self) -> torch.Tensor:
        return self._memory.tensor

    @property
    def peer(self) -> PeerOffer:
        return self._peer

    def admit(self, offset: int, nbytes: int, *, lease: float) -> SlotTicket:
        try:
            index, generation, token = self._table.admit(offset, nbytes, lease)
        except _transport.TransportError as error:
            if error.status == _transport.NO_MEMORY:
                raise PoolExhaustedError(f"{error}: release publications, or make the pool larger") from error
            raise translate(error, "admitting a slot") from error
        return SlotTicket(index, generation, token, offset, nbytes)

    def withdraw(self, ticket: SlotTicket, *, revoked: bool = False) -> bool:
        return self._table.withdraw(ticket.index, ticket.generation, revoked=revoked)

    def notices(self, timeout: float) -> list[Notice]:
        return [
            Notice(_NOTICE_KINDS[kind], index, generation, consumer, mac)
            for kind, index, generation, consumer, mac in self._table.notifications(timeout)
        ]

    def wake(self) -> None:
        self._table.wake()

    def close(self, timeout: float) -> None:
        if os.getpid() != self._owner:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout
        self._table.close()
        for worker in self._workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        for region in self._regions:
            region.close()
        self._regions.clear()
        self._memory.close()


class _Reports:
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


class _UcxRead(Read):
    def __init__(
        self, read: _transport.Read, action: str, reports: _Reports, memories: Sequence[object] = ()
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
            # Nobody closed the consumer, or its caller says so: another read was given up, and its
            # connection closed to get the memory back, just before this one was posted.
            raise PeerLostError(
                f"{error}: the connection was given up with another read",
                scope="peer",
                status=_transport.CLOSED,
            ) from error

    def watch(self, callback: Callable[[], None]) -> None:
        self._reports.watch(self._read, callback)

    def cancel(self) -> None:
        self._read.abandon(_transport.CANCELLED)

    @property
    def settled(self) -> bool:
        return self._read.settled


class _EndpointConnection(Connection):
    """``served`` and ``rdma``: bytes come through an endpoint into the landing pool."""

    def __init__(
        self,
        access: Access,
        endpoint: _transport.Endpoint,
        reports: _Reports,
        destination: _transport.MemoryRegion | None,
        keys: tuple[_transport.RemoteKey, _transport.RemoteKey] | None = None,
        *,
        lands_anywhere: bool = False,
    ) -> None:
        self._access: Access = access
        self._endpoint = endpoint
        self._reports = reports
        self._destination = destination
        self._keys = keys
        self._lands_anywhere = lands_anywhere

    @property
    def access(self) -> Access:
        return self._access

    @property
    def broken(self) -> bool:
        return self._endpoint.failure != 0

    def read(self, ticket: SlotTicket, spans: Sequence[Span]) -> Read:
        wanted = [span for span in spans if span.nbytes > 0]
        slot = (*_slot(ticket), ticket.offset, ticket.nbytes)
        if self._destination is None or self.broken:
            raise PeerLostError("the connection is lost", scope="peer", status=self._endpoint.failure)
        try:
            if self._keys is None:
                read = self._endpoint.read_served(*slot, wanted, self._destination)
            else:
                read = self._endpoint.read_remote(*slot, wanted, self._destination, *self._keys)
        except _transport.TransportError as error:
            raise UsageError(f"reading a slot: {error}") from error
        nbytes = sum(span.nbytes for span in wanted)
        return _UcxRead(read, f"{self._access} read of {nbytes} bytes", self._reports)

    @property
    def lands_anywhere(self) -> bool:
        return self._lands_anywhere

    def read_into(self, ticket: SlotTicket, sources: Sequence[int], memories: Sequence[torch.Tensor]) -> Read:
        if not self._lands_anywhere:
            raise UsageError(f"this {self._access!r} connection lands in the pool only")
        if self.broken:
            raise PeerLostError("the connection is lost", scope="peer", status=self._endpoint.failure)
        native = [_transport.Memory.borrow(one.data_ptr(), one.numel(), owner=one) for one in memories]
        spans = [(source, 0, one.numel()) for source, one in zip(sources, memories, strict=True)]
        try:
            read = self._endpoint.read_served_into(
                *_slot(ticket), ticket.offset, ticket.nbytes, spans, native
            )
        except _transport.TransportError as error:
            raise UsageError(f"reading a slot: {error}") from error
        nbytes = sum(nbytes for *_, nbytes in spans)
        return _UcxRead(read, f"served read of {nbytes} bytes", self._reports, native)

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


class _MappedConnection(_EndpointConnection):
    """``mapped``: bytes are where the producer wrote them; the endpoint carries notifications."""

    def __init__(self, endpoint: _transport.Endpoint, reports: _Reports, peer: _transport.PeerPool) -> None:
        super().__init__("mapped", endpoint, reports, None)
        self._peer = peer

    @property
    def broken(self) -> bool:
        return self._peer.alive() != 0

    def read(self, ticket: SlotTicket, spans: Sequence[Span]) -> Read:
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


class UcxReader(Reader):
    """Landing memory and cached connections over UCX; see :func:`open_reader`."""

    def __init__(self, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> None:
        self._device = device
        self._access = access
        self._options = dict(options)
        self._rdma = offers_rdma(options)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[tuple[bytes, str], _EndpointConnection] = {}
        self._connecting: dict[tuple[bytes, str], Gate] = {}
        self._hellos: set[_UcxRead] = set()
        self._reports = _Reports()
        self._workers: dict[bool, tuple[_transport.Worker, _transport.MemoryRegion]] = {}
        self._closed = False  # lets no connection in
        self._freed = False
        load_library()
        self._memory = PoolMemory(nbytes, device, shared=False)

    @property
    def pool(self) -> torch.Tensor:
        return self._memory.tensor

    def connect(
        self, peer: PeerOffer, access: Access | Literal["auto"], deadline: Deadline
    ) -> Steps[Connection]:
        if peer.backend != "ucx":
            raise ManifestError(
                f"the manifest is for backend {peer.backend!r}, this consumer runs 'ucx': "
                "use one backend on both sides"
            )
        offers = self._choose(peer, access if access != "auto" else self._access)
        for position, offer in enumerate(offers):
            try:
                return (yield from self._connect(peer, offer, deadline))
            except PeerLostError:
                # A pool that cannot be mapped (another container, say) may still be reached otherwise.
                if position == len(offers) - 1:
                    raise
        raise AssertionError("unreachable: _choose never returns an empty list")

    def _choose(self, peer: PeerOffer, access: str) -> list[AccessOffer]:
        offered = {offer.access: offer for offer in peer.offers}
        if access != "auto":
            if access not in offered:
                raise ConnectError(
                    f"access {access!r} is not offered by this producer, which offers "
                    f"{', '.join(offered) or 'nothing that this version knows'}",
                    scope="peer",
                )
            return [offered[access]]
        ranked: list[Access] = []
        if peer.host == host_mark():
            ranked.append("mapped")
        if self._rdma:
            ranked.append("rdma")
        ranked.append("served")
        # What a producer offers as its only way is meant, even where auto would not take it.
        chosen = [offered[name] for name in ranked if name in offered] or list(offered.values())
        if not chosen:
            raise ConnectError("this producer offers no access that this version knows", scope="peer")
        return chosen

    def _connect(self, peer: PeerOffer, offer: AccessOffer, deadline: Deadline) -> Steps[Connection]:
        """Return the cached connection, wait for the call that makes one, or make it."""
        key = (peer.uid, offer.access)
        while True:
            with self._lock:
                self._check_open()
                connection = self._connections.get(key)
                if connection is not None and not connection.broken:
                    return connection
                gate = self._connecting.get(key)
                if gate is None:
                    mine = self._connecting[key] = Gate()
                    break
            yield gate
            if not gate.wait(deadline.remaining()):
                raise TransferTimeoutError("connecting to the producer took too long", scope="peer")
        try:
            fresh = yield from self._open(peer, offer, deadline)
            with self._lock:
                if not self._closed:
                    self._forget_broken()
                    self._connections[key] = fresh
                    return fresh
            fresh.close(0.0)
            raise ClosedError("the reader is closed")
        finally:
            with self._lock:
                del self._connecting[key]
            mine.open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader is closed")

    def _forget_broken(self) -> None:
        for key in [key for key, connection in self._connections.items() if connection.broken]:
            del self._connections[key]

    def _open(self, peer: PeerOffer, offer: AccessOffer, deadline: Deadline) -> Steps[_EndpointConnection]:
        if offer.access == "mapped":
            return self._open_mapped(peer, offer)
        worker, region = self._worker(rdma=offer.access == "rdma")
        action = f"connecting to producer {peer.uid.hex()[:8]} by {offer.access!r}"
        with native_errors(action):
            endpoint = worker.connect(offer.address)
        try:
            yield from self._greet(_UcxRead(endpoint.hello(peer.uid), action, self._reports), deadline)
            keys = self._unpack(endpoint, offer.key) if offer.access == "rdma" else None
        except (PeerLostError, RemoteAccessError) as error:
            # Whoever answers there, or does not, is not the producer of this manifest.
            raise ConnectError(
                f"{error}: the producer has closed or died, or its address is not reachable from here",
                scope="peer",
                status=error.status,
            ) from error
        # Over tcp bytes are copied to where they go; a device would have to register that memory first.
        anywhere = offer.access == "served" and self._device.type == "cpu" and not self._rdma
        return _EndpointConnection(
            offer.access, endpoint, self._reports, region, keys, lands_anywhere=anywhere
        )

    def _greet(self, hello: _UcxRead, deadline: Deadline) -> Steps[None]:
        """Wait until the producer has said that it is the one."""
        with self._lock:
            self._hellos.add(hello)
            stopped = self._closed
        try:
            if stopped:
                hello.cancel()
            yield hello
            hello.wait(deadline.remaining())
        except BaseException:
            hello.cancel()
            raise
        finally:
            with self._lock:
                self._hellos.discard(hello)

    def _unpack(
        self, endpoint: _transport.Endpoint, key: bytes
    ) -> tuple[_transport.RemoteKey, _transport.RemoteKey]:
        pool_base, pool_nbytes, pool_key, control_base, control_nbytes, control_key = _parse_rdma_key(key)
        with native_errors("unpacking remote keys"):
            return (
                endpoint.unpack(pool_key, pool_base, pool_nbytes),
                endpoint.unpack(control_key, control_base, control_nbytes),
            )

    def _open_mapped(self, peer: PeerOffer, offer: AccessOffer) -> _EndpointConnection:
        try:
            pid, control, pool, slots, nbytes = MAPPED_KEY.unpack(offer.key)
        except struct.error as error:
            raise ManifestError(f"the mapped offer has {len(offer.key)} bytes: {error}") from error
        if pid <= 0 or control < 0 or pool < 0 or not 0 < nbytes < 1 << 62:
            raise ManifestError("the mapped offer names no process, descriptor or size")
        served = (other.address for other in peer.offers if other.access == "served")
        address = offer.address or next(served, b"")
        if not address:
            raise ManifestError("the mapped offer comes without an address for notifications")
        with native_errors(f"mapping the pool of process {pid}"):
            mapped = _transport.PeerPool.open(
                pid=pid,
                control_descriptor=control,
                pool_descriptor=pool,
                uid=peer.uid,
                pool_nbytes=nbytes,
                slots=slots,
            )
            worker, _ = self._worker(rdma=False)
            return _MappedConnection(worker.connect(address), self._reports, mapped)

    def _worker(self, *, rdma: bool) -> tuple[_transport.Worker, _transport.MemoryRegion]:
        with self._lock:
            self._check_open()
            if rdma not in self._workers:
                context = create_context(self._options, self._device, rdma=rdma)
                region = self._memory.register(context)
                with native_errors("starting a UCX worker"):
                    self._workers[rdma] = (_transport.Worker.create(context), region)
            return self._workers[rdma]

    def poll(self, timeout: float) -> None:
        self._reports.poll(timeout)

    def wake(self) -> None:
        self._reports.wake()

    def stop(self) -> None:
        with self._lock:
            self._closed = True
            hellos = list(self._hellos)
        for hello in hellos:
            hello.cancel()

    def close(self, timeout: float) -> None:
        if os.getpid() != self._owner:
            return
        self.stop()
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
            self._connections.clear()
            freed, self._freed = self._freed, True
        if freed:
            return
        deadline = time.monotonic() + timeout
        for worker, region in workers:
            worker.close(max(0.0, deadline - time.monotonic()))
            region.close()
        self._memory.close()


def _parse_rdma_key(key: bytes) -> tuple[int, int, bytes, int, int, bytes]:
    """Check the form of an ``rdma`` offer's key; the ranges are checked before each get."""
    try:
        fields = msgpack.unpackb(key, max_array_len=6, max_bin_len=4096)
    except (ValueError, msgpack.UnpackException) as error:
        raise ManifestError(f"the rdma key cannot be decoded: {error}") from error
    kinds = (int, int, bytes, int, int, bytes)
    if not isinstance(fields, list) or [type(field) for field in fields] != list(kinds):
        raise ManifestError("the rdma key has the wrong form")
    for base, nbytes, packed in (fields[:3], fields[3:]):
        if not packed or base < 0 or nbytes <= 0 or base + nbytes >= 1 << 64:
            raise ManifestError("the rdma key names no memory")
    return (fields[0], fields[1], fields[2], fields[3], fields[4], fields[5])


def export_pool(
    nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
) -> ExportedPool:
    """Allocate a pool, register it with UCX and offer it to peers.

    Args:
        nbytes: Size of the pool in bytes.
        device: Where the pool is, ``cpu`` or a CUDA device.
        access: ``"auto"``, ``"served"``, ``"rdma"`` or ``"mapped"``: what is offered.
        options: UCX settings without the ``UCX_`` prefix; they win over the environment, which
            wins over our defaults.
        slots: Most slots that may be admitted at once.

    Raises:
        UsageError: UCX does not take an option, or this access cannot be offered on the device.
        RegistrationError: Memory could not be had or registered.
        BackendUnavailableError: No UCX library can be used.

    After an error nothing is left behind.
    """
    return UcxExportedPool(nbytes, device=device, access=access, options=options, slots=slots)


def open_reader(nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> Reader:
    """Allocate landing memory; UCX contexts are made when the first peer needs them.

    Args and errors are those of :func:`export_pool`.
    """
    return UcxReader(nbytes, device=device, access=access, options=options)
