# SPDX-License-Identifier: Apache-2.0
"""Which peers were silent when they were last asked, so that nobody waits long for them again."""

from __future__ import annotations

import threading
import time

PATIENCE_SECONDS = 5.0
"""What a silent peer is given to answer a later pull: connecting over a lossy network takes a
second or two, and so may an answer from a host that is overloaded."""

_FORGET_SECONDS = 60.0


class SilentPeers:
    """Peers that have let a pull run out of time; any method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[bytes, float] = {}
        self._last: dict[bytes, float] = {}

    def seconds(self, uid: bytes) -> float | None:
        """Return for how long a peer has been silent; None for one that is not known to be."""
        since = self._since.get(uid)
        return None if since is None else time.monotonic() - since

    def add(self, uid: bytes) -> None:
        """Note that a peer did not answer in time."""
        now = time.monotonic()
        with self._lock:
            for old in [one for one, last in self._last.items() if now - last > _FORGET_SECONDS]:
                del self._last[old], self._since[old]
            self._since.setdefault(uid, now)
            self._last[uid] = now

    def discard(self, uid: bytes) -> None:
        """Note that a peer has answered."""
        if uid in self._since:
            with self._lock:
                self._since.pop(uid, None)
                self._last.pop(uid, None)
