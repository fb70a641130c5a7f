# SPDX-License-Identifier: Apache-2.0
"""What a consumer wants from a publication, and the bytes that came for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tensorferry import layout, packing, payload, slicing
from tensorferry.backends.base import Span
from tensorferry.dtypes import str_to_dtype
from tensorferry.errors import IntegrityError, UsageError
from tensorferry.layout import Region
from tensorferry.manifest import Manifest, TensorSpec
from tensorferry.payload import Structure
from tensorferry.records import listed, shown
from tensorferry.slicing import Index, Selection

# Memory of its own for a read costs as much time as copying about so many bytes.
_DIRECT_NBYTES = 16 << 10


class Piece(NamedTuple):
    """A region of the slot, and the memory in which its bytes are."""

    region: Region
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted from a publication.

    Attributes:
        manifest: Of the publication.
        structure: The wanted part of the payload's structure.
        specs: The tensors of that part, in the order of their marks.  Of those in ``selections``
            what they land: the result, or one dimension of elements if there are gaps between.
        regions: What lands in one piece: neighbouring tensors, or the selected part of one.
        selections: What is wanted of the tensors that are not wanted whole, by their index.
    """

    manifest: Manifest
    structure: Structure
    specs: Sequence[TensorSpec]
    regions: list[Region]
    selections: Mapping[int, Selection] = field(default_factory=dict)

    @classmethod
    def of(
        cls, manifest: Manifest, names: Sequence[str] | None, slices: Mapping[str, Index] | None = None
    ) -> Order:
        """Take the whole payload or the top-level ``names`` of it, and parts of the tensors in ``slices``.

        Raises:
            UsageError: A name is not in the payload, or is given twice; or a slice is of no
                tensor there, or does not fit it.
        """
        structure, specs = manifest.structure, list(manifest.tensors)
        if names is not None:
            structure, indices = payload.select(manifest.structure, names)
            specs = [manifest.tensors[index] for index in indices]
        selections = _selections(specs, slices)
        for index, selection in selections.items():
            specs[index] = specs[index]._replace(offset=specs[index].offset + selection.first)
        return cls._landing(manifest, structure, specs, selections)

    @classmethod
    def _landing(
        cls,
        manifest: Manifest,
        structure: Structure,
        specs: list[TensorSpec],
        selections: dict[int, Selection],
    ) -> Order:
        for index, selection in selections.items():
            elements = selection.landed_nbytes // str_to_dtype(specs[index].dtype).itemsize
            shape = selection.shape if selection.is_exact else (elements,)
            specs[index] = specs[index]._replace(shape=shape, nbytes=selection.landed_nbytes)
        return cls(manifest, structure, specs, layout.regions(specs, selections), selections)

    def in_place(self) -> Order:
        """Return the same order where the slot's memory is at hand: each region is one range of it."""
        if not self.selections:
            return self
        selections = {index: selection.in_place() for index, selection in self.selections.items()}
        return self._landing(self.manifest, self.structure, list(self.specs), selections)

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        gaps = sum(selection.landed_nbytes - selection.nbytes for selection in self.selections.values())
        return sum(spec.nbytes for spec in self.specs) - gaps

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
        pieces = []
        for region in regions:
            specs, offsets = self._placed(region)
            for first, last in packing.chunks(specs, offsets):
                start = region.start + offsets[first]
                nbytes = specs[last - 1].offset + specs[last - 1].nbytes - start
                # A chunk starts where its tensors keep their alignment; one of its own, at its first byte.
                gap = 0 if last == first + 1 else start % layout.ALIGNMENT
                part = Region(start, nbytes, region.members[first:last])
                pieces.append(Piece(part, packing.fresh(gap + nbytes, device)[gap:]))
        return pieces

    def copies(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors in fresh memory; copies of a CUDA device are only queued."""
        copied = []
        for piece in pieces:
            if self._gapped(piece.region):
                continue
            for result in self.destinations([piece.region], device):
                start = result.region.start - piece.region.start
                packing.copy_out(result.memory, piece.memory[start : start + result.region.nbytes])
                copied.append(result)
        gapped = self._found([piece for piece in pieces if self._gapped(piece.region)])
        compact = {index: packing.copy_strided(view, device) for index, view in gapped.items()}
        return self._complete(self._found(copied) | compact, device)

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
        for piece in pieces:
            if piece.region.members[0] in self.selections:
                continue
            specs, offsets = self._placed(piece.region)
            sums = packing.checksums(piece.memory, offsets, [spec.nbytes for spec in specs])
            for spec, found in zip(specs, sums, strict=True):
                if spec.checksum != found:
                    raise IntegrityError(
                        f"the bytes of {shown(spec.path)} have the checksum {found:016x}, the producer's "
                        f"were {spec.checksum:016x}; the data was discarded: pull again, or publish again"
                    )

    def _found(self, pieces: Sequence[Piece]) -> dict[int, torch.Tensor]:
        """Return the tensors that are in the pieces as views, by their index."""
        found: dict[int, torch.Tensor] = {}
        for piece in pieces:
            views = packing.carve(piece.memory, *self._placed(piece.region))
            found.update(zip(piece.region.members, views, strict=True))
            if self._gapped(piece.region):
                (index,) = piece.region.members
                found[index] = self.selections[index].view(found[index])
        return found

    def _complete(self, found: Mapping[int, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        return [
            found[index] if index in found else packing.empty(spec, device)
            for index, spec in enumerate(self.specs)
        ]

    def _ranges(self, region: Region) -> list[tuple[int, int]]:
        """Return the ranges of the slot, first byte and bytes, that land in a region one after another."""
        selection = self.selections.get(region.members[0])
        if selection is None:
            return [(region.start, region.nbytes)]
        return selection.ranges(region.start - selection.first)

    def _gapped(self, region: Region) -> bool:
        selection = self.selections.get(region.members[0])
        return selection is not None and not selection.is_exact

    def _placed(self, region: Region) -> tuple[list[TensorSpec], list[int]]:
        """Return the tensors of a region, and their offsets in it."""
        specs = [self.specs[index] for index in region.members]
        return specs, [spec.offset - region.start for spec in specs]


def _selections(specs: Sequence[TensorSpec], slices: Mapping[str, Index] | None) -> dict[int, Selection]:
    """Fit indices to tensors, both by the tensors' place in ``specs``."""
    if slices is None:
        return {}
    if not isinstance(slices, Mapping):
        raise UsageError(f"slices is a mapping from paths of tensors to indices, not {type(slices).__name__}")
    places = {spec.path: place for place, spec in enumerate(specs)}
    selections = {}
    for path, index in slices.items():
        if path not in places:
            there = listed(places) or "none at all"
            raise UsageError(f"slices has {path!r}, but the tensors to pull are {there}")
        spec = specs[places[path]]
        selections[places[path]] = slicing.select(path, index, spec.shape, str_to_dtype(spec.dtype).itemsize)
    return selections
