# SPDX-License-Identifier: Apache-2.0
"""One test for each way in which a peer may send something else than a manifest."""

from __future__ import annotations

import ast
import math
import pickle
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorferry
from manifests import BODY, KEY, altered, body_of, forge, make_manifest
from tensorferry import metadata, wire
from tensorferry.errors import ManifestError, ProtocolError
from tensorferry.manifest import decode_manifest, encode_manifest

GOOD = encode_manifest(make_manifest())
SIGNED = encode_manifest(make_manifest(), KEY)
HEADER = GOOD[: wire.HEADER_NBYTES]
DEEP = 100_000


def sealed(body: bytes) -> bytes:
    """Give any bytes the digest without which they would not be looked at."""
    return wire.seal(body, None)


def refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(ManifestError, match=match):
        decode_manifest(data)


def survives(data: bytes, key: bytes | None = None) -> bool:
    """Return whether the bytes are accepted; any error but ProtocolError fails the test."""
    try:
        decode_manifest(data, key)
    except ProtocolError:
        return False
    return True


def with_entry(*path: Any, value: Any) -> bytes:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return altered(GOOD, change)


# The envelope.


@pytest.mark.parametrize(("data", "key"), [(GOOD, None), (SIGNED, KEY)], ids=["plain", "signed"])
def test_truncated_at_each_byte(data, key):
    for end in range(len(data)):
        assert not survives(data[:end], key), end


@pytest.mark.parametrize(("data", "key"), [(GOOD, None), (SIGNED, KEY)], ids=["plain", "signed"])
def test_bits_flipped_at_each_byte(data, key):
    for i in range(len(data)):
        for bit in range(8):
            assert not survives(data[:i] + bytes((data[i] ^ 1 << bit,)) + data[i + 1 :], key), (i, bit)


def test_bits_flipped_at_each_byte_by_someone_who_makes_a_new_digest():
    body = GOOD[BODY:]
    accepted = sum(
        survives(sealed(body[:i] + bytes((body[i] ^ 1 << bit,)) + body[i + 1 :]))
        for i in range(len(body))
        for bit in range(8)
    )
    assert 0 < accepted < 8 * len(body)


def test_a_mac_stripped_or_moved_between_manifests():
    other = encode_manifest(make_manifest(request_id="other"), KEY)
    body = SIGNED[BODY:]
    assert not survives(HEADER + body, KEY)
    assert not survives(sealed(body), KEY)
    assert not survives(other[:BODY] + body, KEY)
    assert not survives(SIGNED[: wire.HEADER_NBYTES] + bytes(wire.DIGEST_NBYTES) + body, KEY)


@pytest.mark.parametrize("data", [b"", b"\x00", HEADER, HEADER[:7], b"MZ" + bytes(100), bytes(1000)])
def test_no_manifest_at_all(data):
    refused(data)


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_is_never_loaded(protocol):
    """sgl-project/sglang#21435, vllm-project/vllm#17192, InternLM/lmdeploy#4804: peers were unpickled."""

    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    bomb = pickle.dumps(Bomb(), protocol)
    refused(bomb)
    refused(HEADER + bomb)
    refused(sealed(bomb))
    refused(with_entry("peer", "uid", value=bomb))


@pytest.mark.parametrize(("position", "value"), [(6, 2), (6, 0x80), (7, 1)])
def test_unknown_flags(position, value):
    data = bytearray(GOOD)
    data[position] = value
    refused(bytes(data), "flags")


@pytest.mark.parametrize("tail", [b"\x00", b"\xc0", GOOD, bytes(5000)])
def test_trailing_data(tail):
    refused(GOOD + tail, "altered")
    refused(sealed(GOOD[BODY:] + tail), "follow")


def test_too_long_is_refused_unread(monkeypatch):
    monkeypatch.setattr(wire, "unseal", lambda data, key: pytest.fail("read"))
    refused(bytes((16 << 20) + 1), "limit")


# msgpack.


@pytest.mark.parametrize("body", [None, True, 1, 1.5, "x", b"x", [], [1, 2]], ids=repr)
def test_a_body_that_is_no_map(body):
    refused(forge(body), "not a map")


HUGE = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "array32 that fits the limit": b"\xdd\x00\xff\x00\x00",
    "map32": b"\xdf\xff\xff\xff\xff",
    "str32": b"\xdb\xff\xff\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x05",
    "array16": b"\xdc\xff\xff",
    "map16": b"\xde\xff\xff",
}


def peak_of_refusing(data: bytes) -> int:
    tracemalloc.start()
    try:
        refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("head", HUGE.values(), ids=HUGE)
