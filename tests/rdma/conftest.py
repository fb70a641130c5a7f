# SPDX-License-Identifier: Apache-2.0
"""A producer's and a consumer's process on the two ends of an RDMA wire, alive for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(1, str(Path(__file__).parents[1] / "integration"))

import lane
import peers


class Wire:
    """Two ends and a process on each."""

    def __init__(self, near: lane.End, far: lane.End, producer: lane.AnyPeer, consumer: lane.AnyPeer) -> None:
        self.near, self.far = near, far
        self.producer, self.consumer = producer, consumer

    def open(self, pool_size: str = "64MiB", **options: Any) -> None:
        """Open a producer and a consumer; ``key`` is for both, the rest for the producer."""
        self.consumer.call(peers.close, "consumer")  # first: without its producer closing takes five seconds
        self.producer.call(lane.open_producer, self.near, pool_size, **options)
        self.open_consumer(pool_size, **{name: options[name] for name in ("key",) if name in options})

    def open_consumer(self, pool_size: str = "64MiB", **options: Any) -> None:
        self.consumer.call(lane.open_consumer, self.far, pool_size, **options)

    def send(self, request_id: str, build: Any, *args: Any, **options: Any) -> None:
        """Publish and pull what ``build(*args)`` returns, and see that every bit is there."""
        manifest = self.producer.call(peers.publish, request_id, build, *args, **options)
        assert self.consumer.call(peers.pull_and_compare, manifest, build, *args) == ""
        assert self.producer.call(peers.wait_released, request_id, 10)

    def traffic(self) -> dict[str, int]:
        """Count what has crossed so far, as the consumer's machine sees it."""
        return self.consumer.call(lane.traffic, self.far.device)

    def pulls(self) -> dict[str, int]:
        return self.consumer.call(peers.statistics, "consumer")["pulls_by_access"]


@pytest.fixture(scope="session")
def wire() -> Iterator[Wire]:
    near, far = lane.ends()
    with near.process() as producer, far.process() as consumer:
        yield Wire(near, far, producer, consumer)
