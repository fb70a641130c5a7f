# SPDX-License-Identifier: Apache-2.0
"""What somebody may send instead of a manifest, drawn at random from a seed.

Most inputs are *structure-aware*: the body of a good manifest is taken apart, changed in a few
places, and sealed again with the right digest or MAC.  Without that the digest would refuse
nearly everything, and nothing behind it would be tried.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import enormous
import msgpack
import torch
from trees import Map, Place, Raw, build, copy, parse, places

from manifests import BODY, KEY, make_manifest
from tensorferry import wire
from tensorferry.backends.base import AccessOffer, PeerOffer
from tensorferry.backends.ucx_offers import MappedKey, RdmaKey, RemoteRange
from tensorferry.manifest import encode_manifest

OTHER_KEY = b"somebody else's key"

INTEGERS = [0, 1, 2, 3, 7, 8, 64, 65, 255, 4096, 4097, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
INTEGERS += [1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -4096, -(1 << 31), -(1 << 63)]
FLOATS = [0.0, -0.0, 1.0, 60.0, 5e-324, 1.7e308, math.nan, math.inf, -math.inf, -1.0]
TEXTS = ["", "a", "a.b", "a[0]", '["a"]', "\x00", "\n", "\x1b[2J", "\u202e", "é" * 9, "x" * 70, "x" * 5000]
TEXTS += ["mapped", "rdma", "served", "telepathy", "little", "big", "xxh3", "ucx", "nixl", "__class__"]
DTYPES = ["uint8", "bool", "float32", "bfloat16", "complex128", "float8_e4m3fn", "qint8", "float33", "nn", ""]
LENGTHS = [0, 1, 15, 16, 17, 23, 24, 64, 65, 4096, 4097, 8193, 65537]
NO_UTF8 = [Raw(b"\xa1\xff"), Raw(b"\xa2\xc0\x80"), Raw(b"\xa3\xed\xa0\x80"), Raw(b"\xd9\x05ab")]
HUGE = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
HUGE += [b"\xc9\xff\xff\xff\xff\x05", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xdd\x00\xff\x00\x00", b"\xc1"]
EXTENSIONS = [msgpack.ExtType(5, b"x"), msgpack.ExtType(127, bytes(300)), msgpack.Timestamp(1, 2)]
OPENINGS = [b"\x91", b"\x81\xa1a", b"\x92\xc0", b"\xdd\x00\x00\x00\x01", b"\x82\xa1a\xc0\xa1b"]


class Input(NamedTuple):
    """What a consumer with ``key`` is given, how it came to be, and whether its digest is wrong."""

    data: bytes
    key: bytes | None
    kind: str
    damaged: bool = False


def seeds() -> list[bytes]:
    """Return good manifests of different kinds, without a key."""
    rdma = RdmaKey(RemoteRange(1 << 44, 1 << 20, b"k" * 20), RemoteRange(1 << 45, 4096, b"c" * 20)).pack()
    mapped = MappedKey(4321, 7, 8, 64, 1 << 20).pack()
    offers = (AccessOffer("rdma", b"r" * 90, rdma), AccessOffer("mapped", b"", mapped))
    summed = make_manifest(checksum="xxh3", producer="encoder-0", consumers=3)
    specs = tuple(spec._replace(checksum=i << 60) for i, spec in enumerate(summed.tensors))
    many = {"layers": [{"w": torch.zeros(3, i), "b": torch.zeros(3)} for i in range(12)], "x": (None, [])}
    names = {name: torch.zeros(2) for name in ("a b", "a.b", '"', "\u202e", "")}
    deep: Any = torch.zeros(1)
    for _ in range(20):
        deep = [deep]
    manifests = [
        make_manifest(),
        dataclasses.replace(summed, tensors=specs),
        make_manifest({}),
        make_manifest({"none": None, "empty": torch.zeros(0, 4096), "lists": [[], (), {}]}),
        make_manifest(many, peer=PeerOffer(b"u" * 16, "ucx", b"h", offers)),
        make_manifest({**names, "deep": deep}, metadata={"x": [1.5, None, b"b", {"y": [True]}], "é": -1}),
    ]
    return [encode_manifest(manifest) for manifest in manifests]


class Mutator:
    """Draws inputs; the same seed and index give the same input.

    Args:
        seed: Of all inputs together.
        corpus: Inputs to start from beside the good manifests.
        large: Share of inputs that are near the limits of size; they take long.
    """

    def __init__(self, seed: int, corpus: Sequence[bytes] = (), *, large: float = 0.0005) -> None:
        self._seed = seed
        self._large = large
        good = seeds()
        self._whole = [*good, *corpus]
        self._good = [parse(data[BODY:]) for data in good]
        self._trees = [*self._good, *(tree for tree in map(_tree, corpus) if isinstance(tree, Map))]

    def draw(self, index: int) -> Input:
        """Return one input."""
        chance = random.Random(f"{self._seed} {index}")
        if chance.random() < self._large:
            name = chance.choice(sorted(enormous.CASES))
            return self._sealed(chance, enormous.CASES[name](chance.random() ** 2), f"enormous: {name}")
        kind = chance.choices(list(_KINDS), _WEIGHTS)[0]
        return _KINDS[kind](self, chance, kind)

    def _sealed(self, chance: random.Random, body: bytes, kind: str) -> Input:
        key = KEY if chance.random() < 0.3 else None
        wanted = key if chance.random() < 0.95 else chance.choice([None, KEY, OTHER_KEY])
        return Input(wire.seal(body, key), wanted, kind)

    def _fields(self, chance: random.Random, kind: str) -> Input:
        tree = copy(chance.choice(self._trees if chance.random() < 0.3 else self._good))
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            chance.choice(_CHANGES)(tree, chance, self._trees)
        return self._sealed(chance, build(tree), kind)

    def _encoding(self, chance: random.Random, kind: str) -> Input:
        body = chance.choice(self._whole)[BODY:]
        return self._sealed(chance, _damaged(body, chance, self._whole), kind)

    def _transport(self, chance: random.Random, kind: str) -> Input:
        data = chance.choice(self._whole)
        key = None
        if chance.random() < 0.3:
            data, key = wire.seal(data[BODY:], KEY), KEY
        changed = _damaged(data, chance, self._whole)
        return Input(changed, key, kind, changed != data and changed not in self._whole)

    def _header(self, chance: random.Random, kind: str) -> Input:
        data = bytearray(chance.choice(self._whole))
        for _ in range(chance.randint(1, 3)):
            if len(data) > wire.HEADER_NBYTES:
                data[chance.randrange(wire.HEADER_NBYTES)] = chance.choice([0, 1, 2, chance.randrange(256)])
        body = bytes(data[BODY:])
        if chance.random() < 0.5:  # with the digest that belongs to such a header
            digest = wire._digest(None, bytes(data[: wire.HEADER_NBYTES]), body)
            data[wire.HEADER_NBYTES :] = digest + body
        return Input(bytes(data), chance.choice([None, None, KEY]), kind)

    def _foreign(self, chance: random.Random, kind: str) -> Input:
        value = {
            "id": chance.choice(TEXTS),
            "n": [chance.choice(INTEGERS) for _ in range(chance.randrange(9))],
        }
        data = chance.choice(
            [
                lambda: pickle.dumps(value, chance.randrange(6)),
                lambda: msgpack.packb(chance.choice([value, [value], 7, None, "text", b"bytes", [1, 2]])),
                lambda: json.dumps(value).encode(),
                lambda: chance.randbytes(chance.choice(LENGTHS)),
                lambda: bytes(chance.choice(LENGTHS)),
                lambda: b"",
            ]
        )()
        return Input(data, None, kind) if chance.random() < 0.3 else self._sealed(chance, data, kind)


_KINDS: dict[str, Callable[[Mutator, random.Random, str], Input]] = {
    "fields changed and sealed again": Mutator._fields,
    "encoding changed and sealed again": Mutator._encoding,
    "damaged on the way": Mutator._transport,
    "header changed": Mutator._header,
    "something else": Mutator._foreign,
}
_WEIGHTS = [70, 12, 8, 5, 5]


def _tree(data: bytes) -> Any:
    try:
        return parse(data[BODY:])
    except Exception:  # not every input of a corpus can be taken apart
        return None


def _damaged(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Flip bits, cut, insert, repeat and splice."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        other = chance.choice(others)
        match chance.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 2:
                del changed[at : at + chance.randint(1, 8)]
            case 3:
                changed[at:at] = chance.choice([chance.randbytes(chance.randint(1, 8)), *HUGE])
            case 4:
                del changed[at:]
            case 5:
                start = chance.randrange(len(other) + 1)
                changed[at:] = other[start:]
            case _:
                start = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[start : start + chance.randint(1, 40)]
    return bytes(changed)


# Changes of a tree: each takes the tree, a source of chance, and other trees.

_Change = Callable[[Map, random.Random, Sequence[Map]], None]


def _value(chance: random.Random) -> Any:
    return chance.choice(
        [
            lambda: chance.choice(INTEGERS),
            lambda: chance.choice(FLOATS),
            lambda: chance.choice(TEXTS + DTYPES),
            lambda: bytes(chance.choice(LENGTHS)),
            lambda: chance.choice([None, True, False, [], Map(), [None], [True], [False]]),
            lambda: chance.choice(NO_UTF8),
            lambda: Raw(chance.choice(HUGE)),
            lambda: chance.choice(EXTENSIONS),
            lambda: Raw(pickle.dumps("pickled", chance.randrange(6))),
        ]
    )()


def _anywhere(tree: Any, chance: random.Random) -> Place:
    return chance.choice(list(places(tree)) or [Place([tree], 0)])


def _container(tree: Any, chance: random.Random) -> Any:
    found = [place.get() for place in places(tree)]
    return chance.choice([tree, *(node for node in found if isinstance(node, list))])


def _replace(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    _anywhere(tree, chance).put(_value(chance))


def _calculate(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    numbers = [place for place in places(tree) if type(place.get()) in (int, float)]
    if numbers:
        place = chance.choice(numbers)
        step = chance.choice([1, -1, 2, 63, -64, 512, 1 << 20, 1 << 62, -(1 << 62)])
        place.put(chance.choice([place.get() + step, -place.get(), place.get() * 2]))


def _remove(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    node = _container(tree, chance)
    if node:
        del node[chance.randrange(len(node))]


def _repeat(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    node = _container(tree, chance)
    if node:
        entry = node[chance.randrange(len(node))]
        times = chance.choice([1, 1, 1, 2, 16, 300])
        at = chance.randrange(len(node) + 1)
        node[at:at] = [list(entry) if isinstance(node, Map) else entry] * times


def _rename(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    node = _container(tree, chance)
    if isinstance(node, Map) and node:
        key = chance.choice([_value(chance), chance.choice(node)[0]])
        node[chance.randrange(len(node))][0] = key


def _shuffle(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    chance.shuffle(_container(tree, chance))


def _nest(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    place = _anywhere(tree, chance)
    depth = chance.choice([1, 2, 3, 31, 32, 33, 500, 1024, 5000])
    place.put(Raw(chance.choice(OPENINGS) * depth + build(place.get())))


def _graft(tree: Map, chance: random.Random, others: Sequence[Map]) -> None:
    _anywhere(tree, chance).put(copy(_anywhere(chance.choice(others), chance).get()))


def _add_unknown(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    node = _container(tree, chance)
    if isinstance(node, Map):
        node.insert(
            chance.randrange(len(node) + 1), [chance.choice([*TEXTS, _value(chance)]), _value(chance)]
        )


def _add_tensor(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    """Add a tensor behind the others in a way that is right, or nearly."""
    slot, structure = tree.get("slot"), tree.get("structure")
    columns = [tree.get(key) for key in ("types", "type", "offset")]
    if not isinstance(slot, Map) or not isinstance(structure, Map) or {*map(type, columns)} != {list}:
        return
    end = slot.get("nbytes")
    sizes = [chance.choice([0, 1, 1, 2, 5]) for _ in range(chance.choice([0, 1, 2, 4, 63, 64, 65]))]
    itemsize = chance.choice([1, 2, 4, 8])
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "complex64"}[itemsize]
    nbytes = math.prod(sizes) * itemsize
    if type(end) is not int or nbytes > 1 << 40:
        return
    mark: Any = chance.choice([True, [True], [False, True, None], Map([["k", True]])])
    structure.append([f"added {chance.random()}", mark])
    columns[0].append([dtype, sizes])
    columns[1].append(len(columns[0]) - 1)
    columns[2].append(chance.choice([end, end, end + 8, -(-end // 64) * 64, end - 1, 0]))
    slot.set("nbytes", end + nbytes + chance.choice([0, 64, 72, -1]))
    if type(tree.get("sums")) is list:
        tree.get("sums").append(chance.choice(INTEGERS))


def _overlap(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    offsets = tree.get("offset")
    if type(offsets) is list and len(offsets) > 1:
        source = chance.choice(offsets)
        step = chance.choice([0, 1, 4, 64, -4])
        offsets[chance.randrange(len(offsets))] = source + step if type(source) is int else source


def _reorder(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    """Swap the places of two tensors of one type: still a good manifest."""
    offsets, kinds = tree.get("offset"), tree.get("type")
    if type(offsets) is list and type(kinds) is list and len(offsets) == len(kinds) > 1:
        one, other = chance.randrange(len(offsets)), chance.randrange(len(offsets))
        offsets[one], offsets[other] = offsets[other], offsets[one]
        kinds[one], kinds[other] = kinds[other], kinds[one]


def _reshape(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    types = tree.get("types")
    if type(types) is list and types:
        sizes = [chance.choice([0, 1, 2, 3, *INTEGERS]) for _ in range(chance.choice([0, 1, 2, 3, 64, 65]))]
        types[chance.randrange(len(types))] = [chance.choice(DTYPES), sizes]


def _offer(tree: Map, chance: random.Random, _: Sequence[Map]) -> None:
    """Change what opens the pool: foreign kinds of access, and keys that the backend takes apart."""
    peer = tree.get("peer")
    offers = peer.get("offers") if isinstance(peer, Map) else None
    if type(offers) is not list:
        return
    numbers = [chance.choice(INTEGERS) for _ in range(5)]
    fields = [chance.choice([1, 4096, *INTEGERS]), chance.choice([1, 4096, *INTEGERS]), b"key"] * 2
    if chance.random() < 0.5:
        fields[chance.randrange(6)] = _value(chance)
    key = chance.choice(
        [
            lambda: MappedKey(*[n % (1 << (31, 31, 31, 32, 64)[i]) for i, n in enumerate(numbers)]).pack(),
            lambda: build(fields),
            lambda: _damaged(build(fields), chance, [build(fields)]),
            lambda: build(_value(chance)),
            lambda: chance.choice(OPENINGS) * chance.choice([3, 2000]),
            lambda: b"\x81\x91\x01\x01",  # a map with a list as its key
            lambda: bytes(chance.choice(LENGTHS)),
        ]
    )()
    access = chance.choice(["mapped", "rdma", "rdma", "served", "telepathy", chance.choice(TEXTS)])
    offer = Map([["access", access], ["address", bytes(chance.choice(LENGTHS))], ["key", key]])
    if offers and chance.random() < 0.7:
        offers[chance.randrange(len(offers))] = offer
    else:
        offers.append(offer)


_CHANGES: list[_Change] = [
    *[_replace] * 3,
    *[_calculate] * 2,
    *[_add_tensor] * 2,
    *[_offer] * 2,
    _remove,
    _repeat,
    _rename,
    _shuffle,
    _nest,
    _graft,
    _add_unknown,
    _overlap,
    _reorder,
    _reshape,
]
