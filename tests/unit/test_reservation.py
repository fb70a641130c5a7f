# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import time
import warnings

import fake_backend
import pytest
import torch

from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import (
    ClosedError,
    ForkedProcessError,
    PayloadTooLargeError,
    PoolExhaustedError,
    PoolTimeoutError,
    StaleHandleError,
    UsageError,
)

KIB = 1024


@pytest.fixture
def producer(make_producer):
    return make_producer("64KiB", access="served")


def pool() -> torch.Tensor:
    return fake_backend.POOLS[-1].pool


def in_pool(tensor: torch.Tensor) -> bool:
    return pool().data_ptr() <= tensor.data_ptr() < pool().data_ptr() + pool().numel()


def test_tensors_live_in_the_pool_and_are_published_without_a_copy(producer, make_consumer):
    reservation = producer.reserve("a", 16 * KIB)
    x = reservation.empty("x", (10, 20), torch.float32)
    y = reservation.empty("y", [], torch.bfloat16)
    assert in_pool(x)
    assert in_pool(y)
    assert (x.shape, y.shape, y.dtype) == ((10, 20), (), torch.bfloat16)
    torch.arange(200.0, out=x.view(-1))
    y.fill_(2.5)
    before = pool().clone()
    manifest = reservation.publish(metadata={"n": 1})
    assert torch.equal(pool(), before)
    got = make_consumer().pull(manifest)
    assert torch.equal(got["x"], torch.arange(200.0).view(10, 20))
    assert float(got["y"]) == 2.5
    assert producer.wait_released("a", 5)
    assert producer.statistics().allocated_nbytes == 0


