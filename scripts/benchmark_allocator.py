#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a block costs to allocate and to free, with 10 to 100,000 live blocks: ours and the reference's algorithm.

Every allocator is filled with payloads of mixed sizes and stirred, and then keeps its number of live blocks: each
round frees some at random and allocates as many, and the allocators take turns.  Beside the cost of a call, averaged
over a round, the table has the median of single calls.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from payload_mixes import MIXES
from rich.console import Console
from rich.table import Table

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
    any and splits it; freeing takes the buddy out of its list by ``remove``, merges, and appends.  A dict has a
    record of every block, so whether the buddy is free is known without a scan.
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


@dataclass
class Subject:
    """One allocator under a number of live blocks, and what was measured of it, in microseconds."""

    allocator: Allocator
    live: list[int]
    sizes: list[int]
    rng: random.Random
    rounds: dict[str, list[float]] = field(default_factory=lambda: {"allocate": [], "free": []})
    calls: dict[str, list[float]] = field(default_factory=lambda: {"allocate": [], "free": []})

    def stir(self, count: int) -> None:
        """Replace blocks by others."""
        for _ in range(count):
            place = self.rng.randrange(len(self.live))
            self.allocator.free(self.live[place])
            self.live[place] = self._allocate(self.rng.choice(self.sizes))

    def measure(self) -> None:
        """Free a batch of blocks and allocate as many, once as a whole and once call by call."""
        for timed, seconds in ((self._batch, self.rounds), (self._single, self.calls)):
            self.rng.shuffle(self.live)
            count = min(BATCH, -(-len(self.live) // 2))
            leaving, self.live = self.live[:count], self.live[count:]
            sizes = self.rng.choices(self.sizes, k=count)
            seconds["free"].append(timed(self.allocator.free, leaving)[0])
            spent, offsets = timed(self.allocator.allocate, sizes)
            seconds["allocate"].append(spent)
            assert None not in offsets, "the pool is full"
            self.live += offsets

    def _allocate(self, size: int) -> int:
        offset = self.allocator.allocate(size)
        assert offset is not None, "the pool is full"
        return offset

    @staticmethod
    def _batch(call: Callable[[int], object], arguments: list[int]) -> tuple[float, list]:
        started = time.perf_counter_ns()
        results = [call(argument) for argument in arguments]
        return (time.perf_counter_ns() - started) / len(arguments) / 1e3, results

    @staticmethod
    def _single(call: Callable[[int], object], arguments: list[int]) -> tuple[float, list]:
        results, spent = [], []
        for argument in arguments:
            started = time.perf_counter_ns()
            results.append(call(argument))
            spent.append(time.perf_counter_ns() - started)
        return statistics.median(spent) / 1e3, results


def subjects(num_live: int, rng: random.Random) -> dict[str, Subject]:
    """Fill every allocator with as many blocks, and stir."""
    sizes = [MIXES["small"](rng) for _ in range(4096)]
    rounded = sum(1 << (size - 1).bit_length() for size in sizes) / len(sizes)
    pool_size = 1 << (int(1.3 * rounded * num_live) + 64 * max(sizes) // num_live).bit_length()
    found = {}
    for name, make in ALLOCATORS.items():
        subject = Subject(make(pool_size), [], sizes, random.Random(num_live))
        subject.live = [subject._allocate(rng.choice(sizes)) for _ in range(num_live)]
        subject.stir(2 * num_live)
        found[name] = subject
    return found


def statistics_cost(allocator: BuddyAllocator, rounds: int) -> dict[str, float]:
    """Return the median microseconds of the calls that only ask."""
    questions: dict[str, Callable[[], object]] = {
        "get_stats": allocator.get_stats,
        "free_bytes": lambda: allocator.free_bytes,
        "can_allocate": lambda: allocator.can_allocate(1 << 20),
        "count_free_slots": lambda: allocator.count_free_slots(1 << 20),
        "get_block_info": lambda: allocator.get_block_info(0),
    }
    return {
        name: statistics.median(Subject._single(lambda _: ask(), [0] * BATCH)[0] for _ in range(rounds))  # noqa: B023
        for name, ask in questions.items()
    }


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds (default 31)")
    parser.add_argument("--live", type=int, nargs="+", default=[10, 1_000, 10_000, 100_000], help="live blocks")
    arguments = parser.parse_args()
    costs = Table(title=f"microseconds a call, medians of {arguments.rounds} interleaved rounds; in brackets single calls")
    for column in ("live blocks", "", "allocate", "free", "both, against the reference's"):
        costs.add_column(column, justify="left" if not column else "right")
    asking = Table(title="calls that only ask, microseconds")
    for num_live in arguments.live:
        measured = subjects(num_live, random.Random(0))
        for _ in range(arguments.rounds):
            for subject in measured.values():
                subject.measure()
        reference = 0.0
        for name, subject in measured.items():
            medians = {call: statistics.median(spent) for call, spent in subject.rounds.items()}
            singles = {call: statistics.median(spent) for call, spent in subject.calls.items()}
            both = sum(medians.values())
            reference = reference or both
            cells = [f"{medians[call]:.1f} ({singles[call]:.1f})" for call in ("allocate", "free")]
            costs.add_row(f"{num_live:,}", name, *cells, f"{reference / both:.1f} times as fast")
            if isinstance(subject.allocator, BuddyAllocator):
                asked = statistics_cost(subject.allocator, arguments.rounds)
                if not asking.columns:
                    for column in ("live blocks", "", *asked):
                        asking.add_column(column, justify="left" if not column else "right")
                asking.add_row(f"{num_live:,}", name, *(f"{spent:.1f}" for spent in asked.values()))
    Console(width=120).print(costs, asking)


if __name__ == "__main__":
    main()
