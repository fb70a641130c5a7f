# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors into a slot and out of it, bit for bit.

Nothing is converted, so no float operation can touch a NaN.
Runs of equal tensors, of which payloads often have thousands, take a few calls of torch
altogether instead of several for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import xxhash

from tensorferry import _tensors, pages
from tensorferry.columns import EXCHANGE, TensorType
from tensorferry.dtypes import str_to_dtype
from tensorferry.layout import ALIGNMENT, Region
from tensorferry.tensor_table import TensorTable

# Results up to this size share memory with their neighbours, chunk by chunk: allocating each
# for itself takes longer than everything else.  The chunk bounds what one result keeps alive.
_SMALL_NBYTES = 32 << 10
_CHUNK_NBYTES = 1 << 20

# Torch moves these as they are where dtypes agree; others are shown to it as integers.  Of bool
# it would make 0 and 1, whatever the byte was.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COPIED_AS_THEY_ARE = {*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Run(NamedTuple):
    """Tensors of one dtype and shape at a constant distance in bytes."""

    first: int
    length: int
    stride: int


def pack(slot: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """Copy tensors into a slot, one pass for each whatever its strides.

    Args:
        slot: Flat uint8 tensor, aligned to 64 bytes.
        tensors: Plain strided tensors, neither conjugated nor negated lazily.
        offsets: First byte of each in the slot, a multiple of 64.

    Copies that involve a CUDA device are only queued.
    """
    kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
    for run in _runs(kinds, offsets):
        dtype, shape, device = kinds[run.first]
        sources = tensors[run.first : run.first + run.length]
        nbytes = sources[0].nbytes
        if not nbytes:
            continue
        if run.length > 1 and nbytes <= _SMALL_NBYTES:
            target = _strided(slot, dtype, shape, offsets[run.first], run)
            if dtype not in _COPIED_AS_THEY_ARE:
                sources, target = [_as_integers(source) for source in sources], _as_integers(target)
            if device == slot.device:
                torch.stack(list(sources), out=target)
            else:  # one transfer between the devices instead of thousands
                target.copy_(torch.stack(list(sources)), non_blocking=device.type == "cuda")
            continue
        for source, offset in zip(sources, offsets[run.first : run.first + run.length], strict=True):
            _copy_in(slot[offset : offset + nbytes], source)


def _copy_in(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.device.type == source.device.type == "cpu" and source.is_contiguous():
        copy_bytes(target, source)
        return
    typed = target.view(source.dtype).view(source.shape)
    _as_integers(typed).copy_(_as_integers(source), non_blocking=source.device.type == "cuda")


def clear_gaps(slot: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Zero what lies between tensors: a slot's readers must not see what was there before.

    Args:
        slot: Flat uint8 tensor; on a CUDA device the writes are only queued.
        offsets: First byte of each tensor in the slot.
        sizes: Bytes of each tensor; those without bytes have no place.
    """
    if slot.device.type == "cpu":
        _tensors.clear_gaps(slot.data_ptr(), slot.numel(), offsets, sizes)
        return
    end = 0
    for offset, nbytes in sorted(zip(offsets, sizes, strict=True)):
        if nbytes:
            if offset > end:
                slot[end:offset].zero_()
            end = offset + nbytes


def copy_out(memory: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a flat uint8 tensor; copies that involve a CUDA device are only queued."""
    if memory.device.type == source.device.type == "cpu":
        copy_bytes(memory, source)
    else:
        memory.copy_(source, non_blocking=memory.device.type == "cuda")


def copy_strided(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the elements of a tensor in fresh memory, contiguous.

    Copies that involve a CUDA device are only queued.
    """
    copy = _typed(fresh(source.nbytes, device), source.dtype, source.shape)
    _as_integers(copy).copy_(_as_integers(source), non_blocking=device.type == "cuda")
    return copy


def fresh(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a flat uint8 tensor with undefined contents."""
    if device.type != "cpu" or nbytes < pages.SMALLEST_NBYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return pages.take(nbytes)


def carve(table: TensorTable, pieces: Sequence[tuple[Region, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Return tensors as views of memory.

    Args:
        table: The tensors.
        pieces: Ranges of the slot, all with bytes, and flat uint8 tensors with what they hold, in which
            elements are aligned.

    Returns:
        The tensor at each place of the table, None where no piece has it.
    """
    if EXCHANGE is not None and all(memory.device.type == "cpu" for _, memory in pieces):
        native = [
            (memory, memory.data_ptr(), memory.numel(), region.start, region.members)
            for region, memory in pieces
        ]
        return EXCHANGE.views(native, table.types, table.kinds, table.offsets)
    found: list[torch.Tensor | None] = [None] * len(table)
    for region, memory in pieces:
        kinds = [table.kinds[place] for place in region.members]
        offsets = [table.offsets[place] - region.start for place in region.members]
        for place, view in zip(region.members, _carve(table, memory, kinds, offsets), strict=True):
            found[place] = view
    return found


def _carve(
    table: TensorTable, memory: torch.Tensor, kinds: list[int], offsets: list[int]
) -> Iterator[torch.Tensor]:
    for run in _runs(kinds, offsets):
        name, shape = table.types[kinds[run.first]]
        dtype, offset = str_to_dtype(name), offsets[run.first]
        if run.length == 1:
            yield _typed(memory[offset : offset + dtype.itemsize * prod(shape)], dtype, shape)
            continue
        # Views refuse some in-place operations with gradients; detached ones are plain tensors.
        stacked = _strided(memory, dtype, shape, offset, run)
        yield from (view.detach() for view in stacked.unbind(0))


def _typed(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return memory.view(dtype).view(shape).detach()


def empty(kind: TensorType, device: torch.device) -> torch.Tensor:
    """Return a tensor without elements."""
    # Seen through bytes, since torch warns about complex32 where it allocates it.
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return _typed(nothing, str_to_dtype(kind[0]), kind[1])


def checksums(memory: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the 64-bit XXH3 of ranges of a flat uint8 tensor, which may be on a CUDA device."""
    host = memory.cpu()
    view = memoryview(host.numpy())  # type: ignore[arg-type]
    digest: Callable[[memoryview], int] = xxhash.xxh3_64_intdigest
    return [digest(view[offset : offset + nbytes]) for offset, nbytes in zip(offsets, sizes, strict=True)]


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all of a contiguous CPU tensor to the beginning of another; the GIL is released.

    Torch would start its OpenMP threads, which take milliseconds where the cores are busy, be it with the
    peer's OpenMP threads.
    """
    if source.nbytes > destination.nbytes:
        raise AssertionError(f"{source.nbytes} bytes do not fit into {destination.nbytes}")
    _tensors.copy(destination.data_ptr(), source.data_ptr(), source.nbytes)


def _runs(kinds: Sequence[object], offsets: Sequence[int]) -> Iterator[_Run]:
    """Group tensors of one kind that follow each other at a constant distance."""
    first, total = 0, len(kinds)
    while first < total:
        last, stride = first + 1, 0
        if last < total and kinds[last] == kinds[first]:
            stride = offsets[last] - offsets[first]
            while (
                last < total and kinds[last] == kinds[first] and offsets[last] - offsets[last - 1] == stride
            ):
                last += 1
        if stride % ALIGNMENT:  # not ours: element sizes need not divide it
            last, stride = first + 1, 0
        yield _Run(first, last - first, stride)
        first = last


def chunks(table: TensorTable, places: Sequence[int]) -> list[tuple[int, int]]:
    """Cut tensors into those with memory of their own and chunks of small neighbours.

    Args:
        table: The tensors.
        places: Those to cut, all with bytes, in ascending order of their offsets.

    Returns:
        The first of each chunk in ``places``, and the one after its last: tensors of up to 32 KiB
        each in a chunk of up to 1 MiB, or one larger tensor.
    """
    return _tensors.chunks(places, table.offsets, table.sizes, _SMALL_NBYTES, _CHUNK_NBYTES)


def _strided(
    memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int, run: _Run
) -> torch.Tensor:
    """Return a run of tensors in a flat uint8 tensor as one tensor with one more dimension."""
    itemsize = dtype.itemsize
    first = memory[offset : offset + itemsize].view(dtype)  # all of the memory may start in an element
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * max(size, 1))
    return first.as_strided(
        (run.length, *shape),
        (run.stride // itemsize, *reversed(strides[:-1])),
        first.storage_offset(),
    )


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    integer = _INTEGER.get(tensor.dtype.itemsize)
    if integer is None:  # complex128; its parts are floats of 8 bytes
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(integer)
