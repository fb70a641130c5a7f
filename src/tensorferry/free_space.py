# SPDX-License-Identifier: Apache-2.0
"""What is free in a pool, in units of its smallest block: as buddies, or as runs of any length.

The work of an operation depends on the logarithm of the pool's size at most, never on how many blocks
there are.  Of pieces of one size the one that became free last is taken first: its memory is the
likeliest to be in caches, and taking it is ``dict.popitem``.  Nothing here takes a lock.
"""

from __future__ import annotations

# Wide words make the trees flat.  Beyond this width the integers themselves begin to cost.
_WORD_BITS = 10
_IN_WORD = (1 << _WORD_BITS) - 1


class SortedIntegers:
    """A set of integers that knows the first one from any number on.

    A tree of bit words: bit ``n`` of a level says that word ``n`` of the level below is not
    zero.  Only words that are not zero are kept.

    Args:
        num_bits: Length of the longest integer to be kept, in bits.
    """

    def __init__(self, num_bits: int) -> None:
        self._levels: list[dict[int, int]] = [{} for _ in range(max(1, -(-num_bits // _WORD_BITS)))]

    def add(self, number: int) -> None:
        """Put in an integer that is not in the set."""
        for words in self._levels:
            bit = 1 << (number & _IN_WORD)
            number >>= _WORD_BITS
            word = words.get(number)
            if word is not None:
                words[number] = word | bit
                return
            words[number] = bit

    def remove(self, number: int) -> None:
        """Take out an integer that is in the set."""
        for words in self._levels:
            bit = 1 << (number & _IN_WORD)
            number >>= _WORD_BITS
            word = words[number] ^ bit
            if word:
                words[number] = word
                return
            del words[number]

    def first_from(self, number: int) -> int | None:
        """Return the smallest integer that is at least ``number``, None if there is none."""
        levels = self._levels
        for level, words in enumerate(levels):
            word = words.get(number >> _WORD_BITS, 0) >> (number & _IN_WORD)
            if word:
                number += (word & -word).bit_length() - 1
                while level:
                    level -= 1
                    word = levels[level][number]
                    number = number << _WORD_BITS | (word & -word).bit_length() - 1
                return number
            number = (number >> _WORD_BITS) + 1
        return None

    def last(self) -> int:
        """Return the largest integer of a set that is not empty."""
        number = 0
        for words in reversed(self._levels):
            number = number << _WORD_BITS | words[number].bit_length() - 1
        return number


class Buddies:
    """Free memory as aligned blocks of a power of two of units; free buddies are merged.

    A pool that is no power of two has several roots side by side.  What lies past its end is
    never free, hence never merged with.

    Args:
        units: Size of the pool; all of it is free.
    """

    def __init__(self, units: int) -> None:
        num_orders = units.bit_length()
        self._orders: dict[int, int] = {}
        self._blocks: list[dict[int, None]] = [{} for _ in range(num_orders)]
        self._filled = 0  # bit k: there are blocks of order k
        for order in reversed(range(num_orders)):
            if units >> order & 1:
                self.give_back(units >> order + 1 << order + 1, 1 << order)

    def take(self, units: int) -> int | None:
        """Take a block of a power of two, from the smallest one that holds it.

        Returns:
            Where it starts; None, and nothing was changed, if there is none.
        """
        wanted = units.bit_length() - 1
        larger = self._filled >> wanted
        if not larger:
            return None
        order = wanted + (larger & -larger).bit_length() - 1
        blocks = self._blocks[order]
        start, _ = blocks.popitem()
        del self._orders[start]
        if not blocks:
            self._filled ^= 1 << order
        if order > wanted:
            # Between the two orders there are no blocks, or a smaller one would have been taken.
            self._filled ^= (1 << order) - (1 << wanted)
            while order > wanted:
                order -= 1
                upper = start + (1 << order)
                self._orders[upper] = order
                self._blocks[order][upper] = None
        return start

    def give_back(self, start: int, units: int) -> None:
        """Take back what was taken, and merge it with its buddies."""
        orders = self._orders
        order = units.bit_length() - 1
        buddy = start ^ units
        while orders.get(buddy) == order:
            del orders[buddy]
            blocks = self._blocks[order]
            del blocks[buddy]
            if not blocks:
                self._filled ^= 1 << order
            start &= buddy
            order += 1
            buddy = start ^ (1 << order)
        orders[start] = order
        self._blocks[order][start] = None
        self._filled |= 1 << order

    def has(self, units: int) -> bool:
        """Return whether that much can be taken."""
        return self._filled >> (units.bit_length() - 1) != 0

    def count(self, units: int) -> int:
        """Return how often that much, a power of two, can be taken."""
        order = units.bit_length() - 1
        return sum(len(blocks) << above for above, blocks in enumerate(self._blocks[order:]))

    def size_at(self, start: int) -> int | None:
        """Return the units of the free block that starts there, None if none does."""
        order = self._orders.get(start)
        return None if order is None else 1 << order

    def largest(self) -> int:
        """Return the units of the largest free block, 0 if there is none."""
        return 1 << self._filled.bit_length() >> 1

    def by_size(self) -> dict[int, int]:
        """Return how many free blocks there are of each size."""
        return {1 << order: len(blocks) for order, blocks in enumerate(self._blocks) if blocks}


class Runs:
    """Free memory as runs of any length, each as long as possible; neighbours are always one.

    Args:
        units: Size of the pool; all of it is free.
    """

    def __init__(self, units: int) -> None:
        self._ends: dict[int, int] = {}  # by start
        self._starts: dict[int, int] = {}  # by end
        self._runs: dict[int, dict[int, None]] = {}  # starts by length
        self._lengths = SortedIntegers(units.bit_length())  # those that there are
        self._counts = [0] * (units.bit_length() + 1)  # runs of 2**(k-1) units up to less than 2**k
        self._units = 0
        self.give_back(0, units)

    def take(self, units: int) -> int | None:
        """Take the beginning of the shortest run that is long enough.

        Returns:
            Where it starts; None, and nothing was changed, if there is none.
        """
        length = units if units in self._runs else self._lengths.first_from(units)
        if length is None:
            return None
        runs = self._runs[length]
        start, _ = runs.popitem()
        self._ended(length, runs)
        self._units -= units
        end = self._ends.pop(start)
        if start + units < end:
            self._begin(start + units, end)
        else:
            del self._starts[end]
        return start

    def give_back(self, start: int, units: int) -> None:
        """Take back what was taken, and make it one with its neighbours."""
        self._units += units
        end = start + units
        before = self._starts.pop(start, None)
        if before is not None:
            self._drop(before, start)
            start = before
        after = self._ends.get(end)
        if after is not None:
            self._drop(end, after)
            end = after
        self._begin(start, end)

    def has(self, units: int) -> bool:
        """Return whether that much can be taken."""
        return units in self._runs or self._lengths.first_from(units) is not None

    def count(self, units: int) -> int:
        """Return how often that much can be taken, at least; 0 only if it cannot be at all.

        The better of two bounds: what the shortest run of each class of lengths holds, and what all
        free units hold, less what may be left over in each run.
        """
        by_class = sum(count * (shortest // units) for shortest, count in self.by_size().items())
        by_total = -((len(self._ends) * (units - 1) - self._units) // units)
        return max(by_class, by_total, int(self.has(units)))

    def size_at(self, start: int) -> int | None:
        """Return the units of the free run that starts there, None if none does."""
        end = self._ends.get(start)
        return None if end is None else end - start

    def largest(self) -> int:
        """Return the units of the longest free run, 0 if there is none."""
        return self._lengths.last() if self._runs else 0

    def by_size(self) -> dict[int, int]:
        """Return how many free runs there are from each power of two up to the next."""
        return {1 << bits >> 1: count for bits, count in enumerate(self._counts) if count}

    def _begin(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        length = end - start
        self._counts[length.bit_length()] += 1
        runs = self._runs.get(length)
        if runs is None:
            self._runs[length] = {start: None}
            self._lengths.add(length)
        else:
            runs[start] = None

    def _drop(self, start: int, end: int) -> None:
        """Take out a run; what ends at ``end`` from now on is the caller's business."""
        del self._ends[start]
        length = end - start
        runs = self._runs[length]
        del runs[start]
        self._ended(length, runs)

    def _ended(self, length: int, runs: dict[int, None]) -> None:
        self._counts[length.bit_length()] -= 1
        if not runs:
            del self._runs[length]
            self._lengths.remove(length)
