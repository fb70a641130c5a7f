# SPDX-License-Identifier: Apache-2.0
"""The structures under the allocator, each against a slow one that is plainly right."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry.free_space import Buddies, Runs, SortedIntegers

UNITS = 200


@pytest.mark.parametrize("num_bits", [1, 10, 11, 35])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sorted_integers_are_a_sorted_list(num_bits: int, data: st.DataObject) -> None:
    near = st.integers(0, (1 << num_bits) - 1)
    numbers = data.draw(st.lists(near | near.map(lambda number: number & ~7), max_size=60))
    ours, model = SortedIntegers(num_bits), list[int]()
    for number in numbers:
        place = bisect_left(model, number)
        if place < len(model) and model[place] == number:
            ours.remove(number)
            model.remove(number)
        else:
            ours.add(number)
            insort(model, number)
        if model:
            assert ours.last() == model[-1]
        for query in (0, number, number + 1, data.draw(near), (1 << num_bits) + 5):
            assert ours.first_from(query) == next((kept for kept in model if kept >= query), None)
    for number in model:
        ours.remove(number)
    assert not any(ours._levels)


class Map:
    """Which units of a pool are free, one by one."""

    def __init__(self, units: int) -> None:
        self.free = [True] * units

    def mark(self, start: int, units: int, free: bool) -> None:
        assert all(unit != free for unit in self.free[start : start + units])
        self.free[start : start + units] = [free] * units

    def runs(self) -> list[tuple[int, int]]:
        """Length and start of each run that is as long as possible."""
        found, start = [], 0
        for is_free, group in groupby(self.free):
            length = len(list(group))
            if is_free:
                found.append((length, start))
            start += length
        return found

    def blocks(self) -> list[tuple[int, int]]:
        """Size and start of each aligned block of a power of two that is as large as possible."""
        found, start = [], 0
        while start < len(self.free):
            size = 1
            while start % (2 * size) == 0 and self._all_free(start, 2 * size):
                size *= 2
            if self._all_free(start, size):
                found.append((size, start))
            start += size
        return found

    def _all_free(self, start: int, units: int) -> bool:
        return start + units <= len(self.free) and all(self.free[start : start + units])


# Mostly short ones, so that there are many pieces, and many of one size.
sizes_and_choices = st.lists(
    st.tuples(st.booleans(), st.integers(1, 6) | st.integers(1, UNITS)), min_size=20, max_size=80
)


@settings(max_examples=80, deadline=None)
@given(steps=sizes_and_choices, units=st.integers(1, UNITS))
def test_runs_are_the_longest_and_the_shortest_that_fits_is_taken(
    steps: list[tuple[bool, int]], units: int
) -> None:
    ours, model = Runs(units), Map(units)
    check_against(ours, model, steps, lambda wanted: wanted, Map.runs)


@settings(max_examples=80, deadline=None)
@given(steps=sizes_and_choices, units=st.integers(1, UNITS))
def test_buddies_are_the_largest_and_the_smallest_that_fits_is_taken(
    steps: list[tuple[bool, int]], units: int
) -> None:
    ours, model = Buddies(units), Map(units)
    check_against(ours, model, steps, lambda wanted: 1 << (wanted - 1).bit_length(), Map.blocks)


def check_against(ours, model, steps, rounded, pieces_of) -> None:  # type: ignore[no-untyped-def]
    """Take and give back as told: what is free is the model's, and what is taken begins a best fit."""
    lent: list[tuple[int, int]] = []
    for taking, number in steps:
        if taking or not lent:
            wanted = rounded(number)
            best = min((piece for piece in pieces_of(model) if piece[0] >= wanted), default=None)
            assert ours.has(wanted) == (best is not None) == (ours.count(wanted) > 0)
            start = ours.take(wanted)
            assert (best is None) == (start is None)
            if start is not None:
                assert (best[0], start) in pieces_of(model)
                model.mark(start, wanted, free=False)
                lent.append((start, wanted))
        else:
            start, given_back = lent.pop(number % len(lent))
            ours.give_back(start, given_back)
            model.mark(start, given_back, free=True)
        pieces = pieces_of(model)
        assert {start: size for size, start in pieces} == {
            start: size for start in range(len(model.free)) if (size := ours.size_at(start)) is not None
        }
        assert ours.largest() == max(pieces, default=(0, 0))[0]
        classes = [1 << size.bit_length() - 1 for size, _ in pieces]
        assert ours.by_size() == {size: classes.count(size) for size in classes}
        wanted = rounded(number)
        fitting = sum(size // wanted for size, _ in pieces)
        assert ours.count(wanted) == fitting or (isinstance(ours, Runs) and 0 < ours.count(wanted) <= fitting)


def test_runs_count_what_surely_fits_and_exactly_in_one_run() -> None:
    ours = Runs(61)
    assert [ours.count(units) for units in (1, 2, 20, 61, 62)] == [61, 30, 3, 1, 0]
    starts = [ours.take(10) for _ in range(6)]
    for start in starts[::2]:
        assert start is not None
        ours.give_back(start, 10)
    assert [ours.count(units) for units in (1, 8, 10, 11, 12)] == [31, 3, 1, 0, 0]


@pytest.mark.parametrize("kind", [Buddies, Runs])
def test_of_one_size_what_became_free_last_is_taken_first(kind: type[Buddies] | type[Runs]) -> None:
    ours = kind(64)
    starts = [ours.take(4) for _ in range(16)]
    for index in (2, 9, 4, 14):
        start = starts[index]
        assert start is not None
        ours.give_back(start, 4)
    assert [ours.take(4) for _ in range(5)] == [starts[14], starts[4], starts[9], starts[2], None]
