# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import time
import warnings
from typing import Literal

import fake_backend
import pytest
import torch

from tensorferry import wire
from tensorferry.errors import (
    ClosedError,
    ForkedProcessError,
    PayloadTooLargeError,
    PoolExhaustedError,
    PoolTimeoutError,
    UsageError,
)
from tensorferry.manifest import Manifest, decode_manifest, read_manifest
from tensorferry.producer import Producer

ANN, BOB = b"a" * 16, b"b" * 16
KEY = b"0123456789abcdef"


def backend() -> fake_backend.FakePool:
    return fake_backend.POOLS[-1]


def ticket_of(manifest: bytes):
    return read_manifest(manifest).ticket


def mac_of(
    manifest: Manifest, kind: Literal["release", "reject"], consumer: bytes, key: bytes = KEY
) -> bytes:
    ticket = manifest.ticket
    return wire.notice_mac(
        key,
        kind,
        producer=manifest.peer.uid,
        index=ticket.index,
        generation=ticket.generation,
        token=ticket.token,
        consumer=consumer,
    )


def numbers(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


# Arguments


@pytest.mark.parametrize(
    ("size", "nbytes"), [(8192, 8192), ("64 KiB", 65536), ("1MB", 10**6), ("0.5MiB", 1 << 19), ("4096", 4096)]
)
def test_pool_sizes_are_numbers_or_text(make_producer, size, nbytes):
    assert make_producer(size).statistics().pool_nbytes == nbytes


@pytest.mark.parametrize(
    "size", [0, -1, True, 1.5, None, "", "GiB", "4 GiBs", "-4KiB", "1.0001KiB", "4096", 1 << 62]
)
def test_other_pool_sizes_are_refused(make_producer, size):
    if size == "4096":
        size = 4095  # smaller than one block
    with pytest.raises(UsageError, match="pool_size"):
        make_producer(size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease": 0}, "lease is a positive number"),
        ({"lease": math.inf}, "lease is a positive number"),
        ({"lease": math.nan}, "lease is a positive number"),
        ({"lease": "60"}, "lease is a number of seconds, not str"),
        ({"access": "fast"}, "access is one of 'auto', 'served', 'rdma', 'mapped', not 'fast'"),
        ({"checksum": "md5"}, "checksum is None or 'xxh3', not 'md5'"),
        ({"key": "short"}, "key is 16 to 64 bytes"),
        ({"name": 7}, "name is a str, not int"),
        ({"name": "x" * 5000}, "the name has 5000 bytes"),
        ({"min_block_size": 100}, "min_block_size is a power of two"),
        ({"min_block_size": 32}, "min_block_size is a power of two of at least 64"),
        ({"backend_options": {"TLS": 1}}, "backend_options maps str to str"),
        ({"device": "meta"}, "not on 'meta'"),
        ({"device": "nowhere"}, "is not a device"),
    ],
)
def test_wrong_arguments_are_named(make_producer, options, message):
    with pytest.raises(UsageError, match=message):
        make_producer(**options)
    assert not fake_backend.POOLS


