# SPDX-License-Identifier: Apache-2.0
"""What every backend must do, whatever its access; and what one must whose access is ``mapped``."""

from __future__ import annotations

import os
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch

from tensorferry import errors, steps
from tensorferry.arguments import Deadline
from tensorferry.backends.base import Connection, Notice, Reader, SlotTicket, Span
from tensorferry.testing import host as remote
from tensorferry.testing.host import (
    BackendUnderTest,
    Exported,
    Host,
    HostError,
    HostGoneError,
    pattern,
    resources,
)
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
    exit_status,
    landed,
    whole,
)
from tensorferry.testing.user_contract import UserContract


class BackendContract(UserContract):
    """Tests of a backend in one access mode; derive from a subclass that says what the access is.

    Attributes:
        backend: What is tested.
    """

    producer_survives: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def host(cls) -> Iterator[Host]:
        """Return a process that all tests of the class share."""
        with Host(cls.backend) as host:
            yield host

    @pytest.fixture
    def victim(self) -> Iterator[Host]:
        """Return a process that a test may kill."""
        with Host(self.backend) as host:
            yield host

    @pytest.fixture
    def exported(self, host: Host) -> Iterator[Exported]:
        """Return a pool in the other process."""
        exported = host.export(POOL_NBYTES)
        yield exported
        host.go_on()
        with self.outlived(host):
            exported.close()
        if not host.alive:
            host.restart()

    @pytest.fixture
    def reader(self) -> Iterator[Reader]:
        """Return a reader in this process."""
        reader = self.backend.open_reader(POOL_NBYTES)
        yield reader
        reader.close(SOON)

    @contextmanager
    def outlived(self, host: Host) -> Iterator[None]:
        """Let the block fail if a producer is dead that need not have survived."""
        try:
            yield
        except (HostGoneError, errors.TransferError):
            if self.producer_survives or not host.ends(2.0):
                raise

    # Bytes

    def test_every_byte_arrives_where_it_should(self, exported: Exported, reader: Reader) -> None:
        for nbytes in (1, 7, 4 * KIB, 64 * KIB + 1, 3 * MIB):
            ticket = exported.admit(512, nbytes, seed=nbytes)
            reader.pool.fill_(0xA5)
            bring(reader, connect(reader, exported), ticket, whole(ticket, 256))
            assert torch.equal(landed(reader, nbytes, 256), pattern(nbytes, nbytes))
            assert bool((landed(reader, 256) == 0xA5).all())
            assert bool((landed(reader, 4 * KIB, 256 + nbytes) == 0xA5).all())

    def test_ranges_of_a_slot_arrive_as_one_batch(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 256 * KIB, seed=1)
        spans = [
            Span(start, 1 + 3 * number * KIB, 1 + 14 * number)
            for number, start in enumerate(range(0, 200_000, 999))
        ]
        bring(reader, connect(reader, exported), ticket, [*spans, Span(5, 0, 0)])
        expected = pattern(256 * KIB, 1)
        for source, destination, nbytes in spans:
            assert torch.equal(landed(reader, nbytes, destination), expected[source : source + nbytes])

    def test_a_slot_without_bytes(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 0, seed=1)
        bring(reader, connect(reader, exported), ticket, ())

    def test_many_at_once(self, exported: Exported, reader: Reader) -> None:
        """From as many threads, each out of its own slot and into its own memory."""
        connection, part = connect(reader, exported), POOL_NBYTES // 8
        tickets = [exported.admit(number * part, part - number, seed=number) for number in range(8)]

        def work(number: int) -> int:
            wrong, ticket = 0, tickets[number]
            for turn in range(8):
                spans = [Span(turn, number * part, ticket.nbytes - turn)]
                bring(reader, connection, ticket, spans)
                got = landed(reader, ticket.nbytes - turn, number * part)
                wrong += not torch.equal(got, pattern(ticket.nbytes, number)[turn:])
            return wrong

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(work, range(8))) == 0

    # The slot is the ticket's, or there is an error

    def test_a_withdrawn_slot_is_not_read(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 4 * KIB, seed=1)
        connection = connect(reader, exported)
        bring(reader, connection, ticket, whole(ticket))
        exported.withdraw(ticket)
        for _ in range(2):
            with pytest.raises(errors.LeaseExpiredError):
                bring(reader, connection, ticket, whole(ticket))
        assert exported.withdraw(ticket), "a slot that was withdrawn before has no readers"

    def test_a_revoked_slot_says_so(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 4 * KIB, seed=1)
        exported.withdraw(ticket, revoked=True)
        for _ in range(2):
            with pytest.raises(errors.LeaseRevokedError):
                bring(reader, connect(reader, exported), ticket, whole(ticket))

    def test_a_slot_that_is_used_again_is_never_the_old_one(self, exported: Exported, reader: Reader) -> None:
        connection, old = connect(reader, exported), exported.admit(0, 4 * KIB, seed=1)
        exported.withdraw(old)
        for seed in range(100):
            new = exported.admit(0, 4 * KIB, seed=seed)
            if new.index == old.index:
                break
            exported.withdraw(new)
        assert new.index == old.index, "no entry of the slot table is ever used again"
        assert (new.generation, new.token) != (old.generation, old.token)
        with pytest.raises(errors.LeaseError):
            bring(reader, connection, old, whole(old))
        bring(reader, connection, new, whole(new))
        assert torch.equal(landed(reader, new.nbytes), pattern(new.nbytes, seed))

    def test_a_slot_that_is_replaced_while_it_is_read(self, exported: Exported, reader: Reader) -> None:
        """Whole data of the right publication, or an error."""
        connection, nbytes = connect(reader, exported), 3 * MIB
        expected = pattern(nbytes, 1)
        for turn in range(12):
            ticket = exported.admit(0, nbytes, seed=1)
            reader.pool.zero_()
            exported.start_replacing(ticket, 2, turn * 0.0004)
            try:
                bring(reader, connection, ticket, whole(ticket))
            except errors.LeaseExpiredError:
                continue
            finally:
                exported.host.result()
            assert torch.equal(landed(reader, nbytes), expected), "bytes of another publication"

    def test_a_generation_that_never_was(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 4 * KIB, seed=1)
        forged = replace(ticket, generation=ticket.generation + 1000)
        with pytest.raises((errors.LeaseExpiredError, errors.RemoteAccessError)):
            bring(reader, connect(reader, exported), forged, whole(ticket))

    def test_a_ticket_that_leaves_pool_or_table(self, exported: Exported, reader: Reader) -> None:
        """Is refused, or means what the producer knows it to be; the producer lives on."""
        ticket = exported.admit(0, 4 * KIB, seed=1)
        changes: list[dict[str, int]] = [
            {"index": 1 << 20},
            {"offset": POOL_NBYTES},
            {"offset": 1 << 50},
            {"nbytes": 1 << 40},
        ]
        for change in changes:
            forged, connection = replace(ticket, **change), connect(reader, exported)  # type: ignore[arg-type]
            reader.pool.zero_()
            try:
                bring(reader, connection, forged, [Span(0, 0, 4 * KIB)])
            except errors.TensorferryError:
                pass
            else:
                assert torch.equal(landed(reader, 4 * KIB), pattern(4 * KIB, 1)), change
        bring(reader, connect(reader, exported), ticket, whole(ticket))

    def test_generations_and_tokens_are_never_used_twice(self, exported: Exported) -> None:
        tickets = []
        for _ in range(40):
            tickets.append(exported.admit(0, 64, seed=1))
            exported.withdraw(tickets[-1])
        assert len({ticket.generation for ticket in tickets}) == 40
        assert len({ticket.token for ticket in tickets}) == 40
        assert all(1 <= ticket.generation < 1 << 63 for ticket in tickets)

    def test_a_table_that_is_full(self, host: Host) -> None:
        exported = host.export(64 * KIB, slots=2)
        tickets = [exported.admit(0, 64, seed=1) for _ in range(2)]
        with pytest.raises(HostError, match="PoolExhaustedError"):
            exported.admit(0, 64, seed=1)
        exported.withdraw(tickets[0])
        exported.admit(0, 64, seed=1)
        exported.close()

    # Notices

    @pytest.mark.parametrize("kind", ["release", "reject"])
    def test_a_notice_arrives_once(
        self, exported: Exported, reader: Reader, kind: Literal["release", "reject"]
    ) -> None:
        ticket = exported.admit(0, 64, seed=1)
        connect(reader, exported).notify(kind, ticket, CONSUMER, MAC)
        assert exported.notices(1) == [Notice(kind, ticket.index, ticket.generation, CONSUMER, MAC)]

    def test_a_hundred_notices_arrive_once_each(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 64, seed=1), connect(reader, exported)
        consumers = [number.to_bytes(16, "big") for number in range(100)]
        for one in consumers:
            connection.notify("release", ticket, one, MAC)
        assert sorted(notice.consumer for notice in exported.notices(100)) == consumers

    def test_a_notice_arrives_though_its_reader_closes(self, exported: Exported) -> None:
        ticket, reader = exported.admit(0, 64, seed=1), self.backend.open_reader(4 * KIB)
        connect(reader, exported).notify("release", ticket, CONSUMER, MAC)
        reader.close(1.0)
        assert [notice.consumer for notice in exported.notices(1)] == [CONSUMER]

    def test_a_notice_without_the_token_is_dropped(self, exported: Exported, reader: Reader) -> None:
        ticket, connection = exported.admit(0, 64, seed=1), connect(reader, exported)
        connection.notify("release", replace(ticket, token=bytes(16)), CONSUMER, MAC)
        connection.notify("release", replace(ticket, generation=ticket.generation + 1), CONSUMER, MAC)
        connection.notify("release", replace(ticket, index=1 << 20), CONSUMER, MAC)
        connection.notify("reject", ticket, CONSUMER, MAC)
        assert [notice.kind for notice in exported.notices(1)] == ["reject"]

    def test_a_notice_of_a_withdrawn_slot_is_dropped(self, exported: Exported, reader: Reader) -> None:
        old, connection = exported.admit(0, 64, seed=1), connect(reader, exported)
        exported.withdraw(old)
        new = exported.admit(0, 64, seed=1)
        for ticket in (old, new):
            connection.notify("release", ticket, CONSUMER, MAC)
        assert [notice.generation for notice in exported.notices(1)] == [new.generation]

    def test_waiting_for_notices(self, host: Host) -> None:
        assert host.call(_wait_for_notices, self.backend) == ""

    # Peers

    def test_two_producers(self, exported: Exported, reader: Reader, host: Host) -> None:
        other = host.export(64 * KIB)
        for seed, one in enumerate((exported, other)):
            ticket = one.admit(0, 4 * KIB, seed=seed)
            bring(reader, connect(reader, one), ticket, whole(ticket))
            assert torch.equal(landed(reader, 4 * KIB), pattern(4 * KIB, seed))
        other.close()

    def test_a_connection_says_what_carries_the_bytes(self, exported: Exported, reader: Reader) -> None:
        connection = connect(reader, exported)
        assert connection.access in reader.capabilities.accesses
        assert connection.transports
        assert all(isinstance(one, str) and one for one in connection.transports)

    def test_a_connection_is_kept(self, exported: Exported, reader: Reader) -> None:
        assert connect(reader, exported) is connect(reader, exported)

    def test_a_producer_that_closes_and_its_successor(self, host: Host, reader: Reader) -> None:
        first = host.export(64 * KIB)
        ticket = first.admit(0, 4 * KIB, seed=1)
        connection = connect(reader, first)
        bring(reader, connection, ticket, whole(ticket))
        first.close()
        with pytest.raises((errors.PeerLostError, errors.LeaseExpiredError)), ends_within(SOON):
            bring(reader, connection, ticket, whole(ticket))
        with pytest.raises((errors.TransferError, errors.LeaseExpiredError)), ends_within(2 * SOON):
            bring(reader, connect(reader, first, 2.0), ticket, whole(ticket))
        second = host.export(64 * KIB)
        ticket = second.admit(0, 4 * KIB, seed=2)
        bring(reader, connect(reader, second), ticket, whole(ticket))
        assert torch.equal(landed(reader, 4 * KIB), pattern(4 * KIB, 2))
        second.close()

    def test_a_producer_that_is_killed_and_its_successor(
        self, victim: Host, host: Host, reader: Reader
    ) -> None:
        first = victim.export(POOL_NBYTES)
        ticket = first.admit(0, 3 * MIB, seed=1)
        connection = connect(reader, first)
        bring(reader, connection, ticket, whole(ticket))
        with ends_within(SOON):
            self.kill(victim, connection, ticket)
            with pytest.raises(errors.PeerLostError):
                bring(reader, connection, ticket, whole(ticket))
        assert connection.broken
        with pytest.raises(errors.TransferError), ends_within(SOON):
            bring(reader, connect(reader, first, 2.0), ticket, whole(ticket))
        second = host.export(64 * KIB)
        ticket = second.admit(0, 4 * KIB, seed=2)
        bring(reader, connect(reader, second), ticket, whole(ticket))
        assert torch.equal(landed(reader, 4 * KIB), pattern(4 * KIB, 2))
        second.close()

    @abstractmethod
    def kill(self, victim: Host, connection: Connection, ticket: SlotTicket) -> None:
        """Kill a process while its slot is used, and see that the user is told."""

    def test_connecting_to_a_stopped_producer_ends_in_time(self, exported: Exported, reader: Reader) -> None:
        """It may also succeed, where the producer need not be asked."""
        exported.host.stop()
        with ends_within(3.0), suppress(errors.TransferError):
            connect(reader, exported, 0.5)
        exported.host.go_on()
        ticket = exported.admit(0, 4 * KIB, seed=1)
        bring(reader, connect(reader, exported), ticket, whole(ticket))

    def test_a_manifest_of_another_backend(self, exported: Exported, reader: Reader) -> None:
        peer = replace(exported.peer, backend="carrier-pigeon")
        with pytest.raises(errors.ManifestError, match="carrier-pigeon") as caught:
            steps.run(reader.connect(peer, "auto", Deadline(SOON)))
        assert repr(self.backend.name) in str(caught.value)

    def test_a_producer_that_offers_nothing(self, exported: Exported, reader: Reader) -> None:
        with pytest.raises(errors.ConnectError):
            steps.run(reader.connect(replace(exported.peer, offers=()), "auto", Deadline(SOON)))

    def test_an_access_that_is_not_offered(self, exported: Exported, reader: Reader) -> None:
        other: Any = next(name for name in ("served", "mapped") if name != self.backend.access)
        with pytest.raises(errors.ConnectError, match=other):
            steps.run(reader.connect(exported.peer, other, Deadline(SOON)))

    def test_an_offer_with_a_key_that_is_none(self, exported: Exported, reader: Reader) -> None:
        """A reader says what is wrong with it, or needs no key."""
        ticket = exported.admit(0, 64, seed=1)
        for junk in (b"", b"\xc1", bytes(32), b"x" * 300):
            offers = tuple(replace(offer, key=junk) for offer in exported.peer.offers)
            peer = replace(exported.peer, offers=offers)
            try:
                connection = steps.run(reader.connect(peer, "auto", Deadline(SOON)))
            except (errors.ManifestError, errors.TransferError):
                continue
            bring(reader, connection, ticket, whole(ticket))
            assert torch.equal(landed(reader, 64), pattern(64, 1))

    # Ends

    def test_a_closed_reader(self, exported: Exported) -> None:
        reader = self.backend.open_reader(64 * KIB)
        connect(reader, exported)
        reader.stop()
        for _ in range(2):
            reader.close(1.0)
        with pytest.raises(errors.ClosedError):
            connect(reader, exported)

    def test_closing_from_several_threads(self, exported: Exported) -> None:
        reader = self.backend.open_reader(64 * KIB)
        connect(reader, exported)
        with ThreadPoolExecutor(4) as threads, ends_within(SOON):
            list(threads.map(reader.close, [1.0] * 4))

    def test_a_closed_pool(self, host: Host) -> None:
        assert host.call(_close_pools, self.backend) == ""

    def test_nothing_is_left_behind(self, host: Host) -> None:
        """No descriptor and no thread, on either side."""

        def cycle() -> None:
            exported, reader = host.export(64 * KIB), self.backend.open_reader(64 * KIB)
            ticket, connection = exported.admit(0, 4 * KIB, seed=1), connect(reader, exported)
            bring(reader, connection, ticket, whole(ticket))
            connection.notify("release", ticket, CONSUMER, MAC)
            exported.notices(1)
            reader.close(SOON)
            exported.close()

        def held() -> list[int]:
            return [*resources().values(), *host.call(resources).values()]

        cycle()  # libraries keep what they load, and what they make once
        cycle()
        before = held()
        for _ in range(3):
            cycle()
        grown = eventually(lambda: all(map(int.__le__, held(), before)), 2.0)
        assert grown, f"fd and task of consumer and producer: {before} before, {held()} after"

    def test_a_forked_child_leaves_the_pool_alone(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 4 * KIB, seed=1)
        connection = connect(reader, exported)
        assert exported.host.call(_fork_and_close, exported.number) == 0
        bring(reader, connection, ticket, whole(ticket))
        assert torch.equal(landed(reader, 4 * KIB), pattern(4 * KIB, 1))


