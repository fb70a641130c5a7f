# SPDX-License-Identifier: Apache-2.0
"""A process of the soak that publishes."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import torch

import tensorferry
from soaking.judge import Call
from soaking.messages import LEASE, Credit, Published, Revoke, Settings
from soaking.payloads import Source, digests
from soaking.process import KEY, OPTIONS, Process, ended, failed

CREDITS = 16
"""Publications of one producer that consumers have not dealt with yet, at most."""


class ProducerProcess(Process):
    """Publishes random payloads from several threads until it is told to be quiet."""

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        super().__init__(channel, settings)
        self._source = Source(settings.seed)
        self._drawing = threading.Lock()
        self._serial = 0
        self._credits = threading.Semaphore(CREDITS)
        self.open()

    def open(self) -> None:
        """Open a producer, a third of the time with checksums."""
        self._producer = tensorferry.Producer(
            self.settings.pool_nbytes,
            backend=self.settings.backend,
            access=self.settings.access,  # type: ignore[arg-type]
            backend_options=OPTIONS,
            lease=LEASE,
            key=KEY,
            checksum="xxh3" if self.random.random() < 0.3 else None,
            name=self.settings.name,
        )

    def close(self, timeout: float) -> None:
        """Close it."""
        self._producer.close(timeout)

    def held(self) -> dict[str, int]:
        """Return bytes of the pool, and publications, that have not ended."""
        now = self._producer.statistics()
        return {"pool_nbytes": now.allocated_nbytes, "publications": now.live + now.draining}

    def obey(self, order: object) -> None:
        """Do what the supervisor says."""
        if isinstance(order, Credit):
            self._credits.release()
        elif isinstance(order, Revoke):
            with suppress(tensorferry.ClosedError):
                self._producer.revoke(order.request)
        else:
            super().obey(order)

    def work(self, rng: random.Random) -> None:
        """Publish until it is quiet, as long as consumers keep up."""
        while not self.quiet.is_set():
            if self._credits.acquire(timeout=0.1) and not self._publish(rng):
                self._credits.release()
            time.sleep(rng.expovariate(1 / self.settings.pause))

    def _publish(self, rng: random.Random) -> bool:
        """Publish one payload; return whether consumers have to deal with it now."""
        faults, inject = self.settings.faults, self.settings.inject
        with self._drawing:
            self._serial += 1
            serial = self._serial
            payload = self._source.payload(self._source.size())
        expected = digests(payload)
        if inject == "wrong" and serial == 5:
            payload = with_a_flipped_bit(payload)
        lease = rng.uniform(0.05, 0.6) if "expire" in faults and rng.random() < 0.06 else LEASE
        consumers = 2 if "fan_out" in faults and rng.random() < 0.15 else 1
        timeout = rng.choice([0.0, 0.2, 2.0, 5.0])
        cancels = "cancel" in faults and rng.random() < 0.03
        opening, producer = self.opening, self._producer  # in this order, see Process.obey
        call = Call(
            "publish", f"{self.settings.name}-{serial}", time.monotonic(), 0.0, timeout,
            opening=opening, cancelled=cancels,
        )  # fmt: skip
        terms = {"lease": lease, "consumers": consumers}
        try:
            manifest = publish(producer, call, payload, terms, rng)
        except tensorferry.TensorferryError as error:
            self.send(failed(call, error))
            return False
        call = ended(call)
        nbytes = tensorferry.read_manifest(manifest, KEY).nbytes
        self.send(Published(call, manifest, expected, nbytes, lease, consumers))
        if inject == "leak" and serial == 6:
            self._kept = producer.reserve("never given back", 4096, timeout=60)
        if inject == "crash" and serial == 6:
            os.kill(os.getpid(), signal.SIGSEGV)
        return True


def publish(
    producer: tensorferry.Producer,
    call: Call,
    payload: dict[str, Any],
    terms: dict[str, Any],
    rng: random.Random,
) -> bytes:
    """Publish in one of the ways that there are; return the manifest."""
    name, timeout = call.request, call.timeout
    if call.cancelled or rng.random() < 0.25:
        request = producer.start_publish(name, payload, timeout=timeout, **terms)
        if call.cancelled:
            time.sleep(rng.expovariate(50))
            request.cancel()
        return request.result()
    if rng.random() < 0.2 and all(isinstance(value, torch.Tensor) for value in payload.values()):
        shapes = {key: (value.shape, value.dtype) for key, value in payload.items()}
        with producer.reserve(name, shapes, timeout=timeout) as reservation:
            for key, tensor in reservation.tensors.items():
                tensor.copy_(payload[key])
            return reservation.publish(**terms)
    return producer.publish(name, payload, timeout=timeout, **terms)


def with_a_flipped_bit(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload that differs in one bit of its first tensor."""
    name = next(name for name, value in payload.items() if isinstance(value, torch.Tensor) and value.numel())
    changed = payload[name].clone(memory_format=torch.contiguous_format)
    changed.view(-1).view(torch.uint8)[0] ^= 1
    return {**payload, name: changed}