def test_a_pool_is_closed_if_its_thread_cannot_be_started(make_producer, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        make_producer()
    assert fake_backend.POOLS[-1].closed


def test_backends_go_by_name():
    with pytest.raises(UsageError, match="there is no backend 'udp'; there are 'ucx', 'nixl'"):
        Producer("1MiB", backend="udp")


# Publishing


def test_a_manifest_describes_what_is_in_the_slot(make_producer):
    producer = make_producer(name="encoder", lease=5.0)
    before = time.time()
    payload = {"x": torch.arange(6.0).reshape(2, 3), "l": [torch.tensor(True), None]}
    manifest = producer.publish("req-1", payload, metadata={"seed": 7}, consumers=3)
    read = read_manifest(manifest)
    assert (read.request_id, read.producer, read.metadata, read.consumers) == (
        "req-1",
        "encoder",
        {"seed": 7},
        3,
    )
    assert (read.names, read.shapes["x"], read.dtypes["l[0]"]) == (("x", "l[0]"), (2, 3), "bool")
    assert read.lease == 5.0
    assert before + 5.0 <= read.expires <= time.time() + 5.0
    slot = backend().slot(read.ticket)
    for spec, tensor in zip(read.tensors, [payload["x"], payload["l"][0]], strict=True):
        assert spec.offset % 64 == 0
        stored = slot[spec.offset : spec.offset + spec.nbytes]
        assert stored.numpy().tobytes() == tensor.numpy().tobytes()


def test_a_key_signs_and_a_checksum_is_added(make_producer):
    key = "0123456789abcdef"
    manifest = make_producer(key=key, checksum="xxh3").publish("a", {"x": numbers(100)})
    read = decode_manifest(manifest, key)
    assert read.checksum == "xxh3"
    assert read.tensors[0].checksum is not None


def test_a_live_name_is_taken_and_free_again_afterwards(make_producer):
    producer = make_producer()
    manifest = producer.publish("a", {"x": numbers(10)})
    with pytest.raises(UsageError, match="'a' is published by a Producer already"):
        producer.publish("a", {"x": numbers(10)})
    backend().tell("release", ticket_of(manifest))
    assert producer.wait_released("a", 5)
    assert ticket_of(producer.publish("a", {"x": numbers(10)})).generation > ticket_of(manifest).generation


@pytest.mark.parametrize(
    "tensors", [{}, {"a": None, "b": []}, {"x": torch.empty(0, 4096, dtype=torch.bfloat16)}]
)
def test_payloads_without_bytes_get_a_ticket_and_no_memory(make_producer, tensors):
    producer = make_producer()
    ticket = ticket_of(producer.publish("a", tensors))
    assert (ticket.offset, ticket.nbytes) == (0, 0)
    assert (producer.statistics().live, producer.statistics().allocated_nbytes) == (1, 0)
    backend().tell("release", ticket)
    assert producer.wait_released("a", 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tensors": {"outputs": [{"audio": "text"}]}}, r"outputs\[0\]\.audio"),
        ({"tensors": [1]}, "a payload is a mapping"),
        ({"request_id": 7}, "request_id is a str, not int"),
        ({"request_id": "x" * 5000}, "request_id has 5000"),
        ({"consumers": 0}, "consumers is an integer"),
        ({"consumers": True}, "consumers is an integer"),
        ({"lease": -1.0}, "lease is a positive number"),
        ({"timeout": -1.0}, "timeout is a number of seconds from 0 up"),
        ({"timeout": None}, "timeout is a number of seconds, not NoneType"),
        ({"metadata": {"t": object()}}, "metadata"),
    ],
)
def test_wrong_publishes_leave_nothing_behind(make_producer, call, message):
    producer = make_producer()
    with pytest.raises(UsageError, match=message):
        producer.publish(**{"request_id": "a", "tensors": {"x": numbers(10)}, **call})
    statistics = producer.statistics()
    assert (statistics.live, statistics.allocated_nbytes, statistics.failed_publishes) == (0, 0, 1)
    assert not backend().live
    assert producer.publish("a", {"x": numbers(10)})


def test_what_fails_after_copying_is_undone(make_producer):
    producer = make_producer()
    backend().refuse = PoolExhaustedError("no entry left")
    with pytest.raises(PoolExhaustedError, match="no entry left"):
        producer.publish("a", {"x": numbers(10)})
    backend().refuse = None
    with pytest.raises(UsageError, match="the manifest of 'a' would take"):
        producer.publish("a", {"x": numbers(10)}, metadata={"large": bytes(17 << 20)})
    assert not backend().live
    assert producer.statistics().allocated_nbytes == 0
    assert producer.publish("a", {"x": numbers(10)})
    assert producer.statistics().revoked == 0


# Back-pressure


def test_what_can_never_fit_is_refused_at_once(make_producer):
    with pytest.raises(
        PayloadTooLargeError, match=r"'a' needs 1048577 bytes, the pool of a Producer has 1048576"
    ):
        make_producer("1MiB").publish("a", {"x": numbers((1 << 20) + 1)}, timeout=60)


