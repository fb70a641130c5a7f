# SPDX-License-Identifier: Apache-2.0
"""Counters of what happened, and of how long it took; any method may be called from any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from contextlib import AbstractContextManager

from tensorferry.metrics import PeerStatistics

_MOST_PEERS = 1024


class Counts:
    """Numbers and seconds by name.

    The contexts it gives are plain objects: generators would cost several microseconds a call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def add(self, **counts: int) -> None:
        """Add to counters, all at once."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a time."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def failing(self, name: str) -> AbstractContextManager[None]:
        """Count blocks that raise."""
        return _Failing(self, name)

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Add the time of blocks that do not raise."""
        return _Timed(self, name)

    def figures(self) -> tuple[Counter[str], dict[str, float]]:
        """Return copies of the counters, and of the seconds."""
        with self._lock:
            return self._counts.copy(), self._seconds.copy()


class PeerCounts:
    """What came from which producer, and how."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: OrderedDict[tuple[bytes, str], tuple[tuple[str, ...], int, int]] = OrderedDict()

    def add(self, uid: bytes, access: str, transports: tuple[str, ...], nbytes: int) -> None:
        """Count a pull."""
        key = uid, access
        with self._lock:
            _, pulls, before = self._peers.get(key, ((), 0, 0))
            self._peers[key] = transports, pulls + 1, before + nbytes
            self._peers.move_to_end(key)
            if len(self._peers) > _MOST_PEERS:
                self._peers.popitem(last=False)

    def figures(self) -> tuple[PeerStatistics, ...]:
        """Return all that are kept, the latest last."""
        with self._lock:
            kept = list(self._peers.items())
        return tuple(PeerStatistics(uid.hex(), access, *counts) for (uid, access), counts in kept)


class _Failing(AbstractContextManager[None]):
    def __init__(self, counts: Counts, name: str) -> None:
        self._counts = counts
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._counts.add(**{self._name: 1})


class _Timed(AbstractContextManager[None]):
    def __init__(self, counts: Counts, name: str) -> None:
        self._counts = counts
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._counts.add_seconds(self._name, time.perf_counter() - self._started)
