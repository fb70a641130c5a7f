# SPDX-License-Identifier: Apache-2.0
"""What tcp gives at best: one stream, writes of 1 MiB, one buffer at each end, as iperf3 does it."""

from __future__ import annotations

import time

import torch

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.copies import touched
from tensorferry.cli.bench_peers.packed import Layout
from tensorferry.cli.bench_peers.sockets import open_client, open_server, receive_into

REQUIREMENT = ""

_WRITE_NBYTES = 1 << 20
_DONE = b"\0"


def load() -> None:
    """Nothing is needed."""


class Sender(base.Sender):
    """Writes the bytes of the payload, which lie side by side before the clock starts."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._connection = open_server(link)
        self._block = touched(packed.room(job.payload))
        self._nbytes = 0

    def prepare(self, payloads: list[Tensors]) -> None:
        layout = Layout.of(payloads[0])
        layout.pack(self._block, payloads[0])
        self._nbytes = layout.nbytes

    def send(self, payloads: list[Tensors]) -> float:
        (buffer,) = packed.buffers([self._block[: self._nbytes]])
        began = time.perf_counter()
        for start in range(0, self._nbytes, _WRITE_NBYTES):
            self._connection.sendall(buffer[start : start + _WRITE_NBYTES])
        self._connection.recv(len(_DONE))
        return began

    def close(self) -> None:
        self._connection.close()


class Receiver(base.Receiver):
    """Reads into one buffer."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._connection = open_client(link)
        layout = Layout.of(job.payload.build(0, torch.device("cpu")))
        block = touched(layout.nbytes)
        self._tensors = layout.views(block)
        (self._buffer,) = packed.buffers([block])

    def receive(self, inspect: Inspect) -> Received:
        receive_into(self._connection, self._buffer[:1])
        arrived = time.perf_counter()
        receive_into(self._connection, self._buffer[1:])
        end = time.perf_counter()
        self._connection.sendall(_DONE)
        inspect({name: tensor.to(self.job.device) for name, tensor in self._tensors.items()})
        return Received([], arrived, wire=end - arrived, end=end)
