# SPDX-License-Identifier: Apache-2.0
"""What is free in a pool, in units of its smallest block: as buddies, or as runs of any length.

The work of an operation depends on the logarithm of the pool's size, never on how many blocks there are,
and none leaves work behind for a later one.  Nothing here takes a lock.
"""

from __future__ import annotations

# Wide words make the trees flat.  Beyond this width the integers themselves begin to cost.
_WORD_BITS = 10
_IN_WORD = (1 << _WORD_BITS) - 1


class SortedIntegers:
    """A set of integers that knows the first one from any number on.

    A tree of bit words: bit ``n`` of a level says that word ``n`` of the level below is not
    zero.  Only words that are not zero are kept.  Unlike in a heap, taking one out of the
    middle leaves nothing behind that somebody must sweep up later.

    Args:
        num_bits: Length of the longest integer to be kept, in bits.
    """

    def __init__(self, num_bits: int) -> None:
        self._levels: list[dict[int, int]] = [{} for _ in range(max(1, -(-num_bits // _WORD_BITS)))]

    def __bool__(self) -> bool:
        return bool(self._levels[-1])

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
        num_bits = units.bit_length()
        self._orders: dict[int, int] = {}
        self._starts = [SortedIntegers(num_bits - order) for order in range(num_bits)]
        self._counts = [0] * num_bits
        self._filled = 0  # bit k: there are blocks of order k
        for order in reversed(range(num_bits)):
            if units >> order & 1:
                self._add(units >> (order + 1) << (order + 1), order)

    def take(self, units: int) -> int | None:
        """Take a block of a power of two: the lowest of the smallest ones that hold it.

        Returns:
            Where it starts; None, and nothing was changed, if there is none.
        """
        wanted = units.bit_length() - 1
        larger = self._filled >> wanted
        if not larger:
            return None
        order = wanted + (larger & -larger).bit_length() - 1
        first = self._starts[order].first_from(0)
        assert first is not None, f"order {order} has no block"
        start = first << order
        self._remove(start, order)
        while order > wanted:
            order -= 1
            self._add(start + (1 << order), order)
        return start

    def give_back(self, start: int, units: int) -> None:
        """Take back what was taken, and merge it with its buddies."""
        order = units.bit_length() - 1
        while self._orders.get(buddy := start ^ (1 << order)) == order:
            self._remove(buddy, order)
            start &= buddy
            order += 1
        self._add(start, order)

    def has(self, units: int) -> bool:
        """Return whether that much can be taken."""
        return self._filled >> (units.bit_length() - 1) != 0

    def count(self, units: int) -> int:
        """Return how often that much, a power of two, can be taken."""
        order = units.bit_length() - 1
        return sum(count << above for above, count in enumerate(self._counts[order:]))

    def size_at(self, start: int) -> int | None:
        """Return the units of the free block that starts there, None if none does."""
        order = self._orders.get(start)
        return None if order is None else 1 << order

    def largest(self) -> int:
        """Return the units of the largest free block, 0 if there is none."""
        return 1 << self._filled.bit_length() >> 1

    def by_size(self) -> dict[int, int]:
        """Return how many free blocks there are of each size."""
        return {1 << order: count for order, count in enumerate(self._counts) if count}

    def _add(self, start: int, order: int) -> None:
        self._orders[start] = order
        self._starts[order].add(start >> order)
        self._counts[order] += 1
        self._filled |= 1 << order

    def _remove(self, start: int, order: int) -> None:
        del self._orders[start]
        self._starts[order].remove(start >> order)
        self._counts[order] -= 1
        if not self._counts[order]:
            self._filled ^= 1 << order


class Runs:
    """Free memory as runs of any length, each as long as possible; neighbours are always one.

    Args:
        units: Size of the pool; all of it is free.
    """

    def __init__(self, units: int) -> None:
        self._start_bits = units.bit_length()
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_length = SortedIntegers(2 * self._start_bits)
        # Of the runs of 2**(k-1) units up to less than 2**k: how many, and their units together.
        self._counts = [0] * (units.bit_length() + 1)
        self._totals = [0] * (units.bit_length() + 1)
        self._add(0, units)

    def take(self, units: int) -> int | None:
        """Take the beginning of the shortest run that is long enough, of equals the lowest.

        Returns:
            Where it starts; None, and nothing was changed, if there is none.
        """
        found = self._by_length.first_from(units << self._start_bits)
        if found is None:
            return None
        length = found >> self._start_bits
        start = found ^ length << self._start_bits
        self._remove(start, start + length)
        if length > units:
            self._add(start + units, start + length)
        return start

    def give_back(self, start: int, units: int) -> None:
        """Take back what was taken, and make it one with its neighbours."""
        end = start + units
        before, after = self._starts.get(start), self._ends.get(end)
        if before is not None:
            self._remove(before, start)
            start = before
        if after is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def has(self, units: int) -> bool:
        """Return whether that much can be taken."""
        return units <= self.largest()

    def count(self, units: int) -> int:
        """Return how often that much can be taken, at least; 0 only if it cannot be at all.

        Each class of lengths gives the better one of two bounds: what its shortest run holds, and
        what all its units hold, less what may be left over in each run.
        """
        classes = enumerate(zip(self._counts, self._totals, strict=True))
        bounds = (
            max(count * ((1 << bits >> 1) // units), -((count * (units - 1) - total) // units))
            for bits, (count, total) in classes
            if count
        )
        return sum(bound for bound in bounds if bound > 0) or int(self.has(units))

    def size_at(self, start: int) -> int | None:
        """Return the units of the free run that starts there, None if none does."""
        end = self._ends.get(start)
        return None if end is None else end - start

    def largest(self) -> int:
        """Return the units of the longest free run, 0 if there is none."""
        return self._by_length.last() >> self._start_bits if self._by_length else 0

    def by_size(self) -> dict[int, int]:
        """Return how many free runs there are from each power of two up to the next."""
        return {1 << bits >> 1: count for bits, count in enumerate(self._counts) if count}

    def _add(self, start: int, end: int) -> None:
        length = end - start
        self._ends[start] = end
        self._starts[end] = start
        self._by_length.add(length << self._start_bits | start)
        self._counts[length.bit_length()] += 1
        self._totals[length.bit_length()] += length

    def _remove(self, start: int, end: int) -> None:
        length = end - start
        del self._ends[start], self._starts[end]
        self._by_length.remove(length << self._start_bits | start)
        self._counts[length.bit_length()] -= 1
        self._totals[length.bit_length()] -= length
