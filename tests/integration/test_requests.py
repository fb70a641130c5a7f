# SPDX-License-Identifier: Apache-2.0
"""Requests over real UCX: many at a time, in threads and event loops, cancelled and stuck."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import payloads
import peers
import pytest
from payloads import KIB, MIB

MODES = ["served", "rdma", "mapped"]


@pytest.fixture(scope="module")
def consumer(library):
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


@pytest.fixture(scope="module")
def producer(library):
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


@pytest.fixture
def victim(library):
    """A process that the test may kill or stop."""
    with peers.peer(TENSORFERRY_UCX=library) as one:
        yield one


def publish_many(namespace, count, nbytes, **options):
    return [
        namespace.producer.publish(f"many {i}", payloads.of_size(nbytes, i), **options) for i in range(count)
    ]


# Functions for the consumer's process.


def pull_all(namespace, manifests, nbytes):
    """Start them all before waiting for any; return what was wrong, and the threads that it took."""
    before = threading.active_count()
    requests = [namespace.consumer.start_pull(manifest, timeout=60.0) for manifest in manifests]
    started = threading.active_count() - before
    wrong = [
        found
        for i, request in enumerate(requests)
        if (found := peers.difference(request.result(60), payloads.of_size(nbytes, i)))
    ]
    return wrong, started


def await_all(namespace, manifests, nbytes, loops, library):
    """The same from several event loops in as many threads."""
    wrong = []

    async def pull(i, manifest):
        found = peers.difference(
            await namespace.consumer.start_pull(manifest, timeout=60.0), payloads.of_size(nbytes, i)
        )
        if found:
            wrong.append(found)

    async def some(first):
        await asyncio.gather(*(pull(i, manifests[i]) for i in range(first, len(manifests), loops)))

    def run(first):
        if library == "asyncio":
            asyncio.run(some(first))
        else:
            import uvloop

            loop = uvloop.new_event_loop()
            try:
                loop.run_until_complete(some(first))
            finally:
                loop.close()

    threads = [threading.Thread(target=run, args=(first,)) for first in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return wrong


def hang(namespace, manifest, seconds):
    """Start pulls that hang; return the CPU seconds that waiting for them takes, and the heart beats."""

    async def wait():
        beats = 0
        request = namespace.consumer.start_pull(manifest, timeout=seconds)
        await asyncio.sleep(0.3)  # until UCX has tried and given up spinning
        before = time.process_time()
        while not request.done():
            await asyncio.sleep(0.05)
            beats += 1
        spent = time.process_time() - before
        try:
            await request
        except TimeoutError as error:
            return type(error).__name__, spent, beats

    return asyncio.run(wait())


def cancel_and_reuse(namespace, manifest, other, nbytes):
    """Cancel a pull under way, and see that its memory is not lent before UCX has let go of it."""
    request = namespace.consumer.start_pull(manifest, timeout=60.0)
    time.sleep(0.3)
    request.cancel()
    try:
        request.result(10)
        outcome = ""
    except Exception as error:
        outcome = type(error).__name__
    found = peers.difference(namespace.consumer.pull(other, timeout=60.0), payloads.of_size(nbytes, 1))
    return outcome, found


def beside_a_stopped_one(namespace, stuck, others, nbytes):
    """Pull from a live producer while requests to a stopped one hang."""
    hanging = [namespace.consumer.start_pull(stuck, timeout=20.0, release=False) for _ in range(8)]
    wrong, _ = pull_all(namespace, others, nbytes)
    undone = sum(not request.done() for request in hanging)
    for request in hanging:
        request.cancel()
    kinds = {type(request._task.outcome.exception(20)).__name__ for request in hanging}
    return wrong, undone, kinds


def close_with_requests(namespace, manifest):
    requests = [namespace.consumer.start_pull(manifest, timeout=60.0, release=False) for _ in range(50)]
    started = time.monotonic()
    namespace.consumer.close()
    seconds = time.monotonic() - started
    kinds = {type(request._task.outcome.exception(10)).__name__ for request in requests}
    return kinds - {"NoneType"}, seconds


@pytest.mark.parametrize("access", [*MODES, peers.NIXL])
def test_a_thousand_pulls_in_flight(producer, consumer, access):
    producer.call(peers.open_producer, "64MiB", access=access)
    consumer.call(peers.open_consumer, "16MiB", access=access)
    manifests = producer.call(publish_many, 1000, 20 * KIB, lease=120.0)
    wrong, threads = consumer.call(pull_all, manifests, 20 * KIB)
    assert wrong == []
    assert threads <= 1
    assert producer.call(peers.wait_released, "many 999", 20)
    assert consumer.call(peers.statistics, "consumer")["allocated_nbytes"] == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_many_loops_in_many_threads(producer, consumer, loop):
    producer.call(peers.open_producer, "64MiB", access="served")
    consumer.call(peers.open_consumer, "16MiB", access="served")
    manifests = producer.call(publish_many, 200, 64 * KIB, lease=120.0)
    assert consumer.call(await_all, manifests, 64 * KIB, 4, loop) == []


def test_waiting_for_a_stopped_producer_takes_no_cpu_and_the_loop_runs_on(consumer, victim):
    """ai-dynamo/nixl#2047: a stalled transfer was polled for ever."""
    victim.call(peers.open_producer, "16MiB", access="served")
    consumer.call(peers.open_consumer, "16MiB", access="served")
    manifest = victim.call(peers.publish, "a", payloads.of_size, MIB)
    consumer.call(peers.pull, manifest, release=False)
    victim.signal(signal.SIGSTOP)
    kind, spent, beats = consumer.call(hang, manifest, 2.0)
    victim.signal(signal.SIGCONT)
    assert kind == "TransferTimeoutError"
    assert spent < 0.5  # of 1.7 seconds; a thread that polls would take all of them
    assert beats > 5


