# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over NIXL's UCX plugin, on the loopback device; and what is NIXL's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import msgpack
import pytest
import torch

from tensorferry import Consumer, ManifestError, PeerLostError, Producer, UsageError, steps
from tensorferry.arguments import Deadline
from tensorferry.testing import BackendUnderTest, Exported, Host, ReadContract
from tensorferry.testing.host import resources
from tensorferry.testing.reading import bring, connect, eventually, whole

pytest.importorskip("nixl_cu12", reason='NIXL is not installed: pip install "tensorferry[nixl]"')

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}
NIXL = BackendUnderTest("nixl", access="rdma", options=LOOPBACK)

pytestmark = pytest.mark.filterwarnings("ignore:backend='nixl' without an RDMA device")


class TestNixl(ReadContract):
    backend = NIXL
    producer_survives = False  # over tcp UCX may abort one whose reader goes in the middle of an answer


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host(NIXL) as host:
        yield host


@pytest.fixture
def exported(host: Host) -> Iterator[Exported]:
    exported = host.export(64 << 10)
    yield exported
    exported.close()


def test_nothing_of_a_closed_reader_lives_on_with_what_came_from_it(exported: Exported):
    """Else UCX could still write to memory that is free."""
    ticket = exported.admit(0, 4096, seed=1)

    def use() -> list[object]:
        reader = NIXL.open_reader(64 << 10)
        connection = connect(reader, exported)
        bring(reader, connection, ticket, whole(ticket))
        held = [reader, connection, connection.read(ticket, whole(ticket))]
        reader.close(5.0)
        return held

    kept = [use()]
    before = resources()
    kept += [use() for _ in range(3)]
    assert eventually(lambda: all(resources()[what] <= before[what] for what in before), 2.0)


def test_metadata_of_another_producer_is_refused(host: Host, exported: Exported):
    """NIXL would take it, and end the transfers of that one as far as it tells."""
    other = host.export(64 << 10)
    reader = NIXL.open_reader(64 << 10)
    ticket, connection = exported.admit(0, 4096, seed=1), connect(reader, exported)
    stolen = replace(other.peer, offers=exported.peer.offers)
    fields = msgpack.unpackb(other.peer.offers[0].key)
    fields[-1] = b"nonsense"
    broken = replace(other.peer, offers=(replace(other.peer.offers[0], key=msgpack.packb(fields)),))
    for peer in (stolen, broken):
        with pytest.raises(ManifestError):
            steps.run(reader.connect(peer, "auto", Deadline(5)))
    bring(reader, connection, ticket, whole(ticket))
    assert connect(reader, exported) is connection
    bring(reader, connect(reader, other), (fresh := other.admit(0, 64, seed=2)), whole(fresh))
    reader.close(5.0)
    other.close()


@pytest.mark.parametrize("producing", ["ucx", "nixl"])
def test_a_producer_and_a_consumer_of_different_backends(producing: str):
    pulling = "nixl" if producing == "ucx" else "ucx"
    with (
        Producer("1MiB", backend=producing, backend_options=LOOPBACK) as producer,
        Consumer("1MiB", backend=pulling, backend_options=LOOPBACK) as consumer,
    ):
        manifest = producer.publish("a", {"x": torch.arange(3)})
        with pytest.raises(ManifestError, match=f"request 'a'.*'{producing}'.*'{pulling}'"):
            consumer.pull(manifest)


@pytest.mark.parametrize("made", [Producer, Consumer])
@pytest.mark.parametrize("access", ["served", "mapped"])
def test_another_access(made: type[Producer], access: str):
    with pytest.raises(UsageError, match=f"'rdma'.*{access}"):
        made("1MiB", backend="nixl", access=access)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin": "SNAIL"}, "SNAIL.*UCX"),
        ({"num_wrkers": "2"}, "num_wrkers.*num_workers"),
        ({"progress_thread": "maybe"}, "maybe"),
        ({"TLS": "tcp,cuda"}, "UCX_TLS"),
        ({"plugin": "POSIX", "TLS": "tcp"}, "TLS"),
    ],
    ids=str,
)
def test_an_option_that_is_none(options: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message):
        Consumer("1MiB", backend="nixl", backend_options=options)


@pytest.mark.parametrize(
    "more", [{"progress_thread": "yes"}, {"num_workers": "2"}, {"ucx_devices": "lo"}], ids=str
)
def test_options_of_nixl(more: dict[str, str]):
    payload = {"x": torch.arange(100_000), "y": [None, torch.tensor(1.5)]}
    with ExitStack() as stack:
        given = {"backend": "nixl", "backend_options": {**LOOPBACK, **more}}
        producer = stack.enter_context(Producer("4MiB", **given))
        consumer = stack.enter_context(Consumer("4MiB", **given))
        got = consumer.start_pull(producer.publish("a", payload)).result(10)
        assert torch.equal(got["x"], payload["x"])
        assert producer.wait_released("a", 10)


BOTH = """
import warnings
warnings.simplefilter("ignore")
import torch
from tensorferry import Consumer, Producer
options = {"TLS": "tcp", "NET_DEVICES": "lo"}
pairs = []
for backend, access in ORDER:
    given = {"backend": backend, "access": access, "backend_options": options}
    pairs.append((Producer("16MiB", **given), Consumer("16MiB", **given)))
for turn in range(3):
    for producer, consumer in pairs:
        x = torch.arange(1_000_000) + turn
        assert torch.equal(consumer.pull(producer.publish("a", {"x": x}))["x"], x)
        assert producer.wait_released("a", 10)
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libucp" in line}
for producer, consumer in reversed(pairs):
    consumer.close()
    producer.close()
print(len(libraries))
"""


@pytest.mark.parametrize("first", ["ucx", "nixl"])
def test_two_builds_of_ucx_in_one_process(first: str):
    ways = [("ucx", "served"), ("ucx", "rdma"), ("nixl", "rdma")]
    order = ways if first == "ucx" else ways[::-1]
    ended = subprocess.run(
        [sys.executable, "-c", BOTH.replace("ORDER", repr(order))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


def test_producers_that_are_lost_are_forgotten(host: Host, exported: Exported):
    """NIXL keeps an agent's metadata until it is told to drop it."""
    reader = NIXL.open_reader(64 << 10)
    with Host(NIXL) as victim:
        lost = victim.export(64 << 10)
        ticket, connection = lost.admit(0, 4096, seed=1), connect(reader, lost)
        bring(reader, connection, ticket, whole(ticket))
        victim.kill()
        with pytest.raises(PeerLostError):
            bring(reader, connection, ticket, whole(ticket))
    assert eventually(lambda: connection.broken)
    ticket = exported.admit(0, 4096, seed=1)
    bring(reader, connect(reader, exported), ticket, whole(ticket))
    assert list(reader._connections) == [exported.peer.uid]
    reader.close(5.0)
