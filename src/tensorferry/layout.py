# SPDX-License-Identifier: Apache-2.0
"""Where tensors go in a slot, and which ranges of it a consumer reads: arithmetic only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

from tensorferry import _tensors
from tensorferry.tensor_table import TensorTable

ALIGNMENT = 64
"""Bytes; every tensor of a slot starts at a multiple of it."""

MAX_GAP_NBYTES = 8 << 10
"""Bytes between two tensors up to which reading on is cheaper than another read."""


class Region(NamedTuple):
    """Neighbouring tensors that cross as one range of bytes.

    Attributes:
        start: First byte of the range in the slot.
        nbytes: Bytes of the range, with the gaps between its tensors.
        members: Which tensors lie in it, in ascending order of their offset.
    """

    start: int
    nbytes: int
    members: Sequence[int]


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Place tensors one after another.

    Args:
        sizes: Bytes of each tensor.

    Returns:
        The offset of each tensor from the start of the slot, and the bytes of the slot.
    """
    return _tensors.lay_out(list(sizes), ALIGNMENT)


def regions(table: TensorTable, alone: Collection[int] = ()) -> list[Region]:
    """Group tensors into the fewest ranges without large gaps; tensors without bytes are left out.

    Args:
        table: The tensors.
        alone: Those that get a region of their own.
    """
    offsets, sizes = table.offsets, table.sizes
    found = [Region(offsets[place], sizes[place], [place]) for place in alone if sizes[place]]
    if alone or 0 in sizes:
        others = [place for place, nbytes in enumerate(sizes) if nbytes and place not in alone]
    else:
        others = list(range(len(sizes)))
    others.sort(key=offsets.__getitem__)
    return found + list(starmap(Region, _tensors.regions(others, offsets, sizes, MAX_GAP_NBYTES)))


def landing_offsets(regions: Sequence[Region]) -> tuple[list[int], int]:
    """Place ranges in landing memory so that their tensors keep their alignment.

    Returns:
        The offset of each range from the start of the landing block, and the block's bytes.
    """
    offsets = []
    end = 0
    for region in regions:
        offset = align(end) + region.start % ALIGNMENT
        offsets.append(offset)
        end = offset + region.nbytes
    return offsets, end


def align(offset: int) -> int:
    """Return the next multiple of :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
