# SPDX-License-Identifier: Apache-2.0
"""Pool memory for NIXL, and how ranges of memory are named to it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from tensorferry.errors import RegistrationError, UsageError

Ranges = npt.NDArray[np.uint64]
"""Rows of address, bytes and device."""


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return flat memory for a pool, pinned where an accelerator is there.

    Raises:
        UsageError: There are no pools on such a device.
        RegistrationError: It cannot be had.
    """
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"a pool is on 'cpu' or 'cuda', not on {str(device)!r}")
    try:
        if device.type == "cuda" or torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError, RuntimeError, AssertionError) as error:
        raise RegistrationError(f"allocating a pool of {nbytes} bytes on {device} failed: {error}") from error
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def ranges(rows: list[tuple[int, int, int]]) -> Ranges:
    """Return rows of address, bytes and device."""
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)
