# SPDX-License-Identifier: Apache-2.0
"""What a consumer wants from a publication, and the bytes that came for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from tensorferry import layout, packing, payload, slicing
from tensorferry.backends.base import Span
from tensorferry.columns import TensorType
from tensorferry.dtypes import str_to_dtype
from tensorferry.errors import IntegrityError, UsageError
from tensorferry.layout import Region
from tensorferry.manifest import Manifest
from tensorferry.payload import Structure
from tensorferry.records import listed, shown
from tensorferry.slicing import Index, Selection
from tensorferry.tensor_table import TensorTable

# Memory of its own for a read costs as much time as copying about so many bytes.
_DIRECT_NBYTES = 16 << 10


class Piece(NamedTuple):
    """A region of the slot, and the memory in which its bytes are."""

    region: Region
    memory: torch.Tensor


class Part(NamedTuple):
    """Some of the bytes that land in a pool and are copied out of it.

    Attributes:
        spans: What to read.
        copies: Memory of results, and where in the pool its bytes land.
    """

    spans: list[Span]
    copies: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted from a publication.

    Attributes:
        manifest: Of the publication.
        structure: The wanted part of the payload's structure.
        table: The tensors of that part, in the order of their marks.  Of those in ``selections``
            what they land: the result, or one dimension of elements if there are gaps between.
        regions: What lands in one piece: neighbouring tensors, or the selected part of one.
        selections: What is wanted of the tensors that are not wanted whole, by their index.
    """

    manifest: Manifest
    structure: Structure
    table: TensorTable
    regions: list[Region]
    selections: Mapping[int, Selection]
    _whole: TensorTable

    @classmethod
    def of(
        cls, manifest: Manifest, names: Sequence[str] | None, slices: Mapping[str, Index] | None = None
    ) -> Order:
        """Take the whole payload or the top-level ``names`` of it, and parts of the tensors in ``slices``.

        Raises:
            UsageError: A name is not in the payload, or is given twice; or a slice is of no
                tensor there, or does not fit it.
        """
        structure, table = manifest.structure, TensorTable.of(manifest.tensors)
        if names is not None:
            structure, places = payload.select(manifest.structure, names)
            table = table.take(places)
        return cls._landing(manifest, structure, table, _selections(table, slices))

    @classmethod
    def _landing(
        cls,
        manifest: Manifest,
        structure: Structure,
        whole: TensorTable,
        selections: dict[int, Selection],
    ) -> Order:
        table = whole.replace({place: _landed(whole, place, one) for place, one in selections.items()})
        return cls(manifest, structure, table, layout.regions(table, selections), selections, whole)

    def in_place(self) -> Order:
        """Return the same order where the slot's memory is at hand: each region is one range of it."""
        if not self.selections:
            return self
        selections = {index: selection.in_place() for index, selection in self.selections.items()}
        return self._landing(self.manifest, self.structure, self._whole, selections)

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        gaps = sum(selection.landed_nbytes - selection.nbytes for selection in self.selections.values())
        return self.table.nbytes - gaps

    @property
    def suits_results(self) -> bool:
        """Whether landing in the results is right, and faster than copying from landing memory."""
        more_reads = sum(selection.reads - 1 for selection in self.selections.values())
        without_gaps = all(selection.is_exact for selection in self.selections.values())
        return without_gaps and more_reads * _DIRECT_NBYTES <= self.nbytes

    def __str__(self) -> str:
        manifest = self.manifest
        name = "" if manifest.producer is None else f"{shown(manifest.producer)} "
        return f"request {shown(manifest.request_id)} of producer {name}{manifest.peer.uid.hex()[:8]}"

    def spans(self, offsets: Sequence[int]) -> list[Span]:
        """Return the reads that bring each region to its offset in a pool."""
        found = []
        for region, offset in zip(self.regions, offsets, strict=True):
            for source, nbytes in self._ranges(region):
                found.append(Span(source, offset, nbytes))
                offset += nbytes
        return found

    def targets(self, pieces: Sequence[Piece]) -> list[tuple[int, torch.Tensor]]:
        """Return the ranges that land in pieces: the first byte of each in the slot, and its memory."""
        found: list[tuple[int, torch.Tensor]] = []
        for piece in pieces:
            sources, sizes = zip(*self._ranges(piece.region), strict=True)
            found += zip(sources, piece.memory.split_with_sizes(sizes), strict=True)
        return found

    def destinations(self, regions: Sequence[Region], device: torch.device) -> list[Piece]:
        """Return fresh memory for results without gaps, cut as they will share it, still without contents."""
        table, pieces = self.table, []
        for region in regions:
            for first, last in packing.chunks(table, region.members):
                members = region.members[first:last]
                start = table.offsets[members[0]]
                nbytes = table.offsets[members[-1]] + table.sizes[members[-1]] - start
                # A chunk starts where its tensors keep their alignment; one of its own, at its first byte.
                gap = 0 if len(members) == 1 else start % layout.ALIGNMENT
                memory = packing.fresh(gap + nbytes, device)
                pieces.append(Piece(Region(start, nbytes, members), memory[gap:] if gap else memory))
        return pieces

    def parts(self, results: Sequence[Piece], pool: torch.Tensor, start: int, nbytes: int) -> list[Part]:
        """Cut the way of whole tensors into parts that can be copied out while later ones arrive.

        Args:
            results: Memory of the results, as :meth:`destinations` gives it for all regions.
            pool: Where bytes land.
            start: Where in it the landing block begins.
            nbytes: Of a part, about.
        """
        offsets, _ = layout.landing_offsets(self.regions)
        shifts = {
            member: start + offset - region.start
            for region, offset in zip(self.regions, offsets, strict=True)
            for member in region.members
        }
        parts = [Part([], [])]
        room = nbytes
        for result in results:
            shift, first = shifts[result.region.members[0]], 0
            while first < result.region.nbytes:
                taken = min(result.region.nbytes - first, nbytes)
                source = result.region.start + first
                landed = pool[source + shift : source + shift + taken]
                parts[-1].spans.append(Span(source, source + shift, taken))
                parts[-1].copies.append((result.memory[first : first + taken], landed))
                first += taken
                room -= taken
                if room <= 0:
                    parts.append(Part([], []))
                    room = nbytes
        return [part for part in parts if part.spans]

    def copies(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors in fresh memory; copies of a CUDA device are only queued."""
        copied, gapped = [], []
        for piece in pieces:
            if self._gapped(piece.region):
                gapped.append(piece)
                continue
            for result in self.destinations([piece.region], device):
                start = result.region.start - piece.region.start
                packing.copy_out(result.memory, piece.memory[start : start + result.region.nbytes])
                copied.append(result)
        found = self._found(copied)
        for place, view in enumerate(self._found(gapped) if gapped else ()):
            if view is not None:
                found[place] = packing.copy_strided(view, device)
        return self._complete(found, device)

    def views(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors as views of the pieces; those without bytes are on ``device``."""
        return self._complete(self._found(pieces), device)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Compare the bytes that came with the producer's checksums, if there are any.

        A checksum is of a whole tensor: those of which a part came are left out.

        Raises:
            IntegrityError: They differ; the message names the first tensor.
        """
        if self.manifest.checksum is None:
            return
        sums = self.table.sums
        assert sums is not None  # validation took no manifest without them
        for piece in pieces:
            if piece.region.members[0] in self.selections:
                continue
            table, members = self.table, piece.region.members
            offsets = [table.offsets[place] - piece.region.start for place in members]
            found = packing.checksums(piece.memory, offsets, [table.sizes[place] for place in members])
            for place, digest in zip(members, found, strict=True):
                if sums[place] != digest:
                    raise IntegrityError(
                        f"the bytes of {shown(table.paths[place])} have the checksum {digest:016x}, "
                        f"the producer's were {sums[place]:016x}; the data was discarded: "
                        f"pull again, or publish again"
                    )

    def _found(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        """Return the tensors that are in the pieces as views, by their place."""
        found = packing.carve(self.table, pieces)
        for piece in pieces if self.selections else ():
            if self._gapped(piece.region):
                (place,) = piece.region.members
                found[place] = self.selections[place].view(cast(torch.Tensor, found[place]))
        return found

    def _complete(self, found: list[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
        """Put tensors without bytes where they belong."""
        complete = cast("list[torch.Tensor]", found)
        if 0 in self.table.sizes:
            for place, nbytes in enumerate(self.table.sizes):
                if not nbytes:
                    complete[place] = packing.empty(self.table.types[self.table.kinds[place]], device)
        return complete

    def _ranges(self, region: Region) -> list[tuple[int, int]]:
        """Return the ranges of the slot, first byte and bytes, that land in a region one after another."""
        selection = self.selections.get(region.members[0])
        if selection is None:
            return [(region.start, region.nbytes)]
        return selection.ranges(region.start - selection.first)

    def _gapped(self, region: Region) -> bool:
        selection = self.selections.get(region.members[0])
        return selection is not None and not selection.is_exact


def _landed(whole: TensorTable, place: int, selection: Selection) -> tuple[TensorType, int, int]:
    """Return what of a selected tensor lands: type, offset in the slot and bytes."""
    dtype = whole.types[whole.kinds[place]][0]
    elements = selection.landed_nbytes // str_to_dtype(dtype).itemsize
    shape = selection.shape if selection.is_exact else (elements,)
    return (dtype, shape), whole.offsets[place] + selection.first, selection.landed_nbytes


def _selections(table: TensorTable, slices: Mapping[str, Index] | None) -> dict[int, Selection]:
    """Fit indices to tensors, both by the tensors' place in the table."""
    if slices is None:
        return {}
    if not isinstance(slices, Mapping):
        raise UsageError(f"slices is a mapping from paths of tensors to indices, not {type(slices).__name__}")
    places = {path: place for place, path in enumerate(table.paths)}
    selections = {}
    for path, index in slices.items():
        if path not in places:
            there = listed(places) or "none at all"
            raise UsageError(f"slices has {path!r}, but the tensors to pull are {there}")
        dtype, shape = table.types[table.kinds[places[path]]]
        selections[places[path]] = slicing.select(path, index, shape, str_to_dtype(dtype).itemsize)
    return selections
