# SPDX-License-Identifier: Apache-2.0
"""NIXL: a one-sided READ from registered memory into registered memory, and its notification."""

from __future__ import annotations

import time
from typing import Any

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.copies import touched
from tensorferry.cli.bench_peers.packed import Layout

REQUIREMENT = "nixl-cu12==1.5.1"

_MEMORY = "DRAM"
_PAUSE_SECONDS = 20e-6  # without it polling starves the progress threads


def load() -> None:
    """Import the library."""
    _api()


def _api() -> Any:
    from nixl_cu12 import _api as api  # its meta package is not needed

    return api


def _agent(name: str, job: Job) -> Any:
    base.ucx_settings(job)
    api = _api()
    threads = job.options["progress_threads"]
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=threads, backends=["UCX"]))


class Sender(base.Sender):
    """Packs into registered memory, hands over where it lies, and waits for the notification."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._agent = _agent("producer", job)
        self._pool = touched(packed.room(job.payload))
        self._agent.register_memory(self._pool)
        link.send(self._agent.get_agent_metadata())
        link.tell({"address": self._pool.data_ptr()})
        self._agent.add_remote_agent(link.receive())

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        layout.pack(self._pool, tensors)
        published = time.perf_counter()
        self.link.send(layout.header())
        while not self._agent.get_new_notifs():
            time.sleep(_PAUSE_SECONDS)
        return published

    def about(self) -> dict[str, str]:
        return {"progress threads": str(self.job.options["progress_threads"]), **base.ucx_settings(self.job)}


class Receiver(base.Receiver):
    """Reads into registered memory, and copies into new tensors."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._agent = _agent("consumer", job)
        self._pool = touched(packed.room(job.payload))
        self._agent.register_memory(self._pool)
        self._peer = self._agent.add_remote_agent(link.receive())
        self._address = link.hear()["address"]
        link.send(self._agent.get_agent_metadata())

    def receive(self, inspect: Inspect) -> Received:
        layout = Layout.parse(self.link.receive())
        arrived = time.perf_counter()
        self._read(layout.nbytes)
        there = time.perf_counter()
        pool = self._pool[: layout.nbytes]
        block = pool.clone() if self.job.device.type == "cpu" else pool
        tensors = packed.finish(layout, block, self.job.device)
        return Received([tensors], arrived, there - arrived, time.perf_counter() - there)

    def _read(self, nbytes: int) -> None:
        agent = self._agent
        local = agent.get_xfer_descs([(self._pool.data_ptr(), nbytes, 0)], _MEMORY)
        remote = agent.get_xfer_descs([(self._address, nbytes, 0)], _MEMORY)
        handle = agent.initialize_xfer("READ", local, remote, self._peer, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
