# SPDX-License-Identifier: Apache-2.0
"""A buddy allocator over one pool of memory; it hands out offsets and touches no byte.

Inside, everything is counted in units of ``min_block_size``.  Free memory is kept as aligned
power-of-two blocks, one free list per order (a block of order ``k`` has ``2**k`` units and
starts at a multiple of ``2**k``), and two free buddies are always merged.  An allocation is
any run of units: giving it back cuts the run into aligned blocks and merges each upwards.
So an exact pool is nothing special (what lies past its end is never free, hence never
merged with), and neither is a trimmed allocation.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

# One counter for the process: a generation names one allocation of one pool, so a handle of
# another pool is told apart as surely as a stale one.  ``next`` on it is atomic.
_generations = itertools.count(1)

# Requests of at least this part of the pool may be put together from neighbouring free blocks.
# Only blocks of a quarter of the request or more need looking at, so this bounds the search.
_LARGE_REQUEST_DIVISOR = 16


@dataclass(frozen=True)
class Block:
    """A snapshot of one block of the pool.

    Attributes:
        offset: Bytes from the start of the pool.
        size: Bytes that the block takes up.
        allocated: Whether somebody holds it.
        request_id: Who holds it, as given to ``allocate``.
        generation: Number of this allocation, unique in the process; 0 for a free block.
        requested_size: Bytes that were asked for; 0 for a free block.
    """

    offset: int
    size: int
    allocated: bool = False
    request_id: str | None = None
    generation: int = 0
    requested_size: int = 0


class _Run(NamedTuple):
    """Neighbouring units, in ``min_block_size``."""

    start: int
    units: int


class _FreeList:
    """The free blocks of one order, with the lowest at hand.

    Removing from the middle leaves the entry in the heap and only takes it out of
    ``starts``; ``_queued`` keeps an entry from being queued twice, so the heap never grows
    past the number of blocks of this order.
    """

    def __init__(self) -> None:
        self.starts: set[int] = set()
        self._heap: list[int] = []
        self._queued: set[int] = set()

    def add(self, start: int) -> None:
        self.starts.add(start)
        if start not in self._queued:
            self._queued.add(start)
            heapq.heappush(self._heap, start)

    def lowest(self) -> int:
        while self._heap[0] not in self.starts:
            self._queued.discard(heapq.heappop(self._heap))
        return self._heap[0]


class BuddyAllocator:
    """Lends blocks of a pool, in logarithmic time however many are lent.

    Any method may be called from any thread.

    Args:
        pool_size: Bytes, positive.  Rounded up to a power of two, unless ``exact``.
        min_block_size: Smallest block in bytes, a power of two.  Offsets are multiples of it.
        exact: Never use more than ``pool_size``: the pool is the largest multiple of
            ``min_block_size`` that fits, several power-of-two roots side by side.
        trim: Take ``size`` rounded up to ``min_block_size`` only.  The rest of the
            power-of-two block is free at once, and a large request for which there is no
            power-of-two block may span neighbouring free blocks.  Without it, a block is
            rounded up to a power of two.

    Raises:
        ValueError: ``min_block_size`` is not a power of two, ``pool_size`` is not positive,
            or an exact pool is smaller than one block.
    """

    def __init__(
        self, pool_size: int, min_block_size: int = 1 << 20, *, exact: bool = False, trim: bool = False
    ) -> None:
        pool_size, min_block_size = operator.index(pool_size), operator.index(min_block_size)
        if min_block_size <= 0 or min_block_size & (min_block_size - 1):
            raise ValueError(f"min_block_size must be a power of two, got {min_block_size}")
        if pool_size <= 0:
            raise ValueError(f"pool_size must be positive, got {pool_size}")
        units = pool_size // min_block_size if exact else 1 << _order(-(-pool_size // min_block_size))
        if units == 0:
            raise ValueError(f"an exact pool of {pool_size} bytes holds no block of {min_block_size} bytes")
        self._requested_pool_size = pool_size
        self._min_block_size = min_block_size
        self._units = units
        self._trim = trim
        self._lock = threading.Lock()
        self._free_lists = [_FreeList() for _ in range(_order(units) + 1)]
        self._live: dict[int, Block] = {}
        self._allocated_bytes = 0
        self._requested_bytes = 0
        self._give_back(_Run(0, units))

    def __repr__(self) -> str:
        return (
            f"<BuddyAllocator {self._allocated_bytes} of {self.pool_size} bytes lent "
            f"in {len(self._live)} blocks>"
        )

    @property
    def pool_size(self) -> int:
        """Bytes that the allocator covers, after rounding."""
        return self._units * self._min_block_size

    @property
    def min_block_size(self) -> int:
        """Bytes of the smallest block."""
        return self._min_block_size

    @property
    def allocated_bytes(self) -> int:
        """Bytes in blocks that are lent, with what rounding added."""
        return self._allocated_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent, in however many pieces."""
        return self.pool_size - self._allocated_bytes

    @property
    def num_allocations(self) -> int:
        """Blocks that are lent."""
        return len(self._live)

    def allocate(self, size: int, request_id: str | None = None) -> int | None:
        """Lend a block and return its offset.

        Args:
            size: Bytes, positive.
            request_id: Kept with the block, for :meth:`get_block_info`.

        Returns:
            The offset in bytes, or None if there is no room now or ``size`` is larger than
            the pool; nothing was changed then.

        Raises:
            ValueError: ``size`` is not positive; nothing was changed.
        """
        block = self.allocate_block(size, request_id)
        return None if block is None else block.offset

    def allocate_block(self, size: int, request_id: str | None = None) -> Block | None:
        """Lend a block and return all about it; like :meth:`allocate` otherwise.

        Args:
            size: Bytes, positive.
            request_id: Kept with the block.

        Returns:
            The block, with its generation, or None if there is no room.

        Raises:
            ValueError: ``size`` is not positive; nothing was changed.
        """
        size = operator.index(size)
        if size <= 0:
            raise ValueError(f"allocation size must be positive, got {size}")
        with self._lock:
            run = self._find(self._units_for(size))
            if run is None:
                return None
            self._take(run)
            block = Block(
                offset=run.start * self._min_block_size,
                size=run.units * self._min_block_size,
                allocated=True,
                request_id=request_id,
                generation=next(_generations),
                requested_size=size,
            )
            self._live[block.offset] = block
            self._allocated_bytes += block.size
            self._requested_bytes += size
            return block

    def free(self, offset: int, generation: int | None = None) -> bool:
        """Take a block back and merge it with its free buddies.

        Args:
            offset: What :meth:`allocate` returned.
            generation: The block's generation.  With it, a block that was freed and lent
                again is left alone; None frees whatever block starts at ``offset``.

        Returns:
            False, and nothing was changed, if no such block is lent.
        """
        with self._lock:
            block = self._live.get(offset)
            if block is None or generation not in (None, block.generation):
                return False
            del self._live[offset]
            self._allocated_bytes -= block.size
            self._requested_bytes -= block.requested_size
            self._give_back(_Run(offset // self._min_block_size, block.size // self._min_block_size))
            return True

    def get_block_info(self, offset: int) -> Block | None:
        """Return the lent or free block that starts at ``offset`` bytes, None if there is none."""
        with self._lock:
            block = self._live.get(offset)
            if block is not None or offset % self._min_block_size:
                return block
            order = self._free_order(offset // self._min_block_size)
            return None if order is None else Block(offset, self._min_block_size << order)

    def can_allocate(self, size: int) -> bool:
        """Return whether :meth:`allocate` of ``size`` bytes would succeed now."""
        with self._lock:
            return size > 0 and self._find(self._units_for(size)) is not None

    def count_free_slots(self, slot_size: int) -> int:
        """Return how many blocks of ``slot_size`` bytes can be lent now, at least.

        Args:
            slot_size: Bytes; 0 is returned for a size that is not positive.

        Returns:
            The exact number for blocks of a power of two.  With ``trim``, more may fit where
            free blocks happen to be neighbours; it is 0 only if none fits.
        """
        if slot_size <= 0:
            return 0
        with self._lock:
            units = self._units_for(slot_size)
            order = _order(units)
            whole = sum(len(free.starts) << higher for higher, free in enumerate(self._free_lists[order:]))
            return whole or int(self._find(units) is not None)

    def get_stats(self) -> dict[str, Any]:
        """Return a consistent snapshot of all figures, sizes in bytes.

        Returns:
            ``pool_size``, ``min_block_size``, ``allocated_bytes``, ``free_bytes``,
            ``num_allocations``, ``num_blocks`` (lent and free), ``free_blocks_by_size``
            (size to count); ``requested_bytes`` (what callers of live blocks asked for),
            ``wasted_bytes`` (what rounding added to that), ``largest_free_block`` (the largest
            aligned one), and ``requested_pool_size``.
        """
        with self._lock:
            free = {
                self._min_block_size << order: len(blocks.starts)
                for order, blocks in enumerate(self._free_lists)
                if blocks.starts
            }
            return {
                "pool_size": self.pool_size,
                "requested_pool_size": self._requested_pool_size,
                "min_block_size": self._min_block_size,
                "allocated_bytes": self._allocated_bytes,
                "requested_bytes": self._requested_bytes,
                "wasted_bytes": self._allocated_bytes - self._requested_bytes,
                "free_bytes": self.free_bytes,
                "num_allocations": len(self._live),
                "num_blocks": len(self._live) + sum(free.values()),
                "free_blocks_by_size": free,
                "largest_free_block": max(free, default=0),
            }

    # The methods below work in units and need the lock.

    def _units_for(self, size: int) -> int:
        units = -(-size // self._min_block_size)
        return units if self._trim else 1 << _order(units)

    def _find(self, units: int) -> _Run | None:
        """Return where ``units`` would go: the smallest block that holds them, lowest first."""
        for free in self._free_lists[_order(units) :]:
            if free.starts:
                return _Run(free.lowest(), units)
        if self._trim and units * _LARGE_REQUEST_DIVISOR >= self._units >= units:
            return self._find_across_blocks(units)
        return None

    def _find_across_blocks(self, units: int) -> _Run | None:
        """Return the start of the smallest run of free neighbours that holds ``units``.

        Such a run contains an aligned block of at least a quarter of the next power of two.
        """
        seeds = (free.starts for free in self._free_lists[max(0, _order(units) - 2) :])
        runs = (self._widen(start) for start in itertools.chain.from_iterable(seeds))
        best = min(
            (run for run in runs if run.units >= units), key=lambda run: (run.units, run.start), default=None
        )
        return None if best is None else _Run(best.start, units)

    def _widen(self, start: int) -> _Run:
        """Return the whole run of free blocks around the free block at ``start``."""
        first = end = start
        while (order := self._free_order(end)) is not None:
            end += 1 << order
        while (order := self._free_order_before(first)) is not None:
            first -= 1 << order
        return _Run(first, end - first)

    def _free_order(self, start: int) -> int | None:
        return next((k for k, free in enumerate(self._free_lists) if start in free.starts), None)

    def _free_order_before(self, end: int) -> int | None:
        return next((k for k, free in enumerate(self._free_lists) if end - (1 << k) in free.starts), None)

    def _take(self, run: _Run) -> None:
        """Take a run of free units out of the free lists; the tail of its last block stays free."""
        position, end = run.start, run.start + run.units
        while position < end:
            order = self._free_order(position)
            if order is None:  # a broken invariant: stop before memory is lent twice
                raise AssertionError(f"unit {position} of {run} is not free")
            self._free_lists[order].starts.remove(position)
            position += 1 << order
        for start, order in _aligned_blocks(end, position):
            self._free_lists[order].add(start)

    def _give_back(self, run: _Run) -> None:
        """Put a run of units into the free lists, merging buddies."""
        for start, order in _aligned_blocks(run.start, run.start + run.units):
            while (buddy := start ^ (1 << order)) in self._free_lists[order].starts:
                self._free_lists[order].starts.remove(buddy)
                start, order = min(start, buddy), order + 1
            self._free_lists[order].add(start)


def _order(units: int) -> int:
    """Return the smallest ``k`` with ``2**k >= units``."""
    return (units - 1).bit_length()


def _aligned_blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, end)`` into the fewest aligned power-of-two blocks, as (start, order)."""
    while start < end:
        order = (end - start).bit_length() - 1
        if start:
            order = min(order, (start & -start).bit_length() - 1)
        yield start, order
        start += 1 << order
