# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref

import fake_backend
import pytest
import torch

from tensorferry.errors import (
    ClosedError,
    ConnectError,
    ForkedProcessError,
    ManifestError,
    PoolExhaustedError,
    PoolTimeoutError,
    TransferCancelledError,
    TransferTimeoutError,
    UsageError,
)

PAYLOAD = {"x": torch.arange(1000), "l": [None, torch.tensor(2.5)]}
HANGS = TransferTimeoutError("never seen")


@pytest.fixture
def pair(make_producer, make_consumer):
    return make_producer(access="served"), make_consumer()


def reader() -> fake_backend.FakeReader:
    return fake_backend.READERS[-1]


def test_brings_what_pull_brings(pair):
    producer, consumer = pair
    request = consumer.start_pull(producer.publish("a", PAYLOAD))
    assert torch.equal(request.result(5)["x"], PAYLOAD["x"])
    assert request.done()
    assert torch.equal(request.result()["l"][1], PAYLOAD["l"][1])  # again
    assert repr(request).startswith("<Request pull of request 'a' of producer")
    assert repr(request).endswith("done>")
    assert producer.wait_released("a", 5)
    assert not request.cancel()


def test_publishes_what_publish_publishes(pair):
    producer, consumer = pair
    request = producer.start_publish("a", PAYLOAD, metadata={"n": 1})
    assert torch.equal(consumer.pull(request.result(5))["x"], PAYLOAD["x"])


