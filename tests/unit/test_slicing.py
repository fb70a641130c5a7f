# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry import slicing
from tensorferry.errors import UsageError
from tensorferry.layout import MAX_GAP_NBYTES
from tensorferry.slicing import HEADERS_NBYTES, MANY_READS, MAX_READS, select

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
KIB = 1024


def filled(shape, dtype=torch.int64) -> torch.Tensor:
    """A tensor of random bits, so that no two places look alike."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (memory & 1 if dtype is torch.bool else memory).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    # contiguous() would leave any stride of a single element as it is.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def simulated(whole: torch.Tensor, index) -> torch.Tensor:
    """Read as planned from the bytes of a tensor, and see the result in what has landed."""
    selection = select("x", index, whole.shape, whole.dtype.itemsize)
    memory = bits(whole)
    before = torch.zeros(64, dtype=torch.uint8)  # bytes land somewhere in a pool
    landed = torch.cat([before, *(memory[start : start + n] for start, n in selection.ranges(0))])[64:]
    assert len(landed) == sum(nbytes for _, nbytes in selection.ranges(0)) == selection.landed_nbytes
    return selection.view(landed.view(whole.dtype))


def check(whole: torch.Tensor, index) -> None:
    """Compare with torch's own indexing: the plan, and the same index in plain terms."""
    expected = whole[index]
    selection = select("x", index, whole.shape, whole.dtype.itemsize)
    assert selection.shape == tuple(expected.shape)
    assert selection.nbytes == expected.nbytes
    for found in (simulated(whole, index), whole[selection.index]):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(bits(found), bits(expected))


# Any index


def entries(size: int) -> st.SearchStrategy[object]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, size + 2))
    if not size:
        return slices
    integers = st.integers(-size, size - 1)
    return slices | integers | integers.map(np.int64)


@st.composite
def indexed(draw) -> tuple[torch.Tensor, object]:
    """A tensor, and an index that fits it."""
    shape = draw(st.lists(st.integers(0, 7), max_size=5))
    dots = draw(st.booleans())
    taken = draw(st.integers(0, len(shape)))
    before = draw(st.integers(0, taken)) if dots else taken
    dims = [*shape[:before], *shape[len(shape) - (taken - before) :]] if dots else shape[:taken]
    index: list[object] = [draw(entries(size)) for size in dims]
    if dots:
        index.insert(before, ...)
    for _ in range(draw(st.integers(0, 2))):
        index.insert(draw(st.integers(0, len(index))), None)
    whole = filled(shape, draw(st.sampled_from(DTYPES)))
    return whole, index[0] if len(index) == 1 and draw(st.booleans()) else tuple(index)


# Small limits bring tensors of a few bytes into each of the ways to read.
LIMITS = st.tuples(
    st.sampled_from([0, 3, HEADERS_NBYTES]),
    st.sampled_from([1, 4, MANY_READS]),
    st.sampled_from([4, MAX_READS]),
)


@given(case=indexed(), limits=LIMITS)
def test_equals_indexing_by_torch(case, limits):
    headers, many, most = limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "HEADERS_NBYTES", headers)
        patch.setattr(slicing, "MANY_READS", many)
        patch.setattr(slicing, "MAX_GAP_NBYTES", max(headers, 20))
        patch.setattr(slicing, "MAX_READS", most)
        check(*case)
        selection = select("x", case[1], case[0].shape, case[0].dtype.itemsize)
        assert len(selection.ranges(0)) <= most
        if headers == 0 and selection.nbytes // case[0].dtype.itemsize <= min(many, most):
            assert selection.is_exact


@pytest.mark.parametrize("headers", [0, 1, 2, 5, 12])
def test_equals_indexing_by_torch_for_every_step(headers, monkeypatch):
    monkeypatch.setattr(slicing, "HEADERS_NBYTES", headers)
    whole = filled((3, 4, 3, 5), torch.uint8)
    for steps in itertools.product([1, 2, 3], repeat=4):
        check(whole, tuple(slice(None, None, step) for step in steps))


