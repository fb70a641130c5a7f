# SPDX-License-Identifier: Apache-2.0
"""Tensors read by RDMA devices, between two devices of one host or between two hosts."""

from __future__ import annotations

import asyncio

import lane
import payloads
import peers
import pytest
import torch
from payloads import KIB, MIB

pytestmark = lane.needs_rdma

# Where verbs or UCX change their ways: inline and short sends, one packet, segments, zero copy.
EDGES = [1, 8, 64, KIB, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB]
SIZES = sorted({size + more for size in EDGES for more in (-1, 0, 1)})


@pytest.fixture(scope="module")
def shared(wire):
    """A producer and a consumer for tests that leave them as they were."""
    wire.open("128MiB")
    return wire


def no_elements():
    return {"x": torch.empty(0, 4096, dtype=torch.bfloat16), "y": [None]}


@pytest.mark.parametrize(
    "build",
    [
        payloads.every_dtype,
        payloads.odd_floats,
        payloads.every_layout,
        payloads.nested,
        no_elements,
        dict,
    ],
)
def test_every_bit_arrives(shared, build):
    before = shared.pulls()["rdma"]
    shared.send(build.__name__, build)
    assert shared.pulls()["rdma"] == before + 1


def test_sizes_around_internal_edges(shared):
    assert shared.producer.call(publish_sizes, SIZES) == len(SIZES)
    assert shared.consumer.call(pull_sizes, shared.producer.call(manifests_of_sizes), SIZES) == []
    for size in SIZES:
        assert shared.producer.call(peers.wait_released, f"size {size}", 10)


def publish_sizes(namespace, sizes):
    namespace.manifests = [
        namespace.producer.publish(f"size {size}", payloads.of_size(size, size)) for size in sizes
    ]
    return len(namespace.manifests)


def manifests_of_sizes(namespace):
    return namespace.manifests


def pull_sizes(namespace, manifests, sizes):
    """Return what was wrong."""
    found = (
        peers.difference(namespace.consumer.pull(manifest), payloads.of_size(size, size))
        for manifest, size in zip(manifests, sizes, strict=True)
    )
    return [one for one in found if one]


def test_the_device_carries_the_bytes_and_tcp_does_not(shared):
    """Packets of the device hold 4 KiB of data at most; a segment of tcp 64 KiB."""
    nbytes = 16 * MIB
    manifest = shared.producer.call(peers.publish, "counted", payloads.of_size, nbytes)
    before = shared.traffic()
    assert shared.consumer.call(peers.pull_and_compare, manifest, payloads.of_size, nbytes) == ""
    after = shared.traffic()
    assert after["received"] - before["received"] >= nbytes // (4 * KIB)
    assert after["tcp"] - before["tcp"] < 100, "something large went over tcp"
    assert shared.producer.call(peers.wait_released, "counted", 10)


def test_a_payload_of_many_parts_arrives(shared):
    shared.send("large", payloads.of_size, 40 * MIB + 1)


def test_thousands_of_small_tensors_arrive(shared):
    shared.send("many", payloads.many, 3000, KIB)


def test_borrowed_bits_are_the_same(shared):
    manifest = shared.producer.call(peers.publish, "borrowed", payloads.nested)
    assert shared.consumer.call(peers.borrow_and_compare, manifest, payloads.nested) == ""
    assert shared.producer.call(peers.wait_released, "borrowed", 10)


def test_only_the_bytes_of_chosen_names_cross(shared):
    nbytes = 100 * KIB
    manifest = shared.producer.call(peers.publish, "names", payloads.many, 100, nbytes)
    names = ["t99", "t3", "t4"]
    before = shared.traffic()["received"]
    assert shared.consumer.call(peers.pull_and_compare, manifest, chosen, names, nbytes, names=names) == ""
    packets = shared.traffic()["received"] - before
    assert packets < 100 * nbytes // (4 * KIB) // 4
    assert shared.producer.call(peers.wait_released, "names", 10)


def chosen(names, nbytes):
    whole = payloads.many(100, nbytes)
    return {name: whole[name] for name in names}


