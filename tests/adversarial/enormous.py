# SPDX-License-Identifier: Apache-2.0
"""Bodies as large as they may be, each of them the most work or memory of its kind."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import msgpack

from manifests import body_of, make_manifest
from tensorferry.manifest import encode_manifest
from tensorferry.payload import MAX_NODES

_LIMIT = 16_000_000


def _count(share: float, most: int = MAX_NODES - 1) -> int:
    return max(1, round(share * most))


def _array(items: Iterable[bytes]) -> bytes:
    listed = list(items)
    return b"\xdd" + struct.pack(">I", len(listed)) + b"".join(listed)


def _same(count: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


def _map(pairs: Iterable[bytes]) -> bytes:
    listed = list(pairs)
    return b"\xdf" + struct.pack(">I", len(listed)) + b"".join(listed)


def _named(count: int, value: bytes) -> bytes:
    return _map(b"\xa6" + f"{i:06x}".encode() + value for i in range(count))


def _body(slot_nbytes: int = 0, **fields: bytes) -> bytes:
    """Encode a good body with some of its fields replaced by these bytes."""
    body = body_of(encode_manifest(make_manifest({})))
    body["slot"]["nbytes"] = slot_nbytes
    packed = {key: msgpack.packb(value) for key, value in body.items()} | fields
    return _map(msgpack.packb(key) + value for key, value in packed.items())


def _alike(count: int, order: Callable[[int], int], shape: bytes = b"\x92\xa5uint8\x91\x01") -> bytes:
    """``count`` tensors of one type, 64 bytes apart."""
    return _body(
        64 * count,
        structure=b"\x81\xa1x" + _same(count, b"\xc3"),
        types=b"\x91" + shape,
        type=_same(count, b"\x00"),
        offset=_array(b"\xce" + struct.pack(">I", 64 * order(i)) for i in range(count)),
    )


def _all_different(count: int) -> bytes:
    return _body(
        count * count,
        structure=_named(count, b"\xc3"),
        types=_array(b"\x92\xa5uint8\x91\xce" + struct.pack(">I", i) for i in range(count)),
        type=_array(b"\xce" + struct.pack(">I", i) for i in range(count)),
        offset=_array(b"\xcf" + struct.pack(">Q", i * (i - 1) // 2) for i in range(count)),
    )


def _long_paths(share: float) -> bytes:
    key = "😀".encode() * 120
    count = _count(share)
    structure = b"\x81\xda" + struct.pack(">H", len(key)) + key + _same(count, b"\xc3")
    nothing = b"\x91\x92\xa5uint8\x91\x00"
    return _body(structure=structure, types=nothing, type=_same(count, b"\x00"), offset=_same(count, b"\x00"))


def _unknown(value: bytes) -> bytes:
    return _body(later=value)


def _text(nbytes: int) -> bytes:
    return b"\xdb" + struct.pack(">I", nbytes // 2 * 2) + "é".encode() * (nbytes // 2)


CASES: dict[str, Callable[[float], bytes]] = {
    # How large: 1.0 for as large as may be, or just above.
    "tensors in order": lambda share: _alike(_count(share), lambda i: i),
    "tensors in disorder": lambda share: _alike(_count(share), lambda i: i * 40_503 % _count(share)),
    "tensors all in one place": lambda share: _alike(_count(share), lambda i: 0),
    "tensors without bytes": lambda share: _alike(_count(share), lambda i: i, b"\x92\xa5uint8\x91\x00"),
    "tensors all different": lambda share: _all_different(_count(share)),
    "long paths": _long_paths,
    "marks": lambda share: _body(structure=b"\x81\xa1x" + _same(_count(share, _LIMIT), b"\xc3")),
    "lists in the structure": lambda share: _body(
        structure=b"\x81\xa1x" + _same(_count(share, _LIMIT), b"\x90")
    ),
    "names in the structure": lambda share: _body(structure=_named(_count(share, 2_000_000), b"\xc0")),
    "nils in metadata": lambda share: _body(metadata=b"\x81\xa1x" + _same(_count(share, _LIMIT), b"\xc0")),
    "texts in metadata": lambda share: _body(
        metadata=b"\x81\xa1x" + _same(_count(share, _LIMIT // 3), b"\xa2ab")
    ),
    "floats in metadata": lambda share: _body(
        metadata=b"\x81\xa1x" + _same(_count(share, _LIMIT // 9), b"\xcb" + bytes(8))
    ),
    "names in metadata": lambda share: _body(metadata=_named(_count(share, 2_000_000), b"\xc0")),
    "maps": lambda share: _unknown(_same(_count(share, _LIMIT // 4), b"\x81\xa1a\xc0")),
    "empty maps": lambda share: _unknown(_same(_count(share, _LIMIT), b"\x80")),
    "arrays of arrays": lambda share: _unknown(_same(_count(share, _LIMIT // 6), b"\x95" + b"\x90" * 5)),
    "integers": lambda share: _unknown(_same(_count(share, _LIMIT // 9), b"\xcf" + b"\xff" * 8)),
    "empty texts": lambda share: _unknown(_same(_count(share, _LIMIT), b"\xa0")),
    "one text": lambda share: _unknown(_text(_count(share, _LIMIT))),
    "a long id": lambda share: _body(id=_text(_count(share, _LIMIT))),
    "a long dtype": lambda share: _body(types=b"\x91\x92" + _text(_count(share, _LIMIT)) + b"\x90"),
    "a long name": lambda share: _body(
        structure=b"\x81" + _text(_count(share, _LIMIT)) + b"\xc3",
        types=b"\x91\x92\xa5uint8\x91\x01",
        type=b"\x91\x00",
        offset=b"\x91\x64",
    ),
    "shapes of many sizes": lambda share: _body(
        types=_same(_count(share, _LIMIT // 80), b"\x92\xa5uint8\xdc\x00\x40" + b"\x01" * 64)
    ),
    "deep": lambda share: _unknown(b"\x91" * _count(share, _LIMIT) + b"\xc0"),
    "announced, not there": lambda share: _unknown(
        _same(_count(share, _LIMIT // 5), b"\xdd\x00\xff\xff\xff")
    ),
}
