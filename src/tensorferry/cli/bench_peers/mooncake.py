# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine over tcp: a blocking read between registered buffers.

It listens on every interface.
"""

from __future__ import annotations

import time
from typing import Any

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.copies import touched
from tensorferry.cli.bench_peers.packed import Layout

REQUIREMENT = "mooncake-transfer-engine-non-cuda==0.3.13"


def load() -> None:
    """Import the library."""
    import mooncake.engine  # noqa: F401


def _engine(link: Link, pool: Any) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(link.host, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine could not be initialised; its log says why")
    if engine.register_memory(pool.data_ptr(), pool.nbytes):
        raise RuntimeError("the memory could not be registered")
    return engine


class Sender(base.Sender):
    """Packs into registered memory, hands over where it lies, and is told over the link."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._pool = touched(packed.room(job.payload))
        self._engine = _engine(link, self._pool)
        port = self._engine.get_rpc_port()
        link.tell({"peer": f"{link.host}:{port}", "address": self._pool.data_ptr()})

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        layout.pack(self._pool, tensors)
        published = time.perf_counter()
        self.link.send(layout.header())
        self.link.receive()
        return published


class Receiver(base.Receiver):
    """Reads into registered memory, and copies into new tensors."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._pool = touched(packed.room(job.payload))
        self._engine = _engine(link, self._pool)
        self._remote = link.hear()

    def receive(self, inspect: Inspect) -> Received:
        layout = Layout.parse(self.link.receive())
        arrived = time.perf_counter()
        source = self._remote["peer"], self._pool.data_ptr(), self._remote["address"], layout.nbytes
        if self._engine.transfer_sync_read(*source):
            raise RuntimeError("the transfer failed; the engine's log says why")
        there = time.perf_counter()
        pool = self._pool[: layout.nbytes]
        block = pool.clone() if self.job.device.type == "cpu" else pool
        tensors = packed.finish(layout, block, self.job.device)
        done = time.perf_counter()
        self.link.send(b"done")
        return Received([tensors], arrived, there - arrived, done - there)
