# SPDX-License-Identifier: Apache-2.0
"""A buddy allocator over one pool of memory; it hands out offsets and touches no byte.

Inside, everything is counted in units of ``min_block_size``.  What is free is kept by
:mod:`tensorferry.free_space`: as buddies, or in a trimmed pool as runs of any length.  Here are the
blocks that are lent, the figures, and the lock.
"""

from __future__ import annotations

import itertools
import operator
import threading
from typing import Any, NamedTuple

from tensorferry.free_space import Buddies, Runs

# One counter for the process: a generation names one allocation of one pool, so a handle of
# another pool is told apart as surely as a stale one.  ``next`` on it is atomic.
_generations = itertools.count(1)


class Block(NamedTuple):
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


class BuddyAllocator:
    """Lends blocks of a pool, in the same time however many are lent.

    Any method may be called from any thread.

    Args:
        pool_size: Bytes, positive.  Rounded up to a power of two, unless ``exact``.
        min_block_size: Smallest block in bytes, a power of two.  Offsets are multiples of it.
        exact: Never use more than ``pool_size``: the pool is the largest multiple of
            ``min_block_size`` that fits, several power-of-two roots side by side.
        trim: Take ``size`` rounded up to ``min_block_size`` only, from the shortest run of free
            memory that is long enough; what is left of it stays free.  A free block is any such run
            then, and free neighbours are always merged.  Without it, a block is rounded up to a
            power of two, and only buddies are merged.

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
        self._free: Buddies | Runs = Runs(units) if trim else Buddies(units)
        self._live: dict[int, Block] = {}
        self._allocated_bytes = 0
        self._requested_bytes = 0

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
            units = self._units_for(size)
            start = self._free.take(units)
            if start is None:
                return None
            offset, taken = start * self._min_block_size, units * self._min_block_size
            block = Block(offset, taken, True, request_id, next(_generations), size)
            self._live[offset] = block
            self._allocated_bytes += taken
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
            self._free.give_back(offset // self._min_block_size, block.size // self._min_block_size)
            return True

    def get_block_info(self, offset: int) -> Block | None:
        """Return the lent or free block that starts at ``offset`` bytes, None if there is none."""
        with self._lock:
            block = self._live.get(offset)
            if block is not None or offset % self._min_block_size:
                return block
            units = self._free.size_at(offset // self._min_block_size)
            return None if units is None else Block(offset, units * self._min_block_size)

    def can_allocate(self, size: int) -> bool:
        """Return whether :meth:`allocate` of ``size`` bytes would succeed now."""
        with self._lock:
            return size > 0 and self._free.has(self._units_for(size))

    def count_free_slots(self, slot_size: int) -> int:
        """Return how many blocks of ``slot_size`` bytes can be lent now, at least.

        Args:
            slot_size: Bytes; 0 is returned for a size that is not positive.

        Returns:
            The exact number, unless the pool is trimmed: more may fit then, but it is 0 only if
            none fits.
        """
        if slot_size <= 0:
            return 0
        with self._lock:
            return self._free.count(self._units_for(slot_size))

    def get_stats(self) -> dict[str, Any]:
        """Return a consistent snapshot of all figures, sizes in bytes.

        Returns:
            ``pool_size``, ``min_block_size``, ``allocated_bytes``, ``free_bytes``,
            ``num_allocations``, ``num_blocks`` (lent and free), ``free_blocks_by_size``
            (size to count; in a trimmed pool a block counts for the power of two at or below its
            size); ``requested_bytes`` (what callers of live blocks asked for), ``wasted_bytes`` (what
            rounding added to that), ``largest_free_block`` (the most that can be lent in one
            piece now), and ``requested_pool_size``.
        """
        with self._lock:
            free = {units * self._min_block_size: count for units, count in self._free.by_size().items()}
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
                "largest_free_block": self._free.largest() * self._min_block_size,
            }

    # The methods below need the lock.

    def _units_for(self, size: int) -> int:
        units = -(-size // self._min_block_size)
        return units if self._trim else 1 << _order(units)


def _order(units: int) -> int:
    """Return the smallest ``k`` with ``2**k >= units``."""
    return (units - 1).bit_length()
