# SPDX-License-Identifier: Apache-2.0
"""A process with the pools that a test reads; it can be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tensorferry.backends import registry
from tensorferry.backends.base import ExportedPool, Notice, PeerOffer, Reader, SlotTicket

_SPAWN = multiprocessing.get_context("spawn")  # a forked child could not use the backend
_QUIET_SECONDS = 0.15
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend in one of its access modes.

    Attributes:
        name: What manifests call it.
        module: Where its ``export_pool`` and ``open_reader`` are, for one that is not installed by its name.
        access: The mode.
        options: Its ``backend_options``, on both sides.
        device: Where pools are.
    """

    name: str
    access: str
    module: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    def install(self) -> None:
        """Make it known by its name in this process."""
        if self.module is not None:
            registry.MODULES[self.name] = self.module

    def export_pool(self, nbytes: int, slots: int) -> ExportedPool:
        """Make a pool in this process."""
        self.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rdma over tcp warns
            return registry.export_pool(
                self.name,
                nbytes,
                device=torch.device(self.device),
                access=self.access,
                options=self.options,
                slots=slots,
            )

    def open_reader(self, nbytes: int) -> Reader:
        """Make a reader in this process."""
        self.install()
        return registry.open_reader(
            self.name,
            nbytes,
            device=torch.device(self.device),
            access=self.access,
            options=self.options,
        )


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return bytes that differ with their place and the seed, for both sides to make alike."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8 + 1,), generator=generator)
    return words.view(torch.uint8)[:nbytes]


def resources() -> dict[str, int]:
    """Return how many descriptors and threads this process has."""
    return {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}


def stop(pid: int) -> None:
    """Stop a process; on return none of its threads runs, which the signal alone does not promise."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(_state(task) not in "TtZX" for task in tasks.iterdir()):
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return "X"


class HostError(Exception):
    """What a call in the other process raised; ``kind`` is the name of its class."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        """Keep what happened there."""
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind


class HostGoneError(Exception):
    """The other process has died."""


class Host:
    """A spawned process that makes the calls it is told to, one after another.

    Close it, or use it in a ``with`` statement.
    """

    def __init__(self, backend: BackendUnderTest) -> None:
        """Start the process; it is ready when the first call returns."""
        self.backend = backend
        self._exported = 0
        self.restart()

    def restart(self) -> None:
        """Start a process in place of one that has died."""
        self._channel, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.is_alive()

    def ends(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end of a process that may be dying; tell whether it came."""
        self._process.join(timeout)
        return not self.alive

    def __enter__(self) -> Host:
        """Return it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill the process."""
        self.kill()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have ``function(*args)`` called there; both must be picklable.

        Raises:
            HostGoneError: The process has died.
        """
        try:
            self._channel.send((function, args))
        except OSError as error:
            raise HostGoneError(f"the process has died: {error}") from error

    def result(self) -> Any:
        """Return what the function that was started returns.

        Raises:
            HostError: It raised something.
            HostGoneError: The process has died.
        """
        assert self._channel.poll(_ANSWER_SECONDS), f"the other process is silent for {_ANSWER_SECONDS:g} s"
        try:
            error, value = self._channel.recv()
        except (OSError, EOFError) as gone:
            raise HostGoneError(f"the process has died: {gone!r}") from gone
        if error is not None:
            raise HostError(*error)
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call there and wait for the result."""
        self.start(function, *args)
        return self.result()

    def export(self, nbytes: int, slots: int = 16) -> Exported:
        """Make a pool there."""
        self._exported += 1
        peer = self.call(_export, self._exported, self.backend, nbytes, slots)
        return Exported(self, self._exported, peer, nbytes)

    def stop(self) -> None:
        """Let the process do nothing until :meth:`go_on`."""
        assert self._process.pid is not None
        stop(self._process.pid)

    def go_on(self) -> None:
        """Let a stopped process run."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process without a chance to say goodbye."""
        self._process.kill()
        self._process.join(10)
        self._channel.close()


@dataclass
class Exported:
    """A pool in another process.

    Attributes:
        host: The process.
        number: Which of its pools.
        peer: What manifests say of it.
        nbytes: Its size.
    """

    host: Host
    number: int
    peer: PeerOffer
    nbytes: int

    def admit(self, offset: int, nbytes: int, seed: int, lease: float = 60.0) -> SlotTicket:
        """Fill a range with :func:`pattern` and let peers read it."""
        ticket: SlotTicket = self.host.call(_admit, self.number, offset, nbytes, seed, lease)
        return ticket

    def withdraw(self, ticket: SlotTicket, *, revoked: bool = False) -> bool:
        """Withdraw a slot."""
        unread: bool = self.host.call(_withdraw, self.number, ticket, revoked)
        return unread

    def start_replacing(self, ticket: SlotTicket, seed: int, delay: float) -> None:
        """After ``delay`` withdraw a slot and, as soon as that is allowed, fill it anew; not waited for."""
        self.host.start(_replace, self.number, ticket, seed, delay)

    def notices(self, count: int) -> list[Notice]:
        """Wait for ``count`` notices; return all that have come by a moment later."""
        notices: list[Notice] = self.host.call(_notices, self.number, count)
        return notices

    def close(self) -> None:
        """Close the pool."""
        self.host.call(_close, self.number)


def _serve(channel: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            function, args = channel.recv()
            try:
                answer: Any = (None, function(*args))
            except BaseException as error:
                answer = ((type(error).__name__, str(error), traceback.format_exc()), None)
            channel.send(answer)


# In the process of a Host:

POOLS: dict[int, ExportedPool] = {}
"""The pools of this process by number."""


def _export(number: int, backend: BackendUnderTest, nbytes: int, slots: int) -> PeerOffer:
    POOLS[number] = backend.export_pool(nbytes, slots)
    return POOLS[number].peer


def _admit(number: int, offset: int, nbytes: int, seed: int, lease: float) -> SlotTicket:
    POOLS[number].pool[offset : offset + nbytes] = pattern(nbytes, seed)
    return POOLS[number].admit(offset, nbytes, lease=lease)


def _withdraw(number: int, ticket: SlotTicket, revoked: bool) -> bool:
    return POOLS[number].withdraw(ticket, revoked=revoked)


def _replace(number: int, ticket: SlotTicket, seed: int, delay: float) -> None:
    pool = POOLS[number]
    fresh = pattern(ticket.nbytes, seed)
    time.sleep(delay)
    if not pool.withdraw(ticket):
        end = time.monotonic() + 20.0
        while not any(
            notice.kind == "drained" and notice.generation == ticket.generation
            for notice in pool.notices(1.0)
        ):
            assert time.monotonic() < end, "a slot with readers was withdrawn and never reported as drained"
    pool.pool[ticket.offset : ticket.offset + ticket.nbytes] = fresh


def _notices(number: int, count: int) -> list[Notice]:
    pool, found, end = POOLS[number], list[Notice](), time.monotonic() + 10.0
    while len(found) < count and time.monotonic() < end:
        found += pool.notices(end - time.monotonic())
    end = time.monotonic() + _QUIET_SECONDS
    while (rest := end - time.monotonic()) > 0:
        found += pool.notices(rest)
    return found


def _close(number: int) -> None:
    POOLS.pop(number).close(5.0)