class ViewContract(BackendContract):
    """Tests of a backend whose connections are ``mapped``: bytes are viewed, not read."""

    def test_reads_are_refused(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(0, 64, seed=1)
        with pytest.raises(errors.UsageError):
            connect(reader, exported).read(ticket, whole(ticket))

    def test_a_view_is_the_slot(self, exported: Exported, reader: Reader) -> None:
        ticket = exported.admit(4096, 1000, seed=1)
        view = connect(reader, exported).view(ticket)
        assert (view.dtype, view.shape) == (torch.uint8, (1000,))
        assert torch.equal(view, pattern(1000, 1))

    def test_a_view_outlives_what_it_came_from(self, host: Host, reader: Reader) -> None:
        """It can be read for as long as it is held; what it holds is not promised."""
        exported = host.export(64 * KIB)
        ticket = exported.admit(0, 4 * KIB, seed=1)
        connection = connect(reader, exported)
        view = connection.view(ticket)
        exported.close()
        with pytest.raises((errors.PeerLostError, errors.LeaseExpiredError)):
            connection.verify(ticket)
        reader.close(SOON)
        view.clone()

    def kill(self, victim: Host, connection: Connection, ticket: SlotTicket) -> None:
        """Kill it under a view."""
        view = connection.view(ticket)
        victim.kill()
        view.clone()
        with pytest.raises(errors.PeerLostError):
            connection.verify(ticket)


# In the process of a Host:


def _wait_for_notices(backend: BackendUnderTest) -> str:
    """Return what is wrong, '' if nothing is."""
    pool = backend.export_pool(64 * KIB, 4)
    started = time.monotonic()
    if pool.notices(0.2) != [] or not 0.1 < time.monotonic() - started < 2.0:
        return f"notices(0.2) returned after {time.monotonic() - started:.2f} seconds"
    for end in (pool.wake, lambda: pool.close(1.0)):
        timer = threading.Timer(0.2, end)
        timer.start()
        started = time.monotonic()
        if pool.notices(30.0) != [] or time.monotonic() - started > SOON:
            return f"{end} did not end notices(30)"
        timer.join()
    return "" if pool.notices(0.1) == [] else "a closed pool has notices"


def _close_pools(backend: BackendUnderTest) -> str:
    """Return what is wrong, '' if nothing is."""
    pool = backend.export_pool(64 * KIB, 4)
    ticket = pool.admit(0, 64, lease=60.0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pool.close, [1.0] * 4))
    pool.close(0.0)
    if not pool.withdraw(ticket):
        return "closing withdrew nothing"
    try:
        pool.admit(0, 64, lease=60.0)
    except errors.ClosedError:
        return ""
    return "a closed pool admits slots"


def _fork_and_close(number: int) -> int:
    """Close a pool in a forked child; return how the child ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads
        child = os.fork()
    if child == 0:
        try:
            remote.POOLS[number].close(0.0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return exit_status(child)
