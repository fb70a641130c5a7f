# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import threading
import time
import warnings

import fake_backend
import pytest
import torch

from tensorferry.backends.base import ConnectionGivenUpError
from tensorferry.consumer import Consumer
from tensorferry.errors import (
    AuthenticationError,
    ClosedError,
    ConnectError,
    ForkedProcessError,
    IntegrityError,
    LeaseExpiredError,
    LeaseRevokedError,
    ManifestError,
    PayloadTooLargeError,
    PeerLostError,
    PoolTimeoutError,
    RemoteAccessError,
    TransferTimeoutError,
    UsageError,
)
from tensorferry.manifest import read_manifest

MODES = ["mapped", "served"]


@pytest.fixture(params=[*MODES, "direct"])
def way(request):
    """An access mode; ``direct`` is ``served`` without landing in the pool."""
    return request.param


@pytest.fixture
def mode(way):
    return "served" if way == "direct" else way


@pytest.fixture
def pair(make_producer, make_consumer, way, mode):
    """A producer and a consumer that reads it in ``mode``."""
    producer, consumer = make_producer(access=mode), make_consumer()
    reader().lands_anywhere = way == "direct"
    return producer, consumer


@pytest.fixture
def served(make_producer, make_consumer):
    return make_producer(access="served"), make_consumer()


def reader() -> fake_backend.FakeReader:
    return fake_backend.READERS[-1]


def backend() -> fake_backend.FakePool:
    return fake_backend.POOLS[-1]


PAYLOAD = {
    "x": torch.arange(600.0).reshape(20, 30),
    "l": [torch.tensor(3.5), None, (torch.zeros(0, 3), {"y": torch.arange(5)})],
    "z": torch.tensor([True, False]),
}


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other is None


def in_pool(tensor: torch.Tensor, pool: torch.Tensor) -> bool:
    return pool.data_ptr() <= tensor.data_ptr() < pool.data_ptr() + pool.numel()


# Pulling


def test_a_pull_brings_what_was_published_and_releases(pair, way, mode):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", PAYLOAD))
    assert same(got, PAYLOAD)
    assert producer.wait_released("a", 5)
    statistics = consumer.statistics()
    assert (statistics.pulls, statistics.failed_pulls, statistics.allocated_nbytes) == (1, 0, 0)
    assert statistics.pulls_by_access == {"mapped": 0, "served": 0, "rdma": 0, mode: 1}
    assert statistics.bytes_pulled == read_manifest(producer.publish("b", PAYLOAD)).nbytes
    assert statistics.wire_seconds > 0
    assert (statistics.landing_seconds > 0) == (way == "served")


def test_results_are_independent_of_both_pools(pair):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", PAYLOAD))
    for pool in (backend().pool, reader().pool):
        assert not in_pool(got["x"], pool)
        pool.fill_(255)
    assert same(got, PAYLOAD)


def test_results_can_be_changed_in_place_with_gradients(pair):
    producer, consumer = pair
    payload = {"one": torch.ones(9000), "run": [torch.ones(8) for _ in range(4)], "two": torch.ones(8, 1)}
    got = consumer.pull(producer.publish("a", payload))
    for tensor in (got["one"], got["run"][0], got["run"][3], got["two"]):
        weight = torch.ones(tensor.shape, requires_grad=True)
        tensor.mul_(weight).sum().backward()
        assert weight.grad is not None


def test_names_select_and_order(pair):
    producer, consumer = pair
    got = consumer.pull(producer.publish("a", PAYLOAD), names=["z", "x"])
    assert same(got, {"z": PAYLOAD["z"], "x": PAYLOAD["x"]})
    assert consumer.statistics().bytes_pulled == PAYLOAD["x"].nbytes + PAYLOAD["z"].nbytes


@pytest.mark.parametrize(
    ("names", "message"), [(["y"], "there are 'x', 'l', 'z'"), (["x", "x"], "twice"), ("x", "list")]
)
def test_wrong_names_are_refused_before_connecting(served, names, message):
    producer, consumer = served
    with pytest.raises(UsageError, match=message):
        consumer.pull(producer.publish("a", PAYLOAD), names=names)
    assert reader().connected == 0


def test_no_names_bring_nothing_and_release(pair):
    producer, consumer = pair
    assert consumer.pull(producer.publish("a", PAYLOAD), names=[]) == {}
    assert producer.wait_released("a", 5)


