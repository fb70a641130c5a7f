# SPDX-License-Identifier: Apache-2.0
"""Ray's object store: the producer puts the tensors, the consumer gets and copies them.

Both are drivers of one cluster, which listens on every interface.  What is got is read-only
memory of the store, so ordinary tensors are copies of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from typing import Any

import torch

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout, Stage

REQUIREMENT = "ray==2.60.*"

_SLACK = 256 << 20


def load() -> None:
    """Import the library."""
    _ray()


def _ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # for the second driver to join; nobody else can reach it
    import ray

    return ray


def _start(**options: Any) -> Any:
    ray = _ray()
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)
    return ray


class Sender(base.Sender):
    """Starts a cluster of one node, and puts."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._ray = _start(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=4 * job.payload.nbytes + _SLACK,
            _node_ip_address=link.host,
        )
        self._stage = Stage(packed.room(job.payload))
        link.tell({"address": self._ray.get_runtime_context().gcs_address})

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        parts = self._stage.parts(layout, tensors)
        # As arrays they go into the store without pickling their bytes.
        reference = self._ray.put((layout.header(), [part.numpy() for part in parts]))
        published = time.perf_counter()
        self.link.send(self._ray.cloudpickle.dumps(reference))
        self.link.receive()
        return published

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.link.receive()  # the consumer has left the cluster
        self._ray.shutdown()


class Receiver(base.Receiver):
    """Joins the cluster, gets and copies."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        self._ray = _start(address=link.hear()["address"], _node_ip_address=link.host)

    def receive(self, inspect: Inspect) -> Received:
        reference = self._ray.cloudpickle.loads(self.link.receive())
        arrived = time.perf_counter()
        header, arrays = self._ray.get(reference)
        there = time.perf_counter()
        layout = Layout.parse(header)
        parts = [torch.from_numpy(array).to(self.job.device, copy=True) for array in arrays]
        tensors = layout.adopt(parts) if layout.few else layout.views(parts[0])
        done = time.perf_counter()
        del arrays, reference
        self.link.send(b"done")
        return Received([tensors], arrived, there - arrived, done - there, end=done)

    def close(self) -> None:
        self._ray.shutdown()
        self.link.send(b"left")
