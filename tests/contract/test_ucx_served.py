# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over UCX, on the loopback device, in ``served`` access."""

from __future__ import annotations

from tensorferry.testing import BackendUnderTest, Host, ServedContract
from tensorferry.testing.host import POOLS
from tensorferry.testing.reading import bring, connect, whole

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


class TestServed(ServedContract):
    backend = BackendUnderTest("ucx", access="served", options=LOOPBACK)


def test_a_pool_that_was_dropped_and_never_closed_ends_without_a_deadlock():
    """The thread of its worker takes the GIL to let go of the pool, while it is waited for."""
    backend = TestServed.backend
    with Host(backend) as host:
        exported, reader = host.export(1 << 16), backend.open_reader(1 << 16)
        ticket = exported.admit(0, 4096, 1)
        bring(reader, connect(reader, exported), ticket, whole(ticket))
        assert host.call(drop, exported.number) == 0
        reader.close(1.0)


def drop(number: int) -> int:
    del POOLS[number]
    return len(POOLS)
