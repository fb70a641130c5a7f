# SPDX-License-Identifier: Apache-2.0
"""Payloads of gibibytes between two real processes; a file of its own, since it takes minutes."""

from __future__ import annotations

import payloads
import peers
import psutil
import pytest
import torch
from payloads import GIB, KIB, MIB

from tensorferry.manifest import read_manifest

CHUNK = 64 * MIB


@pytest.mark.parametrize("access", ["served", "mapped"])
def test_a_gibibyte_from_a_pool_of_its_size(two, access):
    """kvcache-ai/Mooncake#364, #3503: a large buffer was registered in part only, without a word."""
    producer, consumer = two
    producer.call(peers.open_producer, GIB, access=access)
    consumer.call(peers.open_consumer, GIB, access=access)
    manifest = producer.call(peers.publish, "large", payloads.of_size, GIB)
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, GIB) == ""
    peers.close_both(two)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("library", "access"),
    [("wheel", "served"), ("system", "rdma"), ("wheel", "mapped")],  # our sums are the same with each library
    indirect=["library"],
)
def test_more_than_four_gibibytes(two, access):
    if psutil.virtual_memory().available < 18 * GIB:
        pytest.skip("needs 18 GiB of free memory: two pools, the source and the result")
    producer, consumer = two
    nbytes = 4 * GIB + 2 * MIB + 1
    producer.call(peers.open_producer, nbytes + 64 * KIB, access=access)
    consumer.call(peers.open_consumer, nbytes + 64 * KIB if access != "mapped" else "1MiB", access=access)
    manifest = producer.call(publish_chunks, nbytes)
    assert read_manifest(manifest).nbytes == nbytes
    assert consumer.call(pull_chunks, manifest) == []
    peers.close_both(two)


def publish_chunks(namespace, nbytes):
    """Publish one large tensor, random in each chunk, without a second copy of it around."""
    whole = torch.empty(nbytes, dtype=torch.uint8)
    for number, chunk in enumerate(whole.split(CHUNK)):
        chunk.copy_(payloads.random_bytes(len(chunk), number))
    return namespace.producer.publish("huge", {"x": whole})


def pull_chunks(namespace, manifest):
    """Return the numbers of the chunks that differ."""
    chunks = namespace.consumer.pull(manifest)["x"].split(CHUNK)
    return [
        number
        for number, chunk in enumerate(chunks)
        if not torch.equal(chunk, payloads.random_bytes(len(chunk), number))
    ]
