# SPDX-License-Identifier: Apache-2.0
"""Which slots of a producer may be read: the table that peers look into, and the notices they send."""

from __future__ import annotations

import secrets
import struct
import threading
from collections import deque
from typing import Literal, NamedTuple

import numpy as np
import torch

from tensorferry.backends.base import Notice, NoticeKind, SlotTicket
from tensorferry.errors import ClosedError, PoolExhaustedError

HEADER_NBYTES = 32
"""At the head of the table: the producer's uid, a word that is 1 while it is open, and nothing."""

WORD_NBYTES = 8
REVOKED = 1 << 63
"""Added to the generation in the word of a slot that was revoked; the word of others that ended is 0."""

_MOST_QUEUED = 1 << 16  # the holder of a token may send what it likes, as often as it likes
_NOTICE = struct.Struct("<4sB16s16sIQ32s")
_MAGIC = b"TFN1"
_KINDS: dict[int, NoticeKind] = {1: "release", 2: "reject"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def pack_notice(kind: Literal["release", "reject"], ticket: SlotTicket, consumer: bytes, mac: bytes) -> bytes:
    """Return the message by which a consumer gives a slot back."""
    return _NOTICE.pack(_MAGIC, _NUMBERS[kind], ticket.token, consumer, ticket.index, ticket.generation, mac)


class _Slot(NamedTuple):
    generation: int
    token: bytes


class SlotTable:
    """Slots by index, and the words that say which publication each holds.

    Peers read the words by themselves, so a word changes before the memory of its slot can be written
    again.  Any method may be called from any thread.

    Args:
        uid: Of the producer.
        pool_nbytes: Size of the pool.
        slots: How many may be admitted at a time.
    """

    def __init__(self, uid: bytes, pool_nbytes: int, slots: int) -> None:
        self.memory = torch.zeros(HEADER_NBYTES + slots * WORD_NBYTES, dtype=torch.uint8)
        self.slots = slots
        self._pool_nbytes = pool_nbytes
        whole = self.memory.numpy()
        whole[:16] = np.frombuffer(uid, dtype=np.uint8)
        self._header = whole[16:HEADER_NBYTES].view(np.uint64)
        self._header[0] = 1
        self._words = whole[HEADER_NBYTES:].view(np.uint64)
        self._changed = threading.Condition()
        self._admitted: dict[int, _Slot] = {}
        self._free = deque(range(slots))  # what was freed first is used first, so that late readers learn why
        self._next_generation = 1
        self._queue: list[Notice] = []
        self._woken = False
        self._closed = False

    def admit(self, offset: int, nbytes: int) -> SlotTicket:
        """Give a range of the pool an index, a generation and a token.

        Raises:
            PoolExhaustedError: There is no index left.
            ClosedError: The table is closed.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("the pool is closed")
            if not self._free:
                raise PoolExhaustedError(
                    f"all {self.slots} slots are taken: release publications, or make the pool larger"
                )
            index, generation = self._free.popleft(), self._next_generation
            self._next_generation += 1
            slot = self._admitted[index] = _Slot(generation, secrets.token_bytes(16))
            self._words[index] = generation
            return SlotTicket(index, generation, slot.token, offset, nbytes)

    def withdraw(self, ticket: SlotTicket, *, revoked: bool) -> None:
        """Let late readers find that the slot has ended."""
        with self._changed:
            slot = self._admitted.get(ticket.index)
            if slot is None or slot.generation != ticket.generation or self._closed:
                return
            self._words[ticket.index] = slot.generation | REVOKED if revoked else 0
            del self._admitted[ticket.index]
            self._free.append(ticket.index)

    def report(self, messages: list[bytes]) -> None:
        """Queue what consumers say of admitted slots whose tokens they know; drop the rest."""
        with self._changed:
            for message in messages:
                if len(message) != _NOTICE.size or len(self._queue) >= _MOST_QUEUED:
                    continue
                magic, kind, token, consumer, index, generation, mac = _NOTICE.unpack(message)
                slot = self._admitted.get(index)
                if magic != _MAGIC or kind not in _KINDS or slot is None:
                    continue
                if slot.generation == generation and secrets.compare_digest(slot.token, token):
                    self._queue.append(Notice(_KINDS[kind], index, generation, consumer, mac))
            self._changed.notify_all()

    def notices(self, timeout: float) -> list[Notice]:
        """Wait for notices; none on timeout, after :meth:`wake`, and once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._woken or self._closed, timeout)
            taken, self._queue, self._woken = self._queue, [], False
            return taken

    def wake(self) -> None:
        """End a :meth:`notices` that is running."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Withdraw all slots, and say so at the head of the table."""
        with self._changed:
            self._closed = True
            self._header[0] = 0
            self._words[:] = 0
            self._changed.notify_all()
