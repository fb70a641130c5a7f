# SPDX-License-Identifier: Apache-2.0
"""What manifests of one producer have in common, decoded and checked once for all of them.

Who publishes one kind of payload again and again writes manifests that differ in a few entries.
Those come first, so the rest is the same bytes each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tensorferry import validation
from tensorferry.backends.base import SlotTicket
from tensorferry.payload import leaf_paths
from tensorferry.records import Record
from tensorferry.tensor_table import TensorTable

OWN_KEYS = ("id", "slot", "expires", "sums", "metadata")
"""What each manifest has for itself."""

_MOST_NBYTES = 1 << 20
_MOST_NBYTES_OF_ONE = 256 << 10


class Standing:
    """A manifest without what is its own; must not be changed.

    Attributes:
        structure: The payload without its tensors.
        peer: Who has the slot.
        lease: Seconds for which it is kept.
        consumers: How many must release it.
        byteorder: Of the elements.
        has_sums: Whether there is a checksum for each tensor.
        producer: The producer's name, or None.
    """

    def __init__(self, record: Record) -> None:
        self.byteorder = validation.byteorder(record)
        self.has_sums = "checksum" in record and bool(record.choice("checksum", ("xxh3",)))
        self.structure = record.mapping("structure")
        self._columns = validation.tensor_columns(record, self.structure, self.byteorder)
        self.peer = validation.peer(record.record("peer"))
        self.lease = record.seconds("lease", positive=True)
        self.consumers = record.integer("consumers", 1, validation.MAX_CONSUMERS)
        self.producer = record.text("producer", validation.MAX_NAME_NBYTES) if "producer" in record else None
        columns = self._columns
        self._table = TensorTable(
            lambda: leaf_paths(self.structure), columns.types, columns.kinds, columns.offsets, columns.sizes
        )
        self._fits: tuple[int, int] | None = None

    def check(self, slot: SlotTicket) -> None:
        """Make sure that the tensors lie in a slot as they must.

        Raises:
            ManifestError: One does not.
        """
        place = (slot.nbytes, slot.offset % validation.MAX_ALIGNMENT)
        if place != self._fits:
            validation.check_places(self._columns, self.structure, slot)
            self._fits = place

    def table(self, own: Record) -> TensorTable:
        """Return the tensors of a manifest."""
        if not self.has_sums:
            return self._table
        return self._table.with_sums(validation.sums(own, len(self._table)))


class StandingParts:
    """The last few that a consumer met, by their bytes; any method may be called from any thread.

    What peers can make it keep is bounded: 1 MiB of their bytes, and 256 KiB for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: OrderedDict[bytes, Standing] = OrderedDict()
        self._nbytes = 0

    def get(self, encoded: bytes) -> Standing | None:
        """Return what these bytes stand for, if that is known."""
        with self._lock:
            found = self._parts.get(encoded)
            if found is not None:
                self._parts.move_to_end(encoded)
            return found

    def add(self, encoded: bytes, standing: Standing) -> None:
        """Keep what these bytes stand for, in place of what was not asked for longest."""
        if len(encoded) > _MOST_NBYTES_OF_ONE:
            return
        with self._lock:
            if encoded not in self._parts:
                self._nbytes += len(encoded)
            self._parts[encoded] = standing
            while self._nbytes > _MOST_NBYTES:
                forgotten, _ = self._parts.popitem(last=False)
                self._nbytes -= len(forgotten)
