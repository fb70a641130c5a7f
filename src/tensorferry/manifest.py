# SPDX-License-Identifier: Apache-2.0
"""The manifest: all that a consumer needs to know of one publication.

A manifest that arrived is untrusted.  :func:`decode_manifest` checks all of it before anyone
allocates memory for it or connects anywhere.  ``docs/wire-format.md`` describes the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from tensorferry import validation, wire
from tensorferry.backends.base import PeerOffer, SlotTicket
from tensorferry.errors import ManifestError, UsageError
from tensorferry.metadata import plain_metadata
from tensorferry.payload import Structure
from tensorferry.records import Record
from tensorferry.standing import OWN_KEYS, Standing, StandingParts
from tensorferry.tensor_table import TensorSpec, TensorTable

Checksum = Literal["xxh3"]

_PACKED_OWN_KEYS = tuple(map(wire.pack, OWN_KEYS))


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
    byteorder: validation.ByteOrder = validation.NATIVE
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
    own, standing = _own(manifest), _standing(manifest)
    try:
        body = wire.join(wire.pack(own), wire.pack(standing), _packed_peer(manifest.peer))
        data = wire.seal(body, secret)
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
    known: StandingParts | None = None,
) -> Manifest:
    """Decode and check a manifest; time and memory are bounded by its length.

    Args:
        data: The bytes that :func:`encode_manifest` gave.
        key: The producer's key; without one, only a manifest without a MAC is accepted.
        max_bytes: Longer manifests are refused unread.
        known: What earlier manifests had in common; the result may share its parts with others then, and
            must not be changed.

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
    return _manifest(wire.unseal(bytes(data), secret), known)


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


def _own(manifest: Manifest) -> dict[str, Any]:
    """Return the entries under :data:`tensorferry.standing.OWN_KEYS`."""
    ticket = manifest.ticket
    own: dict[str, Any] = {
        "id": manifest.request_id,
        "slot": {
            "index": ticket.index,
            "generation": ticket.generation,
            "token": ticket.token,
            "offset": ticket.offset,
            "nbytes": ticket.nbytes,
        },
        "expires": float(manifest.expires),
    }
    if manifest.checksum is not None:
        own["sums"] = TensorTable.of(manifest.tensors).sums or []
    if manifest.metadata:
        own["metadata"] = plain_metadata(manifest.metadata)
    return own


def _standing(manifest: Manifest) -> dict[str, Any]:
    """Return the other entries, without the peer's."""
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
    standing: dict[str, Any] = {
        "lease": float(manifest.lease),
        "consumers": manifest.consumers,
        "byteorder": manifest.byteorder,
        "structure": manifest.structure,
        "type": table.kinds,
        "types": [[dtype, list(shape)] for dtype, shape in table.types],
        "offset": table.offsets,
    }
    if manifest.checksum is not None:
        standing["checksum"] = manifest.checksum
    if manifest.producer is not None:
        standing["producer"] = manifest.producer
    return standing


@lru_cache(maxsize=64)
def _packed_peer(peer: PeerOffer) -> bytes:
    offers = [{"access": one.access, "address": one.address, "key": one.key} for one in peer.offers]
    return wire.pack(
        {"peer": {"uid": peer.uid, "backend": peer.backend, "host": peer.host, "offers": offers}}
    )


def _manifest(body: bytes, known: StandingParts | None) -> Manifest:
    first, rest = wire.split(body, _PACKED_OWN_KEYS)
    standing = None if known is None else known.get(rest)
    if standing is None:
        own = Record(wire.unpack(body), "the manifest")
        standing = Standing(own)
        if known is not None and sum(key in own for key in OWN_KEYS) == wire.entries(first):
            known.add(rest, standing)
    else:
        own = Record(wire.unpack(first, wire.MAX_NODES - len(rest)), "the manifest")
    ticket = validation.ticket(own.record("slot"))
    standing.check(ticket)
    metadata = own.mapping("metadata") if "metadata" in own else {}
    validation.check_metadata(metadata)
    return Manifest(
        request_id=own.text("id", validation.MAX_NAME_NBYTES),
        tensors=standing.table(own),
        structure=standing.structure,
        peer=standing.peer,
        ticket=ticket,
        lease=standing.lease,
        expires=own.seconds("expires"),
        metadata=metadata,
        consumers=standing.consumers,
        byteorder=standing.byteorder,
        checksum="xxh3" if standing.has_sums else None,
        producer=standing.producer,
    )