@given(case=indexed())
def test_ranges_are_apart_and_inside(case):
    whole, index = case
    ranges = select("x", index, whole.shape, whole.dtype.itemsize).ranges(0)
    assert all(nbytes > 0 for _, nbytes in ranges)
    ends = [0, *(start + nbytes for start, nbytes in ranges)]
    if ranges:
        assert ranges[0][0] >= 0
        assert ends[-1] <= whole.nbytes
    # Ranges that touch would have been one.
    assert all(start > end for end, (start, _) in zip(ends[1:], ranges[1:], strict=False))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0, 4), (2, 1, 3, 1), (4, 0, 2)])
@pytest.mark.parametrize("index", [..., (), None, (None, ...), (..., None)], ids=str)
def test_all_of_any_shape(shape, index):
    check(filled(shape), index)


def test_integers_of_other_libraries():
    class Two:
        def __index__(self) -> int:
            return 2

    whole = filled((5, 6))
    for index in (
        np.int8(-1),
        np.uint64(4),
        Two(),
        slice(np.int64(1), Two()),
        (Two(), slice(None, None, Two())),
    ):
        check(whole, index)


def test_slices_clamp_as_those_of_python():
    whole = filled((5,))
    for index in (slice(0, 99), slice(-99, 2), slice(9, 99), slice(4, 1), slice(-1, -9), slice(1, 4, 99)):
        check(whole, index)
    huge = select("x", slice(-(1 << 70), 1 << 70, 1 << 70), (5,), 8)
    assert (huge.shape, huge.ranges(0)) == ((1,), [(0, 8)])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 11])
