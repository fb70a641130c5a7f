# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers over the fake backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import fake_backend
import pytest

from tensorferry.backends import registry
from tensorferry.consumer import Consumer
from tensorferry.producer import Producer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the fake backend available as ``backend="fake"``."""
    monkeypatch.setitem(registry.MODULES, "fake", "fake_backend")
    yield
    fake_backend.POOLS.clear()
    fake_backend.READERS.clear()


@pytest.fixture
def make_producer(fake: None) -> Iterator[Callable[..., Producer]]:
    made: list[Producer] = []

    def make(pool_size: int | str = "1MiB", **options: object) -> Producer:
        made.append(Producer(pool_size, backend="fake", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for producer in made:
        producer.close()


@pytest.fixture
def make_consumer(fake: None) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(pool_size: int | str = "1MiB", **options: object) -> Consumer:
        made.append(Consumer(pool_size, backend="fake", **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(condition: Callable[[], object], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.001)

    return wait
