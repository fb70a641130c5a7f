# SPDX-License-Identifier: Apache-2.0
"""What a backend must do whose connections read: ``served`` and ``rdma``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tensorferry import errors
from tensorferry.backends.base import Connection, Read, Reader, Releaser, SlotTicket, Span
from tensorferry.testing.contract import BackendContract
from tensorferry.testing.host import Exported, Host, pattern
from tensorferry.testing.reading import (
    CONSUMER,
    KIB,
    MAC,
    MIB,
    POOL_NBYTES,
    SOON,
    bring,
    connect,
    ends_within,
    eventually,
    landed,
    whole,
)


class ReadContract(BackendContract):
    """Tests of a backend whose connections are ``served`` or ``rdma``.

    Attributes:
        backend: What is tested.
        producer_survives: False where a library is known to end a producer whose readers go in the middle
            of a read: what should be true of it afterwards is then tested only if it lives.
    """

    # Spans

    def test_spans_that_leave_slot_or_landing_pool(self, exported: Exported, reader: Reader) -> None:
        """Nothing is posted then, of the other spans neither."""
        ticket, connection = exported.admit(64 * KIB, 4 * KIB, seed=1), connect(reader, exported)
        reader.pool.zero_()
        for span in (
            Span(0, 0, 4 * KIB + 1),
            Span(4 * KIB, 0, 1),
            Span(4 * KIB + 1, 0, 1),
            Span(1 << 63, 0, 1 << 63),
            Span(0, POOL_NBYTES, 1),
            Span(0, POOL_NBYTES - 1, 2),
            Span(0, 1 << 63, 1),
        ):
            with pytest.raises(errors.UsageError):
                connection.read(ticket, [Span(0, 0, 64), span])
        time.sleep(0.05)
        assert not landed(reader, 64).any()

    def test_the_slot_without_any_span(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 4 * KIB, seed=1), connect(reader, exported)
        for spans in ([], [Span(0, 0, 0)]):
            connection.read(ticket, spans).wait(SOON)
        exported.withdraw(ticket)
        with pytest.raises(errors.LeaseExpiredError):
            connection.read(ticket, []).wait(SOON)

    def test_memory_of_the_caller(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 64 * KIB, seed=1), connect(reader, exported)
        memories = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (1, 1000, 64 * KIB)]
        if not connection.lands_anywhere:
            with pytest.raises(errors.UsageError):
                connection.read_into(ticket, [0, 7, 0], memories)
            return
        connection.read_into(ticket, [0, 7, 0], memories).wait(SOON)
        expected = pattern(64 * KIB, 1)
        for start, memory in zip([0, 7, 0], memories, strict=True):
            assert torch.equal(memory, expected[start : start + len(memory)])
        with pytest.raises(errors.UsageError):
            connection.read_into(ticket, [1], memories[2:])

    # Release with the read

    def test_a_release_goes_with_a_read_that_ends_well(self, exported: Exported, reader: Reader) -> None:
        good, bad = (exported.admit(at, 4 * KIB, seed=1) for at in (0, 64 * KIB))
        connection = connect(reader, exported)
        connection.read(good, whole(good), Releaser(CONSUMER, MAC)).wait(SOON)
        exported.withdraw(bad)
        with pytest.raises(errors.LeaseExpiredError):
            connection.read(bad, whole(bad), Releaser(CONSUMER, MAC)).wait(SOON)
        found = exported.notices(1)
        assert [(one.kind, one.generation, one.consumer, one.mac) for one in found] == [
            ("release", good.generation, CONSUMER, MAC)
        ]

    def test_no_release_goes_with_a_read_that_was_given_up(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        with stopped(exported.host):
            read = connection.read(ticket, whole(ticket), Releaser(CONSUMER, MAC))
            ended = ends_at_once(read)
            read.cancel()
        with self.outlived(exported.host):
            assert len(exported.notices(0)) == ended

    # Deadlines, cancelling, and memory that is still written to

    def test_a_stopped_producer_costs_no_more_than_the_timeout(
        self, exported: Exported, reader: Reader
    ) -> None:
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        bring(reader, connection, ticket, whole(ticket))
        with stopped(exported.host):
            read = connection.read(ticket, whole(ticket))
            with ends_within(2.5):
                try:
                    read.wait(0.4)
                except errors.TransferTimeoutError:
                    pass
                else:  # a device read it without the process
                    assert torch.equal(landed(reader, ticket.nbytes), pattern(ticket.nbytes, 1))
            if reader.capabilities.takes_reads_back:
                assert eventually(lambda: read.settled), "the read was not taken back from a silent peer"
        assert eventually(lambda: read.settled), "the memory of the read is never given back"
        reader.pool.zero_()
        time.sleep(0.1)
        assert not reader.pool.any(), "something was written after the read had settled"
        with self.outlived(exported.host):
            self._read_again(exported, reader, ticket)

    def test_cancelling(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        with stopped(exported.host):
            read = connection.read(ticket, whole(ticket))
            if ends_at_once(read):
                pytest.skip("a device reads without the process: there is no time to cancel")
            with ThreadPoolExecutor(1) as threads, ends_within(5.0):
                waiting = threads.submit(read.wait, 30.0)
                time.sleep(0.05)
                read.cancel()
                with pytest.raises(errors.TransferCancelledError):
                    waiting.result()
            early = read.settled
            if early:
                reader.pool.zero_()
        assert eventually(lambda: read.settled), "the memory of the read is never given back"
        time.sleep(0.1)
        assert not (early and reader.pool.any()), "something was written after the read had settled"
        read.cancel()
        with self.outlived(exported.host):
            self._read_again(exported, reader, ticket)

    def test_cancelling_what_has_ended_changes_nothing(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 4 * KIB, seed=1)
        read = connect(reader, exported).read(ticket, whole(ticket))
        read.wait(SOON)
        read.cancel()
        read.wait(0.0)
        assert eventually(lambda: read.settled)

    def kill(self, victim: Host, connection: Connection, ticket: SlotTicket) -> None:
        """Kill it during a read."""
        victim.stop()
        read = connection.read(ticket, whole(ticket))
        ended = ends_at_once(read)
        victim.kill()
        if not ended:
            with pytest.raises(errors.PeerLostError):
                read.wait(SOON)
        assert eventually(lambda: read.settled), "the memory of the read is never given back"

    def _read_again(self, exported: Exported, reader: Reader, ticket: SlotTicket) -> None:
        again(reader, exported, ticket)
        assert torch.equal(landed(reader, ticket.nbytes), pattern(ticket.nbytes, 1))

    # Callbacks

    def test_each_watched_read_is_reported_once(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 64 * KIB, seed=1), connect(reader, exported)
        calls: list[int] = []
        reads = [connection.read(ticket, whole(ticket, number * 64 * KIB)) for number in range(20)]
        for number, read in enumerate(reads):
            read.watch(lambda number=number: calls.append(number))  # type: ignore[misc]
        poll(reader, lambda: len(set(calls)) == 20)
        reader.poll(0.1)
        assert sorted(calls) == list(range(20))
        for read in reads:
            read.wait(0.0)
        ended = connection.read(ticket, whole(ticket))
        ended.wait(SOON)
        ended.watch(lambda: calls.append(20))
        poll(reader, lambda: calls[-1] == 20)

    def test_reads_that_fail_are_reported(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        calls: list[str] = []
        with stopped(exported.host):
            given_up = connection.read(ticket, whole(ticket))
            given_up.watch(lambda: calls.append("given up"))
            given_up.cancel()
            poll(reader, lambda: calls == ["given up"])
        with self.outlived(exported.host):
            exported.withdraw(ticket)
            late = connect(reader, exported).read(ticket, whole(ticket))
            late.watch(lambda: calls.append("late"))
            poll(reader, lambda: calls == ["given up", "late"])
            with pytest.raises((errors.LeaseExpiredError, errors.PeerLostError)):
                late.wait(0.0)

    def test_a_second_callback_takes_the_place_of_the_first(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        calls: list[int] = []
        with stopped(exported.host):
            read = connection.read(ticket, whole(ticket))
            ended = ends_at_once(read)
            for number in (1, 2):
                read.watch(lambda number=number: calls.append(number))  # type: ignore[misc]
        poll(reader, lambda: 2 in calls)
        reader.poll(0.1)
        assert calls == [2] or ended

    def test_waking_a_poll(self, reader: Reader) -> None:
        with ends_within(SOON):
            reader.wake()
            reader.poll(30.0)
            timer = threading.Timer(0.1, reader.wake)
            timer.start()
            reader.poll(30.0)
            timer.join()
        with ends_within(2.0):
            reader.poll(0.1)

    # Ends

    def test_closing_with_reads_under_way(self, exported: Exported) -> None:
        reader = self.backend.open_reader(POOL_NBYTES)
        ticket, connection = exported.admit(0, 3 * MIB, seed=1), connect(reader, exported)
        with stopped(exported.host):
            reads = [connection.read(ticket, whole(ticket)) for _ in range(3)]
            ended = ends_at_once(reads[-1])
            with ThreadPoolExecutor(3) as threads, ends_within(SOON):
                waiting = [threads.submit(read.wait, 30.0) for read in reads]
                time.sleep(0.05)
                reader.close(1.0)
                for one in waiting:
                    assert ended or isinstance(one.exception(SOON), errors.TensorferryError)
            assert all(read.settled for read in reads)
        with pytest.raises(errors.TensorferryError):
            connection.read(ticket, []).wait(1.0)

    def test_a_consumer_that_gives_up_for_good_does_not_harm_others(
        self, exported: Exported, reader: Reader
    ) -> None:
        ticket = exported.admit(0, 3 * MIB, seed=1)
        other = self.backend.open_reader(POOL_NBYTES)
        connection = connect(other, exported)
        with stopped(exported.host):
            connection.read(ticket, whole(ticket))
            other.close(0.0)
        with self.outlived(exported.host):
            self._read_again(exported, reader, ticket)


class ServedContract(ReadContract):
    """Tests of a backend whose producer is asked for each read."""

    def test_a_producer_that_is_asked_knows_the_slot(self, exported: Exported, reader: Reader) -> None:
        """Token, bounds and the end of the lease are the producer's."""
        ticket, connection = exported.admit(4 * KIB, 4 * KIB, seed=1), connect(reader, exported)
        short = exported.admit(16 * KIB, 64, seed=1, lease=0.1)
        for forged in (replace(ticket, token=bytes(16)), replace(ticket, nbytes=64 * KIB)):
            with pytest.raises((errors.RemoteAccessError, errors.LeaseExpiredError)):
                connection.read(forged, [Span(0, 0, forged.nbytes)]).wait(SOON)
        time.sleep(0.2)
        with pytest.raises(errors.LeaseExpiredError):
            connection.read(short, whole(short)).wait(SOON)


@contextmanager
def stopped(host: Host) -> Iterator[None]:
    """Let a process do nothing during the block."""
    host.stop()
    try:
        yield
    finally:
        host.go_on()


def ends_at_once(read: Read) -> bool:
    """Whether a read of a stopped process ends nonetheless, as a device's would; it is watched till then."""
    return eventually(lambda: read.settled, 0.1)


def again(reader: Reader, exported: Exported, ticket: SlotTicket) -> Connection:
    """Read a slot whole after a read was given up, which may have closed the connection."""
    try:
        connection = connect(reader, exported)
        bring(reader, connection, ticket, whole(ticket))
    except errors.PeerLostError:
        connection = connect(reader, exported)
        bring(reader, connection, ticket, whole(ticket))
    return connection


def poll(reader: Reader, done: object) -> None:
    """Poll until something is so."""
    assert callable(done)
    end = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < end, "a read that ended was not reported"
        reader.poll(0.5)