@pytest.mark.parametrize(
    "payload", [{}, {"a": None, "b": []}, {"x": torch.empty(0, 4096, dtype=torch.bfloat16)}]
)
def test_nothing_is_read_for_zero_bytes(pair, payload):
    """ai-dynamo/modelexpress#295: one descriptor of size 0 made UCX refuse the whole list."""
    producer, consumer = pair
    verified = []
    reader().before_verify = lambda pool, ticket: verified.append(ticket)
    assert same(consumer.pull(producer.publish("a", payload)), payload)
    assert producer.wait_released("a", 5)
    assert not any(reader().posted)
    assert len(verified) == 1


def test_a_whole_payload_is_one_read(make_producer, make_consumer):
    """ai-dynamo/nixl#156, ray-project/ray#64205: each of thousands of tensors was a transfer of its own."""
    producer, consumer = make_producer("16MiB", access="served"), make_consumer("16MiB")
    payload = {f"t{i}": torch.full((256,), float(i)) for i in range(10_000)}
    manifest = producer.publish("a", payload)
    assert len(manifest) < 1_000_000
    assert same(consumer.pull(manifest), payload)
    assert [len(spans) for spans in reader().posted] == [1]


def test_only_wanted_ranges_are_read(served):
    producer, consumer = served
    payload = {name: torch.full((5000,), float(ord(name))) for name in "abcdef"}
    got = consumer.pull(producer.publish("r", payload), names=["a", "b", "e"])
    assert same(got, {name: payload[name] for name in "abe"})
    spans = reader().posted[0]
    assert [span.nbytes for span in spans] == [40_000, 20_000] or [span.nbytes for span in spans] == [
        40_032,
        20_000,
    ]


def test_a_slot_is_kept_on_demand_and_released_later(pair, wait_for):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    for _ in range(2):
        assert same(consumer.pull(manifest, release=False), PAYLOAD)
    assert not producer.wait_released("a", 0.05)
    consumer.release(manifest)
    assert producer.wait_released("a", 5)
    consumer.release(manifest)
    wait_for(lambda: producer.statistics().ignored_notices == 1)


def test_with_a_key_on_both_sides_releases_and_rejects_are_believed(make_producer, make_consumer):
    key = "0123456789abcdef"
    producer, consumer = make_producer(key=key), make_consumer(key=key)
    pulled, kept, unwanted = (producer.publish(name, PAYLOAD) for name in ("pulled", "kept", "unwanted"))
    consumer.pull(pulled)
    consumer.pull(kept, release=False)
    consumer.release(kept)
    consumer.reject(unwanted)
    for name in ("pulled", "kept", "unwanted"):
        assert producer.wait_released(name, 5)
    statistics = producer.statistics()
    assert (statistics.released, statistics.rejected, statistics.forged_notices) == (3, 1, 0)


def test_reject_gives_back_without_a_pull(pair):
    """vllm-project/vllm#41269: what was rejected before its transfer stranded for minutes."""
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    started = time.monotonic()
    consumer.reject(manifest)
    consumer.reject(manifest)
    assert producer.wait_released("a", 5)
    assert time.monotonic() - started < 0.5
    assert producer.statistics().rejected == 1


def test_two_consumers_are_told_apart(make_producer, make_consumer):
    producer, ann, bob = make_producer(), make_consumer(), make_consumer()
    manifest = producer.publish("a", PAYLOAD, consumers=2)
    ann.pull(manifest)
    ann.pull(manifest)
    assert not producer.wait_released("a", 0.05)
    bob.pull(manifest)
    assert producer.wait_released("a", 5)


