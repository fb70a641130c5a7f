# SPDX-License-Identifier: Apache-2.0
"""The producer's side over NIXL: a pool and a slot table that peers read by themselves."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping

import msgpack
import torch

from tensorferry.backends.base import AccessOffer, ExportedPool, Notice, PeerOffer, SlotTicket
from tensorferry.backends.nixl_agent import Agent
from tensorferry.backends.nixl_memory import allocate
from tensorferry.backends.nixl_options import Options
from tensorferry.backends.nixl_slots import SlotTable
from tensorferry.backends.ucx_library import rdma_devices
from tensorferry.errors import UsageError


def agent_name(uid: bytes) -> str:
    """Return what the agent of a producer or consumer is called."""
    return f"tensorferry-{uid.hex()}"


def check_access(access: str) -> None:
    """Raise a UsageError if NIXL cannot read that way."""
    if access not in ("auto", "rdma"):
        raise UsageError(f"the backend 'nixl' reads by 'rdma' (or 'auto'), not by {access!r}")


class NixlExportedPool(ExportedPool):
    """A pool that is registered with a NIXL agent; see :func:`export_pool`."""

    def __init__(
        self, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
    ) -> None:
        check_access(access)
        if not rdma_devices():
            warnings.warn(
                "backend='nixl' without an RDMA device: UCX emulates one-sided reads, and over tcp whoever "
                "reaches the port can read any memory of this process; use it in trusted networks only",
                stacklevel=5,
            )
        uid = secrets.token_bytes(16)
        self._owner = os.getpid()
        self._table = SlotTable(uid, nbytes, slots)
        self._pool = allocate(nbytes, device)
        self._agent = Agent(agent_name(uid), Options.of(options), listen=self._table.report)
        try:
            self._agent.register(self._pool)
            self._agent.register(self._table.memory)
            memory, index = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
            where = [memory, self._pool.data_ptr(), nbytes, index, self._table.memory.data_ptr(), slots]
            key = msgpack.packb([*where, self._agent.metadata()])
        except BaseException:
            self._agent.close(0.0)
            raise
        self._peer = PeerOffer(uid, "nixl", b"", (AccessOffer("rdma", b"", key),))

    @property
    def pool(self) -> torch.Tensor:
        return self._pool

    @property
    def peer(self) -> PeerOffer:
        return self._peer

    def admit(self, offset: int, nbytes: int, *, lease: float) -> SlotTicket:
        return self._table.admit(offset, nbytes)

    def withdraw(self, ticket: SlotTicket, *, revoked: bool = False) -> bool:
        self._table.withdraw(ticket, revoked=revoked)
        return True

    def notices(self, timeout: float) -> list[Notice]:
        return self._table.notices(timeout)

    def wake(self) -> None:
        self._table.wake()

    def close(self, timeout: float) -> None:
        if os.getpid() != self._owner:
            return
        self._table.close()
        self._agent.close(timeout)
        self._pool = self._pool.new_empty(0)
