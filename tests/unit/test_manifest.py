# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import dataclasses
import enum
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifests import KEY, altered, body_of, forge, make_manifest
from tensorferry import metadata, payload, validation, wire
from tensorferry.backends.base import AccessOffer
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import AuthenticationError, ManifestError, UsageError, VersionError
from tensorferry.manifest import decode_manifest, encode_manifest, read_manifest
from tensorferry.payload import unflatten

DATA = Path(__file__).parent / "data"


def test_a_decoded_manifest_can_be_pickled_and_copied():
    manifest = decode_manifest(encode_manifest(make_manifest()))
    for again in (pickle.loads(pickle.dumps(manifest)), copy.deepcopy(manifest)):
        assert again == manifest
        assert again.tensors[0].path == "prompt_embeds"
        assert [spec.path for spec in manifest.tensors[1:3]] == list(again.names[1:3])


def test_a_manifest_comes_back_equal():
    manifest = make_manifest(producer="encoder-0", consumers=3)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_checksums_come_back():
    manifest = make_manifest()
    specs = tuple(spec._replace(checksum=(1 << 64) - 1 - i) for i, spec in enumerate(manifest.tensors))
    manifest = dataclasses.replace(manifest, tensors=specs, checksum="xxh3")
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_what_a_manifest_shows():
    manifest = read_manifest(encode_manifest(make_manifest()))
    assert manifest.names == ("prompt_embeds", "pooled[0]", "pooled[2][0]", "guidance", "mask")
    assert manifest.shapes["prompt_embeds"] == (1, 77, 64)
    assert manifest.shapes["guidance"] == ()
    assert manifest.dtypes["mask"] == "bool"
    assert manifest.nbytes == 77 * 64 * 2 + 16 + 0 + 4 + 77
    assert manifest.metadata == {"seed": 7, "size": [1024, 1024]}
    payload = unflatten(manifest.structure, manifest.names)
    assert payload["pooled"] == ["pooled[0]", None, ("pooled[2][0]",)]


