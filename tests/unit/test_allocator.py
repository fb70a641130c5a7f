# SPDX-License-Identifier: Apache-2.0
"""The buddy allocator, checked from outside after every step."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry.allocator import Block, BuddyAllocator

MIB = 1 << 20
GIB = 1 << 30
OPT_INS = [{}, {"exact": True}, {"trim": True}, {"exact": True, "trim": True}]
every_opt_in = pytest.mark.parametrize("opt_in", OPT_INS, ids=lambda chosen: "+".join(chosen) or "plain")


def blocks_of(allocator: BuddyAllocator) -> list[Block]:
    """Walk over the pool from block to block, as anybody can from outside."""
    blocks, offset = [], 0
    while offset < allocator.pool_size:
        block = allocator.get_block_info(offset)
        assert block is not None, f"no block starts at {offset}: a gap or an overlap"
        assert block.offset == offset
        assert block.size > 0
        blocks.append(block)
        offset += block.size
    assert offset == allocator.pool_size
    return blocks


def check_invariants(allocator: BuddyAllocator, live: dict[int, Block]) -> None:
    """Blocks tile the pool, free ones are merged, and every figure adds up."""
    blocks = blocks_of(allocator)
    lent = {block.offset: block for block in blocks if block.allocated}
    assert lent == live
    free = {block.offset: block.size for block in blocks if not block.allocated}
    by_size: dict[int, int] = {}
    for offset, size in free.items():
        counted = size
        if allocator._trim:
            assert offset + size not in free, f"{offset} and {offset + size} are free neighbours"
            counted = 1 << size.bit_length() - 1
        else:
            assert size & (size - 1) == 0
            assert offset % size == 0
            assert free.get(offset ^ size) != size, f"buddies {offset} and {offset ^ size} are both free"
        by_size[counted] = by_size.get(counted, 0) + 1
    stats = allocator.get_stats()
    assert stats["free_blocks_by_size"] == by_size
    assert stats["num_blocks"] == len(blocks)
    assert stats["num_allocations"] == allocator.num_allocations == len(lent)
    assert stats["allocated_bytes"] == allocator.allocated_bytes == sum(block.size for block in lent.values())
    assert stats["requested_bytes"] == sum(block.requested_size for block in lent.values())
    assert stats["wasted_bytes"] == stats["allocated_bytes"] - stats["requested_bytes"] >= 0
    assert stats["free_bytes"] == allocator.free_bytes == sum(free.values())
    largest = stats["largest_free_block"]
    assert largest == max(free.values(), default=0)
    assert not largest or allocator.can_allocate(largest)
    assert not allocator.can_allocate(largest + 1)


def lend(allocator: BuddyAllocator, size: int, live: dict[int, Block]) -> Block | None:
    """Allocate, and check the answer against what the allocator said before."""
    possible, slots = allocator.can_allocate(size), allocator.count_free_slots(size)
    block = allocator.allocate_block(size)
    assert possible == (block is not None) == (slots > 0)
    if block is not None:
        assert block.size >= block.requested_size == size
        assert block.offset % allocator.min_block_size == 0
        live[block.offset] = block
    return block


# What the reference promises


def test_pool_and_blocks_are_rounded_up_to_powers_of_two() -> None:
    allocator = BuddyAllocator(5 * MIB, MIB)
    assert (allocator.pool_size, allocator.min_block_size) == (8 * MIB, MIB)
    offset = allocator.allocate(3 * MIB, request_id="r")
    assert offset == 0
    block = allocator.get_block_info(offset)
    assert block is not None
    assert (block.offset, block.size, block.allocated, block.request_id) == (0, 4 * MIB, True, "r")
    assert BuddyAllocator(1, MIB).pool_size == MIB


def test_the_first_block_is_at_zero_and_its_buddy_next() -> None:
    allocator = BuddyAllocator(8 * MIB)
    assert [allocator.allocate(MIB) for _ in range(8)] == [index * MIB for index in range(8)]
    assert allocator.allocate(1) is None


def test_a_request_that_can_never_fit_is_none() -> None:
    assert BuddyAllocator(4 * MIB).allocate(4 * MIB + 1) is None


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_positive_is_refused(size: int) -> None:
    allocator = BuddyAllocator(MIB)
    with pytest.raises(ValueError, match="must be positive"):
        allocator.allocate(size)
    assert not allocator.can_allocate(size)
    assert allocator.count_free_slots(size) == 0
    check_invariants(allocator, {})


@pytest.mark.parametrize("min_block_size", [0, -4096, 3, 4097, 3 << 20])
def test_min_block_size_must_be_a_power_of_two(min_block_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        BuddyAllocator(MIB, min_block_size)


@pytest.mark.parametrize("pool_size", [0, -1])
def test_a_pool_needs_bytes(pool_size: int) -> None:
    with pytest.raises(ValueError, match="pool_size must be positive"):
        BuddyAllocator(pool_size)


@pytest.mark.parametrize("wrong", [1.5, "4096", None])
def test_sizes_are_integers(wrong: object) -> None:
    with pytest.raises(TypeError):
        BuddyAllocator(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BuddyAllocator(MIB).allocate(wrong)  # type: ignore[arg-type]


def test_a_block_of_the_smallest_size_that_fits_is_taken_first() -> None:
    allocator = BuddyAllocator(8 * MIB)
    for _ in range(8):
        allocator.allocate(MIB)
    for index in (6, 2, 4, 5):
        allocator.free(index * MIB)
    assert {allocator.allocate(MIB) for _ in range(2)} == {2 * MIB, 6 * MIB}
    assert allocator.allocate(MIB) == 4 * MIB


def test_get_block_info_knows_free_blocks_and_nothing_inside_blocks() -> None:
    allocator = BuddyAllocator(4 * MIB)
    allocator.allocate(MIB)
    assert allocator.get_block_info(2 * MIB) == Block(2 * MIB, 2 * MIB)
    for offset in (1, 3 * MIB, 4 * MIB, -MIB):
        assert allocator.get_block_info(offset) is None


def test_count_free_slots() -> None:
    allocator = BuddyAllocator(4 * MIB, MIB)
    assert [allocator.count_free_slots(slot_size=size) for size in (1, MIB, MIB + 1, 4 * MIB, 5 * MIB)] == [
        4,
        4,
        2,
        1,
        0,
    ]
    allocator.allocate(MIB)
    assert [allocator.count_free_slots(size) for size in (MIB, 2 * MIB, 4 * MIB)] == [3, 1, 0]


def test_stats_show_what_was_asked_for_and_what_rounding_added() -> None:
    """In the reference nothing reports the waste of rounding up."""
    allocator = BuddyAllocator(5 * MIB, MIB)
    allocator.allocate(MIB + 1)
    stats = allocator.get_stats()
    assert stats["requested_bytes"] == MIB + 1
    assert stats["allocated_bytes"] == 2 * MIB
    assert stats["wasted_bytes"] == MIB - 1
    assert (stats["requested_pool_size"], stats["pool_size"]) == (5 * MIB, 8 * MIB)


def test_repr_says_how_full_it_is() -> None:
    allocator = BuddyAllocator(4 * MIB)
    allocator.allocate(1)
    assert repr(allocator) == "<BuddyAllocator 1048576 of 4194304 bytes lent in 1 blocks>"


# Freeing


def test_after_small_blocks_the_whole_pool_can_be_had_again() -> None:
    """kvcache-ai/Mooncake#632: freed memory stayed with its size class, so that other sizes found none."""
    allocator = BuddyAllocator(64 * MIB, 4096)
    offsets = [allocator.allocate(64 << 10) for _ in range(1024)]
    assert allocator.allocate(1) is None
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        assert allocator.free(offset)
    assert allocator.allocate(64 * MIB) == 0