def test_a_pool_is_used_to_its_last_block(make_producer):
    """The reference class makes 8 MiB of 5 MiB, and takes 4 MiB for 2 MiB and a byte."""
    producer = make_producer("5MiB")
    assert producer.statistics().pool_nbytes == backend().pool.numel() == 5 << 20
    assert producer.publish("a", {"x": numbers(5 << 20)})


def test_many_small_tensors_take_one_slot(make_producer):
    """In the reference class each would take at least a block of 1 MiB."""
    producer = make_producer("2MiB")
    producer.publish("a", {f"t{i}": numbers(1024) for i in range(1000)})
    statistics = producer.statistics()
    assert (statistics.live, statistics.requested_nbytes) == (1, 1000 * 1024)
    assert statistics.allocated_nbytes < 1000 * 1024 + 4096


def test_a_full_pool_raises_at_once_or_after_the_timeout(make_producer, caplog):
    """LMCache/LMCache#1337, #1339: it was tried again for ever, and each time logged."""
    caplog.set_level("DEBUG")
    producer = make_producer("4MiB")
    producer.publish("a", {"x": numbers(3 << 20)})
    with pytest.raises(PoolExhaustedError, match="request 'b'") as caught:
        producer.publish("b", {"x": numbers(3 << 20)})
    assert caught.value.free_nbytes == 1 << 20
    started = time.monotonic()
    with pytest.raises(PoolTimeoutError, match=r"within 0.3 seconds"):
        producer.publish("b", {"x": numbers(3 << 20)}, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 1.0
    assert (caught.value.requested_nbytes, caught.value.pool_nbytes) == (3 << 20, 4 << 20)
    assert len(caplog.records) <= 1


def test_a_release_wakes_a_waiting_publish(make_producer, threads, wait_for):
    producer = make_producer("4MiB")
    first = producer.publish("a", {"x": numbers(3 << 20)})
    waiting = threads.submit(producer.publish, "b", {"x": numbers(3 << 20)}, timeout=30)
    wait_for(lambda: producer.statistics().waiters == 1)
    started = time.monotonic()
    backend().tell("release", ticket_of(first))
    assert waiting.result(timeout=5)
    assert time.monotonic() - started < 0.5
    assert producer.statistics().publish_seconds < 1.0


# The end of a publication


def test_ends_when_enough_distinct_consumers_have_released(make_producer, wait_for):
    producer = make_producer()
    ticket = ticket_of(producer.publish("a", {"x": numbers(10)}, consumers=2))
    backend().tell("release", ticket, ANN)
    backend().tell("release", ticket, ANN)
    wait_for(lambda: producer.statistics().ignored_notices == 1)
    assert not producer.wait_released("a", 0)
    backend().tell("reject", ticket, BOB)
    assert producer.wait_released("a", 5)
    statistics = producer.statistics()
    assert (statistics.released, statistics.rejected, statistics.live) == (1, 1, 0)


def test_notices_of_other_generations_are_ignored(make_producer, wait_for):
    producer = make_producer()
    ticket = ticket_of(producer.publish("a", {"x": numbers(10)}))
    backend().tell("release", dataclasses.replace(ticket, generation=99))
    backend().drain(ticket)
    wait_for(lambda: producer.statistics().ignored_notices == 1)
    assert producer.statistics().live == 1


def test_with_a_key_notices_without_its_mac_change_nothing_and_are_counted(make_producer, wait_for):
    producer = make_producer(key=KEY)
    manifest = decode_manifest(producer.publish("a", {"x": numbers(10)}), KEY)
    ticket = manifest.ticket
    genuine = mac_of(manifest, "release", ANN)
    backend().tell("release", ticket, ANN)
    backend().tell("release", ticket, ANN, genuine[:-1] + bytes([genuine[-1] ^ 1]))
    backend().tell("release", ticket, BOB, genuine)
    backend().tell("reject", ticket, ANN, genuine)
    backend().tell("release", ticket, ANN, mac_of(manifest, "release", ANN, key=b"f" * 16))
    backend().tell("release", ticket, ANN, b"")
    wait_for(lambda: producer.statistics().forged_notices == 6)
    statistics = producer.statistics()
    assert (statistics.live, statistics.rejected, statistics.ignored_notices) == (1, 0, 0)
    backend().tell("release", ticket, ANN, genuine)
    assert producer.wait_released("a", 5)


def test_a_release_that_is_sent_again_counts_once(make_producer, wait_for):
    """Whoever sees a control message on its way may repeat it: for the same slot, and for its next owner."""
    producer = make_producer(key=KEY)
    manifest = decode_manifest(producer.publish("a", {"x": numbers(10)}, consumers=2), KEY)
    genuine = mac_of(manifest, "release", ANN)
    for _ in range(3):
        backend().tell("release", manifest.ticket, ANN, genuine)
    wait_for(lambda: producer.statistics().ignored_notices == 2)
    assert producer.statistics().live == 1
    producer.revoke("a")
    following = decode_manifest(producer.publish("b", {"x": numbers(10)}), KEY)
    backend().tell("release", manifest.ticket, ANN, genuine)
    backend().tell("release", following.ticket, ANN, genuine)
    wait_for(lambda: producer.statistics().ignored_notices == 3)
    wait_for(lambda: producer.statistics().forged_notices == 1)
    assert producer.statistics().live == 1


def test_without_a_key_macs_are_not_looked_at(make_producer):
    producer = make_producer()
    ticket = ticket_of(producer.publish("a", {"x": numbers(10)}))
    backend().tell("release", ticket, ANN, b"\xff" * 32)
    assert producer.wait_released("a", 5)


def test_leases_end_in_their_own_order(make_producer):
    producer = make_producer(lease=60)
    for name, lease in (("c", 0.3), ("a", 0.1), ("b", 0.2)):
        producer.publish(name, {"x": numbers(10)}, lease=lease)
    started = time.monotonic()
    for name, lease in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        assert producer.wait_released(name, 5)
        assert time.monotonic() - started > lease - 0.05
    assert time.monotonic() - started < 2
    assert producer.statistics().expired == 3
    assert not backend().live


def test_the_thread_sleeps_until_something_happens(make_producer):
    producer = make_producer(lease=60)
    time.sleep(0.1)
    calls = backend().calls_of_notices
    for name in "abc":
        producer.publish(name, {"x": numbers(10)})
    time.sleep(0.3)
    assert backend().calls_of_notices == calls


def test_many_ended_leases_are_forgotten(make_producer):
    producer = make_producer(lease=60)
    for turn in range(1000):
        producer.publish(f"r{turn}", {"x": numbers(10)})
        producer.revoke(f"r{turn}")
    assert len(producer._publisher.publications._deadlines) < 200


def test_revoke_frees_at_once(make_producer):
    producer = make_producer()
    producer.publish("a", {"x": numbers(10)})
    assert producer.revoke("a")
    assert not producer.revoke("a")
    assert producer.wait_released("a", 0)
    assert (producer.statistics().revoked, producer.statistics().allocated_nbytes) == (1, 0)


@pytest.mark.parametrize("end", ["release", "expire", "revoke"])
def test_a_slot_that_is_still_read_is_not_reused(make_producer, wait_for, end):
    """The reference frees a slot at an abort, while it may still be read."""
    producer = make_producer("64KiB")
    backend().drains = True
    ticket = ticket_of(
        producer.publish("a", {"x": numbers(64 << 10)}, lease=0.05 if end == "expire" else None)
    )
    if end == "release":
        backend().tell("release", ticket)
    elif end == "revoke":
        producer.revoke("a")
    wait_for(lambda: producer.statistics().draining == 1)
    assert not producer.wait_released("a", 0)
    with pytest.raises(PoolExhaustedError):
        producer.publish("b", {"x": numbers(10)})
    backend().drain(ticket)
    assert producer.wait_released("a", 5)
    assert producer.publish("b", {"x": numbers(10)})


def test_unknown_names_have_nothing_to_wait_for(make_producer):
    assert make_producer().wait_released("never", 0)


# The end of a producer


def test_close_ends_everything_once(make_producer):
    producer = make_producer()
    producer.publish("a", {"x": numbers(10)})
    assert "closed" not in repr(producer)
    producer.close()
    producer.close()
    assert "closed" in repr(producer)
    assert backend().closed
    for call in (
        lambda: producer.publish("b", {}),
        lambda: producer.revoke("a"),
        lambda: producer.wait_released("a", 0),
        producer.__enter__,
    ):
        with pytest.raises(ClosedError, match="a Producer is closed"):
            call()
    assert producer.statistics().live == 0


def test_close_wakes_those_who_wait(make_producer, threads, wait_for):
    producer = make_producer("64KiB")
    producer.publish("a", {"x": numbers(64 << 10)})
    waiting = [
        threads.submit(producer.publish, "b", {"x": numbers(10)}, timeout=60),
        threads.submit(producer.wait_released, "a", 60),
    ]
    wait_for(lambda: producer.statistics().waiters == 1)
    started = time.monotonic()
    producer.close()
    for future in waiting:
        with pytest.raises(ClosedError):
            future.result(timeout=5)
    assert time.monotonic() - started < 1


def test_a_with_statement_closes(make_producer):
    with make_producer() as producer:
        pass
    assert "closed" in repr(producer)
    assert not any(thread.name == "tensorferry-producer" for thread in threading.enumerate())


def test_a_producer_that_nobody_has_is_closed_with_a_warning(fake, wait_for):
    producer = Producer("1MiB", backend="fake", name="lost")
    producer.publish("a", {"x": numbers(10)})
    with pytest.warns(ResourceWarning, match="Producer 'lost' was not closed"):  # noqa: PT031
        del producer
        gc.collect()
    wait_for(lambda: backend().closed)


def test_a_producer_collected_by_its_own_thread_is_closed(fake, wait_for):
    producer = Producer("1MiB", backend="fake")
    publications, pool = producer._publisher.publications, backend()
    original = publications._apply
    box = [producer]

    def collect(notice, now):  # runs in the thread, with the lock held
        box.clear()
        original(notice, now)

    publications._apply = collect
    ticket = ticket_of(producer.publish("a", {"x": numbers(10)}))
    del producer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.tell("release", ticket)
        wait_for(lambda: pool.closed)


def in_child(function) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_use_it_and_does_not_touch_it(make_producer):
    """openucx/ucx#10748, #4325: UCX in a forked child hangs or crashes."""
    producer = make_producer()
    producer.publish("a", {"x": numbers(10)})

    def child() -> int:
        for call in (
            lambda: producer.publish("b", {}),
            lambda: producer.revoke("a"),
            lambda: producer.wait_released("a", 0),
            producer.statistics,
            producer.__enter__,
        ):
            try:
                call()
            except ForkedProcessError:
                continue
            return 2
        producer.close()
        return 3 if backend().closed else 0

    publisher = producer._publisher
    with publisher.publications._changed, publisher._counts._lock:  # as another thread could hold them
        assert in_child(child) == 0
    assert producer.statistics().live == 1


def test_many_threads_publish_and_release(make_producer, threads):
    producer = make_producer("256KiB")
    pool = backend()

    def work(worker: int) -> None:
        for turn in range(200):
            name = f"{worker}-{turn}"
            ticket = ticket_of(producer.publish(name, {"x": numbers(30_000)}, timeout=30))
            if turn % 3:
                pool.tell("release", ticket)
                assert producer.wait_released(name, 30)
            else:
                assert producer.revoke(name)

    for future in [threads.submit(work, worker) for worker in range(8)]:
        future.result(timeout=60)
    statistics = producer.statistics()
    assert (statistics.publications, statistics.live, statistics.allocated_nbytes) == (1600, 0, 0)
    assert statistics.bytes_published == 1600 * 30_000
    assert statistics.released + statistics.revoked == 1600