def test_a_payload_without_tensors():
    manifest = make_manifest({"a": [], "b": None})
    decoded = decode_manifest(encode_manifest(manifest))
    assert decoded == manifest
    assert decoded.names == ()
    assert decoded.nbytes == 0


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def empty(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor by way of bytes, since torch warns when it makes complex32 itself."""
    return torch.empty((*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)
tensors = st.builds(
    lambda dtype, shape: empty(shape, SUPPORTED_DTYPES[dtype]),
    st.integers(0, len(SUPPORTED_DTYPES) - 1),
    st.lists(st.integers(0, 5), max_size=4),
)
payloads = st.dictionaries(
    text,
    st.recursive(
        st.none() | tensors,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(text, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=3,
)


@given(
    payloads, st.dictionaries(text, plain, max_size=4), text, st.none() | st.binary(min_size=16, max_size=64)
)
def test_any_manifest_comes_back_equal(payload, metadata, request_id, key):
    manifest = make_manifest(payload, metadata=metadata, request_id=request_id)
    assert decode_manifest(encode_manifest(manifest, key), key) == manifest


class Size(enum.IntEnum):
    LARGE = 3


class Word(str):
    __slots__ = ()


def test_metadata_becomes_plain():
    metadata = {"a": (1, [2, (3,)]), "b": Size.LARGE, "c": bytearray(b"x"), "d": True, Word("e"): Word("f")}
    decoded = decode_manifest(encode_manifest(make_manifest(metadata=metadata))).metadata
    assert decoded == {"a": [1, [2, [3]]], "b": 3, "c": b"x", "d": True, "e": "f"}
    assert decoded["d"] is True


def test_nan_in_metadata_is_kept():
    decoded = decode_manifest(encode_manifest(make_manifest(metadata={"x": [math.nan, -0.0, math.inf]})))
    assert math.isnan(decoded.metadata["x"][0])
    assert str(decoded.metadata["x"][1:]) == "[-0.0, inf]"


MOST = payload.MAX_NODES - 1
AT_THE_LIMIT: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors of distinct shapes": lambda: {"payload": {"x": [torch.empty(0, i) for i in range(MOST)]}},
    "lists": lambda: {"payload": {"x": [[] for _ in range(MOST)]}},
    "dicts of one": lambda: {"payload": {"x": [{"y": None}] * (MOST // 2)}},
    "names": lambda: {"payload": {str(i): None for i in range(MOST + 1)}},
    "lists in metadata": lambda: {"metadata": {"x": [[] for _ in range(metadata.MAX_NODES - 3)]}},
    "names in metadata": lambda: {"metadata": {str(i): None for i in range(metadata.MAX_NODES - 1)}},
    "items in metadata": lambda: {"metadata": {"x": [None] * 1_000_000}},
}


@pytest.mark.parametrize("what", AT_THE_LIMIT.values(), ids=AT_THE_LIMIT)
def test_whatever_is_published_can_be_read(what):
    """No limit of the decoder is below what the encoder lets through."""
    manifest = make_manifest(**what())
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_payload_and_metadata_at_their_limits_can_be_read_together():
    manifest = make_manifest(
        **AT_THE_LIMIT["tensors of distinct shapes"](), **AT_THE_LIMIT["lists in metadata"]()
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest


@pytest.mark.parametrize("kind", [list, dict])
def test_more_metadata_than_can_be_read_is_refused(kind):
    many = range(metadata.MAX_NODES)
    more = [[] for _ in many] if kind is list else {str(i): 0 for i in many}
    with pytest.raises(UsageError, match=r"65536 .* at metadata\['x'\]"):
        encode_manifest(make_manifest(metadata={"x": more}))


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"a": [1, {"b": object()}]}, r"metadata\['a'\]\[1\]\['b'\]"),
        ({"a": torch.ones(1)}, r"metadata\['a'\]"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1"),
        ({"a": 1 << 64}, "64 bits"),
        ({"a": -(1 << 63) - 1}, "64 bits"),
        ({"a": "\ud800"}, "Unicode"),
        ({"\ud800": 1}, "Unicode"),
        ([1], "dict"),
    ],
)
def test_unsupported_metadata_is_refused_by_path(metadata, path):
    with pytest.raises(UsageError, match=path):
        encode_manifest(make_manifest(metadata=metadata))


def test_metadata_that_contains_itself_is_refused():
    metadata: dict[str, Any] = {}
    metadata["a"] = metadata
    with pytest.raises(UsageError, match="contains itself"):
        encode_manifest(make_manifest(metadata=metadata))


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": 0.0},
        {"lease": -1.0},
        {"lease": math.nan},
        {"lease": math.inf},
        {"consumers": 0},
        {"request_id": "x" * 5000},
        {"request_id": "\ud800"},
        {"request_id": 7},
        {"producer": "x" * 5000},
        {"metadata": {"x": bytes(17 << 20)}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_encoded_is_refused(changes):
    with pytest.raises(UsageError):
        encode_manifest(make_manifest(**changes))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(data[:1] + data[1:])])
def test_any_bytes_are_taken(wrap):
    manifest = make_manifest()
    assert read_manifest(wrap(encode_manifest(manifest))) == manifest


@pytest.mark.parametrize("data", ["text", None, 7, [1], {}])
def test_what_is_not_bytes_is_a_usage_error(data):
    with pytest.raises(UsageError, match="bytes"):
        decode_manifest(data)


@pytest.mark.parametrize("key", [b"k" * 16, b"k" * 64, "a key made of text", bytearray(16)])
def test_signed_manifests_need_their_key(key):
    manifest = make_manifest()
    data = encode_manifest(manifest, key)
    assert decode_manifest(data, key) == manifest
    with pytest.raises(AuthenticationError, match="wrong"):
        decode_manifest(data, b"another key......")
    with pytest.raises(AuthenticationError, match="no key"):
        decode_manifest(data)


def test_a_key_refuses_unsigned_manifests():
    with pytest.raises(AuthenticationError, match="no MAC"):
        decode_manifest(encode_manifest(make_manifest()), KEY)


def test_text_and_bytes_are_the_same_key():
    data = encode_manifest(make_manifest(), "schlüssel-0123456789")
    assert decode_manifest(data, "schlüssel-0123456789".encode()) == make_manifest()


@pytest.mark.parametrize("key", [b"", b"k" * 15, b"k" * 65, "ü" * 33, 7, "\ud800" * 16])
def test_unfit_keys_are_refused(key):
    with pytest.raises(UsageError, match="key"):
        encode_manifest(make_manifest(), key)
    with pytest.raises(UsageError, match="key"):
        decode_manifest(encode_manifest(make_manifest()), key)


@pytest.mark.parametrize("major", [0, 2, 255])
@pytest.mark.parametrize("key", [None, KEY])
def test_another_major_version_is_refused_before_anything_else(major, key, monkeypatch):
    """vllm-project/vllm#29503, openucx/ucx#7697: peers of other versions decoded what they did not know."""
    monkeypatch.setattr(wire, "unpack", lambda body: pytest.fail("decoded"))
    data = bytearray(encode_manifest(make_manifest(), key))
    data[4] = major
    with pytest.raises(VersionError, match=f"version {major}.0"):
        decode_manifest(data, key)
    with pytest.raises(VersionError):
        decode_manifest(data[:8], key)


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [(KEY, AuthenticationError, "MAC is wrong"), (None, ManifestError, "altered or cut off on its way")],
    ids=["mac", "digest"],
)
def test_nothing_is_decoded_under_a_wrong_mac_or_digest(key, error, match, monkeypatch):
    monkeypatch.setattr(wire, "unpack", lambda body: pytest.fail("decoded"))
    data = encode_manifest(make_manifest(), key)
    damaged = [
        data[:-1] + b"\xff",
        data[:-1],
        data + b"\x00",
        data[:9],
        data[:40],
        data[:8] + bytes(32) + data[40:],
    ]
    for bad in damaged:
        with pytest.raises(error, match=match):
            decode_manifest(bad, key)


