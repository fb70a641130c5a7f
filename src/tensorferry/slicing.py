# SPDX-License-Identifier: Apache-2.0
"""Basic indexing of a tensor that lies in row-major order somewhere else: arithmetic only.

An index is made to fit a shape, and turned into the ranges of bytes that have to be read for
it.  The ranges land one after another, and the result is a strided view of what has landed:

* Outer dimensions are taken apart: each of their selected elements is a range of its own, and
  what lies between is not read.
* From some dimension inwards one range goes from the first selected element to the last, over
  the gaps between.  Where there are none, what has landed is the result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch

from tensorferry.errors import UsageError
from tensorferry.layout import MAX_GAP_NBYTES
from tensorferry.records import shown

_Entry: TypeAlias = "SupportsIndex | slice | EllipsisType | None"
Index: TypeAlias = "_Entry | tuple[_Entry, ...]"

HEADERS_NBYTES = 512
"""Bytes that a read costs on the wire besides its data, about; smaller gaps are always read over."""

MANY_READS = 4096
"""From more reads on, time counts more than bytes: gaps up to ``MAX_GAP_NBYTES`` are read over."""

MAX_READS = 1 << 18
"""More reads are never planned, however wide the gaps; a shape from a peer may ask for any number."""

_WHOLE = slice(None)
_ALLOWED = "an index is made of integers, slices with a positive step, one Ellipsis, and None"


@dataclass(frozen=True, slots=True)
class Selection:
    """What an index picks of one tensor.

    Attributes:
        index: The same index in plain terms: what to apply to the whole tensor.
        shape: Of the result.
        nbytes: Of the result.
        landed_nbytes: Bytes of all ranges.
        first: First byte of the first range, counted from that of the tensor.
    """

    index: tuple[int | slice | None, ...]
    shape: tuple[int, ...]
    nbytes: int
    landed_nbytes: int
    first: int
    _counts: tuple[int, ...]  # of elements, in each dimension of the tensor
    _distances: tuple[int, ...]  # from one to the next in the tensor, in bytes
    _split: int  # how many dimensions are taken apart
    _span: int  # bytes of each range
    _itemsize: int

    @property
    def is_exact(self) -> bool:
        """Whether what lands is the result, without gaps."""
        return self.landed_nbytes == self.nbytes

    @property
    def reads(self) -> int:
        """How many ranges there are at most."""
        return prod(self._counts[: self._split])

    def ranges(self, offset: int) -> list[tuple[int, int]]:
        """Return the ranges to read, first byte and bytes, in the order in which they land.

        Args:
            offset: First byte of the tensor.
        """
        if not self.nbytes:
            return []
        starts = np.array([offset + self.first])
        for count, distance in zip(self._counts[: self._split], self._distances, strict=False):
            starts = (starts[:, None] + np.arange(count) * distance).reshape(-1)
        # The last of a row may touch the first of the next.
        begins = np.flatnonzero(np.diff(starts, prepend=-1 - self._span) != self._span)
        sizes = np.diff(begins, append=len(starts)) * self._span
        return list(zip(starts[begins].tolist(), sizes.tolist(), strict=True))

    def in_place(self) -> Selection:
        """Return the same selection as one range over all gaps, for memory that is at hand."""
        if not self.nbytes:
            return self
        span = self._itemsize + sum(
            (count - 1) * distance for count, distance in zip(self._counts, self._distances, strict=True)
        )
        return replace(self, landed_nbytes=span, _split=0, _span=span)

    def view(self, landed: torch.Tensor) -> torch.Tensor:
        """Return the result as a view of what the ranges have landed, a flat tensor of the same dtype."""
        if self.is_exact:
            return landed.view(self.shape)
        strides = [distance // self._itemsize for distance in self._distances]
        dense = self._span // self._itemsize
        for dim in reversed(range(self._split)):
            strides[dim] = dense
            dense *= self._counts[dim]
        axes = [0 if isinstance(entry, int) else None if entry is None else _WHOLE for entry in self.index]
        return landed.as_strided(self._counts, strides, landed.storage_offset())[tuple(axes)]


def select(path: str, index: Index, shape: Sequence[int], itemsize: int) -> Selection:
    """Fit an index to a tensor, and plan the reads for it.

    Args:
        path: Of the tensor, for messages.
        index: An integer, a slice with a positive step, Ellipsis, None for a new dimension, or a
            tuple of these with one Ellipsis at most.  They mean what they mean to torch.
        shape: Of the tensor.
        itemsize: Bytes of an element.

    Raises:
        UsageError: The index is of another kind, has too many entries, or names an element that
            is not there; the message names the path.
    """
    try:
        entries = _entries(index, len(shape))
        sizes = iter(shape)
        plain = tuple(None if entry is None else _plain(entry, next(sizes)) for entry in entries)
    except UsageError as error:
        raise UsageError(f"slices[{shown(path)}] for a tensor of shape {tuple(shape)}: {error}") from None
    return _plan(plain, shape, itemsize)


def _entries(index: Any, dims: int) -> list[Any]:
    """Return one entry for each dimension, and None for each new one."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [position for position, entry in enumerate(entries) if entry is Ellipsis]
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if len(dots) > 1:
        raise UsageError(f"it has {len(dots)} Ellipses; {_ALLOWED}")
    if taken > dims:
        raise UsageError(f"it has {taken} entries, the tensor has {dims} dimensions")
    position = dots[0] if dots else len(entries)
    entries[position : position + 1] = [_WHOLE] * (dims - taken)
    return entries


