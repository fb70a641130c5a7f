# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from tensorferry import pages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def none_spare() -> Iterator[None]:
    gc.collect()
    pages._spare.clear()
    pages._large_spare.clear()
    yield
    pages._spare.clear()
    pages._large_spare.clear()


def test_memory_is_used_again_once_nobody_has_it():
    first = pages.take(8 * MIB)
    address = first.data_ptr()
    view = first.view(torch.int32).reshape(-1, 2)[1:, 0]
    del first
    other = pages.take(8 * MIB)
    assert other.data_ptr() != address, "a view still has it"
    del view
    assert pages.take(8 * MIB).data_ptr() == address


def test_memory_that_numpy_or_autograd_holds_is_not_used_again():
    tensor = pages.take(8 * MIB)
    address, array = tensor.data_ptr(), tensor.numpy()
    del tensor
    assert pages.take(8 * MIB).data_ptr() != address
    del array
    weight = torch.ones(2 * MIB, requires_grad=True)
    values = pages.take(8 * MIB).view(torch.float32)
    address = values.data_ptr()
    product = weight * values
    del values
    assert pages.take(8 * MIB).data_ptr() != address, "the graph still has it"
    del product


def test_another_size_gets_its_own():
    address = pages.take(8 * MIB).data_ptr()
    assert pages.take(16 * MIB).numel() == 16 * MIB
    assert pages.take(8 * MIB).data_ptr() == address


def test_what_is_kept_is_bounded():
    held = [pages.take(8 * MIB) for _ in range(20)]
    held += [pages.take(nbytes * MIB) for nbytes in (65, 128, 513)]
    held.clear()
    assert [len(one) for one in pages._spare] == [8 * MIB] * 4
    assert [len(one) // MIB for one in pages._large_spare] in ([65], [128])


def test_threads_never_get_the_same_memory():
    wrong = []

    def work(value: int) -> None:
        for _ in range(50):
            tensor = pages.take(4 * MIB)
            tensor[::4096] = value
            if not bool((tensor[::4096] == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
