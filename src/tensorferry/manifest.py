# SPDX-License-Identifier: Apache-2.0
"""The manifest: all that a consumer needs to know of one publication.

A manifest that arrived is untrusted.  :func:`decode_manifest` checks all of it before anyone
allocates memory for it or connects anywhere.  ``docs/wire-format.md`` describes the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

from tensorferry import validation, wire
from tensorferry.backends.base import PeerOffer, SlotTicket
from tensorferry.columns import TensorType
from tensorferry.errors import ManifestError, UsageError
from tensorferry.metadata import plain_metadata
from tensorferry.payload import Structure, leaf_paths
from tensorferry.records import Record

Checksum = Literal["xxh3"]
ByteOrder = Literal["little", "big"]


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


@dataclass(frozen=True, slots=True)
class Manifest:
    """A published slot, as its producer describes it.

    Attributes:
        request_id: The name that the producer gave to the publication.
        tensors: The tensors, in the order of their marks in ``structure``.
        structure: The payload without its tensors; see :mod:`tensorferry.payload`.
        peer: Who has the slot, and how it can be reached.
        ticket: What names the slot to that peer.
        lease: Seconds for which the producer keeps the slot, from publication on.
        expires: Unix time at which it ends by the producer's clock; for people only.
        metadata: What the user added; tuples have become lists.
        consumers: How many consumers must release the slot.
        byteorder: Byte order of the elements.
        checksum: Algorithm of the tensors' checksums, or None.
        producer: The producer's name, or None.
    """

    request_id: str
    tensors: Sequence[TensorSpec]
    structure: Structure
    peer: PeerOffer
    ticket: SlotTicket
    lease: float
    expires: float
    metadata: dict[str, Any] = field(default_factory=dict)
    consumers: int = 1
    byteorder: ByteOrder = validation.NATIVE
    checksum: Checksum | None = None
    producer: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the gaps between them."""
        return TensorTable.of(self.tensors).nbytes

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of the tensors; a tensor directly under a name has the name as its path."""
        return tuple(spec.path for spec in self.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its path."""
        return {spec.path: spec.shape for spec in self.tensors}

    @property
    def dtypes(self) -> dict[str, str]:
        """Name of the dtype of each tensor by its path."""
        return {spec.path: spec.dtype for spec in self.tensors}


def encode_manifest(manifest: Manifest, key: bytes | str | None = None) -> bytes:
    """Encode a manifest, with a MAC if there is a key, else with a digest.

    Args:
        manifest: What to encode; paths and sizes of tensors follow from the rest and are
            not encoded.
        key: 16 to 64 bytes shared with the consumers; text is taken as UTF-8.

    Raises:
        UsageError: What a user gave cannot be encoded (the message names it), or the result
            would be larger than 16 MiB.
    """
    secret = wire.as_key(key)
    body = _body(manifest)
    try:
        data = wire.seal(wire.pack(body), secret)
    except (ValueError, OverflowError, TypeError) as error:
        raise UsageError(f"the manifest of {manifest.request_id!r} cannot be encoded: {error}") from error
    if len(data) > wire.MAX_MANIFEST_NBYTES:
        raise UsageError(
            f"the manifest of {manifest.request_id!r} would take {len(data)} bytes, the limit is "
            f"{wire.MAX_MANIFEST_NBYTES}; send less metadata, or the tensors in several publications"
        )
    return data


def decode_manifest(
    data: bytes | bytearray | memoryview,
    key: bytes | str | None = None,
    max_bytes: int = wire.MAX_MANIFEST_NBYTES,
) -> Manifest:
    """Decode and check a manifest; time and memory are bounded by its length.

    Args:
        data: The bytes that :func:`encode_manifest` gave.
        key: The producer's key; without one, only a manifest without a MAC is accepted.
        max_bytes: Longer manifests are refused unread.

    Raises:
        ManifestError: It is too long, altered on its way, malformed, out of bounds, or of the other
            byte order.
        VersionError: It has another major version; nothing after the header was looked at.
        AuthenticationError: A key is given and the MAC is missing or wrong, or there is a MAC
            and no key; nothing was decoded.
        UsageError: ``data`` is not bytes, or the key is unfit.
    """
    secret = wire.as_key(key)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise UsageError(f"a manifest is bytes, not {type(data).__name__}")
    nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if nbytes > max_bytes:
        raise ManifestError(f"the manifest has {nbytes} bytes, the limit is {max_bytes}")
    return _manifest(wire.unpack(wire.unseal(bytes(data), secret)))


