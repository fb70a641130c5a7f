# SPDX-License-Identifier: Apache-2.0
"""The NIXL backend: both sides, and the doors to them.

NIXL reads one-sidedly, as our ``rdma`` access does, and knows neither deadlines nor how to take a
read back.  So a read that is given up keeps its landing memory until NIXL says that it has ended.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from typing import Literal

import msgpack
import torch

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
from tensorferry.backends.nixl_agent import Agent
from tensorferry.backends.nixl_connection import Cells, NixlConnection, NixlRead, Peer, Reports
from tensorferry.backends.nixl_memory import allocate, ranges
from tensorferry.backends.nixl_options import Options
from tensorferry.backends.nixl_pool import NixlExportedPool, agent_name, check_access
from tensorferry.backends.nixl_slots import HEADER_NBYTES
from tensorferry.errors import (
    ClosedError,
    ConnectError,
    ManifestError,
    PeerLostError,
    TransferTimeoutError,
)
from tensorferry.steps import Gate, Steps, Wait


class NixlReader(Reader):
    """Landing memory and cached connections over NIXL; see :func:`open_reader`."""

    def __init__(self, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> None:
        check_access(access)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[bytes, NixlConnection] = {}
        self._connecting: dict[bytes, Gate] = {}
        self._hellos: set[NixlRead] = set()
        self._reports = Reports()
        self._closed = False
        self._pool = allocate(nbytes, device)
        self._agent = Agent(agent_name(secrets.token_bytes(16)), Options.of(options))
        try:
            self._agent.register(self._pool)
        except BaseException:
            self._agent.close(0.0)
            raise
        self._cells = Cells(self._agent)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(("rdma",), takes_reads_back=False)

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    def connect(
        self, peer: PeerOffer, access: Access | Literal["auto"], deadline: Deadline
    ) -> Steps[Connection]:
        if peer.backend != "nixl":
            raise ManifestError(
                f"the manifest is for backend {peer.backend!r}, this consumer runs 'nixl': "
                "use one backend on both sides"
            )
        offer = next((offer for offer in peer.offers if offer.access == "rdma"), None)
        if offer is None or access not in ("auto", "rdma"):
            offered = ", ".join(offer.access for offer in peer.offers)
            raise ConnectError(
                f"access {access!r} is not offered by this producer, which offers {offered or 'nothing'}",
                scope="peer",
            )
        while True:
            with self._lock:
                self._check_open()
                connection = self._connections.get(peer.uid)
                if connection is not None and not connection.broken:
                    return connection
                gate = self._connecting.get(peer.uid)
                if gate is None:
                    mine = self._connecting[peer.uid] = Gate()
                    break
            yield Wait(gate, deadline)
            if not gate.wait(deadline.remaining()):
                raise TransferTimeoutError("connecting to the producer took too long", scope="peer")
        try:
            self._forget_broken()
            fresh = yield from self._open(peer.uid, offer, connection, deadline)
            with self._lock:
                self._check_open()
                self._connections[peer.uid] = fresh
            return fresh
        finally:
            with self._lock:
                del self._connecting[peer.uid]
            mine.open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader is closed")

    def _open(
        self, uid: bytes, offer: AccessOffer, stale: NixlConnection | None, deadline: Deadline
    ) -> Steps[NixlConnection]:
        peer, metadata = _parse(uid, offer.key)
        if stale is not None:
            if self._agent.flies(peer.name):
                raise ConnectError("reads of the connection that was lost have not ended yet", scope="peer")
            with self._lock:
                self._connections.pop(uid, None)
            self._forget(stale, peer.name)
        self._agent.add_peer(metadata, peer.name)
        connection = None
        try:
            connection = NixlConnection(self._agent, peer, self._pool, self._cells, self._reports)
            yield from self._greet(connection, peer, uid, deadline)
        except PeerLostError as error:
            self._forget(connection, peer.name)
            raise ConnectError(
                f"{error}: the producer has closed or died, or its address is not reachable from here",
                scope="peer",
            ) from error
        except BaseException:
            self._forget(connection, peer.name)
            raise
        return connection

    def _forget_broken(self) -> None:
        """Let go of lost producers, unless one is being connected to anew or its bytes may still land."""
        with self._lock:
            broken = [uid for uid, connection in self._connections.items() if connection.broken]
        for uid in broken:
            if self._agent.flies(agent_name(uid)):
                continue
            with self._lock:
                lost = self._connections.get(uid)
                if lost is None or not lost.broken or uid in self._connecting:
                    continue
                del self._connections[uid]
                gate = self._connecting[uid] = Gate()  # whoever connects to it anew does so after this
            self._forget(lost, agent_name(uid))
            with self._lock:
                del self._connecting[uid]
            gate.open()

    def _forget(self, connection: NixlConnection | None, name: str) -> None:
        if connection is not None:
            self._agent.forget(connection.words)
        self._agent.remove_peer(name)

    def _greet(self, connection: NixlConnection, peer: Peer, uid: bytes, deadline: Deadline) -> Steps[None]:
        """Make sure that the memory at this address is the producer's of the manifest."""
        cell = self._cells.take()
        hello = NixlRead(connection, f"connecting to producer {uid.hex()[:8]}", self._reports)
        local = ranges([(cell.address, HEADER_NBYTES, 0)])
        remote = ranges([(peer.table, HEADER_NBYTES, 0)])
        hello.fly(
            lambda ended: self._agent.read(
                peer.name, ("DRAM", local), ("DRAM", remote), "saying hello", ended
            ),
            lambda: hello.finish(None),
        )
        with self._lock:
            self._hellos.add(hello)
            stopped = self._closed
        try:
            if stopped:
                hello.cancel()
            yield Wait(hello, deadline)
            hello.wait(deadline.remaining())
        finally:
            with self._lock:
                self._hellos.discard(hello)
        is_it = cell.bytes[:16].tobytes() == uid and cell.bytes[16] == 1
        self._cells.give_back(cell)
        if not is_it:
            raise ConnectError(
                f"whoever answers there is not producer {uid.hex()[:8]}, which has closed or died",
                scope="peer",
            )

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
        self._agent.close(timeout)
        with self._lock:
            self._connections.clear()
        self._pool = self._pool.new_empty(0)


