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

_LARGEST_SPARE_NBYTES = 64 << 20
_SPARES = 4  # so at most 256 MiB are kept

# Appending, removing and copying a deque are atomic; the finalizers may run in any thread at any time.
_spare: deque[mmap.mmap] = deque(maxlen=_SPARES)


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
        weakref.finalize(array, _spare.append, pages).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _take_spare(nbytes: int) -> mmap.mmap | None:
    for pages in list(_spare):
        if len(pages) == nbytes:
            with suppress(ValueError):  # another thread was first
                _spare.remove(pages)
                return pages
    return None


def _map(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
