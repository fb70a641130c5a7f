# SPDX-License-Identifier: Apache-2.0
"""Peers that die or stop, links that go down, and limits, with RDMA devices in between.

Soft-RoCE takes UCX's 7 retries for "for ever", so where the end of retries is wanted fewer are set.
"""

from __future__ import annotations

import signal
import time

import lane
import payloads
import peers
import pytest
from payloads import KIB, MIB

pytestmark = lane.needs_rdma

IMPATIENT = {"RC_RETRY_COUNT": "4", "RC_TIMEOUT": "300ms"}
BOUNDED = ("PeerLostError", "ConnectError", "TransferTimeoutError")


@pytest.fixture
def victim(wire):
    """A process at the producers' end that the test may kill or stop."""
    with wire.near.process() as one:
        yield one


@pytest.fixture
def reader(wire):
    """A process at the consumers' end of this test's own, killed after it."""
    with wire.far.process() as one:
        yield one


def fails(peer, *kinds, within=60.0):
    """The function that was started must raise one of these errors."""
    with pytest.raises(peers.RemoteError) as caught:
        peer.result(within)
    assert caught.value.kind in kinds, caught.value
    return caught.value


def pull_and_compare_for(namespace, manifest, nbytes, seconds, timeout):
    """Pull again and again; return how often, and what errors there were.  Wrong bytes fail at once."""
    from tensorferry import TensorferryError

    pulls, errors = 0, []
    end = time.monotonic() + seconds
    want = payloads.of_size(nbytes)
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            got = namespace.consumer.pull(manifest, release=False, timeout=timeout)
        except TensorferryError as error:
            errors.append(type(error).__name__)
        else:
            found = peers.difference(got, want)
            assert found == "", found
            pulls += 1
        assert time.monotonic() - began < timeout + 10, "a pull outlived its timeout"
    return pulls, errors


def test_the_device_reads_while_the_producer_is_stopped(wire, victim, reader):
    """One-sided: nothing of the producer's process takes part, which over tcp would have to."""
    victim.call(lane.open_producer, wire.near, "64MiB")
    reader.call(lane.open_consumer, wire.far, "64MiB")
    manifest = victim.call(peers.publish, "a", payloads.of_size, 8 * MIB, lease=600)
    reader.call(peers.pull, manifest, release=False)
    victim.signal(signal.SIGSTOP)
    for _ in range(3):
        assert reader.call(pull_kept, manifest, 8 * MIB) == ""
    victim.signal(signal.SIGCONT)
    assert reader.call(peers.pull_and_compare, manifest, payloads.of_size, 8 * MIB) == ""
    assert victim.call(peers.wait_released, "a", 10)


def pull_kept(namespace, manifest, nbytes):
    got = namespace.consumer.pull(manifest, release=False, timeout=20)
    return peers.difference(got, payloads.of_size(nbytes))


def test_killing_the_producer_ends_a_pull(wire, victim, reader):
    victim.call(lane.open_producer, wire.near, "64MiB")
    options = {**wire.far.options, **IMPATIENT}
    reader.call(lane.open_consumer, wire.far, "64MiB", backend_options=options)
    manifest = victim.call(peers.publish, "a", payloads.of_size, 32 * MIB, lease=600)
    reader.call(peers.pull, manifest, release=False)
    reader.start(peers.pull_until_it_fails, manifest, 60.0)
    time.sleep(1.0)
    victim.kill()
    began = time.monotonic()
    error = fails(reader, "PeerLostError")
    assert time.monotonic() - began < 25, "it was the timeout that ended it"
    assert "request 'a' of producer" in error.message
    reader.start(peers.pull, manifest, timeout=3.0)
    fails(reader, *BOUNDED)


@pytest.mark.slow
def test_a_consumer_that_is_killed_costs_its_leases_only(wire, reader):
    wire.open("64MiB")
    reader.call(lane.open_consumer, wire.far, "64MiB")
    kept = wire.producer.call(peers.publish, "kept", payloads.of_size, 32 * MIB, lease=8.0)
    reader.call(peers.pull, kept, release=False)
    reader.start(peers.pull_until_it_fails, kept, 60.0)
    time.sleep(0.5)
    reader.kill()  # in the middle of a read, by all odds
    wire.send("others", payloads.of_size, 4 * MIB)
    assert wire.producer.call(peers.wait_released, "kept", 20)
    statistics = wire.producer.call(peers.statistics, "producer")
    assert (statistics["expired"], statistics["allocated_nbytes"]) == (1, 0)


def test_a_late_pull_never_gets_the_bytes_of_the_next_request(wire):
    """The device would read them: the generation that is read after them tells."""
    wire.open("64KiB")
    old = wire.producer.call(peers.publish, "old", payloads.of_size, 64 * KIB, 1, lease=600)
    wire.consumer.call(peers.pull, old, release=False)
    assert wire.producer.call(peers.revoke, "old")
    new = wire.producer.call(peers.publish, "new", payloads.of_size, 64 * KIB, 2)
    wire.consumer.start(peers.pull, old)
    fails(wire.consumer, "LeaseRevokedError", "LeaseExpiredError")
    assert wire.consumer.call(peers.pull_and_compare, new, payloads.of_size, 64 * KIB, 2) == ""