def test_only_the_bytes_of_a_slice_cross(shared):
    manifest = shared.producer.call(peers.publish, "slices", matrix)
    before = shared.traffic()["received"]
    found = shared.consumer.call(peers.pull_and_compare, manifest, rows, slices={"x": (slice(100, 164), ...)})
    packets = shared.traffic()["received"] - before
    assert found == ""
    assert packets < 8 * MIB // (4 * KIB) // 4
    manifest = shared.producer.call(peers.publish, "columns", matrix)
    found = shared.consumer.call(
        peers.pull_and_compare, manifest, columns, slices={"x": (..., slice(5, 300))}
    )
    assert found == ""


def matrix():
    return {"x": payloads.tensor(torch.bfloat16, (1024, 4096), 5)}


def rows():
    return {"x": matrix()["x"][100:164].contiguous()}


def columns():
    return {"x": matrix()["x"][:, 5:300].contiguous()}


def test_what_was_computed_into_the_pool_arrives(shared):
    for turn in range(3):  # the same memory again
        manifest = shared.producer.call(compute_and_publish, turn)
        assert shared.consumer.call(peers.pull_and_compare, manifest, computed, turn) == ""
        assert shared.producer.call(peers.wait_released, f"computed {turn}", 10)


def compute_and_publish(namespace, turn):
    specs = {"x": ((256, 1024), torch.float32)}
    with namespace.producer.reserve(f"computed {turn}", specs, timeout=10) as reservation:
        torch.add(torch.arange(1 << 18).view(256, 1024), turn, out=reservation.tensors["x"])
        return reservation.publish()


def computed(turn):
    return {"x": (torch.arange(1 << 18).view(256, 1024) + turn).float()}


def test_pulls_awaited_together(shared):
    manifests = [
        shared.producer.call(peers.publish, f"async {i}", payloads.of_size, 200 * KIB, i) for i in range(16)
    ]
    assert shared.consumer.call(pull_together, manifests, 200 * KIB) == [""] * 16
    for i in range(16):
        assert shared.producer.call(peers.wait_released, f"async {i}", 10)


def pull_together(namespace, manifests, nbytes):
    async def work():
        requests = [namespace.consumer.start_pull(manifest, timeout=30) for manifest in manifests]
        return [await request for request in requests]

    return [peers.difference(got, payloads.of_size(nbytes, i)) for i, got in enumerate(asyncio.run(work()))]


def test_a_request_that_is_cancelled_spoils_nothing(shared):
    manifest = shared.producer.call(peers.publish, "cancelled", payloads.of_size, 48 * MIB)
    assert shared.consumer.call(cancel_and_pull, manifest, 48 * MIB) in (
        ("TransferCancelledError", ""),
        ("", ""),
    )
    assert shared.producer.call(peers.wait_released, "cancelled", 10)


def cancel_and_pull(namespace, manifest, nbytes):
    from tensorferry import TensorferryError

    request = namespace.consumer.start_pull(manifest, timeout=30, release=False)
    request.cancel()
    outcome = ""
    try:
        request.result(30)
    except TensorferryError as error:
        outcome = type(error).__name__
    return outcome, peers.difference(namespace.consumer.pull(manifest), payloads.of_size(nbytes))


@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
def test_both_directions(wire, turned):
    """A process that is a producer and a consumer at once, as a stage of a pipeline is."""
    wire.open()
    one, other = (wire.producer, wire.near), (wire.consumer, wire.far)
    if turned:
        one, other = other, one
    one[0].call(lane.open_producer, one[1], "16MiB")
    other[0].call(lane.open_consumer, other[1], "16MiB")
    manifest = one[0].call(peers.publish, "a", payloads.of_size, 5 * MIB)
    assert other[0].call(peers.pull_and_compare, manifest, payloads.of_size, 5 * MIB) == ""
    assert one[0].call(peers.wait_released, "a", 10)
    peers.close_both((wire.producer, wire.consumer))


def test_checksums_and_keys(wire):
    wire.open(key=b"0123456789abcdef", checksum="xxh3")
    wire.send("a", payloads.every_layout)
    wire.send("b", payloads.of_size, 3 * MIB)
    statistics = wire.producer.call(peers.statistics, "producer")
    assert (statistics["released"], statistics["forged_notices"]) == (2, 0)
    wire.open_consumer()
    with pytest.raises(peers.RemoteError, match="AuthenticationError"):
        wire.consumer.call(peers.pull, wire.producer.call(peers.publish, "c", dict))


