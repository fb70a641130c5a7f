# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tensorferry import wire

KEY = bytes(range(32))
NOTICE: dict[str, Any] = {
    "producer": b"p" * 16,
    "index": 7,
    "generation": 9,
    "token": b"t" * 16,
    "consumer": b"c" * 16,
}


def test_the_mac_of_a_notice_is_what_the_wire_format_says():
    message = (
        b"\x01" + b"p" * 16 + b"c" * 16 + (7).to_bytes(4, "little") + (9).to_bytes(8, "little") + b"t" * 16
    )
    digest = hashlib.blake2b(message, digest_size=32, key=KEY, person=b"ferry notice 1")
    assert wire.notice_mac(KEY, "release", **NOTICE) == digest.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"producer": b"q" * 16},
        {"index": 8},
        {"generation": 10},
        {"generation": (1 << 63) - 1},
        {"token": b"u" * 16},
        {"consumer": b"d" * 16},
        {"key": KEY[::-1]},
        {"kind": "reject"},
    ],
    ids=str,
)
def test_every_field_of_a_notice_is_in_its_mac(change):
    fields: dict[str, Any] = {"key": KEY, "kind": "release", **NOTICE}
    assert wire.notice_mac(**fields) != wire.notice_mac(**{**fields, **change})


def test_without_a_key_the_mac_of_a_notice_is_zeros():
    assert wire.notice_mac(None, "reject", **NOTICE) == bytes(32)
