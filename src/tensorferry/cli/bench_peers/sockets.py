# SPDX-License-Identifier: Apache-2.0
"""Plain tcp sockets: from the caller's tensors into new ones, by large system calls."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout, Stage

REQUIREMENT = ""

_LENGTH = struct.Struct(">I")
_MOST_BUFFERS = 512
_DONE = b"\0"


def load() -> None:
    """Nothing is needed."""


def open_server(link: Link) -> socket.socket:
    """Listen, tell the other side where, and return the connection to it."""
    family = socket.AF_INET6 if ":" in link.host else socket.AF_INET
    with socket.create_server((link.host, 0), family=family, backlog=1) as listener:
        link.tell({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def open_client(link: Link) -> socket.socket:
    """Connect to where the other side says that it listens."""
    connection = socket.create_connection((link.peer, link.hear()["port"]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send_all(connection: socket.socket, parts: Sequence[memoryview]) -> None:
    """Send buffers by as few calls as they take."""
    waiting = list(parts)
    first = 0
    while first < len(waiting):
        sent = connection.sendmsg(waiting[first : first + _MOST_BUFFERS])
        while first < len(waiting) and sent >= waiting[first].nbytes:
            sent -= waiting[first].nbytes
            first += 1
        if sent:
            waiting[first] = waiting[first][sent:]


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill a buffer.

    Raises:
        ConnectionError: The other side closed before.
    """
    while memory.nbytes:
        nbytes = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        if not nbytes:
            raise ConnectionError("the other side closed the connection")
        memory = memory[nbytes:]


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


class Sender(base.Sender):
    """Sends a header and the tensors as they lie in memory."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._connection = open_server(link)
        self._stage = Stage(packed.room(job.payload))

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        parts = self._stage.parts(layout, tensors)
        began = time.perf_counter()
        header = layout.header()
        head = memoryview(_LENGTH.pack(len(header)) + header)
        send_all(self._connection, [head, *packed.buffers(parts)])
        _receive(self._connection, len(_DONE))
        return began

    def close(self) -> None:
        self._connection.close()


class Receiver(base.Receiver):
    """Receives into new memory, whose views are the results."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._connection = open_client(link)

    def receive(self, inspect: Inspect) -> Received:
        (nbytes,) = _LENGTH.unpack(_receive(self._connection, _LENGTH.size))
        layout = Layout.parse(_receive(self._connection, nbytes))
        arrived = time.perf_counter()
        block, parts = packed.landing(layout)
        for buffer in packed.buffers(parts):
            receive_into(self._connection, buffer)
        there = time.perf_counter()
        tensors = packed.finish(layout, block, self.job.device)
        done = time.perf_counter()
        self._connection.sendall(_DONE)
        return Received([tensors], arrived, there - arrived, done - there)

    def close(self) -> None:
        self._connection.close()
