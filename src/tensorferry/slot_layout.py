# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie in a slot: bounds, and the manifest dictionaries of the reference class.

A manifest dictionary maps a name to a list of entries ``{"offset", "shape", "dtype"}``, one
for a tensor and one per tensor of a list, which also has its ``"list_index"``.  Holes in a list
are None.  The first entry may have two keys more: ``"list_length"``, where the last tensor
does not end the list, and ``"container": "tuple"``.  A list without any tensor has a single
entry with these keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tensorferry.arrays import as_tensor
from tensorferry.dtypes import dtype_to_str, itemsize, str_to_dtype
from tensorferry.errors import ManifestError, UsageError

ALIGNMENT = 512
"""Bytes; each tensor of a batch starts at a multiple of it inside the slot."""

ManifestDict = dict[str, list[dict[str, Any]]]

_MAX_DIMS = 64
_MAX_NBYTES = 1 << 62
_MAX_LIST_ITEMS = 1 << 20  # in a manifest: bounds the memory that a peer's "list_index" takes


class SlotBoundsError(UsageError, ValueError):
    """A copy would leave the slot; nothing was copied."""


class Piece(NamedTuple):
    """The place of one tensor in a slot, in bytes from its start."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Placement(NamedTuple):
    """A tensor that is to be written at ``offset`` bytes from the start of the slot."""

    offset: int
    tensor: torch.Tensor


class Entry(NamedTuple):
    """What a name in a manifest stands for; ``indexes`` is None for a single tensor."""

    pieces: list[Piece]
    indexes: list[int] | None = None
    length: int = 0
    is_tuple: bool = False

    def assemble(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put the tensors of ``pieces`` into the structure that was written."""
        if self.indexes is None:
            return tensors[0]
        items: list[torch.Tensor | None] = [None] * self.length
        for index, tensor in zip(self.indexes, tensors, strict=True):
            items[index] = tensor
        return tuple(items) if self.is_tuple else items


def piece_at(offset: int, shape: Sequence[int], dtype: torch.dtype) -> Piece:
    """Compute the size of a tensor.

    Raises:
        ValueError: The offset or a dimension is negative, or the size has no bound that torch
            could handle; the message says which.
        UnsupportedDtypeError: The dtype cannot be transferred.
    """
    if offset < 0:
        raise ValueError(f"offset {offset} is negative")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions are more than {_MAX_DIMS}")
    if any(dim < 0 for dim in shape):
        raise ValueError(f"shape {list(shape)} has a negative dimension")
    # Torch computes strides from the other dimensions also where one is zero.
    if math.prod(max(dim, 1) for dim in shape) * itemsize(dtype) > _MAX_NBYTES:
        raise ValueError("the shape is too large for any tensor")
    return Piece(offset, math.prod(shape) * itemsize(dtype), tuple(shape), dtype)


def check_bounds(label: str, offset: int, nbytes: int, slot_size: int) -> None:
    """Refuse a range that leaves the slot.

    Raises:
        SlotBoundsError: It does; the message starts with ``label`` and has the numbers.
    """
    if offset < 0 or offset + nbytes > slot_size:
        raise SlotBoundsError(
            f"{label}: {nbytes} bytes at offset {offset} leave the slot of {slot_size} bytes"
        )


def plain_tensor(path: str, value: Any) -> torch.Tensor:
    """Return ``value`` as a plain tensor that can be copied bit for bit.

    Raises:
        UsageError: It cannot be; the message starts with ``path``.
    """
    try:
        return as_tensor(value)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def lay_out(tensors: Mapping[str, Any], slot_size: int) -> tuple[list[Placement], ManifestDict]:
    """Decide where each tensor goes, and describe it.

    Args:
        tensors: Names to a tensor, None, or a list or tuple of tensors and None.
        slot_size: Bytes in the slot.

    Raises:
        UsageError: Something else is in ``tensors``; the message names its path.
        SlotBoundsError: The tensors do not fit.
    """
    placements: list[Placement] = []
    manifest: ManifestDict = {}
    end = 0
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"names are strings, not {name!r}")
        if value is None:
            continue
        entries: list[dict[str, Any]] = []
        for path, index, item in _flatten(name, value):
            tensor = plain_tensor(path, item)
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + tensor.numel() * tensor.element_size()
            check_bounds(path, offset, end - offset, slot_size)
            placements.append(Placement(offset, tensor))
            entry = {"offset": offset, "shape": list(tensor.shape), "dtype": dtype_to_str(tensor.dtype)}
            entries.append(entry if index is None else {**entry, "list_index": index})
        manifest[name] = _with_container_keys(value, entries)
    return placements, manifest