def test_wrong_arguments_are_refused_at_once(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    for call in (
        lambda: consumer.start_pull(manifest, names=["y"]),
        lambda: consumer.start_pull(manifest, timeout=-1),
        lambda: consumer.start_pull(manifest, device="nowhere"),
        lambda: producer.start_publish("b", {"x": object()}),
        lambda: producer.start_publish("b", PAYLOAD, consumers=0),
    ):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(ManifestError):
        consumer.start_pull(manifest[:-1])


def test_failures_are_those_of_pull(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    reader().unreachable = True
    request = consumer.start_pull(manifest)
    with pytest.raises(ConnectError, match="request 'a'"):
        request.result(5)
    assert repr(request).endswith("failed with ConnectError>")
    assert consumer.statistics().failed_pulls == 1


def test_a_result_can_be_waited_for_with_a_timeout(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]
    request = consumer.start_pull(producer.publish("a", PAYLOAD), timeout=0.3)
    with pytest.raises(TransferTimeoutError, match="it goes on"):
        request.result(0.01)
    assert not request.done()
    with pytest.raises(TransferTimeoutError, match="nothing came"):
        request.result(5)


def test_cancelling_gives_the_read_up_and_keeps_its_memory(pair):
    """The landing memory comes back when the backend says that nothing writes there any more."""
    producer, consumer = pair
    reader().read_failures = [HANGS]
    request = consumer.start_pull(producer.publish("a", PAYLOAD))
    while not reader().reads:
        time.sleep(0.001)
    assert request.cancel()
    with pytest.raises(TransferCancelledError, match=r"request 'a'.*was cancelled"):
        request.result(5)
    assert reader().reads[0].cancelled.is_set()
    assert consumer.statistics().quarantined_nbytes > 0
    assert producer.statistics().live == 1  # the slot was not given back
    reader().reads[0].is_settled = True
    assert consumer.statistics().allocated_nbytes == 0


def test_cancelling_a_publish_that_waits_undoes_it(make_producer):
    producer = make_producer("64KiB")
    producer.publish("full", {"x": torch.zeros(64 << 10, dtype=torch.uint8)})
    request = producer.start_publish("b", PAYLOAD, timeout=60)
    while not producer.statistics().waiters:
        time.sleep(0.001)
    assert request.cancel()
    with pytest.raises(TransferCancelledError):
        request.result(5)
    assert producer.statistics().waiters == 0
    assert producer.revoke("full")
    producer.publish("b", PAYLOAD)  # the name is free


def test_publishes_wait_first_come_first_served(make_producer):
    producer = make_producer("64KiB")
    producer.publish("full", {"x": torch.zeros(64 << 10, dtype=torch.uint8)})
    big = producer.start_publish("big", {"x": torch.zeros(60 << 10, dtype=torch.uint8)}, timeout=60)
    small = producer.start_publish("small", {"x": torch.zeros(8 << 10, dtype=torch.uint8)}, timeout=60)
    producer.revoke("full")
    big.result(5)
    assert not small.done()
    producer.revoke("big")
    small.result(5)


def test_a_full_pool_is_an_error_at_once_or_in_time(make_producer):
    producer = make_producer("64KiB")
    producer.publish("full", {"x": torch.zeros(64 << 10, dtype=torch.uint8)})
    with pytest.raises(PoolExhaustedError):
        producer.start_publish("b", PAYLOAD).result(5)
    with pytest.raises(PoolTimeoutError):
        producer.start_publish("b", PAYLOAD, timeout=0.05).result(5)


def test_pulls_that_wait_for_room_get_it_from_quarantine(make_producer, make_consumer):
    producer, consumer = make_producer("256KiB", access="served"), make_consumer("64KiB")
    full = {"x": torch.zeros(64 << 10, dtype=torch.uint8)}
    reader().read_failures = [HANGS]
    stuck = consumer.start_pull(producer.publish("a", full))
    waiting = consumer.start_pull(producer.publish("b", full))
    while not consumer.statistics().waiters:
        time.sleep(0.001)
    stuck.cancel()
    with pytest.raises(TransferCancelledError):
        stuck.result(5)
    assert not waiting.done()
    reader().reads[0].is_settled = True
    assert torch.equal(waiting.result(5)["x"], full["x"])


def test_a_slow_connection_holds_nobody_else_up(make_producer, make_consumer):
    first, second = make_producer(access="served"), make_producer(access="served")
    consumer = make_consumer()
    consumer.pull(second.publish("warm", PAYLOAD))
    reader().connect_seconds = 1.0
    slow = [consumer.start_pull(first.publish(str(i), PAYLOAD)) for i in range(3)]
    assert consumer.start_pull(second.publish("a", PAYLOAD)).result(5)
    assert not any(request.done() for request in slow)
    for request in slow:
        request.result(10)


def test_any_number_on_one_thread(pair):
    producer, consumer = pair
    before = threading.active_count()
    requests = [consumer.start_pull(producer.publish(str(i), {"x": torch.tensor(i)})) for i in range(200)]
    assert threading.active_count() <= before + 1
    assert [int(request.result(10)["x"]) for request in requests] == list(range(200))


def test_closing_ends_requests(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]
    pull = consumer.start_pull(producer.publish("a", PAYLOAD))
    producer.publish("full", {"x": torch.zeros(1 << 19, dtype=torch.uint8)})
    publish = producer.start_publish("b", {"x": torch.zeros(1 << 20, dtype=torch.uint8)}, timeout=60)
    consumer.close()
    producer.close()
    for request in (pull, publish):
        with pytest.raises(ClosedError):
            request.result(5)
    with pytest.raises(ClosedError):
        consumer.start_pull(b"")
    with pytest.raises(ClosedError):
        producer.start_publish("c", PAYLOAD)


def test_a_request_keeps_its_owner(make_producer, fake):
    from tensorferry.consumer import Consumer

    producer = make_producer(access="served")
    consumer = Consumer("1MiB", backend="fake")
    reader().read_failures = [HANGS]
    request = consumer.start_pull(producer.publish("a", PAYLOAD))
    owner = weakref.ref(consumer)
    del consumer
    gc.collect()
    owner().close()
    with pytest.raises(ClosedError):
        request.result(5)


def test_a_forked_child_does_not_wait_for_ever(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]
    running = consumer.start_pull(producer.publish("a", PAYLOAD))
    ended = producer.start_publish("b", PAYLOAD)
    ended.result(5)
    child = os.fork()
    if child == 0:
        code = 0
        try:
            ended.result()
        except BaseException:
            code |= 1
        for call in (running.result, running.cancel):
            try:
                call()
                code |= 2
            except ForkedProcessError:
                pass
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    running.cancel()


# asyncio


def test_awaits_in_an_event_loop(pair):
    producer, consumer = pair

    async def main() -> list[int]:
        manifests = [await producer.start_publish(str(i), {"x": torch.tensor(i)}) for i in range(20)]
        payloads = await asyncio.gather(*(consumer.start_pull(manifest) for manifest in manifests))
        return [int(payload["x"]) for payload in payloads]

    assert asyncio.run(main()) == list(range(20))


def test_the_loop_runs_on_while_a_pull_hangs(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]

    async def main() -> int:
        request = consumer.start_pull(producer.publish("a", PAYLOAD), timeout=0.3)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart = asyncio.ensure_future(beat())
        with pytest.raises(TransferTimeoutError):
            await request
        heart.cancel()
        return beats

    assert asyncio.run(main()) > 3


def test_cancelling_the_task_that_awaits_cancels_the_request(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]

    async def main():
        request = consumer.start_pull(producer.publish("a", PAYLOAD))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 0.05)
        return request

    request = asyncio.run(main())
    with pytest.raises(TransferCancelledError):
        request.result(5)


def test_several_loops_may_await_one_request(pair, threads):
    producer, consumer = pair
    reader().read_failures = [HANGS]
    request = consumer.start_pull(producer.publish("a", PAYLOAD), timeout=0.3)

    async def wait() -> str:
        try:
            await request
        except TransferTimeoutError as error:
            return str(error)

    texts = [future.result(10) for future in [threads.submit(asyncio.run, wait()) for _ in range(4)]]
    assert len(set(texts)) == 1


def test_a_loop_that_was_closed_meanwhile_is_left_alone(pair):
    producer, consumer = pair
    reader().read_failures = [HANGS]
    request = consumer.start_pull(producer.publish("a", PAYLOAD), timeout=0.3)
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await request

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.01))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    with pytest.raises(TransferCancelledError):
        request.result(5)
