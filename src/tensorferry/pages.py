# SPDX-License-Identifier: Apache-2.0
"""Memory for large results: on huge pages, and used again once a result is gone.

Page faults on fresh memory, and the zeroing in them, cost more than the copy that follows
(``docs/benchmarks.md``).  So the memory of the last results that nobody refers to any more is
kept for the next results of the same size.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch

SMALLEST_NBYTES = 4 << 20
"""From here on a huge page of 2 MiB fits in, however the memory is aligned."""

_MIDDLING_NBYTES = 64 << 20
_LARGEST_SPARE_NBYTES = 512 << 20

# Four of up to 64 MiB and a larger one, so at most 768 MiB are kept.  Appending, removing and copying a deque
# are atomic; the finalizers may run in any thread at any time.
_spare: deque[mmap.mmap] = deque(maxlen=4)
_large_spare: deque[mmap.mmap] = deque(maxlen=1)


def take(nbytes: int) -> torch.Tensor:
    """Return a flat uint8 tensor on the CPU with undefined contents.

    Args:
        nbytes: At least :data:`SMALLEST_NBYTES`.

    Raises:
        OSError: The operating system refuses the memory.
    """
    pages = _take_spare(nbytes) or _map(nbytes)
    array = np.frombuffer(pages, dtype=np.uint8)  # lives as long as the tensor's storage
    if nbytes <= _LARGEST_SPARE_NBYTES:
        weakref.finalize(array, _spares(nbytes).append, pages).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _take_spare(nbytes: int) -> mmap.mmap | None:
    spares = _spares(nbytes)
    for pages in list(spares):
        if len(pages) == nbytes:
            with suppress(ValueError):  # another thread was first
                spares.remove(pages)
                return pages
    return None


def _spares(nbytes: int) -> deque[mmap.mmap]:
    return _spare if nbytes <= _MIDDLING_NBYTES else _large_spare


def _map(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