@pytest.mark.slow
def test_memory_that_is_replaced_while_it_is_read_is_never_mixed(wire):
    """Whole data of the right request, or an error."""
    wire.open("32MiB")
    wire.producer.call(keep, 14 * MIB)
    outcomes = set()
    for turn in range(8):
        manifest = wire.producer.call(peers.publish, "a", payloads.of_size, 14 * MIB, turn, timeout=20)
        wire.consumer.start(peers.pull_and_compare, manifest, payloads.of_size, 14 * MIB, turn)
        time.sleep(turn * 0.03)
        wire.producer.call(replace)
        try:
            outcomes.add(wire.consumer.result())
        except peers.RemoteError as error:
            outcomes.add(error.kind)
    assert outcomes <= {"", "LeaseRevokedError", "LeaseExpiredError"}
    assert outcomes != {""}, "nothing was ever replaced in time"


def keep(namespace, nbytes):
    namespace.other = payloads.of_size(nbytes, 1000)


def replace(namespace):
    namespace.producer.revoke("a")
    namespace.producer.publish("b", namespace.other, timeout=20)
    namespace.producer.publish("c", namespace.other, timeout=20)
    namespace.producer.revoke("b")
    namespace.producer.revoke("c")


# Links


@pytest.fixture
def cable(wire):
    """The cable of a pair, which is whole again after the test."""
    if lane.MACHINES != "pair":
        pytest.skip("cuts the cable, and in a pair of scripts/rdma_vm.sh nothing else needs it")
    yield [wire.near.device, wire.far.device]
    for device in (wire.near.device, wire.far.device):
        lane.lose(device, 0)
        lane.set_link(device, "up")


def lose_everywhere(cable, percent):
    for device in cable:
        lane.lose(device, percent)


def published(wire, victim, reader, **more):
    """Open both sides, publish 4 MiB, and pull them once."""
    victim.call(lane.open_producer, wire.near, "64MiB")
    reader.call(lane.open_consumer, wire.far, "64MiB", backend_options={**wire.far.options, **more})
    manifest = victim.call(peers.publish, "a", payloads.of_size, 4 * MIB, lease=600)
    reader.call(peers.pull, manifest, release=False)
    return manifest


def test_packets_lost_for_a_moment_cost_time_only(wire, cable, victim, reader):
    manifest = published(wire, victim, reader)
    reader.start(pull_and_compare_for, manifest, 4 * MIB, 8.0, 30.0)
    time.sleep(1.5)
    lose_everywhere(cable, 100)
    time.sleep(1.0)
    lose_everywhere(cable, 0)
    pulls, errors = reader.result(90)
    assert pulls >= 3
    assert errors == []


@pytest.mark.slow
def test_a_wire_that_loses_packets_brings_every_bit(wire, cable, victim, reader):
    manifest = published(wire, victim, reader)
    lose_everywhere(cable, 0.2)
    pulls, errors = reader.call(pull_and_compare_for, manifest, 4 * MIB, 4.0, 30.0)
    assert pulls >= 1
    assert errors == []


@pytest.mark.slow
def test_a_cut_cable_ends_pulls_in_time_and_serves_again_once_mended(wire, cable, victim, reader):
    manifest = published(wire, victim, reader)
    reader.start(pull_and_compare_for, manifest, 4 * MIB, 6.0, 4.0)
    time.sleep(1.0)
    lose_everywhere(cable, 100)
    pulls, errors = reader.result(60)
    assert pulls >= 1
    assert errors, "nothing failed with the cable cut"
    assert set(errors) <= set(BOUNDED)
    lose_everywhere(cable, 0)
    works_again(reader, manifest)


def works_again(reader, manifest):
    end = time.monotonic() + 60
    while True:
        pulls, errors = reader.call(pull_and_compare_for, manifest, 4 * MIB, 0.1, 8.0)
        if pulls:
            break
        assert time.monotonic() < end, f"no pull works any more: {errors}"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_device_taken_down_and_up(wire, cable, victim, reader, side):
    """Errors in time or whole data, and both work afterwards.

    UCX 1.13 may end the process whose own device is down (Soft-RoCE fails its queue pairs, and UCX takes that
    for fatal); then the other lives on, and a new one works.
    """
    manifest = published(wire, victim, reader)
    device = cable[0] if side == "producer" else cable[1]
    reader.start(pull_and_compare_for, manifest, 4 * MIB, 6.0, 4.0)
    time.sleep(1.0)
    lane.set_link(device, "down")
    time.sleep(2.0)
    lane.set_link(device, "up")
    try:
        pulls, errors = reader.result(60)
    except EOFError:
        assert side == "consumer", "the consumer died with a device that is not its own"
    else:
        assert pulls >= 1
        assert set(errors) <= set(BOUNDED)
    with wire.far.process() as other:
        other.call(lane.open_consumer, wire.far, "64MiB")
        try:
            manifest = victim.call(peers.publish, "b", payloads.of_size, 4 * MIB, lease=600)
        except (EOFError, BrokenPipeError):
            assert side == "producer", "the producer died with a device that is not its own"
            return
        works_again(other, manifest)


# Limits


def test_little_locked_memory_is_an_error_that_says_what_to_do(wire, victim):
    """openucx/ucx#6264, #7930: devices lock what they register; without them 64 KiB is enough."""
    victim.call(limit_locked_memory, 64 << 10)
    victim.start(lane.open_producer, wire.near, "64MiB")
    error = fails(victim, "RegistrationError")
    assert "RLIMIT_MEMLOCK" in error.message
    assert "ulimit -l" in error.message
    assert "65536 bytes" in error.message


def limit_locked_memory(namespace, nbytes):
    from test_limits import limit_locked_memory

    limit_locked_memory(namespace, nbytes)
