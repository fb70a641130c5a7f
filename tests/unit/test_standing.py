# SPDX-License-Identifier: Apache-2.0
"""What manifests have in common is decoded once, and nothing else follows from having seen it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch

from manifests import BODY, KEY, body_of, forge, make_manifest
from tensorferry import wire
from tensorferry.backends.base import SlotTicket
from tensorferry.errors import AuthenticationError, ManifestError
from tensorferry.manifest import Manifest, decode_manifest, encode_manifest
from tensorferry.standing import OWN_KEYS, StandingParts

FIRST = make_manifest()


def decode(data: bytes, known: StandingParts | None) -> Manifest:
    return decode_manifest(data, known=known)


@pytest.fixture
def known() -> StandingParts:
    """What a consumer knows after one manifest."""
    parts = StandingParts()
    decode(encode_manifest(FIRST), parts)
    return parts


def ordered(*entries: tuple[str, Any]) -> bytes:
    """Seal a body with entries in this order, repeated keys included."""
    packer = msgpack.Packer()
    packed = b"".join(packer.pack(key) + packer.pack(value) for key, value in entries)
    return wire.seal(packer.pack_map_header(len(entries)) + packed, None)


def other(**changes: Any) -> Manifest:
    """The next publication of the same producer."""
    ticket = replace(FIRST.ticket, index=9, generation=8, token=b"u" * 16, offset=1 << 20)
    fields: dict[str, Any] = {"request_id": "req-43", "ticket": ticket, "expires": 1.0, "metadata": {}}
    return replace(FIRST, **{**fields, **changes})


@pytest.mark.parametrize(
    "manifest",
    [
        FIRST,
        other(),
        other(metadata={"seed": 8}),
        other(lease=5.0),
        other(consumers=2),
        other(producer="encoder-0"),
        other(peer=replace(FIRST.peer, uid=b"v" * 16)),
        make_manifest({"x": torch.zeros(3)}),
        make_manifest({"x": None}),
    ],
    ids=str,
)
def test_a_manifest_reads_the_same_whatever_was_read_before(known, manifest):
    data = encode_manifest(manifest)
    assert decode(data, known) == decode(data, known) == decode(data, None)
    assert encode_manifest(decode(data, known)) == data


def test_the_tensors_of_one_kind_of_payload_are_decoded_once(known):
    again, third = (decode(encode_manifest(other(request_id=name)), known) for name in ("a", "b"))
    assert again.tensors is third.tensors
    assert again.peer is third.peer


def test_each_manifest_has_its_own_checksums(known):
    rows = list(FIRST.tensors)
    for base in (100, 200):
        sums = [base + place for place in range(len(rows))]
        summed = tuple(row._replace(checksum=number) for row, number in zip(rows, sums, strict=True))
        found = decode(encode_manifest(other(tensors=summed, checksum="xxh3")), known)
        assert [row.checksum for row in found.tensors] == sums


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        (SlotTicket(3, 7, b"t" * 16, 4096, 512), "leaves its slot"),
        (SlotTicket(3, 7, b"t" * 16, 4097, FIRST.ticket.nbytes), "aligned"),
    ],
    ids=["a smaller slot", "an odd slot"],
)
def test_known_tensors_are_held_against_every_slot(known, ticket, message):
    with pytest.raises(ManifestError, match=message):
        decode(encode_manifest(other(ticket=ticket)), known)
    decode(encode_manifest(other()), known)


@pytest.mark.parametrize("key", OWN_KEYS[:3])
def test_what_is_missing_is_not_taken_from_an_earlier_manifest(known, key):
    body = body_of(encode_manifest(FIRST))
    del body[key]
    with pytest.raises(ManifestError, match=repr(key)):
        decode(forge(body), known)


def test_a_key_that_occurs_twice_is_refused_among_known_parts_as_well(known):
    entries = list(body_of(encode_manifest(FIRST)).items())
    decode(ordered(*entries), known)
    with pytest.raises(ManifestError, match="twice"):
        decode(ordered(("id", "req-44"), *entries), known)
    # An entry of one's own among the common ones, where only the first manifest had none in front.
    late = [entry for entry in entries if entry[0] != "metadata"] + [("metadata", {"seed": 7})]
    assert decode(ordered(*late), known).metadata == {"seed": 7}
    with pytest.raises(ManifestError, match="twice"):
        decode(ordered(("metadata", {}), *late), known)


def test_the_order_of_entries_is_free(known):
    data = encode_manifest(FIRST)
    entries = list(body_of(data).items())
    for turned in (entries[::-1], entries[3:] + entries[:3]):
        assert decode(ordered(*turned), known) == decode(data, None)


def test_known_parts_do_not_excuse_a_digest_or_a_mac(known):
    data = bytearray(encode_manifest(other()))
    data[BODY + 5] ^= 1
    with pytest.raises(ManifestError, match="digest"):
        decode(bytes(data), known)
    with pytest.raises(AuthenticationError):
        decode_manifest(encode_manifest(other(), KEY), b"another key 1234", known=known)


def test_what_peers_can_make_a_consumer_keep_is_bounded():
    parts = StandingParts()
    for number in range(40):
        payload = {f"{number}-{place}": None for place in range(9000)}  # about 70 KiB each
        data = encode_manifest(make_manifest(payload))
        assert 64 << 10 < len(data) < 256 << 10
        decode(data, parts)
        assert sum(map(len, parts._parts)) == parts._nbytes <= 1 << 20
    large = encode_manifest(make_manifest({"x" * 100 + str(place): None for place in range(4000)}))
    before = list(parts._parts)
    decode(large, parts)
    assert list(parts._parts) == before