def test_described_tensors_are_made_at_once_and_take_what_they_need(producer):
    reservation = producer.reserve(
        "a",
        {
            "x": ((3, 5), torch.int16),
            "y": torch.empty(7, dtype=torch.float64, device="meta"),
            "z": ([0, 4], "float8_e4m3fn"),
        },
    )
    assert list(reservation.tensors) == ["x", "y", "z"]
    assert reservation.nbytes == 64 + 56
    assert reservation.tensors["z"].shape == (0, 4)
    assert "120 of 120 bytes used" in repr(reservation)
    reservation.cancel()


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_every_dtype_can_be_computed_into(producer, make_consumer, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        with producer.reserve("a", {"x": ((4, 3), dtype)}) as reservation:
            bits = reservation.tensors["x"].view(-1).view(torch.uint8)
            bits.copy_(torch.arange(bits.numel(), dtype=torch.uint8))
            got = make_consumer().pull(reservation.publish())["x"]
    assert got.dtype == dtype
    assert torch.equal(got.view(-1).view(torch.uint8), torch.arange(got.nbytes, dtype=torch.uint8))


def test_any_structure_of_the_tensors_can_be_published(producer, make_consumer):
    reservation = producer.reserve("a", 4 * KIB)
    x = reservation.empty("x", (4, 4), torch.int32)
    y = reservation.empty("y", (2,), torch.int64)
    x.copy_(torch.arange(16).view(4, 4))
    y.fill_(9)
    manifest = reservation.publish({"pair": (y, [None, x[1:3]]), "first": x[0]})
    got = make_consumer().pull(manifest)
    assert list(got) == ["pair", "first"]
    assert torch.equal(got["pair"][1][1], torch.arange(4, 12).view(2, 4))
    assert torch.equal(got["first"], torch.arange(4))


def test_only_tensors_of_the_slot_without_overlap_can_be_published(producer):
    reservation = producer.reserve("a", 4 * KIB)
    x = reservation.empty("x", (4, 4), torch.int32)
    second = producer.reserve("b", 4 * KIB)
    other = second.empty("x", (4,), torch.int32)
    for payload, message in (
        ({"x": torch.zeros(4)}, "x is not in the memory of this reservation"),
        ({"l": [other]}, r"l\[0\] is not in the memory"),
        ({"x": x.t()}, "x is not contiguous"),
        ({"x": x, "row": x[1]}, "x and row share memory"),
        ({"x": x.conj().to(torch.complex64)}, "not in the memory"),
    ):
        with pytest.raises(UsageError, match=message):
            reservation.publish(payload)
    assert reservation.publish()  # the slot is still reserved
    assert producer.statistics().failed_publishes == 5
    second.cancel()


def test_readers_see_nothing_of_what_was_there_before(producer):
    """The manifest opens the slot up to its last tensor, and what lies between them is zero."""
    pool().fill_(0x5A)
    with producer.reserve("a", 4 * KIB) as reservation:
        reservation.empty("unused", (100,), torch.uint8)
        x = reservation.empty("x", (3,), torch.uint8)
        y = reservation.empty("y", (5,), torch.uint8)
        x.fill_(1)
        y.fill_(2)
        from tensorferry import read_manifest

        ticket = read_manifest(reservation.publish({"x": x, "y": y})).ticket
    slot = pool()[ticket.offset : ticket.offset + ticket.nbytes]
    assert slot.tolist() == [0] * 128 + [1] * 3 + [0] * 61 + [2] * 5


def test_a_copied_publication_shows_nothing_of_before_either(producer):
    from tensorferry import read_manifest

    pool().fill_(0x5A)
    ticket = read_manifest(producer.publish("a", {"x": torch.ones(1), "y": torch.ones(1)})).ticket
    slot = pool()[ticket.offset : ticket.offset + ticket.nbytes]
    assert slot[4:64].tolist() == [0] * 60


def test_wrong_requests_change_nothing(producer):
    reservation = producer.reserve("a", 256)
    reservation.empty("x", (50,), torch.float32)
    for call, message in (
        (lambda: reservation.empty("y", (15,), torch.float32), "y needs 60 bytes at 256 of the 256 bytes"),
        (lambda: reservation.empty("x", (1,), torch.int8), "'x' is taken"),
        (lambda: reservation.empty("y", (-1,), torch.int8), "negative"),
        (lambda: reservation.empty("y", (1,), "float3"), "float3"),
        (lambda: reservation.empty("y", (1,), 7), "not a dtype"),
        (lambda: reservation.empty("y", ("a",), torch.int8), "y: "),
        (lambda: producer.reserve("a", 256), "'a' is published by"),
        (lambda: producer.reserve("b", {"x": 5}), "a shape and a dtype"),
        (lambda: producer.reserve("b", -1), "positive"),
        (lambda: producer.reserve(7, 1), "request_id is a str"),
        (lambda: producer.publish("a", {"x": torch.ones(1)}), "'a' is published by"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
    assert producer.statistics().requested_nbytes == 256
    reservation.cancel()


def test_a_full_pool_keeps_no_half_made_reservation(producer):
    """The reference class went on with a reservation that had no slot."""
    full = producer.reserve("full", "64KiB")
    with pytest.raises(PoolExhaustedError):
        producer.reserve("a", 1)
    with pytest.raises(PoolTimeoutError):
        producer.reserve("a", 1, timeout=0.05)
    with pytest.raises(PayloadTooLargeError):
        producer.reserve("a", "65KiB")
    full.cancel()
    producer.reserve("a", 1).cancel()
    assert producer.statistics().allocated_nbytes == 0


def test_the_slot_dies_with_publishing_and_cancelling(producer):
    published, cancelled = producer.reserve("a", 64), producer.reserve("b", 64)
    published.publish({})
    cancelled.cancel()
    cancelled.cancel()
    for reservation, state in ((published, "published"), (cancelled, "cancelled")):
        assert state in repr(reservation)
        for call in (reservation.publish, lambda r=reservation: r.empty("x", (), torch.int8)):
            with pytest.raises(StaleHandleError, match=f"was {state}"):
                call()
    assert producer.revoke("a")
    published.cancel()  # touches nothing any more
    assert producer.statistics().allocated_nbytes == 0


def test_a_context_cancels_what_was_not_published(producer):
    with producer.reserve("a", 64), pytest.raises(UsageError):
        producer.publish("a", {})
    producer.publish("a", {})


def test_a_reserved_name_holds_its_slot(producer):
    reservation = producer.reserve("a", 64)
    assert not producer.wait_released("a", 0)
    assert not producer.revoke("a")
    reservation.cancel()
    assert producer.wait_released("a", 0)


def test_a_forgotten_slot_comes_back_when_its_last_tensor_is_gone(producer, wait_for):
    reservation = producer.reserve("a", 64)
    x = reservation.empty("x", (4,), torch.int32)[1:]
    del reservation
    gc.collect()
    time.sleep(0.05)
    assert producer.statistics().requested_nbytes == 64
    with pytest.warns(ResourceWarning, match="the reservation of 'a' was neither published nor cancelled"):
        del x
    wait_for(lambda: producer.statistics().allocated_nbytes == 0)
    producer.publish("a", {})


def test_a_published_slot_is_free_although_its_tensors_are_around(producer, make_consumer):
    reservation = producer.reserve("a", 64)
    x = reservation.empty("x", (4,), torch.int32).zero_()
    make_consumer().pull(reservation.publish())
    assert producer.wait_released("a", 5)
    assert producer.statistics().allocated_nbytes == 0
    assert x.sum() == 0  # still memory


def test_a_closed_producer_takes_its_reservations_along(producer):
    reservation = producer.reserve("a", 64)
    x = reservation.empty("x", (4,), torch.int32)
    producer.close()
    x.fill_(1)  # the memory is there as long as the tensor
    for call in (
        reservation.publish,
        lambda: reservation.empty("y", (1,), torch.int8),
        lambda: producer.reserve("b", 1),
    ):
        with pytest.raises(ClosedError):
            call()
    reservation.cancel()


def test_a_forked_child_cannot_use_it(producer):
    reservation = producer.reserve("a", 64)
    child = os.fork()
    if child == 0:
        code = 0
        for call in (reservation.publish, lambda: reservation.empty("x", (1,), torch.int8)):
            try:
                call()
                code = 1
            except ForkedProcessError:
                pass
        reservation.cancel()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reservation.publish()