def _parse(uid: bytes, key: bytes) -> tuple[Peer, bytes]:
    try:
        fields = msgpack.unpackb(key, max_array_len=7, max_bin_len=len(key), max_str_len=8)
    except Exception as error:  # whatever msgpack raises, the peer's bytes are the reason
        raise ManifestError(f"the nixl key cannot be decoded: {error}") from error
    kinds = [str, int, int, int, int, int, bytes]
    if not isinstance(fields, list) or [type(field) for field in fields] != kinds:
        raise ManifestError("the nixl key has the wrong form")
    *numbers, metadata = fields
    peer = Peer(agent_name(uid), *numbers)
    ends = (peer.address + peer.nbytes, peer.table + HEADER_NBYTES + 8 * peer.slots)
    if min(numbers[1:]) < 0 or peer.memory not in ("DRAM", "VRAM") or max(ends) >= 1 << 64:
        raise ManifestError("the nixl key names no memory")
    return peer, metadata


def export_pool(
    nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
) -> ExportedPool:
    """Allocate a pool and register it with a NIXL agent.

    Args:
        nbytes: Size of the pool in bytes.
        device: Where the pool is, ``cpu`` or a CUDA device.
        access: ``"auto"`` or ``"rdma"``.
        options: ``plugin`` (``UCX`` unless given), ``progress_thread`` (``yes`` or ``no``), parameters of the
            plugin, and for ``UCX`` UCX settings without the ``UCX_`` prefix, over which NIXL lets the
            environment win.
        slots: Most slots that may be admitted at once.

    Raises:
        UsageError: NIXL does not take an option, or another access is asked for.
        RegistrationError: Memory could not be had or registered.
        BackendUnavailableError: NIXL is not installed, or cannot be used.

    After an error nothing is left behind.
    """
    return NixlExportedPool(nbytes, device=device, access=access, options=options, slots=slots)


def open_reader(nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> Reader:
    """Allocate landing memory and register it with a NIXL agent.

    Args and errors are those of :func:`export_pool`.
    """
    return NixlReader(nbytes, device=device, access=access, options=options)
