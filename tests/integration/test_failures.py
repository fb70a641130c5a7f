# SPDX-License-Identifier: Apache-2.0
"""Leases that end, and peers that die, stop and come back, over real UCX.

Times are asserted only with so much room that a busy machine does not matter.
"""

from __future__ import annotations

import signal
import time

import payloads
import peers
import pytest
from payloads import KIB, MIB

from tensorferry.manifest import read_manifest

MODES = ["served", "rdma", "mapped", peers.NIXL]
LOST = ("PeerLostError", "ConnectError")


@pytest.fixture(scope="module")
def consumer(library):
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


@pytest.fixture
def victim(library):
    """A process that the test may kill or stop."""
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


def fails(peer, *kinds):
    """The function that was started must raise one of these errors."""
    with pytest.raises(peers.RemoteError) as caught:
        peer.result(60)
    assert caught.value.kind in kinds, caught.value
    return caught.value


# Leases


def test_a_late_pull_never_gets_the_bytes_of_the_next_request(mode):
    """vllm-project/vllm#21570: the producer freed by its timeout, and the consumer read what came next."""
    mode.producer.call(peers.open_producer, "64KiB", access=mode.access)
    old = mode.producer.call(peers.publish, "old", payloads.of_size, 64 * KIB, 1, lease=1.5)
    mode.consumer.call(peers.pull_and_compare, old, payloads.of_size, 64 * KIB, 1, release=False)
    assert mode.producer.call(peers.wait_released, "old", 10)
    new = mode.producer.call(peers.publish, "new", payloads.of_size, 64 * KIB, 2)
    mode.consumer.start(peers.pull, old)
    assert "request 'old'" in fails(mode.consumer, "LeaseExpiredError").message
    assert mode.consumer.call(peers.pull_and_compare, new, payloads.of_size, 64 * KIB, 2) == ""


def test_a_revoked_publication_is_gone(mode):
    mode.producer.call(peers.open_producer, "1MiB", access=mode.access)
    manifest = mode.producer.call(peers.publish, "a", payloads.of_size, KIB)
    assert mode.producer.call(peers.revoke, "a")
    for _ in range(2):
        mode.consumer.start(peers.pull, manifest)
        assert "revoked" in fails(mode.consumer, "LeaseRevokedError").message


def test_a_released_publication_is_not_called_revoked(mode):
    mode.producer.call(peers.open_producer, "1MiB", access=mode.access)
    manifest = mode.producer.call(peers.publish, "a", payloads.of_size, KIB)
    mode.consumer.call(peers.pull, manifest)
    assert mode.producer.call(peers.wait_released, "a", 10)
    mode.consumer.start(peers.pull, manifest)
    fails(mode.consumer, "LeaseExpiredError")


def test_a_revoked_publication_whose_slot_is_used_again_is_never_the_next_one(mode):
    """The reason is forgotten then; that the bytes are not the manifest's is not."""
    mode.producer.call(peers.open_producer, "64KiB", access=mode.access)
    old = mode.producer.call(peers.publish, "old", payloads.of_size, KIB, 1)
    assert mode.producer.call(peers.revoke, "old")
    mode.producer.call(use_every_slot, 300)
    mode.consumer.start(peers.pull, old)
    fails(mode.consumer, "LeaseExpiredError")


def use_every_slot(namespace, count):
    for turn in range(count):
        namespace.producer.publish(f"next {turn}", {}, timeout=10)
        namespace.producer.revoke(f"next {turn}")


def test_a_slot_stays_until_its_readers_have_finished(mode):
    """Pull, revoke and publish anew into the same memory: whole data of the right request, or an error.

    The reference frees a slot at an abort, while it may still be read.
    """
    mode.producer.call(peers.open_producer, "32MiB", access=mode.access)
    mode.producer.call(prepare, 30 * MIB)
    outcomes = {"": 0, "LeaseRevokedError": 0}
    for turn in range(20):
        manifest = mode.producer.call(peers.publish, "a", payloads.of_size, 30 * MIB, turn, timeout=10)
        mode.consumer.start(peers.pull_and_compare, manifest, payloads.of_size, 30 * MIB, turn)
        time.sleep(turn / 1000)
        mode.producer.call(replace)
        try:
            outcomes[mode.consumer.result()] += 1
        except peers.RemoteError as error:
            outcomes[error.kind] += 1
    assert sum(outcomes.values()) == 20