def test_a_digest_is_no_mac():
    digest = encode_manifest(make_manifest())
    signed = digest[:6] + bytes((wire.SIGNED,)) + digest[7:]
    with pytest.raises(AuthenticationError, match="MAC is wrong"):
        decode_manifest(signed, KEY)
    with pytest.raises(AuthenticationError, match="no MAC"):
        decode_manifest(digest, KEY)


def test_later_minor_versions_and_unknown_keys_are_accepted(monkeypatch):
    def change(body: dict[str, Any]) -> None:
        for record in (body, body["peer"], body["slot"], *body["peer"]["offers"]):
            record["added later"] = {"x": [1, b"y"]}

    monkeypatch.setattr(wire, "MINOR", 9)
    data = altered(encode_manifest(make_manifest()), change)
    assert data[5] == 9
    assert decode_manifest(data) == make_manifest()


def test_unknown_ways_of_access_are_left_out():
    def change(body: dict[str, Any]) -> None:
        body["peer"]["offers"].insert(0, {"access": "telepathy", "address": 7})

    data = altered(encode_manifest(make_manifest()), change)
    assert [offer.access for offer in decode_manifest(data).peer.offers] == ["mapped", "served"]


OTHER = "big" if sys.byteorder == "little" else "little"


def test_the_other_byte_order_is_refused():
    """safetensors/safetensors#448, #307, pytorch/pytorch#101688: wrong values on big-endian machines."""
    data = encode_manifest(make_manifest(byteorder=OTHER))
    with pytest.raises(ManifestError, match=f"byte order is {OTHER}"):
        decode_manifest(data)


def test_single_bytes_have_no_order():
    payload = {str(dtype): torch.empty(3, dtype=dtype) for dtype in SUPPORTED_DTYPES if dtype.itemsize == 1}
    manifest = make_manifest(payload, byteorder=OTHER)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_tensors_may_lie_in_any_order_without_overlap():
    manifest = make_manifest({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(0)})
    a, b, c = manifest.tensors
    swapped = (a._replace(offset=512), b._replace(offset=0), c._replace(offset=3))
    manifest = dataclasses.replace(manifest, tensors=swapped)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_longest_accepted_manifest_can_be_chosen():
    data = encode_manifest(make_manifest())
    decode_manifest(data, max_bytes=len(data))
    with pytest.raises(ManifestError, match="limit"):
        decode_manifest(data, max_bytes=len(data) - 1)


def test_small_manifests_are_small():
    offers = (AccessOffer("mapped", bytes(60), b""), AccessOffer("served", bytes(150), b""))
    peer = dataclasses.replace(make_manifest().peer, offers=offers)
    payload = {f"tensor_{i}": torch.zeros(i, 4) for i in range(5)}
    for key in (None, KEY):
        assert len(encode_manifest(make_manifest(payload, peer=peer), key)) < 1000


def test_manifests_grow_little_with_each_tensor():
    """ai-dynamo/nixl#156: 15,000 segments had a descriptor of 20 MB."""
    alike = encode_manifest(make_manifest({"x": [torch.empty(256)] * 10_000}))
    assert len(alike) < 10 * 10_000
    named = encode_manifest(make_manifest({f"layers.{i}.weight": torch.empty(i % 50) for i in range(10_000)}))
    assert len(named) < 40 * 10_000


@pytest.mark.parametrize("name", ["manifest-1.0.tfm", "manifest-1.0-signed.tfm"])
def test_golden_manifests_stay_decodable(name, monkeypatch):
    """vllm-project/vllm#55776: what one release wrote the next one must read."""
    monkeypatch.setattr(validation, "NATIVE", "little")
    manifest = decode_manifest((DATA / name).read_bytes(), KEY if "signed" in name else None)
    expected = make_manifest(byteorder="little", checksum="xxh3", producer="encoder-0", consumers=2)
    specs = tuple(
        spec._replace(checksum=i * 0x1111_1111_1111_1111) for i, spec in enumerate(expected.tensors)
    )
    assert manifest == dataclasses.replace(expected, tensors=specs)


def test_the_documented_example_is_the_golden_file():
    document = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    rows = [line[6:53] for line in document.splitlines() if line[:4].isalnum() and line[4:6] == "  "]
    data = (DATA / "manifest-1.0-small.tfm").read_bytes()
    assert bytes.fromhex("".join(rows)) == data
    assert forge(body_of(data)) == data
    assert body_of(data)["structure"] == {"pooled": [True, None]}
    assert decode_manifest(data).names == ("pooled[0]",)
