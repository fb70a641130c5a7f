# SPDX-License-Identifier: Apache-2.0
"""Bodies of manifests as trees that can be changed in ways that msgpack's own types do not allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack


class Map(list[Any]):
    """A msgpack map as a list of ``[key, value]``, so that keys may repeat and be anything."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the first value under a key."""
        return next((value for name, value in self if name == key), default)

    def set(self, key: str, value: Any) -> None:
        """Replace the value under a key, or add it at the end."""
        for pair in self:
            if pair[0] == key:
                pair[1] = value
                return
        self.append([key, value])


class Raw(bytes):
    """Bytes that go into the encoding as they are, whatever they mean there."""


class Place(NamedTuple):
    """Where a node is: ``container[index]``, or the value of that pair of a map."""

    container: list[Any]
    index: int

    def get(self) -> Any:
        """Return the node."""
        entry = self.container[self.index]
        return entry[1] if isinstance(self.container, Map) else entry

    def put(self, value: Any) -> None:
        """Put another node here."""
        if isinstance(self.container, Map):
            self.container[self.index] = [self.container[self.index][0], value]
        else:
            self.container[self.index] = value


def parse(body: bytes) -> Any:
    """Return the tree of an encoded body."""
    return msgpack.unpackb(body, strict_map_key=False, object_pairs_hook=lambda pairs: Map(map(list, pairs)))


def build(node: Any) -> bytes:
    """Encode a tree."""
    if isinstance(node, Raw):
        return bytes(node)
    packer = msgpack.Packer(autoreset=False)
    if isinstance(node, Map):
        packer.pack_map_header(len(node))
        return bytes(packer.bytes()) + b"".join(build(key) + build(value) for key, value in node)
    if isinstance(node, list):
        packer.pack_array_header(len(node))
        return bytes(packer.bytes()) + b"".join(map(build, node))
    if isinstance(node, int) and not isinstance(node, bool):
        node = min(max(node, -(1 << 63)), (1 << 64) - 1)
    packer.pack(node)
    return bytes(packer.bytes())


def copy(node: Any) -> Any:
    """Return a deep copy of a tree."""
    if isinstance(node, Map):
        return Map([key, copy(value)] for key, value in node)
    return list(map(copy, node)) if isinstance(node, list) else node


def places(node: Any) -> Iterator[Place]:
    """Yield the place of every node below a container."""
    if not isinstance(node, list):
        return
    for index in range(len(node)):
        place = Place(node, index)
        yield place
        yield from places(place.get())
