# SPDX-License-Identifier: Apache-2.0
"""Several producers and one consumer: what happens to one producer is nothing to the others."""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import time
from contextlib import ExitStack

import networks
import payloads
import peers
import pytest
from payloads import KIB, MIB

from tensorferry.manifest import read_manifest

LOST = ("PeerLostError", "ConnectError")


@pytest.fixture
def consumer(library):
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


def fails(peer, *kinds):
    """The function that was started must raise one of these errors."""
    with pytest.raises(peers.RemoteError) as caught:
        peer.result(60)
    assert caught.value.kind in kinds, caught.value


# Others go on


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("access", ["served", "mapped"])
def test_one_of_four_producers_ends_and_the_others_are_pulled_from_as_before(
    consumer, library, access, end, record_property
):
    """A pull that waits for the stopped one is running all the while.

    kvcache-ai/Mooncake#2039: one failed replica slowed all transfers.
    """
    with ExitStack() as stack:
        producers = [stack.enter_context(peers.peer(TENSORFERRY_UCX=library)) for _ in range(4)]
        consumer.call(peers.open_consumer, "64MiB", access=access)
        for producer in producers:
            producer.call(peers.open_producer, "16MiB", access=access)
        manifests = [
            one.call(peers.publish, "a", payloads.of_size, MIB, i) for i, one in enumerate(producers)
        ]
        before = consumer.call(pull_in_turn, manifests, 1.0)
        assert all(count > 0 for count in before["pulls"])
        if end == signal.SIGKILL:
            producers[0].kill()  # and wait: a process may still be read in the moment in which it is killed
        else:
            producers[0].signal(end)
        after = consumer.call(pull_in_turn, manifests, 3.0, first_apart=True)
        assert all(count > 0 for count in after["pulls"][1:])
        assert after["wrong"] == before["wrong"] == 0
        # Of a stopped one a mapped pool can still be read, which is right: its lease is kept.
        if end == signal.SIGKILL:
            assert after["error"] in LOST
        elif access == "served":
            assert after["error"] == "TransferTimeoutError"
        slowdown = after["median"] / before["median"]
        record_property("slowdown", round(slowdown, 2))
        print(f"{access}, {signal.Signals(end).name}: others' median pull took {slowdown:.2f} times as long")


def pull_in_turn(namespace, manifests, seconds, first_apart=False):
    """Pull from each in turn, from the first in a thread of its own if so wanted."""
    import threading

    import torch

    expected = [payloads.of_size(MIB, i)["x"] for i in range(len(manifests))]
    found = {"pulls": [0] * len(manifests), "wrong": 0, "error": "", "median": 0.0}
    times = []

    def pull(i, timeout=60.0):
        started = time.monotonic()
        got = namespace.consumer.pull(manifests[i], release=False, timeout=timeout)["x"]
        times.append(time.monotonic() - started)
        found["pulls"][i] += 1
        found["wrong"] += not torch.equal(got, expected[i])

    def pull_first():
        started = time.monotonic()
        try:
            pull(0, timeout=seconds)
        except Exception as error:
            found["error"] = type(error).__name__
        found["first_seconds"] = time.monotonic() - started

    apart = threading.Thread(target=pull_first)
    end = time.monotonic() + seconds
    if first_apart:
        apart.start()
    while time.monotonic() < end:
        for i in range(first_apart, len(manifests)):
            pull(i)
    if first_apart:
        apart.join()
    found["median"] = statistics.median(times)
    return found


