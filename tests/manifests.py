# SPDX-License-Identifier: Apache-2.0
"""Manifests for tests, and ways to take them apart and to forge them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import torch

from tensorferry import wire
from tensorferry.backends.base import AccessOffer, PeerOffer, SlotTicket
from tensorferry.dtypes import dtype_to_str
from tensorferry.manifest import Manifest
from tensorferry.payload import flatten, leaf_paths
from tensorferry.tensor_table import TensorSpec

KEY = b"0123456789abcdef"
BODY = wire.HEADER_NBYTES + wire.DIGEST_NBYTES
"""Where the body begins."""


def make_manifest(payload: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    """Lay a payload out as a producer would, 512 bytes apart, with fixed identifiers."""
    if payload is None:
        payload = {
            "prompt_embeds": torch.zeros(1, 77, 64, dtype=torch.bfloat16),
            "pooled": [torch.zeros(4), None, (torch.zeros(0, 3),)],
            "guidance": torch.tensor(3.5),
            "mask": torch.ones(77, dtype=torch.bool),
        }
    structure, leaves = flatten(payload)
    specs, end = [], 0
    for path, tensor in zip(leaf_paths(structure), leaves.tensors, strict=True):
        shape, nbytes = tuple(tensor.shape), tensor.nbytes
        specs.append(TensorSpec(path, dtype_to_str(tensor.dtype), shape, end, nbytes))
        end += -(-nbytes // 512) * 512
    fields: dict[str, Any] = {
        "request_id": "req-42",
        "tensors": tuple(specs),
        "structure": structure,
        "peer": PeerOffer(
            uid=bytes(range(16)),
            backend="ucx",
            host=b"host and user",
            offers=(
                AccessOffer("mapped", bytes(60), b""),
                AccessOffer("served", b"\xaa" * 150, b"\xbb" * 8),
            ),
        ),
        "ticket": SlotTicket(index=3, generation=7, token=b"t" * 16, offset=4096, nbytes=end),
        "lease": 60.0,
        "expires": 1_750_000_000.0,
        "metadata": {"seed": 7, "size": [1024, 1024]},
    }
    return Manifest(**{**fields, **changes})


def body_of(data: bytes) -> dict[str, Any]:
    """Decode the body of a manifest without any check."""
    body: dict[str, Any] = msgpack.unpackb(data[BODY:])
    return body


def forge(body: Any, key: bytes | None = None) -> bytes:
    """Seal any body with the right digest or MAC."""
    return wire.seal(msgpack.packb(body), key)


def altered(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return an unsigned manifest whose body went through ``change``."""
    body = body_of(data)
    change(body)
    return forge(body)
