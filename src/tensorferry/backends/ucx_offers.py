# SPDX-License-Identifier: Apache-2.0
"""The keys of this backend's offers in manifests: opaque to all others, hostile until parsed."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgpack

from tensorferry.errors import ManifestError

_MAPPED = struct.Struct("<iiiIQ")


class MappedKey(NamedTuple):
    """Where a process of this host has a pool: its number, two descriptors, slots, and bytes of the pool."""

    pid: int
    control: int
    pool: int
    slots: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the bytes for a manifest."""
        return _MAPPED.pack(*self)

    @classmethod
    def parse(cls, key: bytes) -> MappedKey:
        """Check bytes that a peer sent; what they name is checked where it is opened.

        Raises:
            ManifestError: They have another length, or name nothing that can be.
        """
        try:
            parsed = cls(*_MAPPED.unpack(key))
        except struct.error as error:
            raise ManifestError(f"the mapped offer has {len(key)} bytes: {error}") from error
        if parsed.pid <= 0 or parsed.control < 0 or parsed.pool < 0 or not 0 < parsed.nbytes < 1 << 62:
            raise ManifestError("the mapped offer names no process, descriptor or size")
        return parsed


class RemoteRange(NamedTuple):
    """Memory of a peer, and the packed remote key that opens it."""

    address: int
    nbytes: int
    key: bytes


class RdmaKey(NamedTuple):
    """A pool, and the control block with the generations of its slots."""

    pool: RemoteRange
    control: RemoteRange

    def pack(self) -> bytes:
        """Return the bytes for a manifest."""
        packed: bytes = msgpack.packb([*self.pool, *self.control])
        return packed

    @classmethod
    def parse(cls, key: bytes) -> RdmaKey:
        """Check the form of bytes that a peer sent; ranges are checked before each get.

        Raises:
            ManifestError: They have another form, or name memory that cannot be.
        """
        try:
            fields = msgpack.unpackb(key, max_array_len=6, max_bin_len=4096)
        except Exception as error:  # whatever msgpack raises, the peer's bytes are the reason
            raise ManifestError(f"the rdma key cannot be decoded: {error}") from error
        kinds = [int, int, bytes, int, int, bytes]
        if not isinstance(fields, list) or [type(field) for field in fields] != kinds:
            raise ManifestError("the rdma key has the wrong form")
        ranges = RemoteRange(*fields[:3]), RemoteRange(*fields[3:])
        for address, nbytes, packed in ranges:
            if not packed or address < 0 or nbytes <= 0 or address + nbytes >= 1 << 64:
                raise ManifestError("the rdma key names no memory")
        return cls(*ranges)