def test_notices_to_nobody_are_dropped(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    producer.close()
    consumer.release(manifest)
    consumer.reject(manifest)


# What must not be accepted


def test_bytes_that_are_no_manifest_are_refused_before_connecting(make_consumer, make_producer):
    consumer = make_consumer(max_manifest_bytes=100)
    with pytest.raises(ManifestError):
        consumer.pull(b"not a manifest")
    with pytest.raises(ManifestError, match="the limit is 100"):
        consumer.release(make_producer().publish("a", PAYLOAD))
    with pytest.raises(UsageError, match="a manifest is bytes"):
        consumer.pull("text")  # type: ignore[arg-type]
    with pytest.raises(AuthenticationError):
        make_consumer(key="0123456789abcdef").pull(make_producer().publish("a", PAYLOAD))
    assert reader().connected == 0
    assert consumer.statistics().failed_pulls == 2


def test_checksums_catch_foreign_writes(make_producer, make_consumer, mode):
    producer, consumer = make_producer(access=mode, checksum="xxh3"), make_consumer()
    manifest = producer.publish("a", PAYLOAD)
    assert same(consumer.pull(manifest, release=False), PAYLOAD)
    ticket = read_manifest(manifest).ticket
    spec = read_manifest(manifest).tensors[3]
    backend().slot(ticket)[spec.offset] ^= 1
    with pytest.raises(IntegrityError, match=r"request 'a'.*'l\[2\]\[1\]\.y' have the checksum"):
        consumer.pull(manifest)
    assert same(consumer.pull(manifest, names=["x"], release=False), {"x": PAYLOAD["x"]})
    with pytest.raises(IntegrityError), consumer.borrow(manifest):
        pass
    assert consumer.statistics().integrity_failures == 2
    assert producer.statistics().live == 1, "a slot with broken data is not released"
    assert consumer.statistics().allocated_nbytes == 0


def test_data_that_may_be_anothers_is_discarded(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)

    def reuse(pool, ticket):  # between the copy and the check
        producer.revoke("a")
        pool.pool.fill_(7)

    reader().before_verify = reuse
    with pytest.raises(LeaseRevokedError, match="request 'a' of producer"):
        consumer.pull(manifest)
    assert (consumer.statistics().failed_pulls, consumer.statistics().allocated_nbytes) == (1, 0)


def test_a_reused_slot_is_no_corruption(make_producer, make_consumer, mode):
    producer, consumer = make_producer(access=mode, checksum="xxh3"), make_consumer()
    manifest = producer.publish("a", PAYLOAD)
    backend().slot(read_manifest(manifest).ticket).fill_(7)
    reader().before_verify = lambda pool, ticket: producer.revoke("a")
    with pytest.raises(LeaseRevokedError):
        consumer.pull(manifest)
    assert consumer.statistics().integrity_failures == 0


def test_an_ended_publication_is_not_pulled(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    consumer.release(manifest)
    assert producer.wait_released("a", 5)
    with pytest.raises(LeaseExpiredError):
        consumer.pull(manifest)


def test_a_revoked_publication_is_known_as_such(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    producer.revoke("a")
    with pytest.raises(LeaseRevokedError):
        consumer.pull(manifest)


# Room to land in, and reads that fail


def test_landing_needs_room_and_mapped_does_not(make_producer, make_consumer):
    payload = {"x": torch.zeros(10_000)}
    small = make_consumer("8KiB")
    assert same(small.pull(make_producer(access="mapped").publish("a", payload)), payload)
    with pytest.raises(PayloadTooLargeError, match=r"request 'b' of producer .* needs 40000 bytes"):
        small.pull(make_producer(access="served").publish("b", payload))


def test_memory_of_a_failed_read_stays_in_quarantine_until_it_settles(make_producer, make_consumer):
    """ai-dynamo/nixl#2044: a released request still let the device write."""
    producer, consumer = make_producer(access="served"), make_consumer("64KiB")
    manifest = producer.publish("a", {"x": torch.zeros(64 << 8)})
    reader().read_failures = [TransferTimeoutError("scripted")]
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="request 'a' of producer"):
        consumer.pull(manifest, timeout=0.2)
    assert 0.2 <= time.monotonic() - started < 1
    assert reader().reads[0].cancelled.is_set()
    assert consumer.statistics().quarantined_nbytes == 64 << 10
    for _ in range(3):
        with pytest.raises(PoolTimeoutError, match="request 'a' of producer"):
            consumer.pull(manifest, timeout=0.02)
    assert len(reader().posted) == 1, "nothing may land where another read may still write"
    reader().reads[0].is_settled = True
    assert consumer.pull(manifest)
    assert (consumer.statistics().quarantined_nbytes, consumer.statistics().allocated_nbytes) == (0, 0)


def test_a_waiting_pull_gets_memory_that_settles(make_producer, make_consumer, threads, wait_for):
    producer, consumer = make_producer(access="served"), make_consumer("64KiB")
    manifest = producer.publish("a", {"x": torch.zeros(64 << 8)})
    reader().read_failures = [RemoteAccessError("refused")]
    with pytest.raises(RemoteAccessError):
        consumer.pull(manifest)
    waiting = threads.submit(consumer.pull, manifest)
    wait_for(lambda: consumer.statistics().waiters == 1)
    reader().reads[0].is_settled = True
    assert waiting.result(timeout=1)


def test_one_deadline_covers_all_phases(served):
    producer, consumer = served
    reader().connect_seconds = 0.2
    reader().read_failures = [TransferTimeoutError("scripted")]
    started = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        consumer.pull(producer.publish("a", PAYLOAD), timeout=0.4)
    assert 0.35 < time.monotonic() - started < 0.55


# Connections that break


def test_a_stale_connection_is_replaced_without_a_word(pair):
    producer, consumer = pair
    consumer.pull(producer.publish("a", PAYLOAD))
    reader().last.breaks = True
    assert same(consumer.pull(producer.publish("b", PAYLOAD)), PAYLOAD)
    assert (consumer.statistics().reconnects, reader().connected) == (1, 2)


@pytest.mark.parametrize("known", [True, False])
def test_a_lost_peer_is_reported_as_lost(served, known):
    producer, consumer = served
    consumer.pull(producer.publish("a", PAYLOAD))
    manifest = producer.publish("b", PAYLOAD)
    reader().read_failures = [PeerLostError("reset by peer", scope="peer", status=-25)]
    reader().unreachable = True

    def breaks_when_it_is_read(read):
        reader().last.is_broken = known

    reader().on_read = breaks_when_it_is_read
    with pytest.raises(PeerLostError, match=r"request 'b' of producer .*: reset by peer") as caught:
        consumer.pull(manifest)
    assert (caught.value.scope, caught.value.status) == ("peer", -25)
    assert consumer.statistics().reconnects == 0


def test_a_new_connection_that_breaks_is_not_tried_again(served):
    producer, consumer = served
    reader().read_failures = [PeerLostError("reset by peer", scope="peer")]
    with pytest.raises(PeerLostError):
        consumer.pull(producer.publish("a", PAYLOAD))
    assert reader().connected == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_connection_given_up_with_another_read_is_made_anew(served, times):
    """As often as need be, and also where it was new."""
    producer, consumer = served
    reader().read_failures = [ConnectionGivenUpError("closed", scope="peer") for _ in range(times)]

    def breaks_when_it_is_read(read):
        reader().last.is_broken = reader().connected <= times

    reader().on_read = breaks_when_it_is_read
    assert same(consumer.pull(producer.publish("a", PAYLOAD)), PAYLOAD)
    assert reader().connected == times + 1


def test_a_connection_given_up_at_the_end_of_the_time_is_the_end(served):
    producer, consumer = served
    reader().read_failures = [ConnectionGivenUpError("closed", scope="peer")]
    with pytest.raises(TransferTimeoutError, match="closed; no time was left"):
        consumer.pull(producer.publish("a", PAYLOAD), timeout=0)


def test_a_closed_producer_cannot_be_pulled_from(pair):
    producer, consumer = pair
    first, second = producer.publish("a", PAYLOAD), producer.publish("b", PAYLOAD)
    consumer.pull(first)
    producer.close()
    with pytest.raises(PeerLostError):
        consumer.pull(second)
    with pytest.raises(ConnectError):
        consumer.pull(second)


# Borrowing


def test_borrowed_tensors_are_views(pair, mode):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    pool = backend().pool if mode == "mapped" else reader().pool
    with consumer.borrow(manifest) as borrowed:
        assert same(borrowed, PAYLOAD)
        assert in_pool(borrowed["x"], pool)
        assert producer.statistics().live == 1
        assert (consumer.statistics().allocated_nbytes > 0) == (mode == "served")
    assert producer.wait_released("a", 5)
    assert (consumer.statistics().allocated_nbytes, consumer.statistics().pulls) == (0, 1)


def test_borrowing_some_names_and_keeping_the_slot(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    with consumer.borrow(manifest, names=["z"], release=False, device="cpu") as borrowed:
        assert same(borrowed, {"z": PAYLOAD["z"]})
    assert not producer.wait_released("a", 0.05)
    assert same(consumer.pull(manifest), PAYLOAD)


def test_a_lease_that_ends_in_the_block_is_reported_at_its_end(make_producer, make_consumer):
    producer, consumer = make_producer(access="mapped"), make_consumer()
    manifest = producer.publish("a", PAYLOAD)
    entered = False
    with pytest.raises(LeaseRevokedError, match="request 'a'"), consumer.borrow(manifest):  # noqa: PT012
        entered = True
        producer.revoke("a")
    assert entered


def test_landed_bytes_outlive_the_lease(make_producer, make_consumer):
    producer, consumer = make_producer(access="served"), make_consumer()
    with consumer.borrow(producer.publish("a", PAYLOAD)) as borrowed:
        producer.revoke("a")
        backend().pool.fill_(7)
        assert same(borrowed, PAYLOAD)


def test_an_exception_in_the_block_passes_and_keeps_the_slot(pair):
    producer, consumer = pair
    manifest = producer.publish("a", PAYLOAD)
    with pytest.raises(ZeroDivisionError), consumer.borrow(manifest):
        _ = 1 / 0
    assert not producer.wait_released("a", 0.05)
    assert consumer.statistics().allocated_nbytes == 0
    assert same(consumer.pull(manifest), PAYLOAD)


def test_borrowing_onto_another_device_is_refused(served):
    producer, consumer = served
    with pytest.raises(UsageError, match=r"not a device|cannot be used|not there|borrowed where they are"):
        consumer.borrow(producer.publish("a", PAYLOAD), device="cuda:7").__enter__()


def test_closing_inside_the_block_is_reported_at_its_end(pair):
    producer, consumer = pair
    with pytest.raises(ClosedError), consumer.borrow(producer.publish("a", PAYLOAD)):  # noqa: PT012
        started = time.monotonic()
        consumer.close()
        assert time.monotonic() - started < 1


# The end of a consumer


def test_close_ends_everything_once(make_consumer, make_producer):
    consumer = make_consumer(name="vae")
    manifest = make_producer().publish("a", PAYLOAD)
    assert repr(consumer) == "<Consumer 'vae' 1048576 bytes on cpu>"
    consumer.close()
    consumer.close()
    assert "closed" in repr(consumer)
    assert reader().closed
    for call in (
        lambda: consumer.pull(manifest),
        lambda: consumer.release(manifest),
        lambda: consumer.borrow(manifest).__enter__(),
        consumer.__enter__,
    ):
        with pytest.raises(ClosedError, match="Consumer 'vae' is closed"):
            call()
    assert consumer.statistics().pulls == 0


def test_close_cancels_a_pull_that_is_running(served, threads, wait_for):
    producer, consumer = served
    reader().read_failures = [TransferTimeoutError("scripted")]
    waiting = threads.submit(consumer.pull, producer.publish("a", PAYLOAD), timeout=60)
    wait_for(lambda: reader().reads)
    started = time.monotonic()
    consumer.close()
    with pytest.raises(ClosedError, match="a Consumer was closed during request 'a'"):
        waiting.result(timeout=5)
    assert time.monotonic() - started < 1


def test_close_wakes_a_pull_that_waits_for_room(make_producer, make_consumer, threads, wait_for):
    producer, consumer = make_producer(access="served"), make_consumer("64KiB")
    manifest = producer.publish("a", {"x": torch.zeros(64 << 8)})
    reader().read_failures = [RemoteAccessError("refused")]
    with pytest.raises(RemoteAccessError):
        consumer.pull(manifest)
    waiting = threads.submit(consumer.pull, manifest, timeout=60)
    wait_for(lambda: consumer.statistics().waiters == 1)
    consumer.close()
    with pytest.raises(ClosedError):
        waiting.result(timeout=5)


def test_a_consumer_that_nobody_has_is_closed_with_a_warning(fake):
    consumer = Consumer("1MiB", backend="fake", name="lost")
    backend_reader = reader()
    with pytest.warns(ResourceWarning, match="Consumer 'lost' was not closed"):  # noqa: PT031
        del consumer
        gc.collect()
    assert backend_reader.closed


def test_wrong_arguments_are_named(make_consumer, make_producer):
    for options, message in (
        ({"pool_size": 100}, "pool_size is at least 4096"),
        ({"access": "fast"}, "access is one of"),
        ({"max_manifest_bytes": 0}, "max_manifest_bytes"),
    ):
        with pytest.raises(UsageError, match=message):
            make_consumer(**options)
    assert not fake_backend.READERS
    consumer, manifest = make_consumer(), make_producer().publish("a", PAYLOAD)
    with pytest.raises(UsageError, match="timeout"):
        consumer.pull(manifest, timeout=-1)
    with pytest.raises(UsageError, match="'meta'"):
        consumer.pull(manifest, device="meta")
    with pytest.raises(UsageError, match="timeout"):
        consumer.close(timeout="soon")


def test_a_forked_child_cannot_use_it_and_does_not_touch_it(make_consumer, make_producer):
    consumer, producer = make_consumer(), make_producer()
    manifest = producer.publish("a", PAYLOAD)
    with consumer._receiver._counts._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (
                    lambda: consumer.pull(manifest),
                    lambda: consumer.release(manifest),
                    lambda: consumer.borrow(manifest).__enter__(),
                    consumer.statistics,
                ):
                    with pytest.raises(ForkedProcessError, match="before the fork of this process"):
                        call()
                consumer.close()
                status = 3 if reader().closed else 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(consumer.pull(manifest), PAYLOAD)


def test_many_threads_share_a_consumer(make_producer, make_consumer, threads):
    producer, consumer = make_producer("1MiB", access="served"), make_consumer("256KiB")

    def work(worker: int) -> None:
        for turn in range(100):
            payload = {"x": torch.full((worker * 500 + turn + 1,), float(turn))}
            manifest = producer.publish(f"{worker}-{turn}", payload, timeout=30)
            if turn % 5:
                assert same(consumer.pull(manifest), payload)
            else:
                with consumer.borrow(manifest) as borrowed:
                    assert same(borrowed, payload)

    for future in [threads.submit(work, worker) for worker in range(8)]:
        future.result(timeout=60)
    statistics = consumer.statistics()
    assert (statistics.pulls, statistics.failed_pulls, statistics.allocated_nbytes) == (800, 0, 0)
    assert threading.active_count() < 30


# Landing in the results


@pytest.fixture
def direct(served):
    reader().lands_anywhere = True
    return served


def test_bytes_for_the_cpu_land_in_the_results(direct):
    producer, consumer = direct
    reader().pool.fill_(0xAA)
    payload = {"large": torch.randn(30_000), "small": [torch.ones(7), torch.arange(9), None], "none": {}}
    got = consumer.pull(producer.publish("a", payload))
    assert same(got, payload)
    assert bool((reader().pool == 0xAA).all()), "they went through the pool"
    assert [len(spans) for spans in reader().posted] == [2], "one batch, the small ones together"
    assert got["large"].untyped_storage().nbytes() == 120_000


def test_landing_in_the_results_takes_room_as_well(direct):
    producer, consumer = direct
    manifest = producer.publish("a", {"x": torch.ones(100_000)})
    reader().read_failures = [TransferTimeoutError("late")]
    with pytest.raises(TransferTimeoutError):
        consumer.pull(manifest, timeout=0.05)
    assert consumer.statistics().quarantined_nbytes >= 400_000
    reader().reads[-1].is_settled = True
    assert consumer.statistics().allocated_nbytes == 0
    assert bool((consumer.pull(manifest)["x"] == 1).all())


def test_broken_bytes_in_the_results_are_found(make_producer, make_consumer):
    producer, consumer = make_producer(access="served", checksum="xxh3"), make_consumer()
    reader().lands_anywhere = True
    payload = {f"t{i}": torch.full((20_000,), float(i)) for i in range(3)}
    manifest = producer.publish("a", payload)
    assert same(consumer.pull(manifest, release=False), payload)
    ticket = read_manifest(manifest).ticket
    backend().slot(ticket)[90_000] ^= 1
    with pytest.raises(IntegrityError, match="t1"):
        consumer.pull(manifest)


def test_a_borrow_lands_in_the_pool(direct):
    producer, consumer = direct
    with consumer.borrow(producer.publish("a", PAYLOAD)) as got:
        assert same(got, PAYLOAD)
        assert consumer.statistics().allocated_nbytes > 0


# Landing in the pool part by part


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("tensorferry.receiving._PART_NBYTES", 8192)
    monkeypatch.setattr("tensorferry.receiving._COPIES_BESIDE", True)


LARGE = {"x": torch.arange(10_000), "l": [torch.arange(100), None, torch.zeros(0, 3)], "y": torch.arange(7.0)}


@pytest.mark.parametrize("checksum", [None, "xxh3"])
def test_large_payloads_come_in_parts(make_producer, make_consumer, small_parts, checksum):
    producer, consumer = make_producer(access="served", checksum=checksum), make_consumer()
    assert same(consumer.pull(producer.publish("a", LARGE)), LARGE)
    assert len(reader().posted) == 10
    assert sum(span.nbytes for spans in reader().posted for span in spans) >= 80_828
    assert producer.wait_released("a", 5)
    statistics = consumer.statistics()
    assert (statistics.allocated_nbytes, statistics.quarantined_nbytes) == (0, 0)
    assert statistics.landing_seconds > 0


def test_parts_are_of_whole_tensors_only(served, small_parts):
    producer, consumer = served
    manifest = producer.publish("a", LARGE)
    assert same(consumer.pull(manifest, names=["x"], release=False), {"x": LARGE["x"]})
    assert len(reader().posted) == 10
    got = consumer.pull(manifest, slices={"x": slice(None, None, 2)})
    assert bool((got["x"] == LARGE["x"][::2]).all())
    assert len(reader().posted) == 11


def test_the_memory_of_parts_is_free_when_all_have_settled(served, small_parts):
    producer, consumer = served
    manifest = producer.publish("a", LARGE)
    reader().read_failures = [None, TransferTimeoutError("late"), None, TransferTimeoutError("later")]
    with pytest.raises(TransferTimeoutError):
        consumer.pull(manifest, timeout=0.05)
    assert consumer.statistics().quarantined_nbytes > 80_000
    reader().reads[1].is_settled = True
    assert consumer.statistics().quarantined_nbytes > 80_000
    reader().reads[3].is_settled = True
    assert consumer.statistics().allocated_nbytes == 0
    assert producer.statistics().live == 1
    assert same(consumer.pull(manifest), LARGE)


def test_broken_bytes_in_a_part_are_found(make_producer, make_consumer, small_parts):
    producer, consumer = make_producer(access="served", checksum="xxh3"), make_consumer()
    manifest = producer.publish("a", LARGE)
    backend().slot(read_manifest(manifest).ticket)[40_000] ^= 1
    with pytest.raises(IntegrityError, match="x"):
        consumer.pull(manifest)
    assert not producer.wait_released("a", 0.05)
    assert consumer.statistics().allocated_nbytes == 0


# Peers that are silent


def test_a_silent_producer_costs_a_full_timeout_once(served, monkeypatch):
    """Later pulls ask it briefly, and wait as long as they like once it answers."""
    monkeypatch.setattr("tensorferry.routes.PATIENCE_SECONDS", 0.1)
    producer, consumer = served
    manifest = producer.publish("a", PAYLOAD)
    hangs = TransferTimeoutError("")
    reader().read_failures = [hangs, hangs, None, None]
    with pytest.raises(TransferTimeoutError):
        consumer.pull(manifest, timeout=0.3)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"silent for 0 seconds, and did not answer within 0.1") as caught:
        consumer.pull(manifest, timeout=30)
    assert caught.value.scope == "peer"
    assert time.monotonic() - started < 10
    assert same(consumer.pull(manifest, timeout=30, release=False), PAYLOAD)
    assert reader().posted[-2] == []  # the question
    assert same(consumer.pull(manifest, timeout=30), PAYLOAD)
    assert reader().posted[-2] != []  # it is not asked any more


def test_silent_producers_are_forgotten_in_time(monkeypatch):
    from tensorferry import silence

    peers = silence.SilentPeers()
    now = 1000.0
    monkeypatch.setattr(silence.time, "monotonic", lambda: now)
    peers.add(b"a")
    now += 59
    assert peers.seconds(b"a") == 59
    peers.add(b"a")
    now += 59
    peers.add(b"b")
    assert peers.seconds(b"a") == 118
    now += 2
    peers.add(b"b")
    assert peers.seconds(b"a") is None
    peers.discard(b"b")
    assert peers.seconds(b"b") is None