def test_memory_that_is_still_read_is_not_lent_to_others(consumer, victim):
    """sgl-project/sglang#35049, #24580: an abort freed memory in mid-transfer, and others wrote there.

    The consumer is stopped with more on its way than sockets hold; then the publication is taken back.
    """
    producer = consumer
    producer.call(peers.open_producer, "64MiB", access="served")
    victim.call(peers.open_consumer, "64MiB", access="served")
    manifest = producer.call(peers.publish, "a", payloads.of_size, 48 * MIB)
    victim.call(peers.pull, manifest, release=False)
    producer.signal(signal.SIGSTOP)
    victim.start(peers.pull_and_compare, manifest, payloads.of_size, 48 * MIB)
    time.sleep(0.3)
    victim.signal(signal.SIGSTOP)
    producer.signal(signal.SIGCONT)
    time.sleep(0.3)
    producer.call(peers.revoke, "a")
    assert producer.call(peers.statistics, "producer")["draining"] == 1, "nothing is being read"
    read = read_manifest(manifest).ticket
    lent = producer.call(offsets_of_a_hundred, 8 * MIB)
    assert len(lent) == 100
    assert all(offset + 8 * MIB <= read.offset or offset >= read.offset + read.nbytes for offset in lent)
    victim.signal(signal.SIGCONT)
    assert victim.result() == "", "bytes that were not the publication's"
    assert producer.call(peers.wait_released, "a", 20)
    producer.call(peers.publish, "b", payloads.of_size, 60 * MIB)


def offsets_of_a_hundred(namespace, nbytes):
    """Publish and take back a hundred times; return where in the pool each was."""
    other, offsets = payloads.of_size(nbytes, 1), []
    for turn in range(100):
        manifest = namespace.producer.publish(f"other {turn}", other)
        offsets.append(read_manifest(manifest).ticket.offset)
        namespace.producer.revoke(f"other {turn}")
    return offsets


def prepare(namespace, nbytes):
    namespace.other = payloads.of_size(nbytes, 1000)


def replace(namespace):
    """Take "a" back and publish into the one slot that the pool has room for."""
    namespace.producer.revoke("a")
    namespace.producer.publish("b", namespace.other, timeout=10)
    namespace.producer.revoke("b")


# Peers that are lost


@pytest.mark.parametrize("access", ["served", "rdma", peers.NIXL])
def test_killing_the_producer_ends_a_pull(consumer, victim, access):
    victim.call(peers.open_producer, "64MiB", access=access)
    consumer.call(peers.open_consumer, "64MiB", access=access)
    manifest = victim.call(peers.publish, "a", payloads.of_size, 32 * MIB)
    consumer.call(peers.pull, manifest, release=False)
    victim.signal(signal.SIGSTOP)  # so that the pull is surely running when the end comes
    consumer.start(peers.pull, manifest)
    time.sleep(0.3)
    victim.kill()
    error = fails(consumer, "PeerLostError")
    assert "request 'a' of producer" in error.message
    consumer.start(peers.pull, manifest)
    fails(consumer, *LOST)


def test_killing_the_producer_ends_mapped_pulls(consumer, victim):
    victim.call(peers.open_producer, "64MiB", access="mapped")
    consumer.call(peers.open_consumer, "1MiB", access="mapped")
    manifest = victim.call(peers.publish, "a", payloads.of_size, 32 * MIB)
    consumer.start(peers.pull_until_it_fails, manifest, 30.0)
    time.sleep(0.3)
    victim.kill()
    fails(consumer, "PeerLostError")
    consumer.start(peers.pull, manifest)
    fails(consumer, *LOST)


@pytest.mark.parametrize("access", ["served", "mapped", peers.NIXL])
def test_a_restarted_producer_is_reached_by_the_same_consumer(consumer, library, access):
    """ai-dynamo/nixl#795: nobody could use a restarted producer before everybody was restarted."""
    consumer.call(peers.open_consumer, "16MiB", access=access)
    for turn in range(2):
        with peers.peer(TENSORFERRY_UCX=library) as producer:
            producer.call(peers.open_producer, "16MiB", access=access)
            manifest = producer.call(peers.publish, "a", payloads.of_size, MIB, turn)
            assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, MIB, turn) == ""
            producer.kill()


@pytest.mark.parametrize("access", ["served", "rdma", peers.NIXL])
def test_a_stopped_producer_costs_no_more_than_the_timeout(consumer, victim, access):
    """ai-dynamo/nixl#2047: a peer that lived and was stuck was waited for without any limit."""
    victim.call(peers.open_producer, "64MiB", access=access)
    consumer.call(peers.open_consumer, "64MiB", access=access)
    manifest = victim.call(peers.publish, "a", payloads.of_size, 32 * MIB)
    consumer.call(peers.pull, manifest, release=False)
    victim.signal(signal.SIGSTOP)
    started = time.monotonic()
    consumer.start(peers.pull, manifest, timeout=1.0)
    fails(consumer, "TransferTimeoutError")
    assert 0.9 < time.monotonic() - started < 5
    victim.signal(signal.SIGCONT)
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, 32 * MIB) == ""
    end = time.monotonic() + 20
    while consumer.call(peers.statistics, "consumer")["allocated_nbytes"]:
        assert time.monotonic() < end, "the landing memory of the pull that timed out never came back"
        time.sleep(0.05)


def test_a_read_given_up_does_not_close_the_consumer_for_the_next(consumer, victim):
    """Giving it up closes its connection, and a read posted at that moment must connect anew."""
    victim.call(peers.open_producer, "64MiB", access="rdma")
    consumer.call(peers.open_consumer, "64MiB", access="rdma")
    manifest = victim.call(peers.publish, "a", payloads.of_size, 32 * MIB)
    outcomes = [outcome for _ in range(20) for outcome in consumer.call(give_up_and_read, manifest)]
    assert set(outcomes) == {"TransferCancelledError", "ConnectionGivenUpError"}
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, 32 * MIB) == ""


