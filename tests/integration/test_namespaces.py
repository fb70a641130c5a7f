# SPDX-License-Identifier: Apache-2.0
"""Two machines, as far as the network can tell: network namespaces joined by a cable."""

from __future__ import annotations

import os
import shutil
import time

import networks
import payloads
import peers
import pytest
from payloads import KIB, MIB

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2"),
]

ENDED_BY_THE_NETWORK = ("TransferTimeoutError", "PeerLostError", "ConnectError")


@pytest.fixture(scope="module")
def cable():
    with networks.cable() as one:
        yield one


@pytest.fixture(scope="module")
def hosts(cable, library):
    yield from processes_on(cable, library)


def processes_on(cable, library):
    """A process on each of the hosts."""
    with peers.peer(TENSORFERRY_UCX=library) as one, peers.peer(TENSORFERRY_UCX=library) as other:
        one.call(networks.enter_network, cable.hosts[0])
        other.call(networks.enter_network, cable.hosts[1])
        yield one, other


def open_both(hosts, cable, access="served"):
    producer, consumer = hosts
    producer.call(peers.open_producer, "64MiB", access=access, backend_options=cable.options)
    consumer.call(peers.open_consumer, "64MiB", access=access, backend_options=cable.options)


def pull_once_it_works(consumer, manifest, *built_by):
    """Pull over a cable that is good again, which neighbours and TCP may notice a little later."""
    end = time.monotonic() + 60
    while (found := try_to_pull(consumer, manifest, *built_by, timeout=20.0)) in ENDED_BY_THE_NETWORK:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    assert found == ""


def try_to_pull(consumer, manifest, *built_by, timeout):
    """Return the name of the error, or where the result differs, '' if nowhere."""
    try:
        found: str = consumer.call(peers.pull_and_compare, manifest, *built_by, timeout=timeout)
    except peers.RemoteError as error:
        return error.kind
    return found


def ends_by(consumer, seconds, *kinds):
    """The pull that was started must fail, in about its time."""
    started = time.monotonic()
    with pytest.raises(peers.RemoteError) as caught:
        consumer.result(60)
    assert caught.value.kind in kinds, caught.value
    assert time.monotonic() - started < seconds + 30


@pytest.mark.parametrize("access", ["served", "rdma"])
def test_tensors_cross_a_cable(hosts, cable, access):
    producer, consumer = hosts
    open_both(hosts, cable, access)
    for build, args in ((payloads.nested, ()), (payloads.every_dtype, ()), (payloads.of_size, (32 * MIB,))):
        manifest = producer.call(peers.publish, "a", build, *args)
        assert consumer.call(peers.pull_and_compare, manifest, build, *args) == ""
        assert producer.call(peers.wait_released, "a", 10)


def test_an_unreachable_producer_is_a_connection_error(hosts, cable):
    """Its address is on a loopback device that is another host's."""
    producer, consumer = hosts
    open_both(hosts, cable)
    producer.call(peers.open_producer, "1MiB", access="served", backend_options=peers.LOOPBACK)
    manifest = producer.call(peers.publish, "a", payloads.nested)
    consumer.start(peers.pull, manifest, timeout=5.0)
    ends_by(consumer, 5.0, "ConnectError", "TransferTimeoutError")


def test_a_cut_cable_ends_a_pull_by_its_timeout_and_heals(hosts, cable):
    producer, consumer = hosts
    open_both(hosts, cable)
    manifest = producer.call(peers.publish, "a", payloads.of_size, MIB)
    consumer.call(peers.pull, manifest, release=False)
    cable.cut()
    try:
        consumer.start(peers.pull, manifest, timeout=1.0)
        ends_by(consumer, 1.0, "TransferTimeoutError", "PeerLostError")
    finally:
        cable.mend()
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, MIB) == ""


@pytest.mark.parametrize("access", ["served", "rdma"])
def test_a_cable_cut_in_mid_transfer(hosts, cable, access):
    """The cable is slow, so that it is cut when some of the bytes have crossed it."""
    producer, consumer = hosts
    slow = ["dev", cable.device, "root", "tbf", "rate", "200mbit", "burst", "1mb", "latency", "100ms"]
    networks.needed("tc", "-n", cable.hosts[0], "qdisc", "replace", *slow)
    try:
        open_both(hosts, cable, access)
        manifest = producer.call(peers.publish, "a", payloads.of_size, 48 * MIB)
        before = cable.received(1)
        consumer.start(peers.pull, manifest, timeout=3.0)
        end = time.monotonic() + 2
        while cable.received(1) - before < 4 * MIB and time.monotonic() < end:
            time.sleep(0.02)
        cable.cut()
        try:
            assert 4 * MIB <= cable.received(1) - before < 40 * MIB, "it is not in mid-transfer"
            ends_by(consumer, 3.0, "TransferTimeoutError", "PeerLostError")
        finally:
            cable.mend()
    finally:
        networks.needed("tc", "-n", cable.hosts[0], "qdisc", "del", "dev", cable.device, "root")
    pull_once_it_works(consumer, manifest, payloads.of_size, 48 * MIB)
    end = time.monotonic() + 30
    while consumer.call(peers.statistics, "consumer")["allocated_nbytes"]:
        assert time.monotonic() < end, "the landing memory of the pull that was cut never came back"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_host_that_is_gone_is_found_in_seconds_without_anybody_asking(hosts, cable):
    """The connection is idle, and the cable cut without a word; UCX's own settings take 16 seconds."""
    producer, consumer = hosts
    open_both(hosts, cable)
    manifest = producer.call(peers.publish, "a", payloads.of_size, MIB, lease=600.0)
    consumer.call(peers.pull, manifest, release=False)
    assert consumer.call(broken_connections) == [False]
    cable.cut()
    try:
        end = time.monotonic() + 30
        while not all(consumer.call(broken_connections)):
            assert time.monotonic() < end, "the connection still counts as whole"
            time.sleep(0.2)
    finally:
        cable.mend()
    pull_once_it_works(consumer, manifest, payloads.of_size, MIB)


def broken_connections(namespace):
    reader = namespace.consumer._receiver._reader
    return [connection.broken for connection in reader._connections.values()]


@pytest.fixture(scope="module")
def lossy():
    with networks.lossy_cable() as one:
        yield one


@pytest.fixture
def lossy_hosts(lossy, library):
    yield from processes_on(lossy, library)


@pytest.mark.slow
def test_pulls_over_a_cable_that_loses_a_third_bring_the_right_bytes_or_end_in_time(lossy_hosts, lossy):
    """30 % lost each way, 10 ms of delay; each pull has a time that some of them need and some do not."""
    producer, consumer = lossy_hosts
    open_both(lossy_hosts, lossy)
    outcomes = []
    lossy.lose(0.3, 0.01)
    try:
        for turn in range(8):
            built_by = payloads.of_size, 16 * KIB, turn
            manifest = producer.call(peers.publish, str(turn), *built_by, timeout=10)
            started = time.monotonic()
            outcomes.append(try_to_pull(consumer, manifest, *built_by, timeout=6.0))
            assert time.monotonic() - started < 6.0 + 30
    finally:
        lossy.lose(0.0, 0.0)
    assert set(outcomes) <= {"", *ENDED_BY_THE_NETWORK}
    assert "" in outcomes
    manifest = producer.call(peers.publish, "whole", payloads.of_size, 8 * MIB, timeout=30)
    pull_once_it_works(consumer, manifest, payloads.of_size, 8 * MIB)