def _plain(entry: Any, size: int) -> int | slice:
    """Return what picks the same of a dimension, with bounds that are inside it."""
    if not isinstance(entry, slice):
        at = _integer(entry)
        if not -size <= at < size:
            raise UsageError(f"{at} is not in a dimension of size {size}")
        return at % size
    bounds = [None if bound is None else _integer(bound) for bound in (entry.start, entry.stop, entry.step)]
    if bounds[2] is not None and bounds[2] <= 0:
        raise UsageError(f"{entry} has the step {bounds[2]}; {_ALLOWED}")
    chosen = range(*slice(*bounds).indices(size))
    if len(chosen) < 2:  # then a step of any size would do
        return slice(chosen.start, chosen.start + 1, 1) if chosen else slice(0, 0, 1)
    return slice(chosen.start, chosen[-1] + 1, chosen.step)


def _integer(value: Any) -> int:
    # Torch gives masks and arrays of integers a meaning of their own: those are copies in any order.
    if not isinstance(value, (bool, np.ndarray, torch.Tensor)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"{_ALLOWED}, not of {type(value).__name__}")


def _plan(index: tuple[int | slice | None, ...], shape: Sequence[int], itemsize: int) -> Selection:
    picks = [
        range(entry, entry + 1) if isinstance(entry, int) else range(entry.start, entry.stop, entry.step)
        for entry in index
        if entry is not None
    ]
    counts = tuple(map(len, picks))
    pitches = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    distances = tuple(pick.step * pitch for pick, pitch in zip(picks, pitches, strict=True))
    nbytes = itemsize * prod(counts)
    split, span = _split(counts, distances, itemsize) if nbytes else (0, 0)
    sizes = iter(counts)
    axes = [(entry, 1 if entry is None else next(sizes)) for entry in index]
    return Selection(
        index=index,
        shape=tuple(size for entry, size in axes if not isinstance(entry, int)),
        nbytes=nbytes,
        landed_nbytes=prod(counts[:split]) * span,
        first=sum(pick.start * pitch for pick, pitch in zip(picks, pitches, strict=True)) if nbytes else 0,
        _counts=counts,
        _distances=distances,
        _split=split,
        _span=span,
        _itemsize=itemsize,
    )


def _split(counts: Sequence[int], distances: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return from which dimension on gaps are read over, and the bytes of one range then."""
    reads = prod(counts)
    span = itemsize
    for dim in reversed(range(len(counts))):
        if counts[dim] == 1:
            continue
        allowed = HEADERS_NBYTES if reads <= MANY_READS else MAX_GAP_NBYTES
        if distances[dim] - span > allowed and reads <= MAX_READS:
            return dim + 1, span
        span += (counts[dim] - 1) * distances[dim]
        reads //= counts[dim]
    return 0, span
