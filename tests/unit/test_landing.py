# SPDX-License-Identifier: Apache-2.0
"""Landing memory in quarantine comes back, once, and many blocks of it as fast as few."""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from tensorferry import steps
from tensorferry.arguments import Deadline
from tensorferry.backends.base import Read
from tensorferry.landing import BLOCK_NBYTES, Landing


class GivenUp:
    """A read that writes to its memory until it is told to stop."""

    settled = False

    def cancel(self) -> None:
        """Go on."""


def given_up(blocks: int) -> tuple[Landing, list[Any]]:
    """Return landing memory, all of it under reads that were given up, and these."""
    landing = Landing(torch.empty(blocks * BLOCK_NBYTES, dtype=torch.uint8), "the test")
    reads = [GivenUp() for _ in range(blocks)]
    loans = [steps.run(landing.take(1, "a", Deadline(1.0))) for _ in reads]
    for read, loan in zip(reads, loans, strict=True):
        landing.give_up(loan, [cast(Read, read)])
    return landing, reads


def test_what_is_settled_comes_back_and_the_rest_stays():
    landing, reads = given_up(8)
    assert (landing.quarantined_nbytes, landing.allocated_nbytes) == (8, 8 * BLOCK_NBYTES)
    for read in reads[1::2]:
        read.settled = True
    landing.sweep()
    landing.sweep()
    assert (landing.quarantined_nbytes, landing.allocated_nbytes) == (4, 4 * BLOCK_NBYTES)
    for read in reads:
        read.settled = True
    landing.sweep()
    assert (landing.quarantined_nbytes, landing.allocated_nbytes) == (0, 0)


def cost_of_sweeping(blocks: int) -> float:
    """Return the CPU seconds in which so many blocks come back at once."""
    landing, reads = given_up(blocks)
    for read in reads:
        read.settled = True
    started = time.thread_time()
    landing.sweep()
    spent = time.thread_time() - started
    assert landing.allocated_nbytes == 0
    return spent


def test_many_come_back_as_fast_as_few():
    assert cost_of_sweeping(4000) < 20 * min(cost_of_sweeping(500) for _ in range(3)) + 0.02