def test_uneven_ranks_make_up_the_whole(dim, ranks):
    """The last ranks get less, or nothing at all."""
    whole = filled((10, 9, 8), torch.int16)
    size = whole.shape[dim]
    each = -(-size // ranks)
    parts = []
    for rank in range(ranks):
        part = slice(rank * each, (rank + 1) * each)
        parts.append(simulated(whole, (..., part) if dim == -1 else (slice(None),) * dim + (part,)))
    assert torch.equal(torch.cat(parts, dim), whole)


# What is read


def plan(index, shape, itemsize=4):
    return select("x", index, shape, itemsize)


def test_neighbours_are_one_read():
    assert plan(slice(2, 5), (8, 16, 16)).ranges(0) == [(2 * KIB, 3 * KIB)]
    assert plan((3, slice(4, 9)), (8, 16, 16)).ranges(0) == [(3 * KIB + 4 * 64, 5 * 64)]
    assert plan((3, 4, slice(5, 7)), (8, 16, 16)).ranges(0) == [(3 * KIB + 4 * 64 + 20, 8)]


def test_nothing_is_read_for_nothing():
    for index, shape in ((slice(3, 3), (8, 8)), (..., (0, 8)), ((0, slice(0)), (8, 8))):
        selection = plan(index, shape)
        assert (selection.ranges(0), selection.nbytes, selection.landed_nbytes) == ([], 0, 0)


def test_wide_gaps_are_not_read():
    selection = plan((slice(None), slice(256, 512)), (100, 1024))
    assert selection.ranges(0) == [(row * 4 * KIB + KIB, KIB) for row in range(100)]
    assert selection.is_exact
    assert selection.nbytes == 100 * KIB


def test_gaps_that_cost_less_than_a_read_are_read_over():
    one_more = HEADERS_NBYTES + 1
    assert len(plan((slice(None), slice(0, 100)), (50, 100 + HEADERS_NBYTES), 1).ranges(0)) == 1
    assert len(plan((slice(None), slice(0, 100)), (50, 100 + one_more), 1).ranges(0)) == 50
    assert plan(slice(None, None, 2), (1000,)).ranges(0) == [(0, 999 * 4)]
    assert len(plan((slice(None), slice(None, None, 2)), (1000, 2, 100 + one_more), 1).ranges(0)) == 1000


def test_a_range_ends_with_its_last_element():
    selection = plan((slice(1, 3), slice(0, 90)), (4, 100))
    assert selection.ranges(0) == [(400, 400 + 360)]
    assert not selection.is_exact


def test_the_last_of_a_row_and_the_first_of_the_next_are_one_read():
    rows = plan((slice(None), slice(None, None, 2)), (3, 3, KIB), 1).ranges(0)
    assert rows == [(0, KIB), (2 * KIB, 2 * KIB), (5 * KIB, 2 * KIB), (8 * KIB, KIB)]


def test_many_reads_are_made_fewer_where_gaps_are_short():
    """Time for 4,096 reads is worth more than a few KiB each."""
    at_the_limit = plan((slice(None), slice(0, 256)), (MANY_READS, KIB))
    assert len(at_the_limit.ranges(0)) == MANY_READS
    assert len(plan((slice(None), slice(0, 256)), (MANY_READS + 1, KIB)).ranges(0)) == 1
    too_wide = plan((slice(None), slice(0, 256)), (MANY_READS + 1, KIB + MAX_GAP_NBYTES))
    assert len(too_wide.ranges(0)) == MANY_READS + 1
    assert too_wide.is_exact


def test_outer_dimensions_stay_apart_where_inner_ones_are_joined():
    selection = plan((slice(None), slice(0, 10), slice(0, 90)), (6, 40, 100))
    assert selection.ranges(0) == [(block * 16000, 9 * 400 + 360) for block in range(6)]


def test_the_number_of_reads_is_bounded_whatever_a_shape_says():
    """A manifest from a peer may claim any shape; planning must not take memory for it."""
    selection = plan((slice(None), slice(0, 1)), (1 << 40, 1 << 15), 1)
    assert selection.ranges(0) == [(0, ((1 << 40) - 1) * (1 << 15) + 1)]
    assert plan((slice(None), slice(0, 0)), (1 << 62, 1 << 62)).ranges(0) == []
    assert len(plan((slice(None), slice(0, 1)), (MAX_READS, 1 << 15), 1).ranges(0)) == MAX_READS


# What is refused


@pytest.mark.parametrize(
    "index",
    [
        *(
            True,
            np.bool_(False),
            "0",
            1.0,
            b"x",
            [0, 1],
            [],
            {0},
            range(2),
            torch.tensor(0),
            torch.tensor([True]),
        ),
        *(
            np.array(0),
            np.array([0, 1]),
            (0, [1]),
            (0, True),
            slice(True, 2),
            slice(0.0, 2),
            slice("a"),
            ((0,), 1),
        ),
        *(slice(torch.tensor(0), 2), slice(None, None, np.True_), object()),
    ],
    ids=lambda one: repr(one).partition(" at 0x")[0],
)
def test_other_kinds_are_refused(index):
    with pytest.raises(
        UsageError, match=r"slices\['a\[0\].b'\].*shape \(4, 5\).*made of integers, slices with"
    ):
        select("a[0].b", index, (4, 5), 4)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (slice(None, None, -1), r"the step -1; an index is made of .* a positive step"),
        ((0, slice(3, 0, -2)), "the step -2"),
        (slice(None, None, 0), "the step 0"),
        (4, "4 is not in a dimension of size 4"),
        (-5, "-5 is not in a dimension of size 4"),
        ((0, 5), "5 is not in a dimension of size 5"),
        ((slice(0, 0), 1 << 70), "is not in a dimension of size 5"),
        ((0, 0, 0), "3 entries, the tensor has 2 dimensions"),
        ((..., 0, slice(None), 0), "3 entries, the tensor has 2 dimensions"),
        ((..., 0, ...), "2 Ellipses"),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(index, message):
    with pytest.raises(UsageError, match=re.escape("slices['x']") + ".*" + message):
        select("x", index, (4, 5), 4)


@pytest.mark.parametrize("index", [0, slice(0, 1), (..., 0)], ids=repr)
def test_a_tensor_without_dimensions_has_nothing_to_index(index):
    with pytest.raises(UsageError, match="1 entries, the tensor has 0 dimensions"):
        select("x", index, (), 4)


def test_an_empty_dimension_has_no_element():
    with pytest.raises(UsageError, match="0 is not in a dimension of size 0"):
        select("x", 0, (0, 3), 4)
