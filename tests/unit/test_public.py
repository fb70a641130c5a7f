# SPDX-License-Identifier: Apache-2.0
"""What ``import tensorferry`` offers."""

from __future__ import annotations

import inspect

import pytest

import tensorferry
from tensorferry import errors

NOT_ERRORS = {
    "BuddyAllocator",
    "Consumer",
    "ConsumerStatistics",
    "Manifest",
    "Producer",
    "ProducerStatistics",
    "SlotHandle",
    "TransferTensorBuffer",
    "__version__",
    "dtype_to_str",
    "read_manifest",
    "str_to_dtype",
}


def test_all_is_sorted_and_exact():
    every_error = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.TensorferryError)
    }
    assert tensorferry.__all__ == sorted(tensorferry.__all__)
    assert set(tensorferry.__all__) >= NOT_ERRORS | every_error
    assert all(hasattr(tensorferry, name) for name in tensorferry.__all__)


@pytest.mark.parametrize(
    "owner", [tensorferry.Producer, tensorferry.Consumer], ids=lambda owner: owner.__name__
)
def test_public_methods_say_what_they_raise(owner):
    methods = [value for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for method in methods:
        assert "Raises:" in (method.__doc__ or ""), method.__qualname__


@pytest.mark.parametrize(
    "statistics",
    [tensorferry.ProducerStatistics, tensorferry.ConsumerStatistics],
    ids=lambda one: one.__name__,
)
def test_every_figure_is_documented(statistics):
    text = statistics.__doc__ or ""
    for name in statistics.__dataclass_fields__:
        assert f"        {name}:" in inspect.cleandoc(text).replace("\n    ", "\n        "), name


def test_errors_that_are_also_builtin_ones_keep_their_text():
    error = tensorferry.PoolTimeoutError("no room", requested_nbytes=3)
    assert (str(error), error.requested_nbytes, error.pool_nbytes) == ("no room", 3, 0)
    assert isinstance(error, TimeoutError)
