# SPDX-License-Identifier: Apache-2.0
"""Everything a consumer does with a manifest before it connects, and what must hold while it does."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from tensorferry import layout
from tensorferry import manifest as manifests
from tensorferry.backends.ucx import UcxReader
from tensorferry.backends.ucx_offers import MappedKey, RdmaKey
from tensorferry.errors import ConnectError, ManifestError, ProtocolError, TensorferryError, UsageError
from tensorferry.manifest import Manifest, decode_manifest, encode_manifest
from tensorferry.orders import Order, Piece
from tensorferry.payload import unflatten
from tensorferry.standing import StandingParts

CPU_SECONDS = 1.0
MEMORY_NBYTES = 128 << 20
MEMORY_FACTOR = 32
MESSAGE_CHARACTERS = 1000

INDICES = [0, -1, ..., None, 76, (), slice(0, 8), slice(None, None, 2), slice(5, 1), slice(-3, None)]
INDICES += [(..., 0), (..., slice(0, 4)), (slice(None), slice(1, None, 3)), (0, None, slice(1, 2)), 1 << 62]

_LANDING_NBYTES = 1 << 20
_EXAMINED_NBYTES = 1 << 20
_CPU = torch.device("cpu")
_RESET_PEAK = "5"  # to /proc/self/clear_refs: the peak of the resident memory begins anew

_T = TypeVar("_T")


class Finding(Exception):  # noqa: N818 - not an error of the judge
    """What a consumer did that it must not do."""


class Verdict(NamedTuple):
    """How an input ended, what it took, and what is wrong with that."""

    outcome: str
    cpu_seconds: float
    memory_nbytes: int
    finding: str | None


class Judge:
    """A consumer that never connects.

    Args:
        cpu_seconds: Most CPU time for one input.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._known = StandingParts()
        self._reader = UcxReader(4096, device=_CPU, access="auto", options={})
        generator = torch.Generator().manual_seed(1)
        self._slot = torch.randint(0, 256, (_LANDING_NBYTES,), dtype=torch.uint8, generator=generator)
        self._pool = torch.zeros(_LANDING_NBYTES, dtype=torch.uint8)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close(1.0)

    def judge(self, data: bytes, key: bytes | None, *, damaged: bool = False) -> Verdict:
        """Decode an input, use it if it can be used, and measure that.

        Args:
            data: The input.
            key: The consumer's key.
            damaged: Whether the digest cannot be right.
        """
        verdict = self._measured(data, key)
        for _ in range(2):  # a busy machine is not the input's fault
            if verdict.finding is None or verdict.cpu_seconds <= self._cpu_seconds:
                break
            verdict = self._measured(data, key)
        if damaged and verdict.finding is None and verdict.outcome.startswith("accepted"):
            return verdict._replace(finding="it was accepted although it was damaged")
        return verdict

    def _measured(self, data: bytes, key: bytes | None) -> Verdict:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        before, start = _peak_nbytes(), time.process_time()
        finding = None
        seconds, nbytes = 0.0, 0
        try:
            try:
                manifest, outcome = self._used(data, key)
            finally:
                seconds, nbytes = time.process_time() - start, _peak_nbytes() - before
            if len(data) < _EXAMINED_NBYTES:
                if manifest is not None:
                    self._examine(manifest, key)
                self._compare(data, key, manifest)
        except Finding as found:
            outcome, finding = "finding", str(found)
        except Exception as error:
            outcome, finding = type(error).__name__, f"{type(error).__name__}: {error!s:.1000}"
        if finding is None and seconds > self._cpu_seconds:
            finding = f"it took {seconds:.2f} s of CPU time"
        if finding is None and nbytes > MEMORY_NBYTES + MEMORY_FACTOR * len(data):
            finding = f"it took {nbytes >> 20} MiB of memory"
        return Verdict(outcome, seconds, nbytes, finding)

    def _used(self, data: bytes, key: bytes | None) -> tuple[Manifest | None, str]:
        """Do what every pull does."""
        try:
            manifest = decode_manifest(data, key)
        except ProtocolError as error:
            _check_message(error)
            return None, type(error).__name__
        order = Order.of(manifest, None)
        layout.landing_offsets(order.regions)
        unflatten(order.structure, [None] * len(order.table))
        return manifest, self._offers(manifest)

    def _examine(self, manifest: Manifest, key: bytes | None) -> None:
        """Look at it from all sides."""
        _check(len(set(manifest.names)) == len(manifest.tensors), "two tensors have one path")
        self._order(manifest, None)
        names = list(manifest.structure)
        self._order(manifest, random.Random(len(names)).sample(names, min(len(names), 3)))
        _refused(lambda: Order.of(manifest, ["a name that nobody has"]), UsageError)
        if names:
            _refused(lambda: Order.of(manifest, [names[0], names[0]]), UsageError)
        _refused(lambda: Order.of(manifest, None, {"a path that nobody has": 0}), UsageError)
        self._parts(manifest)
        again = encode_manifest(manifest, key)
        _check(encode_manifest(decode_manifest(again, key), key) == again, "it is not the same when sent on")

    def _compare(self, data: bytes, key: bytes | None, manifest: Manifest | None) -> None:
        """Decode it as a consumer does that has met many others, and perhaps its like."""

        def decode() -> Manifest:
            return manifests.decode_manifest(data, key, known=self._known)

        if manifest is None:
            _refused(decode, ProtocolError)
            return
        encoded = encode_manifest(manifest)  # NaNs in metadata are not equal to themselves; their bytes are
        for _ in range(2):
            _check(encode_manifest(decode()) == encoded, "it reads otherwise after others")

    def _order(self, manifest: Manifest, names: Sequence[str] | None) -> None:
        order = Order.of(manifest, names)
        _check(names is None or list(order.structure) == names, "these are not the names asked for")
        leaves = [f"leaf {index}" for index in range(len(order.table))]
        payload = unflatten(order.structure, leaves)
        _check(list(payload) == list(order.structure), "the payload has other names")
        _check(len(str(order)) < 2000, "the order's name is too long for a message")
        members = [index for region in order.regions for index in region.members]
        with_bytes = [index for index, spec in enumerate(order.table) if spec.nbytes]
        _check(sorted(members) == with_bytes, "the regions do not have every tensor once")
        end = 0
        for region in order.regions:
            _check(region.start >= end, "regions overlap")
            end = region.start
            for spec in map(order.table.__getitem__, region.members):
                _check(spec.offset >= end, "tensors overlap")
                end = spec.offset + spec.nbytes
            _check(end == region.start + region.nbytes, "a region ends elsewhere than its last tensor")
        _check(end <= manifest.ticket.nbytes, "a region leaves the slot")
        offsets, nbytes = layout.landing_offsets(order.regions)
        if nbytes > _LANDING_NBYTES or len(order.table) > 1000:
            return
        pieces, end = [], 0
        for offset, region in zip(offsets, order.regions, strict=True):
            _check(offset >= end, "regions overlap where they land")
            end = offset + region.nbytes
            pieces.append(Piece(region, self._pool[offset:end]))
        _check(end == nbytes, "the landing block has another size")
        for spec, tensor in zip(order.table, order.copies(pieces, _CPU), strict=True):
            _check(
                (tuple(tensor.shape), tensor.nbytes) == (spec.shape, spec.nbytes),
                "a tensor has another shape",
            )

    def _parts(self, manifest: Manifest) -> None:
        """Pull parts of some tensors out of random bytes, and compare them with torch's own indexing."""
        chance = random.Random(manifest.ticket.nbytes)
        paths = chance.sample(manifest.names, min(len(manifest.names), 3))
        try:
            order = Order.of(manifest, None, {path: chance.choice(INDICES) for path in paths})
        except UsageError as error:
            _check_message(error)
            return
        offsets, nbytes = layout.landing_offsets(order.regions)
        if max(nbytes, manifest.ticket.nbytes) > _LANDING_NBYTES or len(order.table) > 1000:
            return
        for source, destination, size in order.spans(offsets):
            _check(0 <= source < source + size <= manifest.ticket.nbytes, "a read leaves the slot")
            _check(destination + size <= nbytes, "a read leaves the landing block")
            self._pool[destination : destination + size] = self._slot[source : source + size]
        pieces = [
            Piece(region, self._pool[offset : offset + region.nbytes])
            for offset, region in zip(offsets, order.regions, strict=True)
        ]
        whole = Order.of(manifest, None)
        views = whole.views(
            [Piece(region, self._slot[region.start :][: region.nbytes]) for region in whole.regions], _CPU
        )
        for index, part in enumerate(order.copies(pieces, _CPU)):
            wanted = order.selections.get(index)
            expected = views[index] if wanted is None else views[index][wanted.index]
            _check(part.shape == expected.shape, "a part has another shape than torch gives it")
            _check(_bits(part) == _bits(expected), "a part has other bytes than torch gives it")

    def _offers(self, manifest: Manifest) -> str:
        usable = []
        for offer in manifest.peer.offers:
            try:
                if offer.access == "rdma":
                    RdmaKey.parse(offer.key)
                if offer.access == "mapped":
                    MappedKey.parse(offer.key)
                usable.append(offer.access)
            except ManifestError as error:
                _check_message(error)
        for access in ("auto", "rdma", "mapped", "served"):
            try:
                chosen = self._reader._choose(manifest.peer, access)
                _check(
                    set(chosen) <= set(manifest.peer.offers) and bool(chosen), "it chose what is not offered"
                )
            except ConnectError as error:
                _check_message(error)
        return f"accepted, {len(usable)} of {len(manifest.peer.offers)} offers usable"


def _bits(tensor: torch.Tensor) -> bytes:
    """Return all bytes; as integers, since copies by torch make 0 and 1 of any bool."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return bytes(integers.reshape(-1).numpy().tobytes())


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Finding(otherwise)


def _check_message(error: TensorferryError) -> None:
    """An error's message goes into logs: it must neither flood them nor steer a terminal."""
    message = str(error)
    _check(len(message) <= MESSAGE_CHARACTERS, f"a message of {len(message)} characters: {message:.200}")
    _check(message.isprintable(), f"an unprintable message: {message!r:.200}")


def _refused(action: Callable[[], _T], kind: type[TensorferryError]) -> None:
    try:
        action()
    except kind as error:
        _check_message(error)
    else:
        raise Finding("a wrong call was not refused")
