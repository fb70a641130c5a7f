"""
What is done for each of many tensors: describing, copying, making views of memory.
"""

from collections.abc import Sequence
from typing import Any


class TensorList:
    """
    What was found out about tensors; they must stay alive and as they are.
    """

    @property
    def kinds(self) -> list[int]:
        """The place in types of each tensor."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""

    @property
    def types(self) -> list[tuple[str, tuple[int, ...]]]:
        """Each name of a dtype with each shape, once."""

    @property
    def odd(self) -> list[int]:
        """
        Places of the values that are no plain tensors, and described nowhere else.
        """

    def offsets_from(self, address: int) -> list[int] | None:
        """
        Where the tensors begin; None where one is before the address, strided or not on the CPU.
        """

    def copy(self, address: int, nbytes: int, offsets: Sequence[int]) -> list[int]:
        """
        Copies tensors into memory; returns the places of those that are strided or not on the CPU.
        """

class TensorExchange:
    """Takes and makes many tensors at once."""

    @staticmethod
    def of(type: type, examples: Sequence[tuple[str, object]]) -> TensorExchange | None:
        """
        None where the type has no DLPack exchange API, or it does not know an example's dtype.
        """

    def describe(self, values: list[Any]) -> TensorList: ...

    def views(self, pieces: Sequence[tuple[object, int, int, int, Sequence[int]]], types: Sequence[tuple[str, Sequence[int]]], kinds: Sequence[int], offsets: Sequence[int]) -> list[Any]:
        """
        Tensors on the CPU, None at places that no piece has.  A piece is memory: its owner, which the tensors keep alive, address and bytes, the offset of its first byte, and the places of the tensors in it.
        """

def lay_out(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Offsets of ranges one after another, and their end."""

def find_misplaced(kinds: Sequence[int], offsets: Sequence[int], type_sizes: Sequence[int], itemsizes: Sequence[int], slot_offset: int, slot_nbytes: int) -> tuple[str, int]:
    """
    The fault of a tensor, or '', and its place: 'outside', 'misaligned' or 'unordered'.
    """

def regions(places: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], most_gap: int) -> list[tuple[int, int, list[int]]]:
    """First byte, bytes and places of each range of neighbours."""

def clear_gaps(address: int, nbytes: int, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Zeroes what is between ranges."""

def chunks(places: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], small: int, most: int) -> list[tuple[int, int]]:
    """Chunks of small neighbours."""

def copy(destination: int, source: int, nbytes: int) -> None:
    """Copies bytes between addresses, with several threads where it pays."""