def _flatten(name: str, value: Any) -> Iterator[tuple[str, int | None, Any]]:
    if isinstance(value, list) or type(value) is tuple:
        for index, item in enumerate(value):
            if isinstance(item, (list, tuple, dict)):
                raise _too_deep(f"{name}[{index}]", item)
            if item is not None:
                yield f"{name}[{index}]", index, item
    elif isinstance(value, (tuple, dict)):
        raise _too_deep(name, value)
    else:
        yield name, None, value


def _too_deep(path: str, value: Any) -> UsageError:
    return UsageError(
        f"{path}: a manifest dictionary cannot describe a {type(value).__name__} here, only tensors "
        f"and flat lists or tuples of them; Producer.publish takes nested structures"
    )


def _with_container_keys(value: Any, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    extra: dict[str, Any] = {}
    if isinstance(value, (list, tuple)) and (not value or value[-1] is None):
        extra["list_length"] = len(value)
    if isinstance(value, tuple):
        extra["container"] = "tuple"
    if extra:
        entries = entries or [{}]
        entries[0].update(extra)
    return entries


def check_manifest(manifest: Any, slot_size: int) -> dict[str, Entry]:
    """Check a manifest dictionary that came from a peer, all of it.

    Args:
        manifest: Untrusted.
        slot_size: Bytes in the slot that it describes.

    Returns:
        What each name stands for; a name without entries is left out.

    Raises:
        ManifestError: Something is malformed, out of bounds or too large; the message names it.
    """
    if not isinstance(manifest, Mapping):
        raise ManifestError(f"a manifest is a dictionary, not a {type(manifest).__name__}")
    checked: dict[str, Entry] = {}
    for name, entries in manifest.items():
        if not isinstance(name, str):
            raise ManifestError(f"a name is a string, not a {type(name).__name__}")
        label = repr(name[:80])
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ManifestError(f"{label}: the entries are not a list of dictionaries")
        if entries:
            checked[name] = _check_entries(label, entries, slot_size)
    total = sum(piece.nbytes for entry in checked.values() for piece in entry.pieces)
    if total > slot_size:  # they overlap: a small slot must not become any amount of memory
        raise ManifestError(f"the tensors have {total} bytes, the slot only {slot_size}")
    items = sum(entry.length for entry in checked.values())
    if items > _MAX_LIST_ITEMS:
        raise ManifestError(f"the lists have {items} items, more than {_MAX_LIST_ITEMS}")
    return checked


def _check_entries(label: str, entries: Sequence[Mapping[str, Any]], slot_size: int) -> Entry:
    first = entries[0]
    is_list = any("list_index" in entry for entry in entries) or "list_length" in first
    container = first.get("container", "list")
    if not isinstance(container, str) or container not in ("list", "tuple"):
        raise ManifestError(f"{label}: unknown container {str(container)[:80]!r}")
    if not is_list:
        if len(entries) != 1 or container == "tuple":
            raise ManifestError(f"{label}: {len(entries)} entries without list_index")
        return Entry([_check_piece(label, first, slot_size)])
    if len(entries) == 1 and not first.keys() & {"offset", "shape", "dtype", "list_index"}:
        entries = ()  # a list without tensors
    pieces = [_check_piece(label, entry, slot_size) for entry in entries]
    indexes = [_natural(label, entry, "list_index") for entry in entries]
    length = _natural(label, first, "list_length") if "list_length" in first else max(indexes) + 1
    if len(set(indexes)) != len(indexes) or max(indexes, default=-1) >= length:
        raise ManifestError(f"{label}: a list_index occurs twice or is not below the length {length}")
    return Entry(pieces, indexes, length, container == "tuple")


def _check_piece(label: str, entry: Mapping[str, Any], slot_size: int) -> Piece:
    offset = _natural(label, entry, "offset")
    shape = entry.get("shape")
    if not isinstance(shape, (list, tuple)) or not all(type(dim) is int for dim in shape):
        raise ManifestError(f"{label}: the shape is not a list of integers")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str):
        raise ManifestError(f"{label}: the dtype is not a string")
    try:
        piece = piece_at(offset, shape, str_to_dtype(dtype))
        check_bounds(label, offset, piece.nbytes, slot_size)
    except ManifestError as error:
        raise ManifestError(f"{label}: {error}") from error
    except ValueError as error:
        raise ManifestError(
            str(error) if isinstance(error, SlotBoundsError) else f"{label}: {error}"
        ) from error
    return piece


def _natural(label: str, entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ManifestError(f"{label}: {key} is not an integer in range")
    return value