def test_huge_announced_lengths_allocate_nothing(head):
    assert peak_of_refusing(sealed(head)) < 1 << 20
    assert peak_of_refusing(sealed(b"\x81\xa1x" + head)) < 1 << 20


@pytest.mark.parametrize("head", [HUGE["array32 that fits the limit"], b"\xde\xff\xff"])
def test_nested_huge_lengths_allocate_nothing(head):
    assert peak_of_refusing(sealed(head * 500 + bytes(100_000))) < 8 << 20


@pytest.mark.parametrize(
    "item", [b"\x80", b"\x90", b"\x91\x90", b"\xa0", b"\xa2ab", b"\xcb" + bytes(8), b"\xc0"]
)
def test_memory_is_bounded_by_length(item):
    nbytes = 4 << 20
    count = nbytes // len(item)
    body = b"\x81\xa1x\xdd" + struct.pack(">I", count) + item * count
    assert peak_of_refusing(sealed(body)) < 40 * nbytes


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x92\xc0", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [40, 500, 1023, 1025, DEEP])
def test_deep_nesting(opening, depth):
    refused(sealed(opening * depth + b"\xc0"))
    whole = sealed(b"\x81\xa1x" + opening * depth + b"\xc0" * (depth + 1))
    refused(whole)


@pytest.mark.parametrize("kind", [list, dict])
def test_more_metadata_than_a_producer_may_send(kind):
    many = range(metadata.MAX_NODES)
    refused(
        with_entry(
            "metadata", "x", value=[[]] * len(many) if kind is list else dict.fromkeys(map(str, many))
        ),
        "65536",
    )


@pytest.mark.parametrize("key", ["structure", "metadata"])
@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}], ids=["lists", "maps"])
@pytest.mark.parametrize("depth", [33, 100, 400])
def test_deep_nesting_where_nesting_is_allowed(key, wrap, depth):
    value: Any = None
    for _ in range(depth):
        value = wrap(value)
    refused(with_entry(key, value={"k": value}), "deep")


@pytest.mark.parametrize("where", [("id",), ("metadata", "x"), ("unknown",), ("structure", "x")])
@pytest.mark.parametrize(
    "extension",
    [
        msgpack.ExtType(5, b"x"),
        msgpack.ExtType(127, bytes(300)),
        msgpack.ExtType(5, b""),
        msgpack.Timestamp(1, 2),
    ],
    ids=str,
)
def test_extension_types(where, extension):
    refused(with_entry(*where, value=extension))


@pytest.mark.parametrize(
    "key", [b"\x01", b"\xc0", b"\xc4\x01a", b"\x90", b"\x80", b"\xcb" + bytes(8), b"\xc3"]
)
def test_keys_that_are_no_text(key):
    refused(sealed(b"\x81" + key + b"\x01"))
    refused(sealed(b"\x81\xa1x\x81" + key + b"\x01"))


def test_a_key_twice():
    body = GOOD[BODY:]
    twice = bytes((body[0] + 1,)) + body[1:] + b"\xa2id\xa1x"
    refused(sealed(twice), "twice")
    inner = msgpack.packb({"x": 0})[:-1] + b"\x82\xa1a\x01\xa1a\x02"
    refused(sealed(inner), "twice")


