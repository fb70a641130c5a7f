# SPDX-License-Identifier: Apache-2.0
"""The tensors of a slot by row and by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from tensorferry.columns import TensorType


class TensorSpec(NamedTuple):
    """One tensor in a slot.

    Attributes:
        path: Where it is in the payload, for example ``outputs[0].audio``.
        dtype: Name of its dtype, for example ``"bfloat16"``.
        shape: Its shape; the elements lie in the slot in row-major order.
        offset: First byte, counted from the beginning of the slot.
        nbytes: Bytes that it takes.
        checksum: 64-bit XXH3 of those bytes, or None where the manifest has no checksums.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int | None = None


class TensorTable(Sequence[TensorSpec]):
    """The tensors of a manifest by column; a :class:`TensorSpec` is made when one is asked for.

    Must not be changed.

    Args:
        paths: Makes the path of each tensor, when the first is asked for.
        types: Each dtype with each shape, once.
        kinds: Of each tensor, its place in ``types``.
        offsets: Of each tensor, its first byte in the slot.
        sizes: Of each tensor, its bytes.
        sums: Of each tensor, its checksum; None where there are none.
    """

    def __init__(
        self,
        paths: Callable[[], list[str]],
        types: Sequence[TensorType],
        kinds: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        sums: Sequence[int] | None = None,
    ) -> None:
        self._paths = paths
        self.types = types
        self.kinds = kinds
        self.offsets = offsets
        self.sizes = sizes
        self.sums = sums

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> TensorTable:
        """Take tensors by row."""
        if isinstance(specs, TensorTable):
            return specs
        rows = list(specs)
        types: dict[TensorType, int] = {}
        kinds = [types.setdefault((row.dtype, row.shape), len(types)) for row in rows]
        sums = [row.checksum for row in rows if row.checksum is not None]
        return cls(
            lambda: [row.path for row in rows],
            list(types),
            kinds,
            [row.offset for row in rows],
            [row.nbytes for row in rows],
            sums or None,
        )

    @cached_property
    def paths(self) -> list[str]:
        """The path of each tensor."""
        return self._paths()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    def take(self, places: Iterable[int]) -> TensorTable:
        """Return some of the tensors, in that order."""
        chosen = list(places)
        sums = self.sums
        return TensorTable(
            lambda: [self.paths[place] for place in chosen],
            self.types,
            [self.kinds[place] for place in chosen],
            [self.offsets[place] for place in chosen],
            [self.sizes[place] for place in chosen],
            None if sums is None else [sums[place] for place in chosen],
        )

    def replace(self, rows: Mapping[int, tuple[TensorType, int, int]]) -> TensorTable:
        """Return a table with other types, offsets and sizes at some places; its paths stay."""
        if not rows:
            return self
        types, kinds = list(self.types), list(self.kinds)
        offsets, sizes = list(self.offsets), list(self.sizes)
        for place, (kind, offset, nbytes) in rows.items():
            kinds[place], offsets[place], sizes[place] = len(types), offset, nbytes
            types.append(kind)
        return TensorTable(lambda: self.paths, types, kinds, offsets, sizes, self.sums)

    def with_sums(self, sums: Sequence[int]) -> TensorTable:
        """Return a table of the same tensors with checksums."""
        return TensorTable(lambda: self.paths, self.types, self.kinds, self.offsets, self.sizes, sums)

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorSpec]: ...
    def __getitem__(self, index: int | slice) -> TensorSpec | Sequence[TensorSpec]:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return TensorSpec(
            self.paths[index],
            *self.types[self.kinds[index]],
            self.offsets[index],
            self.sizes[index],
            None if self.sums is None else self.sums[index],
        )

    def __iter__(self) -> Iterator[TensorSpec]:
        return map(self.__getitem__, range(len(self)))

    def __reduce__(self) -> tuple[Callable[[list[TensorSpec]], TensorTable], tuple[list[TensorSpec]]]:
        return TensorTable.of, (list(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorTable({list(self)!r})"
