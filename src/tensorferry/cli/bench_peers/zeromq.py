# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ: one message of a frame for each tensor, sent from the caller's memory.

The results lie where ZeroMQ received them, in memory of their own that nothing uses again.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout, Stage

REQUIREMENT = "pyzmq==27.*"

_PATIENCE_MILLISECONDS = 60_000


def load() -> None:
    """Import the library."""
    import zmq  # noqa: F401


def _socket(link: Link) -> Any:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MILLISECONDS)
    socket.setsockopt(zmq.SNDTIMEO, _PATIENCE_MILLISECONDS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(":" in link.host))
    return socket


class Sender(base.Sender):
    """Sends a header and the tensors as they lie in memory."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._socket = _socket(link)
        port = self._socket.bind_to_random_port(f"tcp://{base.listening_address(link.host)}")
        link.tell({"port": port})
        self._stage = Stage(packed.room(job.payload))

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        parts = self._stage.parts(layout, tensors)
        began = time.perf_counter()
        self._socket.send_multipart([layout.header(), *packed.buffers(parts)], copy=False)
        self._socket.recv()
        return began

    def close(self) -> None:
        self._socket.close()


class Receiver(base.Receiver):
    """Receives frames, and makes tensors over them."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._socket = _socket(link)
        port = link.hear()["port"]
        self._socket.connect(f"tcp://{base.listening_address(link.peer)}:{port}")

    def receive(self, inspect: Inspect) -> Received:
        header = self._socket.recv()
        layout = Layout.parse(header)
        arrived = time.perf_counter()
        frames = self._socket.recv_multipart(copy=False)
        there = time.perf_counter()
        parts = [torch.frombuffer(frame.buffer, dtype=torch.uint8) for frame in frames]
        tensors = layout.adopt(parts) if layout.few else layout.views(parts[0])
        tensors = {name: tensor.to(self.job.device) for name, tensor in tensors.items()}
        done = time.perf_counter()
        self._socket.send(b"done")
        return Received([tensors], arrived, there - arrived, done - there)

    def close(self) -> None:
        self._socket.close()
