# SPDX-License-Identifier: Apache-2.0
"""What the tests of the suite are made of: bringing bytes here, by whatever access, in bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tensorferry import steps
from tensorferry.arguments import Deadline
from tensorferry.backends.base import Connection, Reader, SlotTicket, Span
from tensorferry.testing.host import Exported

KIB, MIB = 1 << 10, 1 << 20
POOL_NBYTES = 4 * MIB
CONSUMER = b"the consumer's 16"[:16]
MAC = bytes(range(32))
SOON = 10.0  # seconds, for what takes far less unless it never comes


def connect(reader: Reader, exported: Exported, timeout: float = SOON) -> Connection:
    """Connect to a pool of another process."""
    return steps.run(reader.connect(exported.peer, "auto", Deadline(timeout)))


def bring(reader: Reader, connection: Connection, ticket: SlotTicket, spans: Sequence[Span]) -> None:
    """Bring ranges of a slot into the reader's pool and have them verified, in whatever access."""
    if connection.access != "mapped":
        connection.read(ticket, spans).wait(SOON)
        return
    view = connection.view(ticket)
    for source, destination, nbytes in spans:
        reader.pool[destination : destination + nbytes] = view[source : source + nbytes]
    connection.verify(ticket)


def landed(reader: Reader, nbytes: int, offset: int = 0) -> torch.Tensor:
    """Return what lies in the reader's pool."""
    return reader.pool[offset : offset + nbytes].cpu()


def whole(ticket: SlotTicket, destination: int = 0) -> list[Span]:
    """Return the span of all of a slot."""
    return [Span(0, destination, ticket.nbytes)]


def eventually(what: Callable[[], bool], seconds: float = SOON) -> bool:
    """Wait until something holds; False if it does not in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"it took {took:.1f} seconds, allowed are {seconds:g}"


def exit_status(child: int) -> int:
    """Return the exit status of a child process, or minus the signal that ended it."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1000
