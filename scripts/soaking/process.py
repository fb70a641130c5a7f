# SPDX-License-Identifier: Apache-2.0
"""What producer and consumer processes of the soak have in common.

Each talks to the supervisor over a socket that keeps messages whole, so a process that is killed
in the middle of anything leaves no half of a message behind.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from soaking.judge import Call
from soaking.messages import MESSAGE_NBYTES, Finish, Quiet, Ready, Reopen, Resources, Settings, Snapshot

KEY = b"known to all processes of the soak"
OPTIONS = {"TLS": "tcp", "NET_DEVICES": "lo"}

_PR_SET_PDEATHSIG = 1
_QUIET_SECONDS = 15.0  # for leases to end and for quarantined memory to come back
_SUPERVISOR_LOST = 3  # exit status


class Process(ABC):
    """One process from its start to its end.

    Args:
        channel: To the supervisor.
        settings: How it shall be.
    """

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.quiet = threading.Event()
        self.opening = 0
        self._channel = channel

    @abstractmethod
    def open(self) -> None:
        """Open a producer or consumer in place of the one before."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Close it."""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Return what it holds that it must have given back at the end."""

    @abstractmethod
    def work(self, rng: random.Random) -> None:
        """Publish or pull until it is quiet; run by each thread."""

    def send(self, message: object) -> None:
        """Report something; without a supervisor the process ends."""
        try:
            self._channel.send(pickle.dumps(message))
        except OSError:
            os._exit(_SUPERVISOR_LOST)

    def obey(self, order: object) -> None:
        """Do what the supervisor says."""
        if isinstance(order, Reopen):
            self._close_timed(self.random.choice([0.0, 0.2, 2.0]))
            self.open()
            # Last: a thread that is between the two then reports the earlier opening, of which more
            # is expected to fail.
            self.opening += 1
        elif isinstance(order, Snapshot):
            self.send(Resources(order.stage, resources()))
        elif isinstance(order, Quiet):
            self.quiet.set()

    def run(self) -> None:
        """Live until the supervisor says Finish."""
        self.send(Ready())
        workers = [
            threading.Thread(target=self.work, args=(random.Random(f"{self.settings.seed} {i}"),))
            for i in range(self.settings.threads)
        ]
        for worker in workers:
            worker.start()
        while data := self._channel.recv(MESSAGE_NBYTES):
            order = pickle.loads(data)
            if isinstance(order, Finish):
                break
            self.obey(order)
        else:
            os._exit(_SUPERVISOR_LOST)
        self.quiet.set()
        for worker in workers:
            worker.join()
        end = time.monotonic() + _QUIET_SECONDS
        while any(self.held().values()) and time.monotonic() < end:
            time.sleep(0.05)
        self.send(Resources("end", resources() | self.held()))
        self._close_timed(5.0)
        self._channel.close()

    def _close_timed(self, timeout: float) -> None:
        started = time.monotonic()
        self.close(timeout)
        self.send(Call("close", "", started, time.monotonic(), timeout))


def ended(call: Call, **results: object) -> Call:
    """Return a call that returned just now."""
    return replace(call, ended=time.monotonic(), **results)  # type: ignore[arg-type]


def failed(call: Call, error: BaseException) -> Call:
    """Return a call that raised an error just now."""
    return ended(call, error=type(error).__name__, message=str(error)[:500])


def resources() -> dict[str, int]:
    """Return what this process holds of the system's, without what only waits for the collector."""
    gc.collect()
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    with open("/proc/self/maps") as maps:
        shared = {tuple(line.split()[3:5]) for line in maps if "/memfd:" in line or "/dev/shm/" in line}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared_memory": len(shared),
        "anonymous_nbytes": int(fields["RssAnon"].split()[0]) << 10,
        "resident_nbytes": int(fields["VmRSS"].split()[0]) << 10,
    }


def run_process(cls: type[Process], channel: socket.socket, settings: Settings) -> None:
    """Be a producer or a consumer until the supervisor says otherwise; the target of each process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the supervisor be killed
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends its processes by itself
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    cls(channel, settings).run()
    sys.stdout.flush()
