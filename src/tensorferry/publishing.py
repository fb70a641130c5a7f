# SPDX-License-Identifier: Apache-2.0
"""How a publication is made: room, copies, admission, manifest."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple

import torch

from tensorferry import layout, packing
from tensorferry.arguments import Deadline
from tensorferry.backends.base import ExportedPool
from tensorferry.columns import TensorColumns
from tensorferry.counting import Counts
from tensorferry.dispatcher import Dispatcher
from tensorferry.errors import UsageError
from tensorferry.manifest import Checksum, Manifest, encode_manifest
from tensorferry.ownership import Lifetime
from tensorferry.payload import Structure, flatten, leaf_paths
from tensorferry.publications import Held, Publications
from tensorferry.room import Room
from tensorferry.steps import Steps
from tensorferry.streams import completed_copies
from tensorferry.tensor_table import TensorTable


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms tensors are published, all of it checked.

    Attributes:
        request_id: Name of the publication.
        consumers: How many must release it.
        lease: Seconds for which it is kept.
        metadata: Plain values for the manifest.
        stream: CUDA stream for the copies, None for the current one.
        after: Events that copies must come after.
    """

    request_id: str
    consumers: int
    lease: float
    metadata: dict[str, Any]
    stream: torch.cuda.Stream | None = None
    after: Sequence[torch.cuda.Event] = ()


class Placed(NamedTuple):
    """A payload that was checked and laid out, before anything is copied."""

    structure: Structure
    columns: TensorColumns
    offsets: list[int]
    nbytes: int


def place(payload: Mapping[str, Any]) -> Placed:
    """Take a payload apart, and lay its tensors out in a slot of their own.

    Raises:
        UsageError: An object in it cannot be sent; the message names its path.
    """
    structure, columns = flatten(payload)
    return Placed(structure, columns, *layout.lay_out(columns.sizes))


def place_in(memory: torch.Tensor, payload: Mapping[str, Any]) -> Placed:
    """Take a payload apart whose tensors are in the slot already, where ``memory`` begins.

    Raises:
        UsageError: A tensor is not, is not contiguous, or shares bytes with another.
    """
    structure, columns = flatten(payload)
    found = columns.offsets_in(memory)
    if found is not None:  # else one by one: something is wrong, or the memory is not on the CPU
        ends = map(add, found, columns.sizes)
        return Placed(structure, columns, found, max(ends, default=0))

    def path(place: int) -> str:
        return leaf_paths(structure)[place]

    offsets = []
    ranges: list[tuple[int, int, int]] = []
    address, capacity = memory.data_ptr(), memory.numel()
    for place, (tensor, nbytes) in enumerate(zip(columns.tensors, columns.sizes, strict=True)):
        start = tensor.data_ptr() - address if nbytes else 0
        if not 0 <= start <= capacity - nbytes or tensor.device != memory.device:
            raise UsageError(
                f"{path(place)} is not in the memory of this reservation; publish tensors that empty() gave"
            )
        if not tensor.is_contiguous() or start % tensor.itemsize:
            raise UsageError(f"{path(place)} is not contiguous; a publication without a copy needs it to be")
        offsets.append(start)
        if nbytes:
            ranges.append((start, start + nbytes, place))
    ranges.sort()
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            raise UsageError(f"{path(one)} and {path(other)} share memory; each tensor needs its own")
    return Placed(structure, columns, offsets, max((end for _, end, _ in ranges), default=0))