@every_opt_in
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_four_siblings_merge_in_whatever_order_they_are_freed(
    order: tuple[int, ...], opt_in: dict[str, bool]
) -> None:
    """vulkano-rs/vulkano#2832: merging left pointers to what had been merged."""
    allocator = BuddyAllocator(4 * MIB, MIB, **opt_in)
    live: dict[int, Block] = {}
    siblings = [lend(allocator, MIB, live) for _ in range(4)]
    for index in order:
        block = siblings[index]
        assert block is not None
        assert allocator.free(block.offset, block.generation)
        del live[block.offset]
        check_invariants(allocator, live)
    assert blocks_of(allocator) == [Block(0, 4 * MIB)]


def test_a_bad_free_says_so_and_changes_nothing() -> None:
    """spaskalev/buddy_alloc#119: a bad free was ignored without a word, and leaked."""
    allocator, other = BuddyAllocator(4 * MIB), BuddyAllocator(4 * MIB)
    block, foreign = allocator.allocate_block(2 * MIB), other.allocate_block(2 * MIB)
    assert block is not None
    assert foreign is not None
    for offset in (2 * MIB, MIB, 1, -1, 1 << 60):  # free, inside, unaligned, outside
        assert not allocator.free(offset)
    assert not allocator.free(foreign.offset, foreign.generation)
    check_invariants(allocator, {0: block})
    assert allocator.free(0)
    assert not allocator.free(0)
    check_invariants(allocator, {})


def test_a_stale_generation_does_not_free_the_next_owner() -> None:
    """The reference frees by offset alone: a stale handle gave the next owner's block away."""
    allocator = BuddyAllocator(MIB)
    first = allocator.allocate_block(MIB)
    assert first is not None
    assert allocator.free(first.offset, first.generation)
    second = allocator.allocate_block(MIB, "second")
    assert second is not None
    assert second.offset == first.offset
    assert not allocator.free(first.offset, first.generation)
    assert allocator.get_block_info(second.offset) == second
    assert allocator.free(second.offset, second.generation)


