# SPDX-License-Identifier: Apache-2.0
"""Pairs of processes, one pair for each UCX library, and the ways between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import peers
import pytest
from peers import Peer

from tensorferry.backends.ucx_library import system_library, wheel_library

EVERYTHING = {"TLS": "all", "NET_DEVICES": "lo"}

ROUTES: dict[str, tuple[str, dict[str, str], bool]] = {
    # name: access, options, one process
    "served-tcp": ("served", peers.LOOPBACK, False),
    "rdma-tcp": ("rdma", peers.LOOPBACK, False),
    "mapped-tcp": ("mapped", peers.LOOPBACK, False),
    "auto-all": ("auto", EVERYTHING, False),
    "served-all": ("served", EVERYTHING, False),
    "rdma-all": ("rdma", EVERYTHING, False),
    "served-one-process": ("served", EVERYTHING, True),
    "rdma-one-process": ("rdma", EVERYTHING, True),
    "mapped-one-process": ("mapped", EVERYTHING, True),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out NIXL with the other library: it brings its own."""
    items[:] = [
        item
        for item in items
        if not {"nixl", "system"} <= {value for value in _parameters(item) if isinstance(value, str)}
    ]


def _parameters(item: pytest.Item) -> list[Any]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


@pytest.fixture(scope="session", params=["wheel", "system"])
def library(request: pytest.FixtureRequest) -> str:
    """Name a UCX library that is installed."""
    found = wheel_library() if request.param == "wheel" else system_library()
    if found is None:
        pytest.skip(f"the {request.param}'s UCX is not installed")
    return str(request.param)


@pytest.fixture(scope="session")
def two(library: str) -> Iterator[tuple[Peer, Peer]]:
    """Two processes that have loaded the library."""
    with peers.peer(TENSORFERRY_UCX=library) as one, peers.peer(TENSORFERRY_UCX=library) as other:
        yield one, other


@dataclass
class Route:
    """A producer and a consumer, in one process or two, joined by one access mode."""

    access: str
    producer: Peer
    consumer: Peer

    def send(self, request_id: str, build: Any, *args: Any, **options: Any) -> None:
        """Publish and pull what ``build(*args)`` returns, and see that every bit is there."""
        manifest = self.producer.call(peers.publish, request_id, build, *args, **options)
        found = self.consumer.call(peers.pull_and_compare, manifest, build, *args)
        assert found == ""
        assert self.producer.call(peers.wait_released, request_id, 10)


@pytest.fixture(scope="module", params=list(ROUTES))
def route(request: pytest.FixtureRequest, two: tuple[Peer, Peer]) -> Iterator[Route]:
    access, options, one_process = ROUTES[request.param]
    yield from _open(access, options, two[0], two[0] if one_process else two[1])


@pytest.fixture(scope="module", params=["served", "rdma", "mapped", peers.NIXL])
def mode(request: pytest.FixtureRequest, two: tuple[Peer, Peer]) -> Iterator[Route]:
    """Two processes over tcp on the loopback device, in each access mode, and on each backend."""
    yield from _open(request.param, peers.LOOPBACK, *two)


def _open(access: str, options: dict[str, str], producer: Peer, consumer: Peer) -> Iterator[Route]:
    producer.call(peers.open_producer, "256MiB", access=access, backend_options=options)
    consumer.call(peers.open_consumer, "256MiB", access=access, backend_options=options)
    yield Route(access, producer, consumer)
    for peer in (producer, consumer):
        for what in ("producer", "consumer"):
            peer.call(peers.close, what)
