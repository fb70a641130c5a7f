# SPDX-License-Identifier: Apache-2.0
"""The UCX backend: the consumer's side, and the doors to both."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Literal

import torch

from tensorferry import _transport
from tensorferry.arguments import Deadline
from tensorferry.backends.base import (
    Access,
    AccessOffer,
    Capabilities,
    Connection,
    ExportedPool,
    PeerOffer,
    Reader,
)
from tensorferry.backends.ucx_connection import EndpointConnection, MappedConnection, Reports, UcxRead
from tensorferry.backends.ucx_native import (
    PoolMemory,
    create_context,
    host_mark,
    load_library,
    native_errors,
    offers_rdma,
    start_worker,
)
from tensorferry.backends.ucx_offers import MappedKey, RdmaKey
from tensorferry.backends.ucx_pool import UcxExportedPool
from tensorferry.errors import (
    ClosedError,
    ConnectError,
    ManifestError,
    PeerLostError,
    RemoteAccessError,
    TransferTimeoutError,
)
from tensorferry.steps import Gate, Steps, Wait

logger = logging.getLogger(__name__)


class UcxReader(Reader):
    """Landing memory and cached connections over UCX; see :func:`open_reader`."""

    def __init__(self, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> None:
        self._device = device
        self._access = access
        self._options = dict(options)
        self._rdma = offers_rdma(options)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[tuple[bytes, str], EndpointConnection] = {}
        self._connecting: dict[tuple[bytes, str], Gate] = {}
        self._hellos: set[UcxRead] = set()
        self._reports = Reports()
        self._workers: dict[bool, tuple[_transport.Worker, _transport.MemoryRegion]] = {}
        self._closed = False  # lets no connection in
        self._freed = False
        load_library()
        self._memory = PoolMemory(nbytes, device, shared=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(("mapped", "rdma", "served"), takes_reads_back=True)

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
        wanted = access if access != "auto" else self._access
        offers = self._choose(peer, wanted)
        failed = ""
        for position, offer in enumerate(offers):
            try:
                return (yield from self._connect(peer, offer, deadline, wanted == "auto", failed))
            except PeerLostError as error:
                # A pool that cannot be mapped (another container, say) may still be reached otherwise.
                if position == len(offers) - 1:
                    raise
                failed = str(error)
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

    def _connect(
        self, peer: PeerOffer, offer: AccessOffer, deadline: Deadline, chosen: bool, failed: str
    ) -> Steps[Connection]:
        """Return the cached connection, wait for the call that makes one, or make it, and say how it goes.

        Args:
            peer: The producer.
            offer: What to take.
            deadline: For all of it.
            chosen: Whether nobody asked for this access, so that a slower one than might be is a surprise.
            failed: How a better one failed, if it did.
        """
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
            yield Wait(gate, deadline)
            if not gate.wait(deadline.remaining()):
                raise TransferTimeoutError("connecting to the producer took too long", scope="peer")
        try:
            fresh = yield from self._open(peer, offer, deadline)
            self._report(peer, fresh, chosen, failed)
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

    def _report(self, peer: PeerOffer, fresh: Connection, chosen: bool, failed: str) -> None:
        """Log what carries the bytes, as a warning where something faster was to be expected."""
        reason = failed
        offered = any(offer.access == "rdma" for offer in peer.offers)
        if chosen and fresh.access == "served" and self._rdma and not offered:
            reason = "not over RDMA, since the producer does not offer that"
        elif chosen and fresh.access == "served" and offered and not self._rdma:
            reason = "not over RDMA, since this process has no such device, or its TLS leaves them out"
        elif chosen and fresh.access == "rdma" and all(used.startswith("tcp/") for used in fresh.transports):
            reason = "not over RDMA, since UCX reaches the peer by no other transport"
        how = f"producer {peer.uid.hex()[:8]} is read by {fresh.access!r} over {', '.join(fresh.transports)}"
        if reason:
            cure = "compare `tensorferry doctor` on both hosts, or ask for this access if it is meant"
            logger.warning("%s: %s; %s", how, reason, cure)
        else:
            logger.info("%s", how)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader is closed")

    def _forget_broken(self) -> None:
        for key in [key for key, connection in self._connections.items() if connection.broken]:
            del self._connections[key]

    def _open(self, peer: PeerOffer, offer: AccessOffer, deadline: Deadline) -> Steps[EndpointConnection]:
        if offer.access == "mapped":
            return self._open_mapped(peer, offer)
        worker, region = self._worker(rdma=offer.access == "rdma")
        action = f"connecting to producer {peer.uid.hex()[:8]} by {offer.access!r}"
        with native_errors(action):
            endpoint = worker.connect(offer.address)
        try:
            yield from self._greet(UcxRead(endpoint.hello(peer.uid), action, self._reports), deadline)
            keys = self._unpack(endpoint, offer.key) if offer.access == "rdma" else None
            with native_errors(action):
                transports = endpoint.transports()
        except (PeerLostError, RemoteAccessError) as error:
            # Whoever answers there, or does not, is not the producer of this manifest.
            raise ConnectError(
                f"{error}: the producer has closed or died, or its address is not reachable from here",
                scope="peer",
                status=error.status,
            ) from error
        # Over tcp bytes are copied to where they go; a device would have to register that memory first.
        anywhere = offer.access == "served" and self._device.type == "cpu" and not self._rdma
        return EndpointConnection(
            offer.access,
            endpoint,
            self._reports,
            region,
            keys,
            transports=transports,
            lands_anywhere=anywhere,
        )

    def _greet(self, hello: UcxRead, deadline: Deadline) -> Steps[None]:
        """Wait until the producer has said that it is the one."""
        with self._lock:
            self._hellos.add(hello)
            stopped = self._closed
        try:
            if stopped:
                hello.cancel()
            yield Wait(hello, deadline)
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
        parsed = RdmaKey.parse(key)
        with native_errors("unpacking remote keys"):
            return (
                endpoint.unpack(parsed.pool.key, parsed.pool.address, parsed.pool.nbytes),
                endpoint.unpack(parsed.control.key, parsed.control.address, parsed.control.nbytes),
            )

    def _open_mapped(self, peer: PeerOffer, offer: AccessOffer) -> EndpointConnection:
        key = MappedKey.parse(offer.key)
        served = (other.address for other in peer.offers if other.access == "served")
        address = offer.address or next(served, b"")
        if not address:
            raise ManifestError("the mapped offer comes without an address for notifications")
        with native_errors(f"mapping the pool of process {key.pid}"):
            mapped = _transport.PeerPool.open(
                pid=key.pid,
                control_descriptor=key.control,
                pool_descriptor=key.pool,
                uid=peer.uid,
                pool_nbytes=key.nbytes,
                slots=key.slots,
            )
            worker, _ = self._worker(rdma=False)
            return MappedConnection(worker.connect(address), self._reports, mapped)

    def _worker(self, *, rdma: bool) -> tuple[_transport.Worker, _transport.MemoryRegion]:
        with self._lock:
            self._check_open()
            if rdma not in self._workers:
                context = create_context(self._options, self._device, rdma=rdma)
                region = self._memory.register(context)
                self._workers[rdma] = (start_worker(context), region)
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
