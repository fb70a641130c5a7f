# SPDX-License-Identifier: Apache-2.0
"""Tensors in one block of memory, for peers that know bytes only.

Neighbours of one dtype are copied by one call of torch, which takes a third of the time of a call
for each where there are thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import msgpack
import torch

from tensorferry.cli.bench_payloads import Payload
from tensorferry.cli.bench_peers.base import Tensors

_ALIGNMENT = 64
_FEW = 16


@dataclass(frozen=True)
class _Run:
    """Neighbours of one dtype, side by side from ``start`` on."""

    dtype: torch.dtype
    first: int
    counts: list[int]
    start: int

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.dtype.itemsize


class Layout:
    """Where tensors lie in a block.

    Attributes:
        nbytes: Of the block.
    """

    def __init__(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self._names, self._dtypes, self._shapes = names, dtypes, shapes
        counts = [prod(shape) for shape in shapes]
        self._runs: list[_Run] = []
        first = end = 0
        for name, group in groupby(dtypes):
            last = first + sum(1 for _ in group)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            self._runs.append(_Run(getattr(torch, name), first, counts[first:last], start))
            first, end = last, start + self._runs[-1].nbytes
        self.nbytes = end

    @classmethod
    def of(cls, tensors: Tensors) -> Layout:
        """Lay tensors out."""
        values = tensors.values()
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in values]
        return cls(list(tensors), names, [list(tensor.shape) for tensor in values])

    @classmethod
    def parse(cls, header: bytes | memoryview) -> Layout:
        """Return the layout of which :meth:`header` was made."""
        return cls(*msgpack.unpackb(header))

    def header(self) -> bytes:
        """Return the description that a consumer needs."""
        data: bytes = msgpack.packb([self._names, self._dtypes, self._shapes])
        return data

    def pack(self, block: torch.Tensor, tensors: Tensors) -> None:
        """Copy contiguous tensors into a block on the CPU."""
        values = list(tensors.values())
        for run in self._runs:
            target = block[run.start : run.start + run.nbytes].view(run.dtype)
            sources = [tensor.view(-1) for tensor in values[run.first : run.first + len(run.counts)]]
            if len(sources) == 1:
                target.copy_(sources[0])
            elif sources[0].is_cpu:
                torch.cat(sources, out=target)
            else:
                target.copy_(torch.cat(sources))

    def views(self, block: torch.Tensor) -> Tensors:
        """Return the tensors as views of a block."""
        parts: list[torch.Tensor] = []
        for run in self._runs:
            flat_run = block[run.start : run.start + run.nbytes].view(run.dtype)
            parts += torch.split(flat_run, run.counts)
        shaped = (
            part if len(shape) == 1 else part.view(shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        )
        return dict(zip(self._names, shaped, strict=True))

    def pieces(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of each tensor in a block, for those that send one after another."""
        return [flat(tensor) for tensor in self.views(block).values()]

    def adopt(self, parts: Sequence[torch.Tensor]) -> Tensors:
        """Return the tensors over flat bytes of which each came by itself."""
        described = zip(self._names, parts, self._dtypes, self._shapes, strict=True)
        return {name: part.view(getattr(torch, dtype)).view(shape) for name, part, dtype, shape in described}

    @property
    def few(self) -> bool:
        """Whether sending each tensor by itself takes less than packing them."""
        return len(self._names) <= _FEW


def room(payload: Payload) -> int:
    """Return bytes that suffice for a payload however its tensors are aligned."""
    return payload.nbytes + _ALIGNMENT * len(payload.shapes)


class Stage:
    """What a sender sends from: the caller's own tensors, or a block where they are many or on a device.

    Args:
        nbytes: Of the block.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8)

    def parts(self, layout: Layout, tensors: Tensors) -> list[torch.Tensor]:
        """Return flat bytes on the CPU, in the order in which :func:`landing` takes them."""
        if layout.few and next(iter(tensors.values())).is_cpu:
            return [flat(tensor) for tensor in tensors.values()]
        block = self._block[: layout.nbytes]
        layout.pack(block, tensors)
        return layout.pieces(block) if layout.few else [block]


def landing(layout: Layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return fresh memory for a payload, and the parts of it that arrive one after another."""
    block = fresh(layout.nbytes)
    return block, layout.pieces(block) if layout.few else [block]


def finish(layout: Layout, block: torch.Tensor, device: torch.device) -> Tensors:
    """Return tensors on their device, over the memory that they have arrived in where it is the CPU's."""
    return layout.views(block if device.type == "cpu" else block.to(device))


def fresh(nbytes: int) -> torch.Tensor:
    """Return new memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def buffers(parts: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Return flat bytes on the CPU as Python's buffers."""
    return (memoryview(part.numpy()) for part in parts)  # type: ignore[arg-type]
