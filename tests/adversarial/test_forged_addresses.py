# SPDX-License-Identifier: Apache-2.0
"""Forged worker addresses and remote keys, which UCX takes without a length: what is refused before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import tensorferry
from manifests import KEY, make_manifest
from tensorferry import validation
from tensorferry.backends.base import AccessOffer
from tensorferry.errors import AuthenticationError, ManifestError
from tensorferry.manifest import decode_manifest, encode_manifest

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


def mutations(raw: bytes) -> Iterator[bytes]:
    """Every byte with some of its bits flipped, and every truncation."""
    for at in range(len(raw)):
        for mask in (0x01, 0x08, 0x80, 0xFF):
            yield raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
        yield raw[:at]


@pytest.fixture(scope="module")
def manifest() -> bytes:
    with tensorferry.Producer(1 << 20, access="served", key=KEY, backend_options=LOOPBACK) as producer:
        return producer.publish("x", {"x": torch.ones(3)}, lease=600)


def test_with_a_key_no_forged_address_comes_to_ucx(manifest: bytes) -> None:
    """An attacker has no key: neither an address in place nor one in a manifest sealed anew is taken."""
    good = decode_manifest(manifest, KEY)
    address = good.peer.offers[0].address
    at = manifest.index(address)
    with tensorferry.Consumer(1 << 20, key=KEY, access="served", backend_options=LOOPBACK) as consumer:
        for forged in mutations(address):
            offer = AccessOffer("served", forged, b"")
            resealed = encode_manifest(replace(good, peer=replace(good.peer, offers=(offer,))))
            for data in (resealed, manifest[:at] + forged + manifest[at + len(address) :]):
                with pytest.raises(AuthenticationError):
                    consumer.pull(data, timeout=5)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (bytes(validation.MAX_ADDRESS_NBYTES + 1), b""),
        (bytes(50), bytes(validation.MAX_KEY_NBYTES + 1)),
    ],
    ids=["address", "key"],
)
def test_lengths_are_bounded(address: bytes, key: bytes) -> None:
    good = make_manifest()
    forged = replace(good, peer=replace(good.peer, offers=(AccessOffer("served", address, key),)))
    with pytest.raises(ManifestError):
        decode_manifest(encode_manifest(forged))
