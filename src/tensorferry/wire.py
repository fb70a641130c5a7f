# SPDX-License-Identifier: Apache-2.0
"""The outer layer of the wire format: header, digest or MAC, and bounded msgpack.

A message is an 8-byte header, 32 bytes over header and body, and the body, a msgpack map.  The
32 bytes are a MAC if there is a key; without one they are a digest, which anyone can make: it
stops accidents on the way, not attackers.
What the map holds is :mod:`tensorferry.manifest`'s concern; ``docs/wire-format.md`` has it all.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any, Literal

import msgpack

from tensorferry.errors import AuthenticationError, ManifestError, UsageError, VersionError

MAGIC = b"\x89TFM"
MAJOR = 1
MINOR = 0
SIGNED = 0x01
HEADER_NBYTES = 8
DIGEST_NBYTES = 32
MAX_MANIFEST_NBYTES = 16 << 20
MAX_NODES = 1 << 19
"""Arrays, maps and entries of maps; the limits of payload and metadata together are below it."""
MAX_ENTRIES = 1 << 17
"""Entries of one map."""

_PURPOSE = b"ferry manifest 1"
_NOTICE_PURPOSE = b"ferry notice 1"
_NOTICE = struct.Struct("<B16s16sIQ16s")  # kind, producer, consumer, index, generation, token
_NOTICE_KINDS = {"release": 1, "reject": 2}


def as_key(key: bytes | str | None) -> bytes | None:
    """Return a MAC key as bytes; text is taken as UTF-8, and None stays None.

    Raises:
        UsageError: The key is not bytes or str, or not 16 to 64 bytes long.
    """
    if key is None:
        return None
    if not isinstance(key, (bytes, bytearray, str)):
        raise UsageError(f"a key is bytes or str, not {type(key).__name__}")
    try:
        secret = key.encode() if isinstance(key, str) else bytes(key)
    except UnicodeEncodeError as error:
        raise UsageError("the key is not valid Unicode") from error
    if not 16 <= len(secret) <= 64:
        raise UsageError(f"a key is 16 to 64 bytes long, this one has {len(secret)}")
    return secret


def seal(body: bytes, key: bytes | None) -> bytes:
    """Put the header, and a MAC or without a key a digest, in front of an encoded body."""
    header = MAGIC + bytes((MAJOR, MINOR, SIGNED if key else 0, 0))
    return header + _digest(key, header, body) + body


def unseal(data: bytes, key: bytes | None) -> bytes:
    """Check version and digest or MAC, and return the body, of which nothing has been decoded.

    Raises:
        ManifestError: This is no message of ours, or without a key: it was altered or cut off.
        VersionError: It has another major version.
        AuthenticationError: A key is given and the MAC is missing or wrong; or there is a MAC
            and no key to check it with.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_NBYTES:
        raise ManifestError(f"this is not a manifest: it begins with {data[: len(MAGIC)]!r}, not {MAGIC!r}")
    major, minor, flags, reserved = data[len(MAGIC) : HEADER_NBYTES]
    if major != MAJOR:
        raise VersionError(
            f"the manifest has version {major}.{minor}, this is tensorferry for version {MAJOR}.x; "
            f"use releases with the same major version on both sides"
        )
    signed = flags == SIGNED
    if key is not None and not signed:
        raise AuthenticationError("the manifest has no MAC, but a key is set; set it at the producer too")
    if flags not in (0, SIGNED) or reserved:
        raise ManifestError(f"the header has unknown flags {flags:#04x} {reserved:#04x}")
    if signed and key is None:
        raise AuthenticationError("the manifest has a MAC, but no key is set to check it with")
    body = data[HEADER_NBYTES + DIGEST_NBYTES :]
    expected = _digest(key, data[:HEADER_NBYTES], body)
    if not hmac.compare_digest(data[HEADER_NBYTES : HEADER_NBYTES + DIGEST_NBYTES], expected):
        if signed:
            raise AuthenticationError(
                "the manifest's MAC is wrong: another key, or it was altered on its way"
            )
        raise ManifestError("the manifest was altered or cut off on its way: its digest is wrong")
    return body


