#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a block costs to allocate and to free at 10 to 100,000 live blocks: ours, the reference's algorithm.

Two states.  ``steady``: sizes are mixed (4 KiB to 1 MiB), blocks come and go, their number stays.  ``ebb``:
twice as many payloads of one size were live, and every second one has gone, as where short requests
alternate with long ones.  Each round builds the state anew, frees some blocks at random and allocates as
many; the allocators take turns.  Beside the cost of a call, averaged over a round, the table has the median
of single calls.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from payload_mixes import FLUX, MIXES
from tensorferry import BuddyAllocator

UNIT = 4096
BATCH = 256


class Allocator(Protocol):
    """What is measured."""

    def allocate(self, size: int) -> int | None:
        """Return an offset, None if there is no room."""

    def free(self, offset: int) -> bool:
        """Take a block back."""


class _Record:
    """A block of the allocator below."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.lent = False
        self.request_id: str | None = None


class ListAllocator:
    """The reference's algorithm, from its description.

    A Python list of free offsets for each order.  Allocating takes the first one of the first list that has
    any and splits it; freeing takes the buddy out of its list by ``remove``, merges, and appends.  A dict has
    a record of every block, so whether the buddy is free is known without a scan.
    """

    def __init__(self, pool_size: int) -> None:
        top = (pool_size // UNIT).bit_length() - 1
        self._lists: list[list[int]] = [[] for _ in range(top + 1)]
        self._lists[top].append(0)
        self._records = {0: _Record(top)}
        self._lock = threading.Lock()
        self._allocated = 0

    def allocate(self, size: int, request_id: str | None = None) -> int | None:
        """Return an offset, None if there is no room."""
        wanted = (-(-size // UNIT) - 1).bit_length()
        with self._lock:
            for order in range(wanted, len(self._lists)):
                if self._lists[order]:
                    return self._split(order, wanted, request_id) * UNIT
            return None

    def _split(self, order: int, wanted: int, request_id: str | None) -> int:
        start = self._lists[order].pop(0)
        for smaller in reversed(range(wanted, order)):
            upper = start + (1 << smaller)
            self._records[upper] = _Record(smaller)
            self._lists[smaller].append(upper)
        record = self._records[start]
        record.order, record.lent, record.request_id = wanted, True, request_id
        self._allocated += UNIT << wanted
        return start

    def free(self, offset: int) -> bool:
        """Take a block back and merge it with its free buddies."""
        start = offset // UNIT
        with self._lock:
            record = self._records.get(start)
            if record is None or not record.lent:
                return False
            order = record.order
            self._allocated -= UNIT << order
            while True:
                buddy = start ^ (1 << order)
                other = self._records.get(buddy)
                if other is None or other.lent or other.order != order:
                    break
                self._lists[order].remove(buddy)
                del self._records[max(start, buddy)]
                start, order = min(start, buddy), order + 1
            record = self._records[start]
            record.order, record.lent, record.request_id = order, False, None
            self._lists[order].append(start)
            return True


ALLOCATORS: dict[str, Callable[[int], Allocator]] = {
    "the reference's algorithm": ListAllocator,
    "ours, classic": lambda pool_size: BuddyAllocator(pool_size, UNIT),
    "ours, exact and trimmed": lambda pool_size: BuddyAllocator(pool_size, UNIT, exact=True, trim=True),
}


Timed = Callable[[Callable[[Any], object], list[Any]], tuple[float, list[Any]]]


def on_average(call: Callable[[Any], object], arguments: list[Any]) -> tuple[float, list[Any]]:
    """Return the microseconds of a call, averaged, and what the calls returned."""
    started = time.perf_counter_ns()
    results = [call(argument) for argument in arguments]
    return (time.perf_counter_ns() - started) / len(arguments) / 1e3, results


def one_by_one(call: Callable[[Any], object], arguments: list[Any]) -> tuple[float, list[Any]]:
    """Return the median of the microseconds of single calls, and what the calls returned."""
    results, spent = [], []
    for argument in arguments:
        started = time.perf_counter_ns()
        results.append(call(argument))
        spent.append(time.perf_counter_ns() - started)
    return statistics.median(spent) / 1e3, results


@dataclass
class Subject:
    """An allocator with a number of live blocks."""

    allocator: Allocator
    live: list[int]
    sizes: list[int]
    rng: random.Random

    def fill(self, count: int) -> None:
        """Allocate that many."""
        self.live += [self._allocate(self.rng.choice(self.sizes)) for _ in range(count)]

    def stir(self, count: int) -> None:
        """Replace blocks by others."""
        for _ in range(count):
            place = self.rng.randrange(len(self.live))
            self.allocator.free(self.live[place])
            self.live[place] = self._allocate(self.rng.choice(self.sizes))

    def measure(self, timed: Timed) -> tuple[float, float]:
        """Allocate and free a batch of blocks; return the microseconds of a call of either."""
        self.rng.shuffle(self.live)
        count = min(BATCH, -(-len(self.live) // 2))
        leaving, self.live = self.live[:count], self.live[count:]
        sizes = self.rng.choices(self.sizes, k=count)
        freeing, _ = timed(self.allocator.free, leaving)
        allocating, offsets = timed(self.allocator.allocate, sizes)
        assert None not in offsets, "the pool is full"
        self.live += offsets
        return allocating, freeing

    def _allocate(self, size: int) -> int:
        offset = self.allocator.allocate(size)
        assert offset is not None, "the pool is full"
        return offset


def steady(make: Callable[[int], Allocator], num_live: int, rng: random.Random) -> Subject:
    """Fill an allocator with blocks of mixed sizes, and stir."""
    sizes = [MIXES["small"](rng) for _ in range(4096)]
    subject = Subject(make(_pool_size(sizes, num_live)), [], sizes, rng)
    subject.fill(num_live)
    subject.stir(2 * num_live)
    return subject


def ebb(make: Callable[[int], Allocator], num_live: int, rng: random.Random) -> Subject:
    """Fill an allocator with twice as many payloads of one size, and free every second one."""
    subject = Subject(make(_pool_size([FLUX], 2 * num_live)), [], [FLUX], rng)
    subject.fill(2 * num_live)
    for offset in subject.live[1::2]:
        subject.allocator.free(offset)
    del subject.live[1::2]
    return subject


def _pool_size(sizes: list[int], num_live: int) -> int:
    """Return a power of two with room for as many blocks, rounded up to powers of two, and some more."""
    rounded = sum(1 << (size - 1).bit_length() for size in sizes) / len(sizes)
    return 1 << (int(1.3 * rounded * num_live) + 64 * max(sizes) // num_live).bit_length()


QUESTIONS: dict[str, Callable[[BuddyAllocator], object]] = {
    "get_stats": BuddyAllocator.get_stats,
    "free_bytes": lambda allocator: allocator.free_bytes,
    "can_allocate": lambda allocator: allocator.can_allocate(1 << 20),
    "count_free_slots": lambda allocator: allocator.count_free_slots(1 << 20),
    "get_block_info": lambda allocator: allocator.get_block_info(0),
}


def asking_cost(allocator: BuddyAllocator) -> list[float]:
    """Return the median microseconds of each question."""
    return [one_by_one(ask, [allocator] * BATCH)[0] for ask in QUESTIONS.values()]


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument(
        "--live", type=int, nargs="+", default=[10, 1_000, 10_000, 100_000], help="live blocks"
    )
    arguments = parser.parse_args()
    costs = Table(
        title=f"microseconds a call, medians of {arguments.rounds} interleaved rounds (of single calls)"
    )
    asking = Table(title="calls that only ask, microseconds")
    for column in ("state", "live blocks", "", "allocate", "free", "both, against the reference's"):
        costs.add_column(column, justify="left" if not column else "right")
    for column in ("state", "live blocks", "", *QUESTIONS):
        asking.add_column(column, justify="left" if not column else "right")
    for state, num_live in itertools.product((steady, ebb), arguments.live):
        spent: dict[str, list[tuple[float, ...]]] = {name: [] for name in ALLOCATORS}
        asked: dict[str, list[list[float]]] = {name: [] for name in ALLOCATORS}
        for seed, (name, make) in itertools.product(range(arguments.rounds), ALLOCATORS.items()):
            subject = state(make, num_live, random.Random(seed))
            spent[name].append((*subject.measure(on_average), *subject.measure(one_by_one)))
            if isinstance(subject.allocator, BuddyAllocator):
                asked[name].append(asking_cost(subject.allocator))
        reference = 0.0
        for name in ALLOCATORS:
            label = (state.__name__, f"{num_live:,}", name)
            allocate, free, one_allocate, one_free = map(statistics.median, zip(*spent[name], strict=True))
            reference = reference or allocate + free
            cells = f"{allocate:.1f} ({one_allocate:.1f})", f"{free:.1f} ({one_free:.1f})"
            costs.add_row(*label, *cells, f"{reference / (allocate + free):.1f} times as fast")
            if asked[name]:
                medians = map(statistics.median, zip(*asked[name], strict=True))
                asking.add_row(*label, *(f"{median:.1f}" for median in medians))
    Console(width=132).print(costs, asking)


if __name__ == "__main__":
    main()
