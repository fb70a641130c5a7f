# SPDX-License-Identifier: Apache-2.0
"""What a consumer wants from a publication, and the bytes that came for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorferry import layout, packing, payload
from tensorferry.errors import IntegrityError
from tensorferry.layout import Region
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

    def copies(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors in fresh memory; copies of a CUDA device are only queued."""
        copied = [packing.unpack(piece.memory, *self._placed(piece.region), device) for piece in pieces]
        return self._in_order(pieces, copied, device)

    def views(self, pieces: Sequence[Piece], device: torch.device) -> list[torch.Tensor]:
        """Return all wanted tensors as views of the pieces."""
        viewed = [packing.carve(piece.memory, *self._placed(piece.region)) for piece in pieces]
        return self._in_order(pieces, viewed, device)

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

    def _in_order(
        self, pieces: Sequence[Piece], tensors: Sequence[list[torch.Tensor]], device: torch.device
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor | None] = [None] * len(self.specs)
        for piece, results in zip(pieces, tensors, strict=True):
            for index, result in zip(piece.region.members, results, strict=True):
                found[index] = result
        return [
            packing.empty(spec, device) if result is None else result
            for spec, result in zip(self.specs, found, strict=True)
        ]