# Exact pools and trimming


def test_an_exact_pool_is_never_larger_than_asked_for() -> None:
    """The reference makes 8 GiB of a pool of 5 GiB."""
    assert BuddyAllocator(5 * GIB, exact=True).pool_size == 5 * GIB
    assert BuddyAllocator(5 * GIB + 4095, 4096, exact=True).pool_size == 5 * GIB
    with pytest.raises(ValueError, match="holds no block"):
        BuddyAllocator(4095, 4096, exact=True)


def test_the_roots_of_an_exact_pool_never_merge_past_its_end() -> None:
    allocator = BuddyAllocator(7 * MIB, MIB, exact=True)
    initial = blocks_of(allocator)
    assert [block.size for block in initial] == [4 * MIB, 2 * MIB, MIB]
    offsets = [allocator.allocate(MIB) for _ in range(7)]
    assert allocator.allocate(1) is None
    for offset in reversed(offsets):
        assert offset is not None
        assert allocator.free(offset)
    assert blocks_of(allocator) == initial


def test_a_trimmed_block_takes_what_it_needs_and_its_tail_is_free_at_once() -> None:
    """The reference lends 64 MiB to whoever needs 33."""
    allocator = BuddyAllocator(64 * MIB, MIB, trim=True)
    live: dict[int, Block] = {}
    block = lend(allocator, 33 * MIB - 5, live)
    assert block is not None
    assert block.size == 33 * MIB
    stats = allocator.get_stats()
    assert stats["largest_free_block"] == 31 * MIB
    assert stats["free_blocks_by_size"] == {16 * MIB: 1}
    tail = lend(allocator, 31 * MIB, live)  # spans all the neighbours that are left
    assert tail is not None
    assert tail.offset == 33 * MIB
    check_invariants(allocator, live)
    assert allocator.free(0)
    assert allocator.free(tail.offset)
    assert blocks_of(allocator) == [Block(0, 64 * MIB)]