@pytest.mark.parametrize("text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])
def test_text_that_is_no_utf8(text):
    packed = bytes((0xA0 + len(text),)) + text
    refused(sealed(b"\x81\xa2id" + packed))
    refused(sealed(b"\x81" + packed + b"\xc0"))


# Fields.


@pytest.mark.parametrize("key", [key for key in body_of(GOOD) if key != "metadata"])
def test_a_missing_field(key):
    refused(altered(GOOD, lambda body: body.pop(key)), key)


@pytest.mark.parametrize("record", ["peer", "slot"])
def test_a_missing_field_of_a_record(record):
    for key in body_of(GOOD)[record]:
        refused(altered(GOOD, lambda body, key=key: body[record].pop(key)), key)


WRONG = [None, True, False, 0, -1, 1 << 64 - 1, 1.5, math.nan, "x", "", b"", b"x", [], [None], {}, {"x": 1}]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_any_field_of_any_other_type_raises_nothing_else(value):
    body = body_of(GOOD)
    paths: list[tuple[Any, ...]] = [(key,) for key in body]
    paths += [(record, key) for record in ("peer", "slot") for key in body[record]]
    paths += [("peer", "offers", 0, key) for key in body["peer"]["offers"][0]]
    paths += [("peer", "offers", 0), ("types", 0), ("types", 0, 0), ("types", 0, 1), ("types", 0, 1, 0)]
    paths += [("type", 0), ("offset", 0), ("structure", "pooled"), ("structure", "pooled", 0)]
    for path in paths:
        survives(with_entry(*path, value=value))


FIELDS = {
    "boolean as number": [(("consumers",), True), (("slot", "index"), False), (("slot", "generation"), True)],
    "float as number": [(("consumers",), 1.0), (("slot", "offset"), 0.0)],
    "number as float": [(("lease",), 60), (("expires",), 0)],
    "text as bytes": [(("peer", "uid"), "u" * 16), (("slot", "token"), "t" * 16)],
    "bytes as text": [(("id",), b"x"), (("peer", "backend"), b"ucx"), (("byteorder",), b"little")],
    "lease": [(("lease",), value) for value in (math.nan, math.inf, -math.inf, -1.0, 0.0)],
    "expires": [(("expires",), value) for value in (math.nan, math.inf, -1.0)],
    "consumers": [(("consumers",), value) for value in (0, -1, 1 << 31)],
    "generation": [(("slot", "generation"), value) for value in (0, -1, 1 << 63, (1 << 63) + 7)],
    "index": [(("slot", "index"), value) for value in (-1, 1 << 32)],
    "slot size": [(("slot", "nbytes"), value) for value in (-1, 1 << 63, (1 << 63) - 4096)],
    "slot offset": [(("slot", "offset"), value) for value in (-1, 1 << 63, (1 << 63) - 1)],
    "token length": [(("slot", "token"), bytes(n)) for n in (0, 15, 17, 5000)],
    "uid length": [(("peer", "uid"), bytes(n)) for n in (0, 15, 17, 5000)],
    "host length": [(("peer", "host"), bytes(65))],
    "backend length": [(("peer", "backend"), "x" * 65), (("peer", "backend"), "ü" * 33)],
    "id length": [(("id",), "x" * 4097)],
    "address length": [(("peer", "offers", 0, "address"), bytes((8 << 10) + 1))],
    "remote key length": [(("peer", "offers", 0, "key"), bytes((64 << 10) + 1))],
    "too many offers": [(("peer", "offers"), [{"access": "x"}] * 17)],
    "offer twice": [(("peer", "offers", 1, "access"), "mapped")],
    "byte order": [(("byteorder",), "middle"), (("byteorder",), "")],
    "checksum": [(("checksum",), "md5"), (("checksum",), "xxh3"), (("checksum",), None)],
    "too many keys": [(("peer",), {str(i): 0 for i in range(257)})],
    "metadata": [(("metadata",), []), (("metadata",), None)],
    "mark": [
        (("structure", "x"), value) for value in (False, 1, 0, "x", b"x", 1.0, [[False, 1]], [True, False])
    ],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [pytest.param(*case, id=f"{name} {i}") for name, cases in FIELDS.items() for i, case in enumerate(cases)],
)
def test_a_field_out_of_bounds(path, value):
    refused(with_entry(*path, value=value))


# Tensors.


@pytest.mark.parametrize("marks", [0, 1, 4, 6, 1000])
def test_more_or_fewer_marks_than_tensors(marks):
    refused(with_entry("structure", value={"x": [True] * marks}))


@pytest.mark.parametrize("column", ["type", "offset"])
@pytest.mark.parametrize("change", [lambda c: c.pop(), lambda c: c.append(0), lambda c: c.clear()])
def test_columns_of_another_length(column, change):
    refused(altered(GOOD, lambda body: change(body[column])), column)


@pytest.mark.parametrize("index", [-1, 5, 1 << 40, True, 0.0, None])
def test_a_tensor_of_no_type(index):
    refused(with_entry("type", 0, value=index))


@pytest.mark.parametrize(
    "dtype",
    ["", "float33", "torch.float32", "qint8", "object", "__class__", "nn", "x" * 5000, 1, None, b"float32"],
)
def test_an_unknown_dtype(dtype):
    refused(with_entry("types", 0, 0, value=dtype))


def test_an_unknown_dtype_is_named():
    refused(with_entry("types", 0, 0, value="float33"), "float33")


@pytest.mark.parametrize(
    "shape",
    [
        [-1],
        [1 << 63],
        [(1 << 63) - 1],
        [1 << 32, 1 << 32],
        [1 << 62, 4, 0],
        [0, 1 << 62, 4],
        [(1 << 64) - 1, 2],
        [1] * 65,
        [1 << 40] * 64,
        [True],
        [1.0],
        [None],
        ["1"],
        [[1]],
        None,
        5,
        {},
    ],
    ids=lambda shape: str(shape)[:30],
)
def test_an_impossible_shape(shape):
    refused(with_entry("types", 0, 1, value=shape))


@pytest.mark.parametrize("entry", [[], ["float32"], ["float32", [1], 0], {}, None, "float32"])
def test_a_malformed_type(entry):
    refused(with_entry("types", 0, value=entry))


@pytest.mark.parametrize("offset", [-1, -512, 1 << 63, (1 << 64) - 1, 1 << 40, True, 0.0, None, "0"])
def test_an_impossible_offset(offset):
    refused(with_entry("offset", 0, value=offset))


def test_a_tensor_outside_of_its_slot():
    """openucx/ucx#3731, #5868: UCX does not check what it is given, so it is checked before."""
    nbytes = body_of(GOOD)["slot"]["nbytes"]
    refused(with_entry("offset", 4, value=nbytes - 76), "leaves its slot")
    refused(with_entry("slot", "nbytes", value=nbytes - 512), "leaves its slot|not in")
    refused(with_entry("offset", 2, value=nbytes + 4))


def test_tensors_that_overlap():
    refused(with_entry("offset", 1, value=0), "overlaps")
    refused(with_entry("offset", 4, value=0), "overlaps")
    refused(with_entry("offset", 3, value=body_of(GOOD)["offset"][1] + 12), "overlaps")


def test_tensors_that_no_view_could_show():
    refused(with_entry("offset", 0, value=1), "aligned")
    refused(with_entry("slot", "offset", value=4097), "aligned")


def test_many_tensors_on_one_spot_are_refused_in_time():
    payload = {"x": [torch.zeros(1)] * 50_000}
    data = encode_manifest(make_manifest(payload))
    begin = time.perf_counter()
    refused(altered(data, lambda body: body.update(offset=[0] * 50_000)), "overlaps")
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("offset", [0, 1, 1 << 40], ids=["overlaps", "odd", "outside"])
def test_names_cannot_write_lines_into_logs_or_steer_terminals(offset):
    name = "a\nb\x1b[2J\u202e" + "c" * 10_000
    payload = {name: torch.ones(4), "other": torch.ones(4)}
    data = encode_manifest(make_manifest(payload, ticket=make_manifest().ticket))
    with pytest.raises(ManifestError) as caught:
        decode_manifest(altered(data, lambda body: body["offset"].__setitem__(1, offset)))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_long_keys_above_many_tensors():
    payload = {"x": [torch.zeros(0)] * 50_000}
    data = encode_manifest(make_manifest(payload))
    long = altered(data, lambda body: body.update(structure={"k" * 100_000: body["structure"]["x"]}))
    assert peak_of_refusing(long) < 64 << 20


def test_millions_of_marks():
    count = 3_000_000
    column = b"\xdd" + struct.pack(">I", count) + bytes(count)
    marks = b"\xdd" + struct.pack(">I", count) + b"\xc3" * count
    body = body_of(GOOD)
    del body["structure"], body["type"], body["offset"]
    packed = msgpack.packb(body)
    data = bytes((packed[0] + 3,)) + packed[1:]
    data += b"\xa9structure\x81\xa1x" + marks + b"\xa4type" + column + b"\xa6offset" + column
    assert peak_of_refusing(sealed(data)) < 160 << 20


def test_paths_cannot_be_made_equal():
    data = encode_manifest(make_manifest({"a": {"b": torch.ones(1)}, "c": torch.ones(1)}))
    data = altered(data, lambda body: body.update(structure={"a": {"b": True}, "a.b": True}))
    assert len(set(decode_manifest(data).names)) == 2


# Anything.


@given(st.binary(max_size=200))
def test_random_bodies(body):
    assert not survives(body)
    assert not survives(sealed(body))


def mutations(seed: int, body: bytes) -> bytes:
    chance = random.Random(seed)
    changed = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randint(1, 8)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                source = chance.randrange(len(changed))
                changed[at:at] = changed[source : source + chance.randint(1, 40)]
    return bytes(changed)


def test_random_mutations():
    for seed in range(4000):
        survives(sealed(mutations(seed, GOOD[BODY:])))


values: Callable[[Any], Any] = lambda inner: (  # noqa: E731
    st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=20),
    values,
    max_leaves=8,
)


@given(st.sampled_from(sorted(body_of(GOOD))), anything)
def test_any_value_in_any_field(key, value):
    survives(with_entry(key, value=value))


@given(st.dictionaries(st.sampled_from(sorted(body_of(GOOD))), anything))
def test_any_body(body):
    assert not survives(forge(body))


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_the_package_neither_unpickles_nor_evaluates():
    sources = sorted(Path(tensorferry.__file__).parent.rglob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            assert not names & FORBIDDEN, f"{source}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", None)
                assert called not in FORBIDDEN_CALLS, f"{source}:{node.lineno}"
                owner = ast.unparse(node.func)
                assert owner not in ("torch.load", "torch.jit.load"), f"{source}:{node.lineno}"
