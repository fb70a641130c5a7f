# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent, and the one thread that sees to it: the only module that knows NIXL's API."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tensorferry.backends.nixl_memory import Ranges
from tensorferry.backends.nixl_options import Options
from tensorferry.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectError,
    ManifestError,
    PeerLostError,
    RegistrationError,
    TensorferryError,
    TransferError,
    UsageError,
)

INSTALL = 'pip install "tensorferry[nixl]"'

# Seconds between looks at NIXL, which reports nothing by itself.
_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3
_LISTENING_PAUSE = 0.5e-3
_ACTIVE_SECONDS = 0.02
_IDLE_SECONDS = 0.1
_FLUSH_SECONDS = 0.02  # in which a notification surely leaves


@cache
def load_api() -> Any:
    """Import NIXL.

    Raises:
        BackendUnavailableError: It is not installed, or cannot be loaded.
    """
    with suppress(OSError):
        # The wheel of NIXL 1.5 has a libnl of its own.  Where the system's comes in after it, with a device
        # driver of rdma-core, the process crashes at its exit.
        ctypes.CDLL("libnl-route-3.so.200")
    try:
        from nixl_cu12 import _api
    except ModuleNotFoundError:
        try:
            from nixl import _api  # the meta package, over a build for another CUDA
        except ImportError as error:
            raise BackendUnavailableError(f"NIXL is not installed ({error}): {INSTALL}") from error
    except ImportError as error:
        raise BackendUnavailableError(f"NIXL cannot be loaded: {error}; see {INSTALL}") from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        _api.logger.setLevel(logging.WARNING)  # else each agent is a line on stdout
    return _api


@contextmanager
def native_errors(action: str) -> Iterator[None]:
    """Translate what NIXL throws while ``action`` is done (the one table of this backend)."""
    try:
        yield
    except TensorferryError:
        raise
    except Exception as error:
        kind = type(error).__name__
        message = f"{action}: NIXL says {error}"
        if kind in ("nixlRemoteDisconnectError", "nixlNotFoundError", "nixlCancelledError"):
            raise PeerLostError(message, scope="peer") from error
        if not kind.startswith("nixl"):
            raise
        raise TransferError(message) from error


Ended: TypeAlias = Callable[[TensorferryError | None], None]
"""Gets what a transfer ended with."""


class Flight(NamedTuple):
    """A transfer that NIXL has not ended yet; ``ended`` gets its error, or None."""

    handle: Any
    peer: str
    action: str
    ended: Ended


