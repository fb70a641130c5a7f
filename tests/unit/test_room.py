# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time

import pytest

from tensorferry import steps
from tensorferry.arguments import Deadline
from tensorferry.errors import ClosedError, PayloadTooLargeError, PoolExhaustedError, PoolTimeoutError
from tensorferry.room import Loan, Room

KIB = 1024


def room(nbytes=64 * KIB, **changes):
    return Room(nbytes, 4 * KIB, **{"owner": "the test", **changes})


def take(one: Room, nbytes: int, borrower: str, timeout: float | None) -> Loan:
    return steps.run(one.take(nbytes, borrower, None if timeout is None else Deadline(timeout)))


def test_lends_and_takes_back():
    one = room()
    loan = take(one, 5 * KIB, "a", None)
    assert (loan.nbytes, one.requested_nbytes, one.allocated_nbytes) == (5 * KIB, 5 * KIB, 8 * KIB)
    one.give_back(loan)
    assert one.allocated_nbytes == 0


def test_refuses_what_can_never_fit():
    with pytest.raises(PayloadTooLargeError, match=r"a needs 65537 bytes, the pool of the test has 65536"):
        take(room(), 64 * KIB + 1, "a", 1.0)


def test_a_full_pool_says_so_with_numbers():
    one = room()
    take(one, 60 * KIB, "a", None)
    with pytest.raises(
        PoolExhaustedError, match=r"no room for b: 8192 bytes are needed.*4096 are free"
    ) as caught:
        take(one, 8 * KIB, "b", None)
    error = caught.value
    assert (error.requested_nbytes, error.free_nbytes, error.pool_nbytes) == (8 * KIB, 4 * KIB, 64 * KIB)


def test_waits_as_long_as_it_was_told_to():
    one = room()
    take(one, 64 * KIB, "a", None)
    started = time.monotonic()
    with pytest.raises(PoolTimeoutError, match=r"no room for b within 0.2 seconds"):
        take(one, 1, "b", 0.2)
    assert 0.2 <= time.monotonic() - started < 1.0
    assert one.waiters == 0


def test_a_waiter_gets_what_is_given_back(threads, wait_for):
    one = room()
    loan = take(one, 64 * KIB, "a", None)
    waiting = threads.submit(take, one, 64 * KIB, "b", 10.0)
    wait_for(lambda: one.waiters == 1)
    one.give_back(loan)
    assert waiting.result(timeout=1).nbytes == 64 * KIB


def test_first_come_first_served_although_smaller_ones_would_fit(threads, wait_for):
    """LMCache/LMCache#1337, #1339: without an order requests waited for ever."""
    one = room()
    kept, other = take(one, 32 * KIB, "a", None), take(one, 16 * KIB, "b", None)
    big = threads.submit(take, one, 32 * KIB, "big", 10.0)
    wait_for(lambda: one.waiters == 1)
    small = [threads.submit(take, one, 4 * KIB, f"small {i}", 10.0) for i in range(3)]
    wait_for(lambda: one.waiters == 4)
    with pytest.raises(PoolExhaustedError, match="4 calls wait"):
        take(one, 4 * KIB, "barging", None)
    time.sleep(0.05)
    assert not any(waiting.done() for waiting in [big, *small])
    one.give_back(other)
    assert big.result(timeout=1).nbytes == 32 * KIB
    one.give_back(kept)
    assert all(waiting.result(timeout=1) for waiting in small)


def test_those_behind_a_head_that_gives_up_are_served(threads, wait_for):
    one = room()
    take(one, 32 * KIB, "a", None)
    big = threads.submit(take, one, 64 * KIB, "big", 0.1)
    wait_for(lambda: one.waiters == 1)
    small = threads.submit(take, one, 4 * KIB, "small", 10.0)
    with pytest.raises(PoolTimeoutError):
        big.result(timeout=5)
    assert small.result(timeout=1)


def cost_of_leaving(waiting: int) -> float:
    """Return the CPU seconds in which 1,000 of those who wait give up, the last ones first."""
    one = room()
    take(one, 64 * KIB, "a", None)
    queue = [one.take(KIB, "b", Deadline(60.0)) for _ in range(waiting)]
    for waiter in queue:
        next(waiter)
    started = time.thread_time()
    for waiter in reversed(queue[-1000:]):
        waiter.close()
    spent = time.thread_time() - started
    assert one.waiters == waiting - 1000
    return spent


def test_giving_up_costs_no_more_among_many():
    assert cost_of_leaving(40_000) < 6 * min(cost_of_leaving(1000) for _ in range(3)) + 0.05


def test_loans_without_memory_count_and_wait_too(threads, wait_for):
    one = room(max_loans=2)
    first, _ = take(one, 0, "a", None), take(one, 4 * KIB, "b", None)
    with pytest.raises(PoolExhaustedError, match="2 of at most 2 slots"):
        take(one, 0, "c", None)
    waiting = threads.submit(take, one, 0, "c", 10.0)
    wait_for(lambda: one.waiters == 1)
    one.give_back(first)
    assert waiting.result(timeout=1).generation == 0


def test_close_wakes_everyone(threads, wait_for):
    one = room()
    loan = take(one, 64 * KIB, "a", None)
    waiting = [threads.submit(take, one, 1, "b", 60.0) for _ in range(3)]
    wait_for(lambda: one.waiters == 3)
    one.close()
    for future in waiting:
        with pytest.raises(ClosedError, match="the test is closed"):
            future.result(timeout=1)
    with pytest.raises(ClosedError):
        take(one, 1, "late", None)
    one.give_back(loan)


def test_those_who_wait_poll(threads, wait_for):
    polled = threading.Event()
    one = room(poll=lambda: polled.set() if one_waits() else None)

    def one_waits() -> bool:
        return one.waiters == 1

    take(one, 64 * KIB, "a", None)
    threads.submit(take, one, 1, "b", 0.2)
    assert polled.wait(1.0)


def test_many_threads_never_hold_more_than_there_is(threads, wait_for):
    one = room()
    held, peak, lock = 0, 0, threading.Lock()

    def work(seed: int) -> None:
        nonlocal held, peak
        for turn in range(100):
            nbytes = ((seed * 7 + turn * 13) % 16 + 1) * 4 * KIB
            loan = take(one, nbytes, "w", 30.0)
            with lock:
                held += nbytes
                peak = max(peak, held)
            with lock:
                held -= nbytes
            one.give_back(loan)

    for future in [threads.submit(work, seed) for seed in range(8)]:
        future.result(timeout=60)
    assert peak <= 64 * KIB
    assert (one.allocated_nbytes, one.waiters) == (0, 0)