class Publisher:
    """Makes publications; all of a producer that must be closed.

    Any method may be called from any thread.

    Args:
        pool: The backend's; closed with this object.
        room: Where slots come from.
        lifetime: The producer's.
        lease: Seconds that most leases last.
        key: Signs manifests, or None.
        checksum: What manifests carry for each tensor, or None.
        name: The producer's, or None.
    """

    def __init__(
        self,
        pool: ExportedPool,
        room: Room,
        lifetime: Lifetime,
        *,
        lease: float,
        key: bytes | None,
        checksum: Checksum | None,
        name: str | None,
    ) -> None:
        self.room = room
        self.publications = Publications(pool, room, lifetime, usual_lease=lease, key=key)
        self.pool = pool.pool
        self._lifetime = lifetime
        self._peer = pool.peer
        self._key = key
        self._checksum: Checksum | None = checksum
        self._name = name
        woken = threading.Event()
        # Nothing of ours that refers to this object: it would live until the collector comes.
        self.dispatcher = Dispatcher(lifetime.what, partial(_sleep, woken), woken.set)
        self._counts = Counts()
        self.counting_failures = self._counts.failing("failed_publishes")
        """Counts each block that raises as a failed publish."""

    def publish(self, terms: Terms, payload: Placed, deadline: Deadline | None) -> Steps[bytes]:
        """Copy a payload into a slot, and return its manifest.

        Args:
            terms: Of the publication.
            payload: What to publish.
            deadline: When to give up waiting for room; None does not wait.

        Raises:
            TensorferryError: As :meth:`tensorferry.Producer.publish` says.

        After an error nothing is published and no room is held.
        """
        with self._lifetime.use(), self.counting_failures:
            held = yield from self.hold(terms.request_id, payload.nbytes, deadline)
            try:
                started = time.perf_counter()
                self._fill(self.slot(held), payload, terms)
                return self._announce(terms, held, payload, started)
            except BaseException:
                self.publications.give_back(held)
                raise

    def _fill(self, slot: torch.Tensor, payload: Placed, terms: Terms) -> None:
        """Copy a payload into its slot."""
        with torch.no_grad():
            columns, offsets = payload.columns, payload.offsets
            left: Sequence[int] = range(len(columns.tensors))
            if slot.device.type == "cpu":
                left = columns.copy(slot, offsets)
            tensors = [columns.tensors[place] for place in left]
            devices = {slot.device, *(tensor.device for tensor in tensors)}
            with completed_copies(devices, terms.stream, terms.after):
                packing.clear_gaps(slot, offsets, columns.sizes)
                packing.pack(slot, tensors, [offsets[place] for place in left])

    def publish_held(self, terms: Terms, held: Held, payload: Mapping[str, Any]) -> bytes:
        """Publish what has been written into a slot that is held; return its manifest.

        Raises:
            TensorferryError: As :meth:`tensorferry.Reservation.publish` says.
        """
        with self._lifetime.use(), self.counting_failures:
            started = time.perf_counter()
            placed = place_in(self.slot(held), payload)
            with torch.no_grad(), completed_copies({self.pool.device}, terms.stream):
                packing.clear_gaps(self.slot(held), placed.offsets, placed.columns.sizes)
            return self._announce(terms, held, placed, started)

    def hold(self, request_id: str, nbytes: int, deadline: Deadline | None) -> Steps[Held]:
        """Take a name and a slot for it.

        Raises:
            UsageError: The name is taken.
            PayloadTooLargeError: The pool is smaller than that.
            PoolExhaustedError: There is no room now, and ``deadline`` is None.
            PoolTimeoutError: There was no room in time.
            ClosedError: The producer was closed before or meanwhile.
        """
        self.publications.claim(request_id)
        try:
            loan = yield from self.room.take(nbytes, f"request {request_id!r}", deadline)
            return Held(request_id, loan)
        except BaseException:
            self.publications.abandon(request_id)
            raise

    def slot(self, held: Held) -> torch.Tensor:
        """Return the memory of a slot that is held."""
        return self.pool[held.loan.offset : held.loan.offset + held.loan.nbytes]

    def figures(self) -> tuple[Counter[str], float]:
        """Return all counters, and the seconds that publishing took without waiting for room."""
        counts = self.publications.count()
        own, seconds = self._counts.figures()
        counts.update(own)
        return counts, seconds.get("publish", 0.0)

    def close(self, timeout: float) -> None:
        """End all requests and publications, wake everyone who waits, and close the pool."""
        self._lifetime.close()
        if self.dispatcher.is_this_thread:
            # The collector took the producer while this thread may have been inside a lock.
            self.dispatcher.close(last_deed=lambda: self._close(timeout))
        else:
            self._close(timeout)

    def _close(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        self.dispatcher.close()
        self.publications.close(deadline.remaining())
        if not self.dispatcher.is_this_thread:
            self.dispatcher.join(deadline.remaining())
        self.pool = self.pool.new_empty(0)  # the memory goes with the last tensor over it

    def _announce(self, terms: Terms, held: Held, payload: Placed, started: float) -> bytes:
        """Admit a slot that has its bytes, and return the manifest."""
        table = self._table(held, payload)
        publication = self.publications.admit(
            held, nbytes=payload.nbytes, lease=terms.lease, consumers=terms.consumers
        )
        try:
            manifest = Manifest(
                request_id=terms.request_id,
                tensors=table,
                structure=payload.structure,
                peer=self._peer,
                ticket=publication.ticket,
                lease=terms.lease,
                expires=time.time() + terms.lease,
                metadata=terms.metadata,
                consumers=terms.consumers,
                checksum=self._checksum,
                producer=self._name,
            )
            data = encode_manifest(manifest, self._key)
        except BaseException:
            self.publications.undo(publication, held)
            raise
        self._counts.add(publications=1, bytes_published=manifest.nbytes)
        self._counts.add_seconds("publish", time.perf_counter() - started)
        return data

    def _table(self, held: Held, payload: Placed) -> TensorTable:
        columns, sums = payload.columns, None
        if self._checksum:
            sums = packing.checksums(self.slot(held), payload.offsets, columns.sizes)
        return TensorTable(
            lambda: leaf_paths(payload.structure),
            columns.types,
            columns.kinds,
            payload.offsets,
            columns.sizes,
            sums,
        )


def _sleep(woken: threading.Event, timeout: float) -> None:
    """Wait to be woken, for the dispatcher."""
    woken.wait(timeout)
    woken.clear()
