# SPDX-License-Identifier: Apache-2.0
"""Checks of a manifest's contents: total, and before anything is allocated or connected to.

Every function raises :class:`ManifestError` and nothing else.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from tensorferry import _tensors, metadata, payload
from tensorferry.backends.base import Access, AccessOffer, PeerOffer, SlotTicket
from tensorferry.dtypes import str_to_dtype
from tensorferry.errors import ManifestError, TensorferryError, UsageError
from tensorferry.records import Record, kind_of, shown

ByteOrder: TypeAlias = Literal["little", "big"]
NATIVE: ByteOrder = sys.byteorder

MAX_NAME_NBYTES = 4096
MAX_BACKEND_NBYTES = 64
MAX_HOST_NBYTES = 64
MAX_ADDRESS_NBYTES = 8 << 10
MAX_KEY_NBYTES = 64 << 10
MAX_OFFERS = 16
MAX_DIMS = 64
MAX_CONSUMERS = (1 << 31) - 1
UID_NBYTES = TOKEN_NBYTES = 16
MAX_ALIGNMENT = 64
"""Bytes; no element needs more."""

_CONTAINERS = {dict, list}
_METADATA = {*_CONTAINERS, type(None), bool, int, float, str, bytes}

_INT64 = (1 << 63) - 1
_UINT64 = (1 << 64) - 1


def ticket(record: Record) -> SlotTicket:
    """Take the record of the slot."""
    offset = record.integer("offset", 0, _INT64)
    return SlotTicket(
        index=record.integer("index", 0, (1 << 32) - 1),
        generation=record.integer("generation", 1, _INT64),
        token=record.binary("token", TOKEN_NBYTES, TOKEN_NBYTES),
        offset=offset,
        nbytes=record.integer("nbytes", 0, _INT64 - offset),
    )


def peer(record: Record) -> PeerOffer:
    """Take the peer's record; offers of an access that is not known here are left out."""
    return PeerOffer(
        uid=record.binary("uid", UID_NBYTES, UID_NBYTES),
        backend=record.text("backend", MAX_BACKEND_NBYTES),
        host=record.binary("host", 0, MAX_HOST_NBYTES),
        offers=_offers(record.items("offers", MAX_OFFERS)),
    )


def _offers(values: list[Any]) -> tuple[AccessOffer, ...]:
    offers: dict[str, AccessOffer] = {}
    for value in values:
        entry = Record(value, "an offer")
        access = entry.text("access", MAX_BACKEND_NBYTES)
        if access not in get_args(Access):
            continue
        if access in offers:
            raise ManifestError(f"the access {access!r} is offered twice")
        offers[access] = AccessOffer(
            access=access,  # type: ignore[arg-type]
            address=entry.binary("address", 0, MAX_ADDRESS_NBYTES),
            key=entry.binary("key", 0, MAX_KEY_NBYTES),
        )
    return tuple(offers.values())


def check_metadata(value: dict[str, Any]) -> None:
    """Check that metadata is of plain types, not too much and not nested too deep."""
    if _metadata_nodes(value, 0) > metadata.MAX_NODES:
        raise ManifestError(f"metadata has more than {metadata.MAX_NODES} lists, maps and entries of maps")


def _metadata_nodes(value: Any, depth: int) -> int:
    """Check a map or list of metadata; return how many lists, maps and entries of maps it is made of."""
    if depth >= metadata.MAX_DEPTH:
        raise ManifestError(f"metadata is nested more than {metadata.MAX_DEPTH} deep")
    is_map = type(value) is dict
    items = value.values() if is_map else value
    kinds = set(map(type, items))
    if not kinds <= _METADATA:
        names = " or ".join(sorted(kind.__name__ for kind in kinds - _METADATA))
        raise ManifestError(f"metadata holds {names}")
    nodes = 1 + (len(value) if is_map else 0)
    if not kinds.isdisjoint(_CONTAINERS):  # else there may be millions: no call for each
        nodes += sum(_metadata_nodes(item, depth + 1) for item in items if type(item) in _CONTAINERS)
    return nodes


def count_tensors(structure: dict[str, Any]) -> int:
    """Check a payload's structure and return how many tensors it has."""
    entries, tensors = _count(structure, 1)
    if entries > payload.MAX_NODES:
        raise ManifestError(f"the structure of the manifest has more than {payload.MAX_NODES} entries")
    try:
        payload.check_paths(structure)
    except UsageError as error:
        raise ManifestError(f"the structure of the manifest: {error}") from error
    return tensors


def _count(node: Any, depth: int) -> tuple[int, int]:
    """Check a container of the structure; return how many entries and tensors are in it and below.

    Where there are too many entries it may return after fewer.
    """
    if type(node) is dict:
        items: Any = node.values()
    elif type(node) is list:
        items = node[1:] if node and node[0] is payload.TUPLE else node
    else:
        raise ManifestError(f"the structure holds {kind_of(node)}")
    if depth > payload.MAX_DEPTH:
        raise ManifestError(f"the structure is nested more than {payload.MAX_DEPTH} deep")
    entries = tensors = len(items)
    if entries > payload.MAX_NODES or payload.all_tensors(items):
        return entries, tensors
    for item in items:
        if item is not payload.TENSOR:
            tensors -= 1
            if item is not None:
                below = _count(item, depth + 1)
                entries += below[0]
                tensors += below[1]
    return entries, tensors