def give_up_and_read(namespace, manifest):
    """Cancel a read that is under way and post another before the connection is closed for it."""
    from tensorferry import TensorferryError, read_manifest, steps
    from tensorferry.arguments import Deadline
    from tensorferry.backends.base import Span

    ticket, reader = read_manifest(manifest).ticket, namespace.consumer._receiver._reader
    connection = steps.run(reader.connect(read_manifest(manifest).peer, "auto", Deadline(5.0)))
    first = connection.read(ticket, [Span(0, 0, 16 * MIB)])
    first.cancel()
    outcomes = []
    for post in (lambda: first, lambda: connection.read(ticket, [Span(0, 16 * MIB, 8)])):
        try:
            post().wait(5.0)
        except TensorferryError as error:
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.parametrize("access", MODES)
def test_a_closed_producer_is_not_pulled_from(consumer, victim, access):
    victim.call(peers.open_producer, "1MiB", access=access)
    consumer.call(peers.open_consumer, "1MiB", access=access)
    first = victim.call(peers.publish, "a", payloads.of_size, KIB)
    second = victim.call(peers.publish, "b", payloads.of_size, KIB)
    consumer.call(peers.pull, first)
    victim.call(peers.close, "producer")
    for _ in range(2):
        consumer.start(peers.pull, second, timeout=10)
        fails(consumer, *LOST)


def test_a_consumer_that_dies_costs_its_leases_only(consumer, victim):
    consumer.call(peers.open_producer, "1MiB", access="served")
    victim.call(peers.open_consumer, "1MiB", access="served")
    kept = consumer.call(peers.publish, "kept", payloads.of_size, KIB, lease=1.0)
    victim.call(peers.pull, kept, release=False)
    victim.kill()
    assert consumer.call(peers.wait_released, "kept", 20)
    statistics = consumer.call(peers.statistics, "producer")
    assert (statistics["expired"], statistics["allocated_nbytes"]) == (1, 0)


def test_a_consumer_that_dies_in_mid_read_costs_its_lease_only(consumer, victim):
    """It is stopped first, with more on its way than sockets hold, so that it surely dies in mid-read."""
    producer = consumer
    producer.call(peers.open_producer, "64MiB", access="served")
    victim.call(peers.open_consumer, "64MiB", access="served")
    manifest = producer.call(peers.publish, "a", payloads.of_size, 48 * MIB)
    victim.call(peers.pull, manifest, release=False)
    producer.signal(signal.SIGSTOP)
    victim.start(peers.pull, manifest)
    time.sleep(0.3)
    victim.signal(signal.SIGSTOP)
    producer.signal(signal.SIGCONT)
    time.sleep(0.3)
    producer.call(peers.revoke, "a")
    assert producer.call(peers.statistics, "producer")["draining"] == 1, "nothing is being read"
    victim.kill()
    assert producer.call(peers.wait_released, "a", 20)
    producer.call(peers.publish, "b", payloads.of_size, 60 * MIB)  # the pool is whole again


def test_a_consumer_that_stops_in_a_pull_holds_its_slot_for_a_bounded_time(consumer, victim, library):
    """Its lease ends; its read is cut off; others notice nothing; it gets no bytes when it wakes."""
    consumer.call(peers.open_producer, "320MiB", access="served")
    victim.call(peers.open_consumer, "256MiB", access="served")
    with peers.peer(TENSORFERRY_UCX=library) as other:
        other.call(peers.open_consumer, "16MiB", access="served")
        small = consumer.call(peers.publish, "small", payloads.of_size, MIB, 7, lease=600)
        for turn in range(20):
            name = f"large {turn}"
            # More than the buffers of a socket hold, so that it cannot arrive while nobody receives.
            manifest = consumer.call(peers.publish, name, payloads.of_size, 192 * MIB, turn, lease=2.0)
            victim.call(peers.pull, small, release=False)
            victim.start(peers.pull_and_compare, manifest, payloads.of_size, 192 * MIB, turn, timeout=60)
            time.sleep(0.03 * (turn + 1))
            victim.signal(signal.SIGSTOP)
            time.sleep(3.0)
            if consumer.call(peers.statistics, "producer")["draining"]:
                break
            victim.signal(signal.SIGCONT)
            assert victim.result() == ""
        else:
            pytest.fail("the consumer was never stopped in the middle of a pull")
        ends = time.monotonic() + 30
        while not consumer.call(peers.wait_released, name, 0):
            assert time.monotonic() < ends, "the slot is still held"
            assert other.call(peers.pull_and_compare, small, payloads.of_size, MIB, 7, release=False) == ""
        consumer.call(peers.publish, "next", payloads.of_size, 192 * MIB, 1000)
        victim.signal(signal.SIGCONT)
        fails(victim, "LeaseExpiredError", "PeerLostError")
        assert victim.call(peers.pull_and_compare, small, payloads.of_size, MIB, 7) == ""
