# SPDX-License-Identifier: Apache-2.0
"""What of the NIXL backend needs no NIXL."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch

from tensorferry import Consumer, Producer
from tensorferry.backends import nixl, nixl_agent
from tensorferry.backends.base import Notice
from tensorferry.backends.nixl_memory import allocate
from tensorferry.backends.nixl_options import Options
from tensorferry.backends.nixl_slots import HEADER_NBYTES, REVOKED, SlotTable, pack_notice
from tensorferry.errors import (
    BackendUnavailableError,
    ClosedError,
    ManifestError,
    PeerLostError,
    PoolExhaustedError,
    RegistrationError,
    TransferError,
    UsageError,
)

UID = bytes(range(16))
CONSUMER, MAC = b"c" * 16, b"m" * 32


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(UID, 1 << 20, 4)


def words(table: SlotTable) -> list[int]:
    return table.memory.numpy()[HEADER_NBYTES:].view(np.uint64).tolist()


@pytest.mark.filterwarnings("ignore:backend='nixl'")
@pytest.mark.parametrize("made", [Producer, Consumer])
def test_without_nixl_the_error_says_how_to_install_it(made: type, monkeypatch: pytest.MonkeyPatch):
    for name in ("nixl_cu12", "nixl"):
        monkeypatch.setitem(sys.modules, name, None)
    nixl_agent.load_api.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r'pip install "tensorferry\[nixl\]"'):
        made("1MiB", backend="nixl")
    nixl_agent.load_api.cache_clear()


def test_the_words_of_slots(table: SlotTable):
    first, second = table.admit(0, 64), table.admit(64, 64)
    assert words(table) == [1, 2, 0, 0]
    table.withdraw(first, revoked=True)
    table.withdraw(second, revoked=False)
    table.withdraw(second, revoked=True)  # it has ended, and why does not change any more
    assert words(table) == [1 | REVOKED, 0, 0, 0]
    assert [table.admit(0, 64).index for _ in range(4)] == [2, 3, 0, 1]
    assert words(table) == [5, 6, 3, 4]
    with pytest.raises(PoolExhaustedError, match="4 slots"):
        table.admit(0, 64)
    table.withdraw(first, revoked=False)  # whose entry is another's now
    assert words(table) == [5, 6, 3, 4]
    assert table.memory[:17].tolist() == [*UID, 1]
    table.close()
    assert words(table) == [0, 0, 0, 0]
    assert table.memory[16] == 0
    with pytest.raises(ClosedError):
        table.admit(0, 64)


def test_notices_must_prove_the_token(table: SlotTable):
    ticket, other = table.admit(0, 64), table.admit(0, 64)
    table.withdraw(other, revoked=False)
    good = pack_notice("reject", ticket, CONSUMER, MAC)
    table.report(
        [
            b"",
            good[:-1],
            good + b"x",
            b"\0" * len(good),
            good[:4] + b"\x03" + good[5:],
            pack_notice("release", replace(ticket, token=bytes(16)), CONSUMER, MAC),
            pack_notice("release", replace(ticket, generation=9), CONSUMER, MAC),
            pack_notice("release", replace(ticket, index=3), CONSUMER, MAC),
            pack_notice("release", other, CONSUMER, MAC),
            good,
        ]
    )
    assert table.notices(0.0) == [Notice("reject", ticket.index, ticket.generation, CONSUMER, MAC)]
    assert table.notices(0.0) == []


def test_a_flood_of_notices_is_bounded(table: SlotTable):
    table.report([pack_notice("release", table.admit(0, 64), CONSUMER, MAC)] * 70_000)
    assert len(table.notices(0.0)) == 65_536


def test_waking_who_waits_for_notices(table: SlotTable):
    timer = threading.Timer(0.05, table.wake)
    timer.start()
    assert table.notices(30.0) == []
    timer.join()


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"\xc1",
        msgpack.packb([1] * 7),
        msgpack.packb(["DRAM", -1, 1, 0, 1, 1, b""]),
        msgpack.packb(["DRAM", 1, 1 << 63, 0, 1 << 63, 1 << 63, b""]),
        msgpack.packb(["BLOCK", 1, 1, 0, 1, 1, b""]),
        msgpack.packb(["DRAM", 1, 1, 0, 1, 1, b"", 0]),
        msgpack.packb({"DRAM": 1}),
    ],
    ids=repr,
)
def test_keys_that_are_none(key: bytes):
    with pytest.raises(ManifestError):
        nixl._parse(UID, key)


def test_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TCP_KEEPCNT", "7")
    options = Options.of({"TLS": "tcp", "engine_config": "TCP_CONN_NB=n", "num_workers": "2"})
    assert (options.plugin, options.progress_thread) == ("UCX", False)
    given = options.for_plugin()
    settings = dict(part.split("=") for part in given["engine_config"].split(","))
    assert (settings["TLS"], settings["TCP_CONN_NB"], given["num_workers"]) == ("tcp", "n", "2")
    assert "TCP_KEEPIDLE" in settings
    assert "TCP_KEEPCNT" not in settings
    assert Options.of({"plugin": "POSIX", "x": "1"}).for_plugin() == {"x": "1"}


class nixlRemoteDisconnectError(Exception):  # noqa: N801, as NIXL calls it
    pass


class nixlBackendError(Exception):  # noqa: N801
    pass


def test_errors_of_nixl():
    for native, ours in ((nixlRemoteDisconnectError, PeerLostError), (nixlBackendError, TransferError)):
        with pytest.raises(ours, match="reading: NIXL says gone"), nixl_agent.native_errors("reading"):
            raise native("gone")
    with pytest.raises(KeyError), nixl_agent.native_errors("reading"):
        raise KeyError("a mistake of our own")


def test_memory_that_cannot_be_had():
    with pytest.raises(RegistrationError, match="allocating"):
        allocate(1 << 61, torch.device("cpu"))
    with pytest.raises(UsageError, match="meta"):
        allocate(64, torch.device("meta"))
