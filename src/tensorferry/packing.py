# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors into a slot and out of it, bit for bit.

Everything is copied as integers of the element's size, so no float operation can touch a NaN.
Runs of equal tensors, of which payloads often have thousands, take a few calls of torch
altogether instead of several for each.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import xxhash

from tensorferry.dtypes import str_to_dtype
from tensorferry.layout import ALIGNMENT, align
from tensorferry.manifest import TensorSpec

# Results up to this size share memory with their neighbours, chunk by chunk: allocating each
# for itself takes longer than everything else.  The chunk bounds what one result keeps alive.
_SMALL_NBYTES = 32 << 10
_CHUNK_NBYTES = 1 << 20
_HUGE_NBYTES = 4 << 20  # from here on a huge page of 2 MiB fits in, however the memory is aligned

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
        sources = tensors[run.first : run.first + run.length]
        if not sources[0].numel():
            continue
        dtype, shape, device = kinds[run.first]
        target = _strided(slot, dtype, shape, offsets[run.first], run)
        if run.length > 1 and device == slot.device:
            torch.stack([_as_integers(source) for source in sources], out=_as_integers(target))
            continue
        for source, destination in zip(sources, target.unbind(0), strict=True):
            if device.type == slot.device.type == "cpu" and source.is_contiguous():
                copy_bytes(destination, source)
            else:
                _as_integers(destination).copy_(_as_integers(source), non_blocking=device.type == "cuda")


def unpack(
    region: torch.Tensor, specs: Sequence[TensorSpec], offsets: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Copy tensors out of a range of bytes into fresh memory.

    Args:
        region: Flat uint8 tensor.
        specs: The tensors; all have bytes.
        offsets: First byte of each in ``region``, ascending.
        device: Where the results go.

    Returns:
        Contiguous tensors.  Those up to 32 KiB may share a storage of up to 1 MiB among
        themselves; larger ones have their own.

    Copies that involve a CUDA device are only queued, on its current stream.
    """
    results: list[torch.Tensor] = []
    for first, last in _chunks(specs, offsets):
        start = offsets[first] // ALIGNMENT * ALIGNMENT
        end = offsets[last - 1] + specs[last - 1].nbytes
        memory = _fresh(align(end - start), device)
        if device.type == region.device.type == "cpu":
            copy_bytes(memory, region[start:end])
        else:
            memory[: end - start].copy_(region[start:end], non_blocking=device.type == "cuda")
        results += carve(memory, specs[first:last], [offset - start for offset in offsets[first:last]])
    return results


def _fresh(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised bytes; large ones on huge pages where the kernel gives them.

    Page faults on fresh memory cost more than the copy that follows: 256 MiB took 113 ms on 4 KiB
    pages and 36 ms on huge ones (two copies, one machine).
    """
    if device.type != "cpu" or nbytes < _HUGE_NBYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def carve(memory: torch.Tensor, specs: Sequence[TensorSpec], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Return views of memory as tensors.

    Args:
        memory: Flat uint8 tensor; the elements must be aligned in it.
        specs: The tensors; all have bytes.
        offsets: First byte of each in ``memory``.
    """
    views: list[torch.Tensor] = []
    for run in _runs([(spec.dtype, spec.shape) for spec in specs], offsets):
        spec = specs[run.first]
        stacked = _strided(memory, str_to_dtype(spec.dtype), spec.shape, offsets[run.first], run)
        # Views that unbind() makes refuse in-place operations with gradients; detached ones don't.
        views += [view.detach() for view in stacked.unbind(0)]
    return views


def empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return a tensor without elements."""
    # Seen through bytes, since torch warns about complex32 where it allocates it.
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return nothing.view(str_to_dtype(spec.dtype)).view(spec.shape)


def checksums(memory: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the 64-bit XXH3 of ranges of a flat uint8 tensor, which may be on a CUDA device."""
    host = memory.cpu()
    view = memoryview(host.numpy())  # type: ignore[arg-type]
    digest: Callable[[memoryview], int] = xxhash.xxh3_64_intdigest
    return [digest(view[offset : offset + nbytes]) for offset, nbytes in zip(offsets, sizes, strict=True)]


def copy_bytes(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all of a contiguous CPU tensor to the beginning of another; the GIL is released.

    One thread copies: torch would start its OpenMP threads, which take milliseconds where the
    cores are busy, be it with the peer's OpenMP threads.
    """
    if source.nbytes > destination.nbytes:
        raise AssertionError(f"{source.nbytes} bytes do not fit into {destination.nbytes}")
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)


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


def _chunks(specs: Sequence[TensorSpec], offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut tensors into those with memory of their own and chunks of small neighbours."""
    first = 0
    while first < len(specs):
        last = first + 1
        if specs[first].nbytes <= _SMALL_NBYTES:
            limit = offsets[first] + _CHUNK_NBYTES
            while (
                last < len(specs)
                and specs[last].nbytes <= _SMALL_NBYTES
                and offsets[last] + specs[last].nbytes <= limit
            ):
                last += 1
        yield first, last
        first = last


def _strided(
    memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int, run: _Run
) -> torch.Tensor:
    """Return a run of tensors in a flat uint8 tensor as one tensor with one more dimension."""
    itemsize = dtype.itemsize
    typed = memory[: memory.numel() // itemsize * itemsize].view(dtype)
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * max(size, 1))
    return typed.as_strided(
        (run.length, *shape),
        (run.stride // itemsize, *reversed(strides[:-1])),
        typed.storage_offset() + offset // itemsize,
    )


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    integer = _INTEGER.get(tensor.dtype.itemsize)
    if integer is None:  # complex128; its parts are floats of 8 bytes
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(integer)
