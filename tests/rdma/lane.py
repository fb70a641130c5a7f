# SPDX-License-Identifier: Apache-2.0
"""The two ends of an RDMA test: two devices of one host, or two machines with one each.

``scripts/rdma_vm.sh`` makes either; on a host with RDMA hardware the first and the last device are taken.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import pytest

from tensorferry.backends.ucx_library import has_verbs, rdma_devices, system_library

DEVICES = Path("/sys/class/infiniband")
MACHINES = os.environ.get("RDMA_VM", "")  # "pair" and "two" in a machine of scripts/rdma_vm.sh
FAR_MACHINE = ("10.77.0.2", 18970)
_KEY = b"two machines of one test"
_RUN, _SIGNAL, _KILL = b"r", b"s", b"k"


def _obstacle() -> str:
    if not rdma_devices():
        return f"no RDMA device here ({DEVICES} is empty); scripts/rdma_vm.sh makes some"
    library = system_library()
    if library is None or not has_verbs(library):
        return "the system has no UCX with verbs (Debian: libucx0)"
    return ""


needs_rdma = [pytest.mark.rdma, pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())]


class ForkedPeer(peers.Peer):
    """A peer forked from this process, which has torch: importing it takes half a minute in a machine."""

    context = multiprocessing.get_context("fork")


class FarPeer:
    """A :class:`peers.Peer` on the other machine, by way of a :class:`ForkedPeer` there."""

    def __init__(self, **environment: str) -> None:
        end = time.monotonic() + 120
        while True:  # the other machine may be starting
            try:
                self._connection = Client(FAR_MACHINE, authkey=_KEY)
                break
            except OSError:
                assert time.monotonic() < end, "the other machine does not answer"
                time.sleep(0.5)
        self._connection.send(environment)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._connection.send_bytes(_RUN + pickle.dumps((function, args, kwargs)))

    def result(self, timeout: float = 60.0) -> Any:
        assert self._connection.poll(timeout), f"the other machine gave no answer in {timeout} seconds"
        error, value = self._connection.recv()
        if error is not None:
            raise error
        return value

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.start(function, *args, **kwargs)
        return self.result()

    def signal(self, number: int) -> None:
        self._connection.send_bytes(_SIGNAL + bytes([number]))

    def kill(self) -> None:
        with suppress(OSError, EOFError):
            self._connection.send_bytes(_KILL)
            while self._connection.recv_bytes() != _KILL:
                pass
        self._connection.close()


AnyPeer = peers.Peer | FarPeer


def serve_far_machine() -> None:
    """Run what the tests on the other machine ask for, until this machine is ended."""
    listener = Listener(("0.0.0.0", FAR_MACHINE[1]), authkey=_KEY)
    while True:
        connection = listener.accept()
        # Forked before this peer's threads start; those of earlier ones hold no lock that it needs.
        one = ForkedPeer(**connection.recv())
        threading.Thread(target=_pass_on, args=(connection, one), daemon=True).start()


def _pass_on(connection: Connection, one: ForkedPeer) -> None:
    answers = threading.Thread(target=_pass_back, args=(one, connection), daemon=True)
    answers.start()
    with suppress(EOFError, OSError):
        while (order := connection.recv_bytes()) and order[:1] != _KILL:
            if order[:1] == _RUN:
                one._connection.send_bytes(order[1:])
            else:
                one.signal(order[1])
    one.kill()
    answers.join()
    with suppress(OSError):
        connection.send_bytes(_KILL)
    connection.close()


def _pass_back(one: ForkedPeer, connection: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            connection.send_bytes(one._connection.recv_bytes())


@dataclass(frozen=True)
class End:
    """One end of the wire: a device, and how processes are started beside it."""

    device: str
    peer: type[AnyPeer]

    @property
    def options(self) -> dict[str, str]:
        """UCX settings to use this device only."""
        return {"TLS": "rc_verbs,ud_verbs", "NET_DEVICES": f"{self.device}:1"}

    @contextmanager
    def process(self, **environment: str) -> Iterator[AnyPeer]:
        one = self.peer(**environment)
        try:
            yield one
        finally:
            one.kill()


def ends() -> tuple[End, End]:
    """Return the producers' end and the consumers'."""
    devices = rdma_devices()
    if MACHINES == "two":
        return End(devices[0], ForkedPeer), End(devices[0], FarPeer)
    return End(devices[0], ForkedPeer), End(devices[-1], ForkedPeer)


# Functions for peers.


def open_producer(namespace: SimpleNamespace, end: End, pool_size: int | str, **options: Any) -> None:
    peers.open_producer(namespace, pool_size, **{"access": "rdma", "backend_options": end.options, **options})


def open_consumer(namespace: SimpleNamespace, end: End, pool_size: int | str, **options: Any) -> None:
    peers.open_consumer(namespace, pool_size, **{"access": "rdma", "backend_options": end.options, **options})


def traffic(namespace: SimpleNamespace, device: str) -> dict[str, int]:
    """Count what has crossed so far: packets of the device, and segments of this machine's tcp."""
    counters = DEVICES / device / "ports/1/hw_counters"
    fields, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    tcp = dict(zip(fields, values, strict=True))
    return {
        "sent": int((counters / "sent_pkts").read_text()),
        "received": int((counters / "rcvd_pkts").read_text()),
        "tcp": int(tcp["InSegs"]) + int(tcp["OutSegs"]),
    }


def netdev_of(device: str) -> str:
    """Return the network device under an RDMA device of software."""
    return (DEVICES / device / "parent").read_text().strip()


def set_link(device: str, state: str) -> None:
    """Take the network device under an RDMA device of this machine "down" or "up"."""
    subprocess.run(["ip", "link", "set", netdev_of(device), state], check=True)


def lose(device: str, percent: float) -> None:
    """Have what leaves a device of this machine be lost on its way, as a switch would lose it."""
    command = ["tc", "qdisc", "replace", "dev", netdev_of(device), "root", "netem", "loss", f"{percent}%"]
    subprocess.run(command, check=True)
