# SPDX-License-Identifier: Apache-2.0
"""Many tensors by column: what is the same for thousands is said once, and loops over them are native."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from tensorferry import _tensors
from tensorferry.arrays import as_tensor
from tensorferry.dtypes import SUPPORTED_DTYPES, dtype_to_str, str_to_dtype
from tensorferry.errors import UsageError

TensorType: TypeAlias = "tuple[str, tuple[int, ...]]"
"""Name of a dtype, and a shape."""


def _exchange() -> _tensors.TensorExchange | None:
    """Return what takes and makes many tensors at once; None where torch is older than that (2.10)."""
    nothing = torch.empty(0, dtype=torch.uint8)  # torch warns about complex32 where it allocates it
    examples = [(dtype_to_str(dtype), nothing.view(dtype)) for dtype in SUPPORTED_DTYPES]
    return _tensors.TensorExchange.of(torch.Tensor, examples)


EXCHANGE = _exchange()


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Plain tensors, and what they are.

    Attributes:
        tensors: Strided and neither conjugated nor negated lazily; some may require gradients.
        types: Each dtype with each shape, once, in the order of their first tensor.
        kinds: Of each tensor, its place in ``types``.
        sizes: Of each tensor, its bytes.
    """

    tensors: Sequence[torch.Tensor]
    types: Sequence[TensorType]
    kinds: Sequence[int]
    sizes: Sequence[int]
    _native: _tensors.TensorList | None = None

    def copy(self, memory: torch.Tensor, offsets: Sequence[int]) -> Sequence[int]:
        """Copy what needs no more than that from the CPU into memory; the GIL is released.

        Args:
            memory: Flat uint8 tensor on the CPU.
            offsets: First byte of each tensor in it.

        Returns:
            The places of the tensors that were not copied: strided ones, and those of other devices.
        """
        if self._native is None:
            return range(len(self.tensors))
        return self._native.copy(memory.data_ptr(), memory.numel(), offsets)

    def offsets_in(self, memory: torch.Tensor) -> list[int] | None:
        """Return where the tensors lie in memory, if all do, apart from each other, aligned and in order.

        Args:
            memory: Flat uint8 tensor.
        """
        offsets = None if self._native is None else self._native.offsets_from(memory.data_ptr())
        if offsets is None:
            return None
        itemsizes = [str_to_dtype(name).itemsize for name, _ in self.types]
        nbytes = [size * prod(shape) for size, (_, shape) in zip(itemsizes, self.types, strict=True)]
        fault, _ = _tensors.find_misplaced(self.kinds, offsets, nbytes, itemsizes, 0, memory.numel())
        return None if fault else offsets


def describe(values: list[Any], path_of: Callable[[int], str]) -> TensorColumns:
    """Take values as plain tensors.

    Args:
        values: Tensors, NumPy arrays, objects with ``__dlpack__``.
        path_of: Returns what a message calls the value at a place.

    Raises:
        UsageError: A value is of a kind that cannot be sent; the message names its path.
    """
    native = None if EXCHANGE is None else EXCHANGE.describe(values)
    places = range(len(values)) if native is None else native.odd
    if places:
        values = values.copy()
        for place in places:
            try:
                values[place] = as_tensor(values[place])
            except UsageError as error:
                raise UsageError(f"{path_of(place)}: {error}") from error.__cause__
        native = None if EXCHANGE is None else EXCHANGE.describe(values)
    if native is None or native.odd:
        return _described(values)
    return TensorColumns(values, native.types, native.kinds, native.sizes, native)


def _described(tensors: list[torch.Tensor]) -> TensorColumns:
    types: dict[tuple[torch.dtype, torch.Size], int] = {}
    kinds = [types.setdefault((tensor.dtype, tensor.shape), len(types)) for tensor in tensors]
    named = [(dtype_to_str(dtype), tuple(shape)) for dtype, shape in types]
    return TensorColumns(tensors, named, kinds, [tensor.nbytes for tensor in tensors])