def test_a_publication_for_several_consumers_waits_for_all(wire):
    wire.open()
    with wire.far.process() as second, wire.near.process() as third:
        second.call(lane.open_consumer, wire.far, "16MiB")
        third.call(lane.open_consumer, wire.near, "16MiB")
        manifest = wire.producer.call(peers.publish, "all", payloads.of_size, 2 * MIB, consumers=3)
        for one in (wire.consumer, second, third):
            assert not wire.producer.call(peers.wait_released, "all", 0)
            assert one.call(peers.pull_and_compare, manifest, payloads.of_size, 2 * MIB) == ""
        assert wire.producer.call(peers.wait_released, "all", 10)


@pytest.mark.slow
def test_eight_consumers_at_once(wire):
    """Each with endpoints, queue pairs and a registration of its own."""
    wire.producer.call(lane.open_producer, wire.near, "64MiB")
    wire.consumer.call(open_eight, wire.far)
    manifest = wire.producer.call(peers.publish, "eight", payloads.of_size, MIB, consumers=8)
    assert wire.consumer.call(pull_by_eight, manifest, MIB) == [""] * 8
    assert wire.producer.call(peers.wait_released, "eight", 10)
    wire.consumer.call(close_eight)


def open_eight(namespace, end):
    from tensorferry import Consumer

    peers.close(namespace, "consumer")
    namespace.eight = [Consumer("4MiB", access="rdma", backend_options=end.options) for _ in range(8)]


def pull_by_eight(namespace, manifest, nbytes):
    requests = [consumer.start_pull(manifest, timeout=60) for consumer in namespace.eight]
    return [peers.difference(request.result(60), payloads.of_size(nbytes)) for request in requests]


def close_eight(namespace):
    for consumer in namespace.eight:
        consumer.close()


# What ``auto`` chooses


def test_auto_takes_the_device_between_hosts(wire):
    """Library, transports and access are chosen by themselves; on one host the devices are given."""
    near, far = {}, {}
    if lane.MACHINES != "two":
        wire.consumer.call(pretend_another_host)
        near, far = (
            {"NET_DEVICES": f"{end.device}:1,{lane.netdev_of(end.device)}"} for end in (wire.near, wire.far)
        )
    wire.producer.call(lane.open_producer, wire.near, "64MiB", access="auto", backend_options=near)
    wire.consumer.call(lane.open_consumer, wire.far, "64MiB", access="auto", backend_options=far)
    before = wire.traffic()
    wire.send("auto", payloads.of_size, 16 * MIB)
    after = wire.traffic()
    assert wire.pulls() == {"mapped": 0, "rdma": 1, "served": 0}
    assert after["received"] - before["received"] >= 16 * MIB // (4 * KIB)
    assert after["tcp"] - before["tcp"] < 100
    (used,) = wire.consumer.call(peers.statistics, "consumer")["peers"]
    assert f"rc_verbs/{wire.far.device}:1" in used["transports"]


def pretend_another_host(namespace):
    from tensorferry.backends import ucx

    ucx.host_mark = lambda: b"another host    "


def test_served_access_leaves_the_device_alone(wire):
    """Over devices UCX's rendezvous would hand out keys to the whole pool; and the count above counts."""
    wire.producer.call(lane.open_producer, wire.near, "64MiB", access="served", backend_options={})
    wire.consumer.call(lane.open_consumer, wire.far, "64MiB", access="served", backend_options={})
    before = wire.traffic()
    wire.send("served", payloads.of_size, 4 * MIB)
    after = wire.traffic()
    assert wire.pulls()["served"] == 1
    assert after["received"] == before["received"]
    assert after["tcp"] > before["tcp"]


def test_tcp_where_there_is_a_device_is_not_passed_over_in_silence(wire):
    wire.producer.call(lane.open_producer, wire.near, "16MiB", access="served", backend_options={})
    wire.consumer.call(lane.open_consumer, wire.far, "16MiB", access="auto", backend_options={})
    manifest = wire.producer.call(peers.publish, "served", payloads.of_size, MIB)
    (said,) = wire.consumer.call(peers.pull_and_hear, manifest)
    assert "is read by 'served' over tcp/" in said
    assert "not over RDMA, since the producer does not offer that" in said