class Columns(NamedTuple):
    """The tensors of a manifest, checked but for where they lie.

    Attributes:
        types: Each dtype with each shape, once.
        kinds: Of each tensor, its place in ``types``.
        offsets: Of each tensor, its first byte in the slot.
        sizes: Of each tensor, its bytes.
        type_sizes: Of each type, the bytes of such a tensor.
        itemsizes: Of each type, the bytes of an element.
    """

    types: list[tuple[str, tuple[int, ...]]]
    kinds: list[int]
    offsets: list[int]
    sizes: list[int]
    type_sizes: list[int]
    itemsizes: list[int]


def byteorder(record: Record) -> ByteOrder:
    """Take the byte order of the elements."""
    return cast(ByteOrder, record.choice("byteorder", ("little", "big")))


def tensor_columns(record: Record, structure: dict[str, Any], byteorder: str) -> Columns:
    """Take the tensors of a structure, which is checked too."""
    count = count_tensors(structure)
    types = [_tensor_type(value, byteorder) for value in record.items("types", count)]
    kinds = _column(record, "type", count, len(types) - 1)
    type_sizes = [row[2] for row in types]
    return Columns(
        [row[:2] for row in types],
        kinds,
        _column(record, "offset", count, _INT64),
        [type_sizes[kind] for kind in kinds],
        type_sizes,
        [row[3] for row in types],
    )


def sums(record: Record, count: int) -> list[int]:
    """Take the checksums of so many tensors."""
    return _column(record, "sums", count, _UINT64)


def check_places(columns: Columns, structure: dict[str, Any], slot: SlotTicket) -> None:
    """Check the tensors against each other and the slot."""
    _, kinds, offsets, sizes, type_sizes, itemsizes = columns
    fault, at = _tensors.find_misplaced(kinds, offsets, type_sizes, itemsizes, slot.offset, slot.nbytes)
    if not fault:
        return
    paths = payload.leaf_paths(structure)
    path, nbytes, offset = paths[at], sizes[at], offsets[at]
    if fault == "outside":
        raise ManifestError(
            f"{shown(path)} ({nbytes} bytes at {offset}) leaves its slot of {slot.nbytes} bytes"
        )
    if fault == "misaligned":
        itemsize = itemsizes[kinds[at]]
        raise ManifestError(f"{shown(path)} at {slot.offset} + {offset} is not aligned to {itemsize} bytes")
    _refuse_overlap(paths, sizes, offsets)


def _column(record: Record, key: str, count: int, high: int) -> list[int]:
    column = record.items(key, count)
    if len(column) != count:
        raise ManifestError(f"{key!r} has {len(column)} items for {count} tensors")
    if not set(map(type, column)) <= {int}:
        raise ManifestError(f"{key!r} holds something else than integers")
    if column and not (min(column) >= 0 and max(column) <= high):
        raise ManifestError(f"{key!r} holds a number that is not in 0..{high}")
    return column


def _refuse_overlap(paths: list[str], sizes: list[int], offsets: list[int]) -> None:
    end, last = 0, ""
    for offset, nbytes, path in sorted(zip(offsets, sizes, paths, strict=True)):
        if nbytes and offset < end:
            raise ManifestError(f"{shown(path)} overlaps {shown(last)} at byte {offset} of the slot")
        if nbytes:
            end, last = offset + nbytes, path


def _tensor_type(value: Any, byteorder: str) -> tuple[str, tuple[int, ...], int, int]:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not str or type(value[1]) is not list:
        raise ManifestError("an entry of 'types' is not a dtype and a shape")
    dtype, shape = value
    if len(shape) > MAX_DIMS:
        raise ManifestError(f"a shape has {len(shape)} dimensions, the limit is {MAX_DIMS}")
    itemsize = _itemsize(dtype)
    if byteorder != NATIVE and itemsize > 1:
        raise ManifestError(f"the manifest's byte order is {byteorder}, this machine's is {NATIVE}")
    nbytes = itemsize
    for size in shape:
        if type(size) is not int or not 0 <= size <= _INT64:
            raise ManifestError(f"a shape holds {size if type(size) is int else kind_of(size)}")
        # torch computes strides with zeros taken as ones, and they must not overflow either.
        nbytes *= max(size, 1)
        if nbytes > _INT64:
            raise ManifestError("a shape has more elements than memory can hold")
    return dtype, tuple(shape), 0 if 0 in shape else nbytes, itemsize


@lru_cache(maxsize=256)
def _itemsize(dtype: str) -> int:
    try:
        return str_to_dtype(dtype).itemsize
    except TensorferryError as error:
        raise ManifestError(f"the manifest has a tensor of unknown dtype {dtype[:64]!r}") from error
