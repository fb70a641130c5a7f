# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch

from tensorferry import _tensors, columns
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import UsageError

EXCHANGE = columns.EXCHANGE
needs_exchange = pytest.mark.skipif(EXCHANGE is None, reason="torch here has no DLPack exchange API")


@pytest.fixture(params=["exchange", "older-torch"], autouse=True)
def exchange(request, monkeypatch):
    if request.param == "older-torch":
        monkeypatch.setattr(columns, "EXCHANGE", None)
    elif columns.EXCHANGE is None:
        pytest.skip("torch here has no DLPack exchange API")


def describe(values):
    return columns.describe(values, lambda place: f"path {place}")


def test_tensors_of_all_kinds_are_described():
    tensors = [torch.empty(48, dtype=torch.uint8).view(dtype) for dtype in SUPPORTED_DTYPES for _ in range(2)]
    found = describe([*tensors, torch.zeros(2, 0, 3), torch.tensor(1.5)])
    assert [found.types[kind] for kind in found.kinds] == [
        *((str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors),
        ("float32", (2, 0, 3)),
        ("float32", ()),
    ]
    assert found.sizes == [*(48 for _ in tensors), 0, 4]
    assert len(found.types) == len(SUPPORTED_DTYPES) + 2


def test_values_of_other_kinds_become_tensors_among_tensors():
    shared = np.arange(4)
    lazy = torch.tensor([1 + 2j]).conj()
    parameter = torch.nn.Parameter(torch.ones(2))
    values = [torch.ones(3), shared, lazy, torch._neg_view(torch.ones(2)), parameter, torch.eye(3)[:, ::2]]
    kept = list(values)
    found = describe(values)
    assert all(one is other for one, other in zip(values, kept, strict=True)), "the caller's list was changed"
    assert [type(one) for one in found.tensors] == [torch.Tensor] * 6
    assert found.tensors[1].data_ptr() == shared.ctypes.data
    assert not found.tensors[2].is_conj()
    assert found.tensors[3].tolist() == [-1, -1]
    assert found.tensors[4].data_ptr() == parameter.data_ptr()
    slot = torch.zeros(1024, dtype=torch.uint8)
    offsets, _ = _tensors.lay_out(found.sizes, 64)
    left = list(found.copy(slot, offsets))
    assert left == ([5] if columns.EXCHANGE else [0, 1, 2, 3, 4, 5])
    if columns.EXCHANGE:
        assert slot[offsets[2] :][:8].view(torch.complex64).item() == 1 - 2j
        assert slot[offsets[3] :][:8].view(torch.float32).tolist() == [-1, -1]


def test_tensors_that_lie_in_memory_are_found_there():
    memory = torch.zeros(256, dtype=torch.uint8)
    words = memory.view(torch.float32)
    inside = [memory[3:5], words[16:20].view(2, 2), torch.empty(0), words[20:30]]
    assert describe(inside).offsets_in(memory) == ([3, 64, 0, 80] if columns.EXCHANGE else None)
    for wrong in (
        [words[16:20], words[19:22]],  # shared bytes
        [words[16:20], words[:4]],  # in another order, which is looked at one by one
        [torch.ones(4)],
        [words[::2]],
    ):
        assert describe(wrong).offsets_in(memory) is None
    assert describe([words[60:]]).offsets_in(memory[:250]) is None
    assert describe([memory[:8]]).offsets_in(memory[4:]) is None


@pytest.mark.parametrize("value", ["text", torch.eye(2).to_sparse(), torch.ones(1, device="meta"), object()])
def test_what_cannot_be_sent_is_named(value):
    with pytest.raises(UsageError, match=r"^path 1: "):
        describe([torch.ones(1), value, torch.ones(1)])


@pytest.mark.parametrize("repeats", [(2**62,), (2**31, 2**31), (2**62, 1)])
def test_views_that_repeat_an_element_too_often_are_refused(repeats):
    with pytest.raises(UsageError, match="path 0"):
        describe([torch.zeros(1).expand(*repeats)])
    assert describe([torch.zeros(0).expand(*repeats[1:], 0)]).sizes == [0]


@needs_exchange
def test_copies_never_leave_the_slot():
    found = EXCHANGE.describe([torch.ones(16, dtype=torch.uint8)])
    slot = torch.zeros(64, dtype=torch.uint8)
    for offsets in ([49], [64], [2**64 - 1], [2**63], [], [0, 16]):
        with pytest.raises(ValueError, match=r"leaves the slot|for each tensor"):
            found.copy(slot.data_ptr(), 64, offsets)
    with pytest.raises(TypeError):
        found.copy(slot.data_ptr(), 64, [-1])
    assert not slot.any()


@needs_exchange
@pytest.mark.parametrize(
    ("types", "kinds", "offsets", "places"),
    [
        ([("uint8", (65,))], [0], [0], [0]),
        ([("uint8", (2,))], [0], [63], [0]),
        ([("float32", (2**62,))], [0], [0], [0]),
        ([("uint8", (1,))], [1], [0], [0]),
        ([("uint8", (1,))], [0], [0], [1]),
        ([("uint8", (1,))], [0], [], [0]),
        ([("nothing", (1,))], [0], [0], [0]),
    ],
)
def test_views_never_leave_their_memory(types, kinds, offsets, places):
    memory = torch.zeros(64, dtype=torch.uint8)
    piece = (memory, memory.data_ptr(), 64, 0, places)
    with pytest.raises((ValueError, IndexError)):
        EXCHANGE.views([piece], types, kinds, offsets)


@needs_exchange
def test_views_keep_their_owner_and_let_it_go():
    memory = torch.arange(64, dtype=torch.uint8)
    before = sys.getrefcount(memory)
    piece = (memory, memory.data_ptr(), 64, 32, [0, 2])
    views = EXCHANGE.views([piece], [("int32", (2, 1))], [0, 0, 0], [32, 0, 40])
    assert views[1] is None
    assert views[0].shape == (2, 1)
    assert views[2].view(torch.uint8).flatten().tolist() == list(range(8, 16))
    assert sys.getrefcount(memory) > before
    for view in views[::2]:
        assert not view.requires_grad
        assert not view._is_view()
    del views, view, piece
    gc.collect()
    assert sys.getrefcount(memory) == before


@pytest.mark.parametrize(
    ("kinds", "offsets", "fault"),
    [
        ([0, 0], [0, 8], ("", 0)),
        ([0, 1, 0], [0, 64, 8], ("", 0)),
        ([0], [61], ("outside", 0)),
        ([0, 0], [0, 57], ("outside", 1)),
        ([0, 0], [0, 6], ("misaligned", 1)),
        ([0, 0], [8, 0], ("unordered", 1)),
        ([0, 0], [0, 4], ("unordered", 1)),
    ],
)
def test_misplaced_tensors_are_found(kinds, offsets, fault):
    assert _tensors.find_misplaced(kinds, offsets, [8, 0], [4, 4], 64, 64) == fault


def test_columns_that_do_not_fit_together_are_errors():
    with pytest.raises(ValueError, match="lengths"):
        _tensors.find_misplaced([0], [], [8], [4], 0, 64)
    with pytest.raises(ValueError, match="no type"):
        _tensors.find_misplaced([1], [0], [8], [4], 0, 64)
    with pytest.raises(IndexError):
        _tensors.regions([1], [0], [8], 0)
    with pytest.raises(IndexError):
        _tensors.chunks([0, 3], [0], [8], 8, 8)


def test_gaps_are_cleared_and_nothing_else():
    memory = torch.full((100,), 7, dtype=torch.uint8)
    _tensors.clear_gaps(memory.data_ptr(), 100, [50, 10, 99, 20], [10, 5, 0, 10])
    assert memory.tolist() == [0] * 10 + [7] * 5 + [0] * 5 + [7] * 10 + [0] * 20 + [7] * 50
    with pytest.raises(ValueError, match="leaves the slot"):
        _tensors.clear_gaps(memory.data_ptr(), 100, [96], [5])
