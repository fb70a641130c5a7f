# SPDX-License-Identifier: Apache-2.0
"""Forged worker addresses and remote keys, which UCX takes without a length: what is refused before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import tensorferry
from manifests import KEY, make_manifest
from tensorferry import validation
from tensorferry.backends.base import AccessOffer
from tensorferry.backends.ucx_library import system_library
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


SCRIPT = """
import sys
from dataclasses import replace
import torch
import tensorferry
from tensorferry.manifest import encode_manifest

OPTIONS = {"backend_options": {"TLS": "tcp", "NET_DEVICES": "lo"}}
with tensorferry.Producer(1 << 20, access="served", **OPTIONS) as producer:
    good = tensorferry.read_manifest(producer.publish("x", {"x": torch.ones(3)}, lease=600))
    offer = good.peer.offers[0]
    address = offer.address
    forged = [address[:n] for n in range(len(address))]
    forged += [bytes([address[0] & 0xF0 | version]) + address[1:] for version in range(2, 16)]
    for one in forged:
        offers = (replace(offer, address=one),)
        data = encode_manifest(replace(good, peer=replace(good.peer, offers=offers)))
        with tensorferry.Consumer(1 << 16, access="served", **OPTIONS) as consumer:
            try:
                right = torch.equal(consumer.pull(data, timeout=0.5, release=False)["x"], torch.ones(3))
            except tensorferry.TensorferryError:
                right = True
        if not right:
            print(one.hex())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["wheel", "system"])
def test_addresses_that_are_cut_off_or_of_another_version_kill_nobody(library: str) -> None:
    """Without a key; UCX alone asserts on the version, and reads behind the end of an address."""
    if library == "system" and system_library() is None:
        pytest.skip("the system's UCX is not installed")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TENSORFERRY_UCX": library, "UCX_LOG_LEVEL": "fatal"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
