# SPDX-License-Identifier: Apache-2.0
"""tensorferry itself, in each access mode and each way of publishing and pulling."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.consumer import Consumer
from tensorferry.producer import Producer

REQUIREMENT = ""

_SLACK = 1 << 20
_RELEASE_SECONDS = 60.0


def load() -> None:
    """It is here."""


def _pool_nbytes(job: Job) -> int:
    return job.batch * (packed.room(job.payload) + _SLACK)


class Sender(base.Sender):
    """Publishes, or reserves beforehand and publishes without a copy."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._producer = Producer(
            _pool_nbytes(job),
            device=job.device,
            access=job.options["access"],
            backend_options=dict(job.settings),
            lease=600.0,
        )
        self._numbers = count()
        self._reserved: list[Any] = []

    def prepare(self, payloads: list[Tensors]) -> None:
        if not self.job.options.get("reserve"):
            return
        for tensors in payloads:
            reservation = self._producer.reserve(self._next(), tensors, timeout=10)
            for name, tensor in reservation.tensors.items():
                tensor.copy_(tensors[name])
            self._reserved.append(reservation)

    def send(self, payloads: list[Tensors]) -> float:
        names = []
        for tensors in payloads:
            if self._reserved:
                reservation = self._reserved.pop(0)
                names.append(reservation.request_id)
                manifest = reservation.publish()
            else:
                names.append(self._next())
                manifest = self._producer.publish(names[-1], tensors)
            published = time.perf_counter()
            self.link.send(manifest)
        for name in names:
            if not self._producer.wait_released(name, _RELEASE_SECONDS):
                raise TimeoutError(f"{name} was not released within {_RELEASE_SECONDS:g} s")
        return published

    def _next(self) -> str:
        return f"call-{next(self._numbers)}"

    def close(self) -> None:
        self._producer.close()

    def about(self) -> dict[str, str]:
        from tensorferry.backends.ucx_native import defaults_of, load_library

        library = load_library()
        return {"UCX": library.version, "library": library.path, **defaults_of(library), **self.job.settings}


class Receiver(base.Receiver):
    """Pulls, starts several pulls, or borrows."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._consumer = Consumer(
            _pool_nbytes(job),
            device=job.device,
            access=job.options["access"],
            backend_options=dict(job.settings),
        )
        self._seconds = (0.0, 0.0)
        self._take = job.options.get("take", "pull")

    @property
    def landing_nbytes(self) -> int:
        return self.job.batch * self.job.payload.nbytes if self.job.options["access"] == "rdma" else 0

    def receive(self, inspect: Inspect) -> Received:
        manifest = self.link.receive()
        arrived = time.perf_counter()
        if self._take == "borrow":
            return self._borrow(manifest, arrived, inspect)
        if self._take == "start_pull":
            pulls = [self._consumer.start_pull(manifest)]
            while len(pulls) < self.job.batch:
                pulls.append(self._consumer.start_pull(self.link.receive()))
            return Received([pull.result() for pull in pulls], arrived)  # their phases overlap
        received = Received([self._consumer.pull(manifest)], arrived)
        received.end = time.perf_counter()
        return self._with_phases(received)

    def _borrow(self, manifest: bytes, arrived: float, inspect: Inspect) -> Received:
        with self._consumer.borrow(manifest) as tensors:
            entered = time.perf_counter()
            inspect(tensors)
            unclocked = time.perf_counter() - entered
        return Received([], arrived, wire=entered - arrived, unclocked=unclocked)

    def _with_phases(self, received: Received) -> Received:
        statistics = self._consumer.statistics()
        before, self._seconds = self._seconds, (statistics.wire_seconds, statistics.landing_seconds)
        received.wire, received.landing = self._seconds[0] - before[0], self._seconds[1] - before[1]
        return received

    def close(self) -> None:
        self._consumer.close()
