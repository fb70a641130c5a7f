# SPDX-License-Identifier: Apache-2.0
"""A client of its own making talks straight to the worker of a producer in another process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch

import tensorferry
from tensorferry import _transport
from tensorferry.backends.base import SlotTicket
from tensorferry.backends.ucx_native import defaults_of, load_library

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}
POOL = 1 << 20
SECRET = 0x5A


def produce(channel: Connection) -> None:
    with tensorferry.Producer(POOL, access="served", backend_options=LOOPBACK) as producer:
        channel.send(producer.publish("given", {"x": torch.full((4096,), 1, dtype=torch.uint8)}, lease=600))
        producer.publish("secret", {"x": torch.full((4096,), SECRET, dtype=torch.uint8)}, lease=600)
        while (request := channel.recv()) is not None:
            channel.send(producer.publish(request, {"x": torch.ones(3)}, lease=600))


@dataclass
class Target:
    """A producer in another process, and what its consumer was given."""

    channel: Connection
    process: multiprocessing.process.BaseProcess
    manifest: bytes

    @property
    def ticket(self) -> SlotTicket:
        return tensorferry.read_manifest(self.manifest).ticket

    @property
    def address(self) -> bytes:
        return tensorferry.read_manifest(self.manifest).peer.offers[0].address

    def serves(self) -> bool:
        """Whether the producer still does its work for an honest consumer."""
        self.channel.send(f"honest {id(object())}")
        manifest = self.channel.recv()
        with tensorferry.Consumer(POOL, backend_options=LOOPBACK) as consumer:
            return bool(torch.equal(consumer.pull(manifest, timeout=20)["x"], torch.ones(3)))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=produce, args=(there,))
    process.start()
    assert here.poll(60), "the producer did not start"
    yield Target(here, process, here.recv())
    here.send(None)
    process.join(20)
    assert process.exitcode == 0


class RawClient:
    """UCX by hand: no check of ours stands between it and the wire but those of the core."""

    def __init__(self, address: bytes, *, remote_memory: bool = False) -> None:
        context = _transport.Context.create(
            load_library(),
            defaults=defaults_of(load_library()),
            options=LOOPBACK,
            remote_memory=remote_memory,
        )
        self.memory = _transport.Memory.allocate(POOL)
        self.region = _transport.MemoryRegion.create(context, self.memory, _transport.MemoryType.HOST)
        self.worker = _transport.Worker.create(context)
        self.endpoint = self.worker.connect(address)

    @property
    def bytes(self) -> torch.Tensor:
        return torch.utils.dlpack.from_dlpack(self.memory.array())

    def read(self, ticket: SlotTicket, source: int, nbytes: int) -> int:
        """Ask for bytes; return 0 or the status of the refusal."""
        # The core refuses to ask for bytes outside the ticket, so the ticket claims the world.
        read = self.endpoint.read_served(
            ticket.index, ticket.generation, ticket.token, 0, 1 << 62, [(source, 0, nbytes)], self.region
        )
        try:
            assert read.wait(20.0), "no answer"
        except _transport.TransportError as error:
            return error.status
        return 0


@pytest.fixture
def client(target: Target) -> Iterator[RawClient]:
    client = RawClient(target.address)
    yield client
    client.worker.close(1.0)


Forgery = Callable[[SlotTicket], tuple[SlotTicket, int, int]]


def forged(ticket: SlotTicket, **changes: object) -> SlotTicket:
    fields = {name: getattr(ticket, name) for name in ("index", "generation", "token", "offset", "nbytes")}
    return SlotTicket(**{**fields, **changes})  # type: ignore[arg-type]


FORGERIES: dict[str, Forgery] = {
    "one byte past the slot": lambda t: (t, t.nbytes, 1),
    "longer than the slot": lambda t: (t, 0, t.nbytes + 1),
    "the whole pool": lambda t: (t, 0, POOL),
    "an offset before the slot": lambda t: (t, (1 << 62) - 4096, 4096),
    "the next slot's index": lambda t: (forged(t, index=t.index + 1), 0, 16),
    "an index out of the table": lambda t: (forged(t, index=(1 << 32) - 1), 0, 16),
    "a later generation": lambda t: (forged(t, generation=t.generation + 1), 0, 16),
    "a generation to come": lambda t: (forged(t, generation=1 << 63), 0, 16),
    "generation zero": lambda t: (forged(t, generation=0), 0, 16),
    "a token of zeros": lambda t: (forged(t, token=bytes(16)), 0, 16),
    "a token with one bit flipped": lambda t: (
        forged(t, token=bytes([t.token[0] ^ 1, *t.token[1:]])),
        0,
        16,
    ),
    "the secret's index and generation with this token": lambda t: (
        forged(t, index=t.index + 1, generation=t.generation + 1),
        0,
        16,
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_read_is_refused_and_brings_nothing(target: Target, client: RawClient, name: str) -> None:
    status = client.read(*FORGERIES[name](target.ticket))
    assert status in (_transport.ACCESS_REFUSED, _transport.LEASE_EXPIRED)
    assert not client.bytes.any()
    assert target.process.is_alive()


def test_the_true_ticket_reads_its_slot(target: Target, client: RawClient) -> None:
    """The test would be worth nothing if the raw client could not read at all."""
    assert client.read(target.ticket, 0, 4096) == 0
    assert torch.equal(client.bytes[:4096], torch.full((4096,), 1, dtype=torch.uint8))


def test_the_producer_serves_others_after_all_forgeries(target: Target, client: RawClient) -> None:
    for forgery in FORGERIES.values():
        assert client.read(*forgery(target.ticket)) != 0
    assert target.serves()


@pytest.mark.parametrize("address", [0, 4096, 1 << 47], ids=["null", "unmapped", "kernel"])
def test_a_plain_get_finds_no_handler_in_a_served_worker(target: Target, address: int) -> None:
    """Over tcp UCX's own handler would read any address; the served worker has none."""
    attacker = RawClient(target.address, remote_memory=True)
    with_key = attacker.region.pack_key()
    key = attacker.endpoint.unpack(with_key, address, 1 << 40)
    ticket = target.ticket
    read = attacker.endpoint.read_remote(
        ticket.index, ticket.generation, ticket.token, 0, 64, [(0, 0, 64)], attacker.region, key, key
    )
    with suppress(_transport.TransportError):
        assert not read.wait(1.0)
    assert not attacker.bytes.any()
    read.abandon(_transport.CANCELLED)
    attacker.worker.close(0.0)
    assert target.process.is_alive()
    assert target.serves()


def test_the_same_get_reads_foreign_memory_of_an_rdma_worker_over_tcp() -> None:
    """Shows that the attack above bites where UCX emulates remote memory access."""
    secret = torch.full((64,), SECRET, dtype=torch.uint8)  # registered with nobody
    context = _transport.Context.create(
        load_library(), defaults=defaults_of(load_library()), options=LOOPBACK, remote_memory=True
    )
    victim = _transport.Worker.create(context)
    attacker = RawClient(victim.address, remote_memory=True)
    key = attacker.endpoint.unpack(attacker.region.pack_key(), secret.data_ptr(), 64)
    read = attacker.endpoint.read_remote(
        0, 1, bytes(16), 0, 64, [(0, 0, 64)], attacker.region, key, key_of(attacker)
    )
    with pytest.raises(
        _transport.TransportError
    ):  # the "generation word" is not 1: the data is here all the same
        read.wait(20.0)
    assert torch.equal(attacker.bytes[:64], secret)
    attacker.worker.close(1.0)
    victim.close(1.0)


def key_of(attacker: RawClient) -> _transport.RemoteKey:
    """A key for memory of the attacker's own, in place of the producer's control block."""
    return attacker.endpoint.unpack(attacker.region.pack_key(), attacker.memory.address, POOL)
