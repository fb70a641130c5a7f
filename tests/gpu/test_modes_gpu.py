# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers on a GPU: runs of small tensors, streams, checksums, devices.

What ``test_transfer_gpu.py`` leaves out; each access mode is asked for by name here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorferry import Consumer, Producer, UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {"NET_DEVICES": "lo"}
LONG = 200_000_000  # clock cycles, about 0.1 s
N = 1 << 20


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest) -> str:
    """Where the pools are."""
    return str(request.param)


@pytest.fixture(params=["served", "mapped"])
def access(request: pytest.FixtureRequest, place: str) -> str:
    if request.param == "mapped" and place == "cuda":
        pytest.skip("a pool on a CUDA device cannot be mapped")
    return str(request.param)


@pytest.fixture
def pair(place: str, access: str) -> Iterator[tuple[Producer, Consumer]]:
    with (
        Producer("64MiB", device=place, access=access, backend_options=OPTIONS) as producer,  # type: ignore[arg-type]
        Consumer("64MiB", device=place, backend_options=OPTIONS) as consumer,
    ):
        yield producer, consumer


def delay() -> None:
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", None])
def test_any_source_reaches_any_device(
    pair: tuple[Producer, Consumer], place: str, device: str | None
) -> None:
    producer, consumer = pair
    payload = {
        "gpu": torch.arange(N, device="cuda", dtype=torch.float32),
        "strided": torch.arange(N, device="cuda").view(1024, -1).t(),
        "cpu": torch.arange(N),
        "runs": [torch.full((64,), i, device="cuda") for i in range(50)],
        "scalar": torch.tensor(3.5, device="cuda", dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, device="cuda"),
    }
    current = torch.cuda.current_device()
    got = consumer.pull(producer.publish("a", payload), device=device)
    assert torch.cuda.current_device() == current
    want_device = torch.device(device or place).type
    for name in ("gpu", "strided", "cpu", "scalar", "empty"):
        assert got[name].device.type == want_device
        assert torch.equal(got[name].cpu(), payload[name].cpu())  # type: ignore[attr-defined]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got["runs"], payload["runs"], strict=True))


def test_a_stream_is_waited_for(pair: tuple[Producer, Consumer]) -> None:
    producer, consumer = pair
    side = torch.cuda.Stream()
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        delay()
        x.fill_(7.0)
    manifest = producer.publish("a", {"x": x}, stream=side)
    assert torch.cuda.current_stream() != side
    assert torch.equal(consumer.pull(manifest, device="cpu")["x"], torch.full((N,), 7.0))


def test_results_are_complete_although_their_stream_was_busy(pair: tuple[Producer, Consumer]) -> None:
    """The landing memory and the slot may be used again as soon as pull() has returned."""
    producer, consumer = pair
    results = []
    for turn in range(8):
        delay()
        manifest = producer.publish("a", {"x": torch.full((N,), float(turn))}, timeout=10)
        results.append(consumer.pull(manifest, device="cuda")["x"])
        assert producer.wait_released("a", 10)
    for turn, result in enumerate(results):
        assert torch.equal(result.cpu(), torch.full((N,), float(turn)))


def test_checksums_of_a_pool_on_the_device(place: str) -> None:
    options = {"device": place, "backend_options": OPTIONS}
    with (
        Producer("16MiB", checksum="xxh3", access="served", **options) as producer,  # type: ignore[arg-type]
        Consumer("16MiB", **options) as consumer,  # type: ignore[arg-type]
    ):
        x = torch.arange(1000, device="cuda")
        assert consumer.pull(producer.publish("a", {"x": x}), device="cuda")["x"].equal(x)


def test_borrowed_views_are_where_the_bytes_are(pair: tuple[Producer, Consumer], place: str) -> None:
    producer, consumer = pair
    manifest = producer.publish("a", {"x": torch.arange(1000)})
    with consumer.borrow(manifest, device=place) as borrowed:
        assert borrowed["x"].device.type == place
        assert borrowed["x"].sum().item() == 499_500
    assert producer.wait_released("a", 10)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="is not there"):
        Producer("1MiB", device=f"cuda:{torch.cuda.device_count()}")


def test_a_stream_of_another_device(pair: tuple[Producer, Consumer]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    producer, _ = pair
    with pytest.raises(UsageError, match="stream is on cuda:1"):
        producer.publish("a", {"x": torch.ones(3, device="cuda:0")}, stream=torch.cuda.Stream("cuda:1"))
    assert producer.statistics().allocated_nbytes == 0
