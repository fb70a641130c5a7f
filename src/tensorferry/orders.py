# SPDX-License-Identifier: Apache-2.0
"""What a consumer wants from a publication, and the bytes that came for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorferry import layout, packing, payload
from tensorferry.errors import IntegrityError
from tensorferry.layout import Region, align_down
from tensorferry.manifest import Manifest, TensorSpec
from tensorferry.payload import Structure


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
        specs: The tensors of that part, in the order of their marks.
        regions: The ranges of the slot in which these tensors lie.
    """

    manifest: Manifest
    structure: Structure
    specs: Sequence[TensorSpec]
    regions: list[Region]

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[str] | None) -> Order:
        """Take the whole payload, or the top-level ``names`` of it.

        Raises:
            UsageError: A name is not in the payload, or is given twice.
        """
        if names is None:
            return cls(manifest, manifest.structure, manifest.tensors, layout.regions(manifest.tensors))
        structure, indices = payload.select(manifest.structure, names)
        specs = [manifest.tensors[index] for index in indices]
        return cls(manifest, structure, specs, layout.regions(specs))

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def __str__(self) -> str:
        manifest = self.manifest
        name = "" if manifest.producer is None else f"{manifest.producer!r} "
        return f"request {manifest.request_id!r} of producer {name}{manifest.peer.uid.hex()[:8]}"

    def destinations(self, regions: Sequence[Region], device: torch.device) -> list[Piece]:
        """Return fresh memory for the results, cut as they will share it, still without contents."""
        pieces = []
        for region in regions:
            specs, offsets = self._placed(region)
            for first, last in packing.chunks(specs, offsets):
                # A chunk starts where its tensors keep their alignment; one of its own, at its first byte.
                start = offsets[first] if last == first + 1 else align_down(offsets[first])
                nbytes = offsets[last - 1] + specs[last - 1].nbytes - start
                part = Region(region.start + start, nbytes, region.members[first:last])
                pieces.append(Piece(part, packing.fresh(nbytes, device)))
        return pieces

    def copies(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors in fresh memory; copies of a CUDA device are only queued."""
        copied = []
        for piece in pieces:
            for result in self.destinations([piece.region], device):
                start = result.region.start - piece.region.start
                packing.copy_out(result.memory, piece.memory[start : start + result.region.nbytes])
                copied.append(result)
        return self.views(copied, device)

    def views(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors as views of the pieces; those without bytes are on ``device``."""
        found: list[torch.Tensor | None] = [None] * len(self.specs)
        for piece in pieces:
            for index, view in zip(
                piece.region.members, packing.carve(piece.memory, *self._placed(piece.region)), strict=True
            ):
                found[index] = view
        return [
            packing.empty(spec, device) if view is None else view
            for spec, view in zip(self.specs, found, strict=True)
        ]

    def check(self, pieces: Sequence[Piece]) -> None:
        """Compare the bytes that came with the producer's checksums, if there are any.

        Raises:
            IntegrityError: They differ; the message names the first tensor.
        """
        if self.manifest.checksum is None:
            return
        for piece in pieces:
            specs, offsets = self._placed(piece.region)
            sums = packing.checksums(piece.memory, offsets, [spec.nbytes for spec in specs])
            for spec, found in zip(specs, sums, strict=True):
                if spec.checksum != found:
                    raise IntegrityError(
                        f"the bytes of {spec.path} have the checksum {found:016x}, the producer's were "
                        f"{spec.checksum:016x}; the data was discarded: pull again, or publish again"
                    )

    def _placed(self, region: Region) -> tuple[list[TensorSpec], list[int]]:
        """Return the tensors of a region, and their offsets in it."""
        specs = [self.specs[index] for index in region.members]
        return specs, [spec.offset - region.start for spec in specs]