@pytest.mark.parametrize("access", ["served", "rdma"])
def test_the_memory_of_a_cancelled_pull_is_lent_when_ucx_has_let_go(consumer, producer, victim, access):
    """The pool has room for one: the next pull gets it after the quarantine, and nothing writes into it.

    ai-dynamo/nixl#2044: a released request still let the device write.
    """
    victim.call(peers.open_producer, "16MiB", access=access)
    producer.call(peers.open_producer, "16MiB", access=access)
    consumer.call(peers.open_consumer, "8MiB", access=access)
    stuck = victim.call(peers.publish, "a", payloads.of_size, 7 * MIB, 0)
    other = producer.call(peers.publish, "b", payloads.of_size, 7 * MIB, 1)
    consumer.call(peers.pull, stuck, release=False)
    victim.signal(signal.SIGSTOP)
    outcome, found = consumer.call(cancel_and_reuse, stuck, other, 7 * MIB)
    victim.signal(signal.SIGCONT)
    assert (outcome, found) == ("TransferCancelledError", "")


@pytest.mark.parametrize("access", [peers.NIXL])
def test_nixl_cannot_cancel_so_the_memory_is_lent_when_the_producer_goes_on(
    consumer, producer, victim, access
):
    """Until then a pull that needs it waits for room, as long as it has time and no longer."""
    victim.call(peers.open_producer, "16MiB", access=access)
    producer.call(peers.open_producer, "16MiB", access=access)
    consumer.call(peers.open_consumer, "8MiB", access=access)
    stuck = victim.call(peers.publish, "a", payloads.of_size, 7 * MIB, 0)
    other = producer.call(peers.publish, "b", payloads.of_size, 7 * MIB, 1)
    consumer.call(peers.pull, stuck, release=False)
    victim.signal(signal.SIGSTOP)
    consumer.start(peers.pull, stuck, timeout=1.0)
    with pytest.raises(peers.RemoteError, match="TransferTimeoutError"):
        consumer.result()
    consumer.start(peers.pull, other, timeout=2.0)
    with pytest.raises(peers.RemoteError, match="PoolTimeoutError"):
        consumer.result()
    victim.signal(signal.SIGCONT)
    assert consumer.call(peers.pull_and_compare, other, payloads.of_size, 7 * MIB, 1) == ""


def test_a_stopped_producer_does_not_hold_up_requests_to_others(consumer, producer, victim):
    victim.call(peers.open_producer, "16MiB", access="served")
    producer.call(peers.open_producer, "16MiB", access="served")
    consumer.call(peers.open_consumer, "32MiB", access="served")
    stuck = victim.call(peers.publish, "a", payloads.of_size, MIB)
    victim.signal(signal.SIGSTOP)  # before anyone has connected
    others = producer.call(publish_many, 50, 64 * KIB)
    wrong, undone, kinds = consumer.call(beside_a_stopped_one, stuck, others, 64 * KIB)
    victim.signal(signal.SIGCONT)
    assert (wrong, undone, kinds) == ([], 8, {"TransferCancelledError"})


def test_closing_ends_requests_that_hang(consumer, victim):
    victim.call(peers.open_producer, "16MiB", access="served")
    consumer.call(peers.open_consumer, "16MiB", access="served")
    manifest = victim.call(peers.publish, "a", payloads.of_size, MIB)
    victim.signal(signal.SIGSTOP)
    kinds, seconds = consumer.call(close_with_requests, manifest)
    victim.signal(signal.SIGCONT)
    assert kinds == {"ClosedError"}
    assert seconds < 20