class Agent:
    """An agent of NIXL; any method may be called from any thread.

    NIXL reports nothing by itself and has no lock of its own, so one thread looks at transfers and
    notifications, and a lock lets one caller in at a time.

    Args:
        name: Unique among all agents that ever meet.
        options: The user's.
        listen: What to do with the notifications that come; None if none are expected.

    Raises:
        UsageError: NIXL has no such plugin, or the plugin no such parameter.
        BackendUnavailableError: NIXL cannot be used.
    """

    def __init__(
        self, name: str, options: Options, listen: Callable[[list[bytes]], None] | None = None
    ) -> None:
        api = load_api()
        config = api.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[])
        try:
            self._agent: Any = api.nixl_agent(name, config)
            _check_plugin(self._agent, options)
            self._agent.create_backend(options.plugin, options.for_plugin())
            self.plugin = options.plugin
        except TensorferryError:
            raise
        except Exception as error:
            raise BackendUnavailableError(
                f"NIXL's plugin {options.plugin} cannot be used: {error}; see backend_options and UCX_* in "
                "the environment"
            ) from error
        self.name = name
        self._listen = listen
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._memories: list[Any] = []  # registered, and so alive
        self._prepared: dict[int, Any] = {}  # by number: who keeps one of NIXL's handles keeps its agent
        self._numbers = itertools.count()
        self._peers: set[str] = set()
        self._stopping = False
        self._orphan = False
        self._active = self._notified = time.monotonic()
        _agents.add(self)
        self._thread = threading.Thread(target=self._run, name="tensorferry-nixl", daemon=True)
        self._thread.start()

    def register(self, memory: torch.Tensor) -> None:
        """Register memory, and keep it until the agent is gone.

        Raises:
            RegistrationError: NIXL, or the device, refuses.
        """
        with self._changed:
            try:
                self._open().register_memory(memory)
            except TensorferryError:
                raise
            except Exception as error:
                raise RegistrationError(f"NIXL cannot register {memory.numel()} bytes: {error}") from error
            self._memories.append(memory)

    def metadata(self) -> bytes:
        """Return what peers need to reach what is registered."""
        with self._changed, native_errors("describing a pool"):
            packed: bytes = self._open().get_agent_metadata()
            return packed

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Make a remote agent known.

        Raises:
            ManifestError: The metadata is malformed, or another agent's.
            ConnectError: It cannot be reached.
        """
        with self._changed:
            agent = self._open()
            if any(other.encode() in metadata for other in self._peers):
                raise ManifestError("NIXL's metadata names another producer, which is connected")
            try:
                found = agent.add_remote_agent(metadata)
            except Exception as error:
                if type(error).__name__ == "nixlMismatchError":
                    raise ManifestError(f"NIXL cannot read the producer's metadata: {error}") from error
                raise ConnectError(f"NIXL cannot reach the producer: {error}", scope="peer") from error
            found = found.decode(errors="replace") if isinstance(found, bytes) else found
            if found != name:
                agent.remove_remote_agent(found)
                raise ManifestError(f"NIXL's metadata is of agent {found!r}, not of {name!r}")
            self._peers.add(name)

    def flies(self, peer: str) -> bool:
        """Whether a transfer from a peer has not ended."""
        with self._changed:
            return any(flight.peer == peer for flight in self._flights)

    def remove_peer(self, name: str) -> None:
        """Forget a remote agent.

        NIXL calls flights to it lost then, although their bytes may still arrive: only what is never
        used again may be their destination.
        """
        with self._changed, suppress(Exception):
            self._peers.discard(name)
            self._open().remove_remote_agent(name)

    def prepare(self, memory: str, rows: npt.NDArray[np.uint64], peer: str = "") -> int:
        """Prepare ranges of a peer, or of this agent, to be read by index; return a number for them.

        Args:
            memory: Type of the memory.
            rows: Of address, bytes, device, stride and count.
            peer: Whose they are.
        """
        with self._changed, native_errors("preparing ranges"):
            number = next(self._numbers)
            self._prepared[number] = self._open().prep_xfer_dlist(peer, rows, memory)
            return number

    def forget(self, prepared: int) -> None:
        """Let go of what was prepared."""
        with self._changed, suppress(Exception):
            self._prepared.pop(prepared).release()

    def read(
        self,
        peer: str,
        local: tuple[str, Ranges],
        remote: tuple[str, Ranges],
        action: str,
        ended: Ended,
    ) -> None:
        """Read ranges of a peer into memory of this agent; both have a type of memory and rows.

        ``ended`` is called on the agent's thread once nothing is written any more.

        Raises:
            PeerLostError: The peer is gone.
        """

        def make(agent: Any) -> Any:
            here, there = (agent.get_xfer_descs(rows, memory) for memory, rows in (local, remote))
            return agent.initialize_xfer("READ", here, there, peer)

        self._post(peer, make, action, ended)

    def read_prepared(
        self,
        peer: str,
        local: tuple[int, int],
        remote: tuple[int, int],
        action: str,
        ended: Ended,
    ) -> None:
        """Read one of the ranges that were prepared into another, as :meth:`read` does."""

        def make(agent: Any) -> Any:
            (here, at), (there, index) = local, remote
            return agent.make_prepped_xfer("READ", self._prepared[here], [at], self._prepared[there], [index])

        self._post(peer, make, action, ended)

    def _post(
        self,
        peer: str,
        make: Callable[[Any], Any],
        action: str,
        ended: Ended,
    ) -> None:
        with self._changed, native_errors(action):
            if self._stopping or peer not in self._peers:
                raise PeerLostError(f"{action}: this side has closed the connection", scope="peer")
            handle = make(self._agent)
            self._agent.transfer(handle)  # what comes of it is seen with the others
            self._flights.append(Flight(handle, peer, action, ended))
            self._active = time.monotonic()
            self._changed.notify_all()

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification; one that cannot be sent is dropped."""
        with self._changed, suppress(Exception):
            self._open().send_notif(peer, message)
            self._active = self._notified = time.monotonic()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for flights, and end the agent; nothing is written after it."""
        if threading.current_thread() is self._thread:  # where the collector may have taken the owner
            self._stopping = self._orphan = True
            return
        end = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not self._flights, timeout)
        time.sleep(max(0.0, min(end, self._notified + _FLUSH_SECONDS) - time.monotonic()))
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._end()

    def _end(self) -> None:
        with self._changed:
            lost = [(flight.ended, flight.action) for flight in self._flights]
            self._flights.clear()
            self._prepared.clear()
            self._agent = None  # the last reference, with which UCX's worker goes
        self._memories.clear()
        for ended, action in lost:
            ended(PeerLostError(f"{action}: this side was closed", scope="peer"))

    def _open(self) -> Any:
        if self._agent is None or self._stopping:
            raise ClosedError("the NIXL agent is closed")
        return self._agent

    # The methods below run on the thread.

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                ended = self._look_at_flights()
                messages = self._take_messages()
                if ended or messages:
                    self._active = time.monotonic()
            for flight, error in ended:
                flight.ended(error)
            ended.clear()
            if messages and self._listen is not None:
                self._listen(messages)
            self._rest()
        if self._orphan:
            self._end()

    def _look_at_flights(self) -> list[tuple[Flight, TensorferryError | None]]:
        ended: list[tuple[Flight, TensorferryError | None]] = []
        kept: list[Flight] = []
        for flight in self._flights:
            error: TensorferryError | None = None
            try:
                with native_errors(flight.action):
                    state = self._agent.check_xfer_state(flight.handle)
            except TensorferryError as failure:
                state, error = "ERR", failure
            if state == "PROC":
                kept.append(flight)
                continue
            if state == "ERR" and error is None:
                error = TransferError(f"{flight.action}: NIXL says that it failed")
            with suppress(Exception):
                flight.handle.release()
            ended.append((flight._replace(handle=None), error))
        if ended:
            self._flights = kept
            self._changed.notify_all()
        return ended

    def _take_messages(self) -> list[bytes]:
        try:
            found = self._agent.get_new_notifs()  # also what lets NIXL make progress
        except Exception:
            return []
        return [message for messages in found.values() for message in messages]

    def _rest(self) -> None:
        quiet = time.monotonic() - self._active
        if self._flights or quiet < _ACTIVE_SECONDS:
            time.sleep(min(max(_SHORTEST_PAUSE, quiet / 100), _LONGEST_PAUSE))
        elif self._listen is not None:
            time.sleep(_LISTENING_PAUSE)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._flights or self._stopping, _IDLE_SECONDS)


def _check_plugin(agent: Any, options: Options) -> None:
    plugins = agent.get_plugin_list()
    if options.plugin not in plugins:
        raise UsageError(f"NIXL has no plugin {options.plugin!r}; there are {', '.join(plugins)}")
    # What the plugin UCX takes beside those that it lists (NIXL 1.5).
    more = {"engine_config", "num_threads", "split_batch_size"} if options.plugin == "UCX" else set()
    known = set(agent.get_plugin_params(options.plugin)) | more
    for name in options.parameters:
        if name not in known:
            raise UsageError(
                f"NIXL's plugin {options.plugin} has no parameter {name!r}; "
                f"there are {', '.join(sorted(known))}"
            )


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _leave_alone() -> None:
    """Let a forked child never destroy the parent's agents: their threads are not there."""
    for agent in list(_agents):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


os.register_at_fork(after_in_child=_leave_alone)
