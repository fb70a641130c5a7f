# SPDX-License-Identifier: Apache-2.0
"""Tensors between two real processes, by every access mode and both UCX libraries."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import payloads
import peers
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payloads import KIB, MIB

from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.manifest import read_manifest

# Where UCX or this library changes its ways: cache lines, pages, eager and rendezvous limits,
# tcp segments of 256 and 512 KiB, results that share memory, spans.
EDGES = [1, 8, 64, 4 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 16 * MIB]
SIZES = sorted({size + more for size in EDGES for more in (-1, 0, 1)})


@pytest.mark.parametrize(
    "build", [payloads.every_dtype, payloads.odd_floats, payloads.every_layout, payloads.nested]
)
def test_every_bit_arrives(route, build):
    """The reference copied to the other process's address inside its own, with both on 127.0.0.1."""
    route.send(build.__name__, build)


@pytest.mark.parametrize("build", [dict, payloads.nested])
def test_borrowed_bits_are_the_same(route, build):
    manifest = route.producer.call(peers.publish, "borrowed", build)
    assert route.consumer.call(peers.borrow_and_compare, manifest, build) == ""
    assert route.producer.call(peers.wait_released, "borrowed", 10)


def test_sizes_around_internal_edges(route):
    for size in SIZES:
        route.send(f"size {size}", payloads.of_size, size, size)


def test_large_payloads_come_in_parts(two):
    """What lands in the pool is copied out while more arrives, where that takes nobody's CPU."""
    producer, consumer = two
    producer.call(peers.open_producer, "128MiB", access="rdma")
    consumer.call(peers.open_consumer, "128MiB", access="rdma")
    consumer.call(copy_beside)
    manifest = producer.call(peers.publish, "a", several_large)
    assert consumer.call(peers.pull_and_compare, manifest, several_large) == ""
    assert producer.call(peers.wait_released, "a", 10)
    assert consumer.call(peers.statistics, "consumer")["landing_seconds"] > 0


def copy_beside(namespace):
    from tensorferry import receiving

    receiving._COPIES_BESIDE = True


def several_large():
    return {
        f"t{i}": payloads.random_bytes(nbytes, i) for i, nbytes in enumerate((40 << 20, 77, 9 << 20, 1 << 20))
    }


@pytest.mark.parametrize(
    ("access", "transports"), [("served", ("tcp/lo",)), ("rdma", ("tcp/lo",)), ("mapped", ("memory",))]
)
def test_statistics_say_what_carried_the_bytes_of_each_peer(two, access, transports):
    producer, consumer = two
    producer.call(peers.open_producer, "16MiB", access=access)
    consumer.call(peers.open_consumer, "16MiB", access=access)
    for turn in range(2):
        manifest = producer.call(peers.publish, f"a{turn}", payloads.of_size, MIB)
        assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, MIB) == ""
    (of_peer,) = consumer.call(peers.statistics, "consumer")["peers"]
    assert of_peer == {
        "uid": read_manifest(manifest).peer.uid.hex(),
        "access": access,
        "transports": transports,
        "pulls": 2,
        "bytes_pulled": 2 * MIB,
    }
    peers.close_both(two)


def test_reading_remotely_over_tcp_because_there_is_nothing_else_is_not_passed_over_in_silence(two):
    producer, consumer = two
    producer.call(peers.open_producer, "16MiB", access="rdma")
    consumer.call(peers.open_consumer, "16MiB", access="auto")
    manifest = producer.call(peers.publish, "a", payloads.of_size, KIB)
    (said,) = consumer.call(peers.pull_and_hear, manifest)
    assert (
        "is read by 'rdma' over tcp/lo: not over RDMA, since UCX reaches the peer by no other transport"
        in said
    )
    peers.close_both(two)


def test_empty_payloads_are_released(route):
    """meta-pytorch/monarch#1133: a size of 0 hung."""
    for build in (dict, no_elements):
        route.send(f"empty {build.__name__}", build)


def no_elements():
    return {"x": torch.empty(0, 4096, dtype=torch.bfloat16), "y": [None]}


def test_ten_thousand_small_tensors(mode):
    """ray-project/ray#64205: thousands of views took a thousand times as long as one tensor."""
    manifest = mode.producer.call(peers.publish, "many", payloads.many, 10_000, KIB)
    assert len(manifest) < 1_000_000
    assert mode.consumer.call(peers.pull_and_compare, manifest, payloads.many, 10_000, KIB) == ""
    assert mode.producer.call(peers.wait_released, "many", 10)