def notice_mac(
    key: bytes | None,
    kind: Literal["release", "reject"],
    *,
    producer: bytes,
    index: int,
    generation: int,
    token: bytes,
    consumer: bytes,
) -> bytes:
    """Return the MAC of a control message; zeros if there is no key.

    Args:
        key: As :func:`as_key` returns it.
        kind: What the message says.
        producer: The 16 bytes of the producer's uid, to whom alone it says so.
        index: Of the slot.
        generation: Of the slot.
        token: The 16 bytes of the slot's token.
        consumer: 16 bytes that name the consumer.
    """
    if not key:
        return bytes(DIGEST_NBYTES)
    message = _NOTICE.pack(_NOTICE_KINDS[kind], producer, consumer, index, generation, token)
    return hashlib.blake2b(message, digest_size=DIGEST_NBYTES, key=key, person=_NOTICE_PURPOSE).digest()


def pack(body: Any) -> bytes:
    """Encode plain values as msgpack.

    Raises:
        ValueError, OverflowError, TypeError: Something cannot be encoded.
    """
    packed: bytes = msgpack.packb(body)
    return packed


def join(*maps: bytes) -> bytes:
    """Return one encoded map with the entries of several, of up to 15 entries each."""
    return _map_header(sum(map(entries, maps))) + b"".join(one[1:] for one in maps)


def entries(encoded: bytes) -> int:
    """Return how many entries an encoded map has, which are up to 15."""
    return encoded[0] & 0x0F


def split(body: bytes, keys: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """Cut an encoded map of a peer in two.

    Nothing is decoded, and what follows the first part is not even looked at.

    Args:
        body: The map, unchecked.
        keys: Encoded.

    Returns:
        Two encoded maps: the leading entries under ``keys``, as many at most, and the others.  The first is
        empty where there are none, or something else than a map.
    """
    reader = msgpack.Unpacker(max_buffer_size=max(len(body), 1))
    reader.feed(body)
    try:
        total, found = reader.read_map_header(), 0
        start = end = reader.tell()
        while found < min(total, len(keys)) and body.startswith(keys, end):
            reader.skip()
            reader.skip()
            found, end = found + 1, reader.tell()
    except Exception:  # whatever msgpack raises; decoding the whole will say what is wrong
        return _map_header(0), body
    return _map_header(found) + body[start:end], _map_header(total - found) + body[end:]


def _map_header(entries: int) -> bytes:
    header: bytes = msgpack.Packer().pack_map_header(entries)
    return header


def unpack(body: bytes, most_nodes: int = MAX_NODES) -> Any:
    """Decode msgpack that nobody vouches for, in memory bounded by its length.

    A first pass without any allocation makes sure that every announced item is there, so a
    few bytes cannot announce a huge array.  Maps must have str keys, none of them twice.

    Raises:
        ManifestError: It is malformed, has extension types, or is nested too deep.
    """
    nodes = 0

    def count(items: list[Any], entries: int = 0) -> list[Any]:
        nonlocal nodes
        nodes += 1 + entries
        if nodes > most_nodes:
            raise ManifestError(f"the manifest has more than {MAX_NODES} arrays, maps and entries of maps")
        return items

    def pairs(items: list[tuple[Any, Any]]) -> dict[str, Any]:
        decoded = dict(count(items, len(items)))
        if len(decoded) != len(items) or not set(map(type, decoded)) <= {str}:
            raise ManifestError("a map in the manifest has a key twice, or one that is no text")
        return decoded

    limit = max(len(body), 1)
    limits = {f"max_{kind}_len": limit for kind in ("str", "bin", "array")}
    limits["max_map_len"] = min(limit, MAX_ENTRIES)  # a map is a list of pairs before a hook sees it
    try:
        scanner = msgpack.Unpacker(max_buffer_size=limit, max_ext_len=0, **limits)
        scanner.feed(body)
        scanner.skip()
        if scanner.tell() != len(body):
            raise ManifestError(f"{len(body) - scanner.tell()} bytes follow the manifest")
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=pairs,
            list_hook=count,
            ext_hook=_no_extensions,
            max_ext_len=0,
            **limits,
        )
    except ManifestError:
        raise
    except Exception as error:  # whatever msgpack raises, the peer's bytes are the reason
        raise ManifestError(f"the manifest is not valid msgpack: {type(error).__name__}: {error}") from error


def _no_extensions(code: int, _: bytes) -> Any:
    raise ManifestError(f"the manifest has a msgpack extension of type {code}")


def _digest(key: bytes | None, header: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=DIGEST_NBYTES, key=key or b"", person=_PURPOSE)
    digest.update(body)
    return digest.digest()
