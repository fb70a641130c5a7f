# SPDX-License-Identifier: Apache-2.0
"""UCXX: tagged messages from the caller's tensors into new ones; its Python has no one-sided reads.

The workers connect by their addresses instead of a listener, which would listen on every interface.
Both sides look for progress without a pause while they wait.
"""

from __future__ import annotations

import struct
import time
from typing import Any

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout, Stage

REQUIREMENT = "ucxx-cu12==0.52.*"

_HEADER, _DATA, _DONE = 1, 2, 3
_HEADER_NBYTES = 4 << 20
_LENGTH = struct.Struct(">I")


def load() -> None:
    """Import the library."""
    import ucxx._lib.libucxx  # noqa: F401


class _Endpoint:
    """A worker and its endpoint to the other side's."""

    def __init__(self, job: Job, link: Link) -> None:
        self.settings = base.ucx_settings(job)
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self._library, self._array = libucxx, Array
        self._worker = libucxx.UCXWorker(
            libucxx.UCXContext(), enable_delayed_submission=False, enable_python_future=False
        )
        link.send(bytes(memoryview(self._worker.address)))
        address = libucxx.UCXAddress.create_from_buffer(link.receive())
        self._endpoint = libucxx.UCXEndpoint.create_from_worker_address(
            self._worker, address, endpoint_error_handling=job.options["error_handling"]
        )

    def post_send(self, buffer: Any, tag: int) -> Any:
        return self._endpoint.tag_send(self._array(buffer), self._library.UCXXTag(tag))

    def post_receive(self, buffer: Any, tag: int) -> Any:
        return self._endpoint.tag_recv(self._array(buffer), self._library.UCXXTag(tag))

    def wait(self, *requests: Any) -> None:
        """Look for progress until all have ended.

        Raises:
            Exception: UCXX's own, of the first that failed.
        """
        for request in requests:
            while not request.completed:
                self._worker.progress()
            request.check_error()

    def about(self) -> dict[str, str]:
        version = ".".join(map(str, self._library.get_ucx_version()))
        return {"UCX": version, **self.settings}


class Sender(base.Sender):
    """Sends a header, and the tensors as they lie in memory."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._endpoint = _Endpoint(job, link)
        self._stage = Stage(packed.room(job.payload))
        self._done = bytearray(1)
        # Wiring up needs both sides to make progress at a time.
        self._endpoint.wait(
            self._endpoint.post_send(bytearray(1), _HEADER), self._endpoint.post_receive(self._done, _DONE)
        )

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        parts = self._stage.parts(layout, tensors)
        began = time.perf_counter()
        header = layout.header()
        header = _LENGTH.pack(len(header)) + header
        requests = [self._endpoint.post_send(header, _HEADER)]
        requests += [self._endpoint.post_send(buffer, _DATA) for buffer in packed.buffers(parts)]
        requests.append(self._endpoint.post_receive(self._done, _DONE))
        self._endpoint.wait(*requests)
        return began

    def about(self) -> dict[str, str]:
        return self._endpoint.about()


class Receiver(base.Receiver):
    """Receives into new memory, whose views are the results."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._endpoint = _Endpoint(job, link)
        self._header = bytearray(_HEADER_NBYTES)
        self._endpoint.wait(
            self._endpoint.post_receive(self._header, _HEADER), self._endpoint.post_send(bytearray(1), _DONE)
        )

    def receive(self, inspect: Inspect) -> Received:
        self._endpoint.wait(self._endpoint.post_receive(self._header, _HEADER))
        (nbytes,) = _LENGTH.unpack_from(self._header)
        layout = Layout.parse(memoryview(self._header)[_LENGTH.size : _LENGTH.size + nbytes])
        arrived = time.perf_counter()
        block, parts = packed.landing(layout)
        self._endpoint.wait(*[self._endpoint.post_receive(buffer, _DATA) for buffer in packed.buffers(parts)])
        there = time.perf_counter()
        tensors = packed.finish(layout, block, self.job.device)
        done = time.perf_counter()
        self._endpoint.wait(self._endpoint.post_send(bytearray(1), _DONE))
        return Received([tensors], arrived, there - arrived, done - there, end=done)