_TENSORS = st.tuples(
    st.sampled_from([str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES]),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from(["plain", "transposed", "sliced", "in_list"]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(description=st.lists(_TENSORS, max_size=40))
def test_random_payloads_arrive(mode, description):
    mode.send("random", payloads.described, description)


def test_a_rejected_publication_is_free_at_once(mode):
    """vllm-project/vllm#41269: what was rejected before its transfer stranded for minutes."""
    manifest = mode.producer.call(peers.publish, "rejected", payloads.of_size, MIB)
    before = mode.producer.call(peers.statistics, "producer")
    mode.consumer.call(reject_twice, manifest)
    assert mode.producer.call(peers.wait_released, "rejected", 10)
    after = mode.producer.call(peers.statistics, "producer")
    assert after["rejected"] == before["rejected"] + 1
    assert after["allocated_nbytes"] == before["allocated_nbytes"] - MIB


def reject_twice(namespace, manifest):
    for _ in range(2):
        namespace.consumer.reject(manifest)


@pytest.mark.parametrize("key", [None, b"0123456789abcdef"], ids=["digest", "mac"])
def test_a_manifest_damaged_in_any_byte_never_reaches_ucx(two, key):
    """openucx/ucx#3731, #5868: a bad key or address crashes the process that unpacks it."""
    producer, consumer = two
    producer.call(peers.open_producer, "1MiB", access="rdma", key=key)
    consumer.call(peers.open_consumer, "1MiB", key=key)
    manifest = producer.call(peers.publish, "a", payloads.of_size, 1000)
    refused = consumer.call(pull_damaged, manifest)
    assert sum(refused.values()) == 2 * len(manifest)
    assert refused.keys() <= {"ManifestError", "AuthenticationError", "VersionError"}
    assert consumer.call(peers.statistics, "consumer")["pulls"] == 0
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, 1000) == ""
    peers.close_both(two)


def pull_damaged(namespace, manifest):
    """Pull with each byte changed, and cut off before each; return how often which error was raised."""
    refused = Counter()
    for i, byte in enumerate(manifest):
        for rest in (bytes([byte ^ 1 << i % 8]) + manifest[i + 1 :], b""):
            try:
                namespace.consumer.pull(manifest[:i] + rest)
            except Exception as error:
                refused[type(error).__name__] += 1
    return refused


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("access", ["served", "mapped"])
def test_eight_producers_and_eight_consumers_mix_nothing_up(two, access):
    """vllm-project/vllm#44238, kvcache-ai/Mooncake#2086: under load of mixed sizes data differed."""
    producer, consumer = two
    producer.call(open_eight, "producers", "Producer", access)
    consumer.call(open_eight, "consumers", "Consumer", "auto")
    producer.start(publish_round, 0)
    for turn in range(_ROUNDS):
        manifests = producer.result()
        producer.start(publish_round, turn + 1)  # while these are pulled
        assert consumer.call(pull_round, turn, manifests) == []
    producer.result()
    producer.call(close_eight, "producers")
    consumer.call(close_eight, "consumers")


_ROUNDS = 40  # of 64 payloads each
_MIXED = (16 * KIB, 2_424_832)


def open_eight(namespace, name, kind, access):
    import tensorferry

    make = getattr(tensorferry, kind)
    opened = [make("64MiB", access=access, backend_options=peers.LOOPBACK) for _ in range(8)]
    setattr(namespace, name, opened)
    namespace.threads = ThreadPoolExecutor(8)


def close_eight(namespace, name):
    for one in getattr(namespace, name):
        one.close()
    namespace.threads.shutdown()


def publish_round(namespace, turn):
    """Have each producer publish eight payloads; return the manifests by producer."""

    def work(which):
        producer = namespace.producers[which]
        return [
            producer.publish(f"{turn}-{i}", payloads.of_size(_MIXED[i % 2], seed(turn, which, i)), timeout=60)
            for i in range(8)
        ]

    return list(namespace.threads.map(work, range(8)))


def pull_round(namespace, turn, manifests):
    """Have each consumer pull one payload of each producer; return what was wrong."""

    def work(which):
        wrong = []
        for source in range(8):
            i = (which + source) % 8
            got = namespace.consumers[which].pull(manifests[source][i], timeout=60)
            wrong.append(peers.difference(got, payloads.of_size(_MIXED[i % 2], seed(turn, source, i))))
        return wrong

    return [one for wrong in namespace.threads.map(work, range(8)) for one in wrong if one]


def seed(turn, producer, payload):
    return turn * 64 + producer * 8 + payload


def test_some_names_bring_some_tensors(mode):
    manifest = mode.producer.call(peers.publish, "names", payloads.many, 100, 100 * KIB)
    names = ["t99", "t3", "t4"]
    found = mode.consumer.call(peers.pull_and_compare, manifest, chosen, names, names=names)
    assert found == ""
    assert mode.producer.call(peers.wait_released, "names", 10)


def chosen(names):
    whole = payloads.many(100, 100 * KIB)
    return {name: whole[name] for name in names}


def test_checksums_and_keys_over_the_wire(two):
    options = {"key": b"0123456789abcdef", "checksum": "xxh3"}
    producer, consumer = two
    producer.call(peers.open_producer, "16MiB", **options)
    consumer.call(peers.open_consumer, "16MiB", key=options["key"])
    manifest = producer.call(peers.publish, "a", payloads.every_layout)
    assert consumer.call(peers.pull_and_compare, manifest, payloads.every_layout) == ""
    assert producer.call(peers.wait_released, "a", 10)
    assert producer.call(peers.statistics, "producer")["forged_notices"] == 0
    unsigned = consumer
    unsigned.call(peers.open_consumer, "16MiB")
    with pytest.raises(peers.RemoteError, match="AuthenticationError"):
        unsigned.call(peers.pull, producer.call(peers.publish, "b", dict))
    peers.close_both(two)


def test_one_flipped_byte_is_found_and_named(two, mode_name):
    """A write into the pool after publish, as the holder of an RDMA key could make it.

    sgl-project/sglang#39229: metadata was right, and the bytes were another request's.
    """
    producer, consumer = two
    producer.call(peers.open_producer, "16MiB", access=mode_name, checksum="xxh3")
    consumer.call(peers.open_consumer, "16MiB", access=mode_name)
    manifest = producer.call(peers.publish, "a", payloads.many, 20, 100 * KIB)
    producer.call(flip_a_byte, manifest, "t7")
    with pytest.raises(peers.RemoteError, match=r"IntegrityError.*the bytes of 't7' have the checksum"):
        consumer.call(peers.pull, manifest)
    assert consumer.call(peers.statistics, "consumer")["integrity_failures"] == 1
    assert not producer.call(peers.wait_released, "a", 0)  # the slot is still held
    names = [f"t{i}" for i in range(20) if i != 7]
    assert consumer.call(peers.pull_and_compare, manifest, others_than_t7, names=names) == ""
    peers.close_both(two)


@pytest.fixture(params=["served", "rdma", "mapped"])
def mode_name(request):
    return request.param


def flip_a_byte(namespace, manifest, path):
    """Change the last byte of a tensor where it lies."""
    manifest = read_manifest(manifest)
    spec = next(spec for spec in manifest.tensors if spec.path == path)
    namespace.producer._publisher.pool[manifest.ticket.offset + spec.offset + spec.nbytes - 1] ^= 1


def others_than_t7():
    whole = payloads.many(20, 100 * KIB)
    del whole["t7"]
    return whole


def test_what_was_computed_into_the_pool_arrives(two, mode_name):
    producer, consumer = two
    producer.call(peers.open_producer, "64MiB", access=mode_name)
    consumer.call(peers.open_consumer, "64MiB", access=mode_name)
    for turn in range(3):  # the same memory again
        manifest = producer.call(compute_and_publish, f"turn {turn}", turn)
        assert consumer.call(peers.pull_and_compare, manifest, computed, turn) == ""
        assert producer.call(peers.wait_released, f"turn {turn}", 10)
    peers.close_both(two)


def compute_and_publish(namespace, request_id, turn):
    with namespace.producer.reserve(request_id, 40 * MIB, timeout=10) as reservation:
        y = reservation.empty("y", (300,), torch.bfloat16)
        x = reservation.empty("x", (1024, 1024), torch.float32)
        torch.add(torch.arange(1 << 20).view(1024, 1024), turn, out=x)
        y.fill_(turn)
        return reservation.publish({"nested": [x[10:20], None, (y,)]})


def computed(turn):
    x = (torch.arange(1 << 20).view(1024, 1024) + turn).float()
    return {"nested": [x[10:20], None, (torch.full((300,), turn, dtype=torch.bfloat16),)]}