def test_a_large_request_spans_the_roots_of_an_exact_pool() -> None:
    allocator = BuddyAllocator(5 * GIB, 4096, exact=True, trim=True)
    initial = blocks_of(allocator)
    assert allocator.count_free_slots(5 * GIB) == 1
    live: dict[int, Block] = {}
    assert lend(allocator, 9 * GIB // 2, live) is not None
    assert lend(allocator, GIB // 2, live) is not None
    assert allocator.free_bytes == 0
    check_invariants(allocator, live)
    for offset in live:
        assert allocator.free(offset)
    assert blocks_of(allocator) == initial
    assert allocator.allocate(5 * GIB) == 0
    assert not allocator.can_allocate(1)


def test_a_large_request_may_start_between_power_of_two_boundaries() -> None:
    allocator = BuddyAllocator(4 * GIB, MIB, trim=True)
    live: dict[int, Block] = {}
    lend(allocator, 5 * GIB // 2, live)
    block = lend(allocator, 5 * GIB // 4, live)  # 1.5 GiB are free from 2.5 GiB on, 1 GiB aligned
    assert block is not None
    assert block.offset == 5 * GIB // 2
    check_invariants(allocator, live)


@pytest.mark.parametrize("nbytes", [4_723_200, 30_819_528, 117_442_048])
def test_payloads_of_one_size_fill_a_trimmed_pool_to_the_last(nbytes: int) -> None:
    allocator = BuddyAllocator(3 * GIB + GIB // 2, 4096, exact=True, trim=True)
    offsets = []
    while (offset := allocator.allocate(nbytes)) is not None:
        offsets.append(offset)
    assert allocator.free_bytes < nbytes
    for offset in random.Random(nbytes).sample(offsets, len(offsets) // 2):
        allocator.free(offset)
    assert allocator.count_free_slots(nbytes) <= len(offsets) // 2
    for _ in range(len(offsets) // 2):
        assert allocator.allocate(nbytes) is not None
    assert not allocator.can_allocate(nbytes)


def test_of_several_runs_the_smallest_that_fits_is_taken() -> None:
    allocator = BuddyAllocator(32 * MIB, MIB, trim=True)
    for _ in range(32):
        allocator.allocate(MIB)
    for index in [*range(1, 8), *range(9, 13), *range(17, 23)]:  # runs of 7, 4 and 6 MiB
        allocator.free(index * MIB)
    assert allocator.allocate(6 * MIB) == 17 * MIB
    assert allocator.allocate(7 * MIB) == MIB
    assert allocator.allocate(5 * MIB) is None


def test_without_trim_an_exact_pool_keeps_to_power_of_two_blocks() -> None:
    allocator = BuddyAllocator(5 * GIB, exact=True)
    assert allocator.allocate(9 * GIB // 2) is None
    assert allocator.allocate(3 * GIB) == 0
    assert allocator.allocate(GIB) == 4 * GIB


# Properties


@every_opt_in
@pytest.mark.parametrize("pool_blocks", [64, 61])
def test_ten_thousand_random_operations(opt_in: dict[str, bool], pool_blocks: int) -> None:
    rng = random.Random(f"{opt_in}{pool_blocks}")
    allocator = BuddyAllocator(pool_blocks * 4096, 4096, **opt_in)
    initial = blocks_of(allocator)
    live: dict[int, Block] = {}
    stale: list[Block] = []
    for _ in range(10_000):
        if not live or rng.random() < 0.52:
            lend(allocator, max(1, int(rng.paretovariate(0.7) * 1500) % (pool_blocks * 5000)), live)
        else:
            block = live.pop(rng.choice(list(live)))
            assert allocator.free(block.offset, block.generation)
            stale.append(block)
        if stale and rng.random() < 0.1:
            block = rng.choice(stale)
            assert not allocator.free(block.offset, block.generation)
        check_invariants(allocator, live)
    for block in list(live.values()):
        assert allocator.free(block.offset)
    assert blocks_of(allocator) == initial
    assert allocator.allocated_bytes == allocator.get_stats()["requested_bytes"] == 0


@settings(max_examples=60, deadline=None)
@given(
    pool_size=st.integers(1, 300_000),
    exact=st.booleans(),
    trim=st.booleans(),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=40),
)
def test_any_sequence_keeps_the_invariants(
    pool_size: int, exact: bool, trim: bool, steps: list[tuple[bool, int]]
) -> None:
    if exact and pool_size < 1024:
        pool_size = 1024
    allocator = BuddyAllocator(pool_size, 1024, exact=exact, trim=trim)
    initial = blocks_of(allocator)
    assert allocator.pool_size <= pool_size or not exact
    live: dict[int, Block] = {}
    for lending, number in steps:
        if lending:
            block = lend(allocator, number, live)
            if block is not None and trim:
                assert block.size - number < 1024
        elif live:
            block = live.pop(sorted(live)[number % len(live)])
            assert allocator.free(block.offset, block.generation)
        check_invariants(allocator, live)
    for block in live.values():
        assert allocator.free(block.offset, block.generation)
    assert blocks_of(allocator) == initial


def test_checkerboard_fragmentation_is_reported_and_heals() -> None:
    allocator = BuddyAllocator(MIB, 4096, trim=True)
    for _ in range(256):
        allocator.allocate(4096)
    for index in range(0, 256, 2):
        allocator.free(index * 4096)
    assert allocator.free_bytes == MIB // 2
    assert allocator.get_stats()["largest_free_block"] == 4096
    assert allocator.allocate(8192) is None
    for index in range(1, 256, 2):
        allocator.free(index * 4096)
    assert allocator.allocate(MIB) == 0


@every_opt_in
def test_nothing_is_left_behind_by_operations(opt_in: dict[str, bool]) -> None:
    def size_of(value: object) -> int:
        if isinstance(value, dict):
            return sum(map(size_of, value.values())) + len(value)
        if isinstance(value, list):
            return sum(map(size_of, value))
        return size_of(vars(value)) if hasattr(value, "__dict__") else 1

    allocator = BuddyAllocator(4096 * 4096, 4096, **opt_in)
    initially = size_of(allocator._free)
    offsets = [allocator.allocate(4096) for _ in range(4096)]
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        allocator.free(offset)
    assert size_of(allocator._free) == initially


def test_cost_does_not_depend_on_the_number_of_live_blocks() -> None:
    def cost(num_live: int) -> float:
        allocator = BuddyAllocator(1 << 32, 4096, exact=True, trim=True)
        offsets = [allocator.allocate(4096) for _ in range(2 * num_live)]
        for offset in offsets[::2]:
            assert offset is not None
            allocator.free(offset)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(300):
                offset = allocator.allocate(5000)
                assert offset is not None
                allocator.free(offset)
            best = min(best, time.perf_counter() - start)
        return best

    assert cost(20_000) < 8 * cost(200)


def test_threads_never_share_a_block() -> None:
    allocator = BuddyAllocator(256 * 4096, 4096, trim=True)
    owners = bytearray(256)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            block = allocator.allocate_block(rng.randint(1, 5 * 4096))
            if block is None:
                continue
            units = range(block.offset // 4096, (block.offset + block.size) // 4096)
            for unit in units:
                if owners[unit]:
                    failures.append(f"unit {unit} was lent twice")
                owners[unit] = seed
            for unit in units:
                owners[unit] = 0
            if not allocator.free(block.offset, block.generation):
                failures.append("a live block could not be freed")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    check_invariants(allocator, {})
