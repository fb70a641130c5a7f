# SPDX-License-Identifier: Apache-2.0
"""Where tensors go in a slot, and which ranges of it a consumer reads: arithmetic only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tensorferry.manifest import TensorSpec

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
    members: list[int]


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Place tensors one after another.

    Args:
        sizes: Bytes of each tensor.

    Returns:
        The offset of each tensor from the start of the slot, and the bytes of the slot.
    """
    offsets = []
    end = 0
    for nbytes in sizes:
        offset = -(-end // ALIGNMENT) * ALIGNMENT if nbytes else end
        offsets.append(offset)
        end = offset + nbytes
    return offsets, end


def regions(specs: Sequence[TensorSpec], alone: Collection[int] = ()) -> list[Region]:
    """Group tensors into the fewest ranges without large gaps; tensors without bytes are left out.

    Args:
        specs: The tensors.
        alone: Those that get a region of their own.
    """
    found = [
        Region(specs[index].offset, specs[index].nbytes, [index]) for index in alone if specs[index].nbytes
    ]
    start = end = 0
    members: list[int] = []
    placed = [
        (spec.offset, spec.nbytes, index)
        for index, spec in enumerate(specs)
        if spec.nbytes and index not in alone
    ]
    for offset, nbytes, index in sorted(placed):
        if members and offset - end > MAX_GAP_NBYTES:
            found.append(Region(start, end - start, members))
            members = []
        if not members:
            start = offset
        members.append(index)
        end = offset + nbytes
    if members:
        found.append(Region(start, end - start, members))
    return found


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
