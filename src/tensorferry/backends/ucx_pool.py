# SPDX-License-Identifier: Apache-2.0
"""The producer's side over UCX: a pool that UCX workers serve."""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
from collections.abc import Mapping

import torch

from tensorferry import _transport
from tensorferry.backends.base import AccessOffer, ExportedPool, Notice, NoticeKind, PeerOffer, SlotTicket
from tensorferry.backends.ucx_native import (
    PoolMemory,
    create_context,
    host_mark,
    native_errors,
    offers_rdma,
    register_memory,
    start_worker,
    translate,
)
from tensorferry.backends.ucx_offers import MappedKey, RdmaKey, RemoteRange
from tensorferry.errors import PoolExhaustedError, UsageError

_NOTICE_KINDS: dict[int, NoticeKind] = {1: "release", 2: "reject", 3: "drained"}


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
            key = MappedKey(
                os.getpid(), self._table.control.descriptor, self._memory.memory.descriptor, slots, nbytes
            ).pack()
            # Where the pool is served as well, notifications go to that address; it is not sent twice.
            offers.insert(0, AccessOffer("mapped", plain_address if access == "mapped" else b"", key))
        if not offers:
            raise UsageError(f"access={access!r} cannot be offered for a pool on {device}")
        return offers

    def _serve(self, context: _transport.Context, nbytes: int) -> tuple[bytes, bytes]:
        region = self._memory.register(context)
        self._regions.append(region)
        control = register_memory(context, self._table.control, _transport.MemoryType.HOST)
        self._regions.append(control)
        worker = start_worker(context)
        self._workers.append(worker)
        with native_errors("offering a pool"):
            worker.serve(self._table, region)
            key = RdmaKey(
                RemoteRange(self._memory.memory.address, nbytes, region.pack_key()),
                RemoteRange(self._table.control.address, self._table.control.nbytes, control.pack_key()),
            )
        return worker.address, key.pack()

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
        # Somebody may keep the closed object for long, an error that refers to it for example.
        self._workers.clear()
        self._regions.clear()
        self._memory.close()