def test_an_address_that_drops_everything_costs_its_own_pull_its_time_and_others_nothing(consumer, library):
    """No refusal comes from there, as from a dead host; UCX on its own would wait two minutes, for all."""
    port = networks.free_port()
    consumer.call(peers.open_consumer, "16MiB", access="served")
    with peers.peer(TENSORFERRY_UCX=library) as other, peers.peer(TENSORFERRY_UCX=library) as gone:
        there = {**peers.LOOPBACK, "TCP_PORT_RANGE": f"{port}-{port}"}
        gone.call(peers.open_producer, "1MiB", access="served", backend_options=there)
        dead = gone.call(peers.publish, "dead", payloads.of_size, KIB)
        gone.kill()
        other.call(peers.open_producer, "16MiB", access="served")
        alive = other.call(peers.publish, "alive", payloads.of_size, MIB, 1)
        with networks.dropping(port):
            found = consumer.call(pull_in_turn, [dead, alive], 3.0, first_apart=True)
            assert found["first_seconds"] < 3.0 + 30
            assert found["error"] == "TransferTimeoutError"
            assert (found["pulls"][1] > 0, found["wrong"]) == (True, 0)


# Restarts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_kills_and_restarts_of_the_producer(consumer, library):
    """ai-dynamo/nixl#1986, vllm-project/vllm#49238: consumers crashed unpacking keys after a restart."""
    consumer.call(peers.open_consumer, "64MiB", access="served")
    for turn in range(20):
        with peers.peer(TENSORFERRY_UCX=library) as producer:
            producer.call(peers.open_producer, "64MiB", access="served")
            manifest = producer.call(peers.publish, "a", payloads.of_size, 8 * MIB, turn)
            started = time.monotonic()
            found = consumer.call(
                peers.pull_and_compare, manifest, payloads.of_size, 8 * MIB, turn, release=False
            )
            assert found == ""
            assert time.monotonic() - started < 60
            consumer.start(peers.pull_until_it_fails, manifest, 30.0)
            time.sleep(turn / 100)  # at another moment of a pull each time
            producer.kill()
        fails(consumer, *LOST)
    figures = consumer.call(peers.statistics, "consumer")
    assert figures["pulls"] >= 20
    assert figures["allocated_nbytes"] == figures["quarantined_nbytes"] == 0


def listens(port):
    """Whether somebody listens at a port of the loopback device; asking there would keep it busy."""
    listening = "0A"
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return [f"0100007F:{port:04X}", listening] in [[row[1], row[3]] for row in rows]


@pytest.mark.timeout(300)
def test_another_producer_at_the_same_address_is_not_taken_for_the_old_one(consumer, library):
    """The port is the same, and so are the slot and the request: only the uid tells them apart."""
    port = networks.free_port()
    options = {**peers.LOOPBACK, "TCP_PORT_RANGE": f"{port}-{port}"}
    manifests = []
    consumer.call(peers.open_consumer, "1MiB", access="served")
    for turn in range(2):
        with peers.peer(TENSORFERRY_UCX=library) as producer:
            open_at_the_port(producer, options)
            assert listens(port)
            manifests.append(producer.call(peers.publish, "a", payloads.of_size, 64 * KIB, turn))
            for old in manifests[:turn]:
                consumer.start(peers.pull, old, timeout=10.0)
                fails(consumer, *LOST)
            new = manifests[turn]
            found = consumer.call(
                peers.pull_and_compare, new, payloads.of_size, 64 * KIB, turn, release=False
            )
            assert found == ""
            producer.kill()
    tickets = [read_manifest(manifest).ticket for manifest in manifests]
    assert tickets[0].generation == tickets[1].generation, "else the uid would not be needed"
    assert (tickets[0].index, tickets[0].offset) == (tickets[1].index, tickets[1].offset)


def open_at_the_port(producer, options):
    """Open a producer; what is left of connections of the one before may keep the port for a minute."""
    port = options["TCP_PORT_RANGE"].partition("-")[0]
    forget = ["ss", "-K", "state", "time-wait", "sport", "=", f":{port}"]
    end = time.monotonic() + 90
    while True:
        try:
            return producer.call(peers.open_producer, "1MiB", access="served", backend_options=options)
        except peers.RemoteError as error:
            if "busy" not in error.message or time.monotonic() > end:
                raise
        if shutil.which("ss"):  # and with root's help it keeps it no longer than this
            subprocess.run(forget, capture_output=True)
        time.sleep(1)
