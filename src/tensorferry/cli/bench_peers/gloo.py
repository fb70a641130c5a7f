# SPDX-License-Identifier: Apache-2.0
"""gloo, by torch.distributed: messages from the caller's tensors into new ones.

Between two hosts its store listens on every interface.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base, packed
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout, Stage

REQUIREMENT = ""

_PATIENCE = timedelta(seconds=60)
_PRODUCER, _CONSUMER = 0, 1


def load() -> None:
    """Find the library, which comes with most builds of torch.

    Raises:
        ImportError: Not with this one.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ImportError("this build of torch has no gloo")


def _join(job: Job, rank: int, method: str) -> None:
    interface = job.settings.get("NET_DEVICES", "")
    if interface and ":" not in interface and "," not in interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=_PATIENCE)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value])


class Sender(base.Sender):
    """Sends a header and the tensors as they lie in memory."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._folder = tempfile.TemporaryDirectory(prefix="tensorferry-bench-")
        method = f"file://{Path(self._folder.name) / 'store'}"
        if not job.one_host:
            method = f"tcp://{base.listening_address(link.host)}:{_free_port(link.host)}"
        link.tell({"method": method})
        _join(job, _PRODUCER, method)
        self._stage = Stage(packed.room(job.payload))

    def send(self, payloads: list[Tensors]) -> float:
        (tensors,) = payloads
        layout = Layout.of(tensors)
        parts = self._stage.parts(layout, tensors)
        began = time.perf_counter()
        header = torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8)
        dist.send(_number(len(header)), _CONSUMER)
        dist.send(header, _CONSUMER)
        for part in parts:
            dist.send(part, _CONSUMER)
        dist.recv(_number(0), _CONSUMER)
        return began

    def close(self) -> None:
        dist.destroy_process_group()
        self._folder.cleanup()


class Receiver(base.Receiver):
    """Receives into new memory, whose views are the results."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        _join(job, _CONSUMER, link.hear()["method"])

    def receive(self, inspect: Inspect) -> Received:
        length = _number(0)
        dist.recv(length, _PRODUCER)
        header = packed.fresh(int(length))
        dist.recv(header, _PRODUCER)
        layout = Layout.parse(header.numpy().tobytes())
        arrived = time.perf_counter()
        block, parts = packed.landing(layout)
        for part in parts:
            dist.recv(part, _PRODUCER)
        there = time.perf_counter()
        tensors = packed.finish(layout, block, self.job.device)
        done = time.perf_counter()
        dist.send(_number(1), _PRODUCER)
        return Received([tensors], arrived, there - arrived, done - there)

    def close(self) -> None:
        dist.destroy_process_group()
