# SPDX-License-Identifier: Apache-2.0
"""What the device lets a peer do that calls UCX by hand, and what it does not."""

from __future__ import annotations

import lane
import payloads
import peers
import psutil
import pytest
from payloads import KIB, MIB

from tensorferry.backends.ucx_offers import RdmaKey
from tensorferry.manifest import read_manifest

pytestmark = lane.needs_rdma

POOL = MIB


@pytest.fixture
def attacker(wire):
    """A process that UCX may end; it is killed after the test."""
    with wire.far.process() as one:
        yield one


@pytest.fixture(scope="module")
def given(wire):
    """A manifest of a producer."""
    wire.open(POOL, checksum="xxh3")
    return wire.producer.call(peers.publish, "given", payloads.of_size, 64 * KIB, lease=600)


@pytest.fixture
def target(wire, given):
    """The same; after the test its producer must still serve."""
    yield given
    found = wire.consumer.call(peers.pull_and_compare, given, payloads.of_size, 64 * KIB, release=False)
    assert found == ""
    wire.send("honest", payloads.of_size, 100 * KIB)


def rdma_of(manifest):
    """Return the address and the keys of the rdma offer."""
    offer = next(one for one in read_manifest(manifest).peer.offers if one.access == "rdma")
    return offer.address, RdmaKey.parse(offer.key)


def open_raw(namespace, end, address):
    from tensorferry import _transport
    from tensorferry.backends.ucx_native import defaults_of, load_library

    context = _transport.Context.create(
        load_library(), defaults=defaults_of(load_library()), options=end.options, remote_memory=True
    )
    namespace.memory = _transport.Memory.allocate(POOL)
    namespace.region = _transport.MemoryRegion.create(context, namespace.memory, _transport.MemoryType.HOST)
    namespace.worker = _transport.Worker.create(context)
    namespace.endpoint = namespace.worker.connect(address)


def read_raw(namespace, ticket, key, first, nbytes, control):
    """Read by hand with a key that claims to reach anywhere; return the status and what came."""
    import torch

    from tensorferry import _transport

    pool = namespace.endpoint.unpack(key, first, 1 << 40)
    word = namespace.endpoint.unpack(control.key, control.address, control.nbytes)
    read = namespace.endpoint.read_remote(
        ticket.index,
        ticket.generation,
        ticket.token,
        0,
        nbytes,
        [(0, 0, nbytes)],
        namespace.region,
        pool,
        word,
    )
    status = 0
    try:
        assert read.wait(30.0), "no answer"
    except _transport.TransportError as error:
        status = error.status
    return status, bytes(torch.utils.dlpack.from_dlpack(namespace.memory.array())[:nbytes].tolist())


def read_slot(attacker, wire, manifest, key, first, nbytes):
    address, keys = rdma_of(manifest)
    attacker.call(open_raw, wire.far, address)
    return attacker.call(read_raw, read_manifest(manifest).ticket, key, first, nbytes, keys.control)


def test_the_true_key_reads_its_region(wire, target, attacker):
    """The tests below would be worth nothing if the raw client could not read at all."""
    keys, ticket = rdma_of(target)[1], read_manifest(target).ticket
    status, came = read_slot(
        attacker, wire, target, keys.pool.key, keys.pool.address + ticket.offset, 64 * KIB
    )
    assert status == 0
    assert came == bytes(payloads.random_bytes(64 * KIB).tolist())


@pytest.mark.parametrize("where", ["before", "across the end", "after"])
def test_a_read_outside_the_region_is_refused_by_the_device(wire, target, attacker, where):
    pool = rdma_of(target)[1].pool
    first = {
        "before": pool.address - 4 * KIB,
        "across the end": pool.address + pool.nbytes - 2 * KIB,
        "after": pool.address + pool.nbytes,
    }[where]
    status, came = read_slot(attacker, wire, target, pool.key, first, 4 * KIB)
    assert status < 0
    assert not any(came)


def test_a_read_with_another_regions_key_is_refused_by_the_device(wire, target, attacker):
    """That of the control block, which every consumer has as well."""
    keys = rdma_of(target)[1]
    status, came = read_slot(attacker, wire, target, keys.control.key, keys.pool.address, 4 * KIB)
    assert status < 0
    assert not any(came)


def test_what_the_holder_of_a_key_writes_is_found_by_the_checksum(wire, target, attacker):
    """InfiniBand devices register memory for writing too, whatever is asked for (docs/security.md)."""
    address, keys = rdma_of(target)
    manifest = wire.producer.call(peers.publish, "altered", payloads.of_size, 64 * KIB, 3)
    place = keys.pool.address + read_manifest(manifest).ticket.offset + 4000
    assert attacker.call(write_raw, wire.far, address, keys.pool.key, place, b"foreign bytes") == 0
    wire.consumer.start(peers.pull, manifest)
    with pytest.raises(peers.RemoteError, match=r"IntegrityError.*'x'"):
        wire.consumer.result()


def write_raw(namespace, end, address, key, target, data):
    import raw_ucx

    return raw_ucx.write(end.options, address, key, target, data)


def test_an_rdma_producer_cannot_be_reached_over_tcp(wire, target, attacker):
    """Over tcp UCX would emulate reads, of any address, for whoever reaches the port."""
    pid = wire.producer.pid
    assert [one for one in psutil.Process(pid).net_connections("inet") if one.laddr] == []
    address, _ = rdma_of(target)
    with pytest.raises(peers.RemoteError, match="TransportError"):
        attacker.call(connect_by_tcp, address)


def connect_by_tcp(namespace, address):
    from tensorferry import _transport
    from tensorferry.backends.ucx_native import defaults_of, load_library

    context = _transport.Context.create(
        load_library(), defaults=defaults_of(load_library()), options={"TLS": "tcp"}, remote_memory=True
    )
    worker = _transport.Worker.create(context)
    assert worker.connect(address).hello(bytes(16)).wait(10.0)


def test_the_rdma_worker_of_auto_does_not_offer_tcp_either(wire):
    """It serves by another worker, without remote memory access."""
    wire.producer.call(lane.open_producer, wire.near, POOL, access="auto", backend_options={})
    manifest = wire.producer.call(peers.publish, "a", dict)
    offers = {one.access: one.address for one in read_manifest(manifest).peer.offers}
    with wire.far.process() as one, pytest.raises(peers.RemoteError, match="TransportError"):
        one.call(connect_by_tcp, offers["rdma"])