def read_manifest(manifest: bytes | bytearray | memoryview, key: bytes | str | None = None) -> Manifest:
    """Show what is in a manifest; connects to nothing.

    Args:
        manifest: The bytes that a producer published.
        key: The producer's key, if it has one.

    Raises:
        ManifestError: The manifest was altered on its way, is malformed or out of bounds.
        VersionError: It was written for another major version.
        AuthenticationError: The key and the MAC do not belong together.
        UsageError: ``manifest`` is not bytes, or the key is unfit.
    """
    return decode_manifest(manifest, key)


def _body(manifest: Manifest) -> dict[str, Any]:
    if not (math.isfinite(manifest.lease) and manifest.lease > 0):
        raise UsageError(f"a lease is a positive number of seconds, not {manifest.lease!r}")
    if not 1 <= manifest.consumers <= validation.MAX_CONSUMERS:
        raise UsageError(f"a publication is for 1 to {validation.MAX_CONSUMERS} consumers")
    for what, text in (("request id", manifest.request_id), ("producer's name", manifest.producer or "")):
        if not isinstance(text, str):
            raise UsageError(f"the {what} is a str, not {type(text).__name__}")
        if len(text.encode(errors="replace")) > validation.MAX_NAME_NBYTES:
            raise UsageError(f"the {what} is longer than {validation.MAX_NAME_NBYTES} bytes")
    table = TensorTable.of(manifest.tensors)
    peer, ticket = manifest.peer, manifest.ticket
    body: dict[str, Any] = {
        "id": manifest.request_id,
        "peer": {
            "uid": peer.uid,
            "backend": peer.backend,
            "host": peer.host,
            "offers": [{"access": o.access, "address": o.address, "key": o.key} for o in peer.offers],
        },
        "slot": {
            "index": ticket.index,
            "generation": ticket.generation,
            "token": ticket.token,
            "offset": ticket.offset,
            "nbytes": ticket.nbytes,
        },
        "lease": float(manifest.lease),
        "expires": float(manifest.expires),
        "consumers": manifest.consumers,
        "byteorder": manifest.byteorder,
        "structure": manifest.structure,
        "type": table.kinds,
        "types": [[dtype, list(shape)] for dtype, shape in table.types],
        "offset": table.offsets,
    }
    if manifest.checksum is not None:
        body["checksum"] = manifest.checksum
        body["sums"] = table.sums or []
    if manifest.producer is not None:
        body["producer"] = manifest.producer
    if manifest.metadata:
        body["metadata"] = plain_metadata(manifest.metadata)
    return body


def _manifest(body: Any) -> Manifest:
    record = Record(body, "the manifest")
    byteorder = record.choice("byteorder", ("little", "big"))
    ticket = validation.ticket(record.record("slot"))
    checksum = record.choice("checksum", ("xxh3",)) if "checksum" in record else None
    structure = record.mapping("structure")
    metadata = record.mapping("metadata") if "metadata" in record else {}
    validation.check_metadata(metadata)
    table = TensorTable(
        lambda: leaf_paths(structure),
        *validation.tensor_columns(record, structure, ticket, byteorder, checksum is not None),
    )
    return Manifest(
        request_id=record.text("id", validation.MAX_NAME_NBYTES),
        tensors=table,
        structure=structure,
        peer=validation.peer(record.record("peer")),
        ticket=ticket,
        lease=record.seconds("lease", positive=True),
        expires=record.seconds("expires"),
        metadata=metadata,
        consumers=record.integer("consumers", 1, validation.MAX_CONSUMERS),
        byteorder=byteorder,  # type: ignore[arg-type]
        checksum=checksum,  # type: ignore[arg-type]
        producer=record.text("producer", validation.MAX_NAME_NBYTES) if "producer" in record else None,
    )
